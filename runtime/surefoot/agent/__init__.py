"""Runs one worker: its trainers, its saves, its line to the coordinator.

Never imports torch. A trainer reaches its agent through `ipc`.
"""
