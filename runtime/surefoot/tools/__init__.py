"""Compares, verifies, exports, imports and deletes checkpoints after a run.

Each is a process of its own that the command starts. Their last line of output is JSON. They read through the same
tiers and check the same digests as a restore does.
"""
