"""Tries a node's processors, memory, disk and network."""
