"""Moves saves from staging memory to tiers: replication, promotion, repair, leaderless GC.

Pure transitions (`state_machine`) decide; threads (`engine`, `uploader`) only carry out. The agent runs
a `Drain` for each of its arenas; library mode runs one in the training process (`checkpointer.library_mode.in_process_backend`).
"""
