"""Runs one worker: its trainers, its staged saves and its connection to the coordinator.

Never imports torch. A trainer reaches its agent through `ipc`.
"""
