"""What operator and runtime share: identities, messages, lineage, and the pure rules about checkpoints.

Nothing in here does I/O, reads a clock or imports a framework; both sides decide with the same functions.
"""
