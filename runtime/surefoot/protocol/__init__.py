"""Contains the parts that operator and runtime share, without I/O, clocks or frameworks.

Identities, messages, lineage, and the pure rules about checkpoints: both sides decide with the same functions.
"""
