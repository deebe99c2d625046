"""From staging memory to tiers: replication of fresh saves, promotion, repair, and upkeep while no leader is there.

Pure transitions (`transitions`) decide; threads (`engine`, `writer`, `promotion`) only carry out. The agent runs
a `Drain` for each of its arenas; library mode runs one in the training process (`checkpointer.in_process`).
"""
