"""Tries a node's processors, memory, disk and network before a worker there gets a rank."""
