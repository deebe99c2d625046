"""Tests a node's processors, GPUs, memory, disk and network before a worker gets a rank."""
