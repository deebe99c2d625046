"""Moves saves from staging memory to tiers: flush, upload, repair, and garbage collection without a leader.

Pure transitions (`state_machine`) decide; threads (`engine`, `uploader`) only execute. The agent runs a `Flusher` for
each arena; library mode runs one in the training process (`checkpointer.library_mode.in_process_backend`).
"""
