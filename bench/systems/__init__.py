"""One file a system: how its users save with it, wait for it, and load from it. `system.System` is the surface."""
