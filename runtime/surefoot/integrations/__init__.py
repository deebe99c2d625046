"""Adapts other libraries' interfaces for saving and launching to this engine.

Each module is imported by who uses that library.
"""
