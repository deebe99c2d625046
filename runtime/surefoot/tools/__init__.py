"""What is done to checkpoints after a run, each a process of its own that the command starts: compare, verify, export,
import.

Their last line of output is JSON. They read through the same tiers and check the same digests as a restore does.
"""
