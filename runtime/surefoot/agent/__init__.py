"""One worker's life: it starts and watches its trainers, drains what they stage, and talks to the coordinator.

Never imports torch. A trainer reaches its agent through `ipc`.
"""
