"""Compares, verifies, exports, imports and deletes checkpoints after a run.

Each tool is a separate process that the `surefoot` command starts; its last line of output is JSON. The tools read
through the same tiers and check the same digests as a restore.
"""
