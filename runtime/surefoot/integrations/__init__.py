"""Adapts other libraries' interfaces for saving and launching to this engine.

Each module is imported only by programs that use that library.
"""
