"""Which rules of the protocol hold in a run. All do, except in the tests that show that each one is needed.

Each switch turns one rule off at the boundary of a model or around a real decision; what is decided with all of them
on is the project's own code, unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    seal: bool = True
    """A claim raises the fence on every reachable holder before its index is read."""
    fence_in_commit: bool = True
    """commit refuses a writer whose epoch is below the fence."""
    fence_in_drop: bool = True
    """drop refuses a writer whose epoch is below the fence."""
    whole_commit: bool = True
    """commit refuses unless every chunk is there."""
    drop_index_first: bool = True
    """drop takes the index entry with the chunks, in one step."""
    reap: bool = True
    """Old trainers are dead before a new epoch's start on the same worker."""
    list_after_read: bool = True
    """The persistent tier is listed after the last index was read."""
    compare_world: bool = True
    """A status patch tests the world it was planned from."""
    compare_status: bool = True
    """A status patch tests the rest of the status as well: else two leaders of one world undo each other's writes."""
    workers_alone: bool = True
    """A worker that is refused keeps nothing else of its plan from being carried out."""
    sweep_by_index: bool = True
    """What a janitor removes has no entry at that moment."""
    compare_first: bool = True
    """An upload compares before it writes under a committed name."""
    agree_manifests: bool = True
    """Persistent puts of manifests are conditional."""


ALL = Rules()
