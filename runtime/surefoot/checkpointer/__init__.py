"""Holds `Checkpointer`, the object that training scripts save and restore with.

`checkpointer` is the object in the training script; `saving` stages saves, `restoring` brings one back, `backends` finds who
keeps the staging memory: the agent, or without one a drain in this process.
"""

from surefoot.checkpointer.checkpointer import Checkpointer as Checkpointer
