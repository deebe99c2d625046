"""Claims epochs and drains saves in the program, where no agent runs.

The ranks decide together by records in the persistent tier: two of them that chose for themselves could restore
different checkpoints.
"""
