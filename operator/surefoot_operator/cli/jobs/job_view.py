"""Defines everything one look at a job has found.

Pure values, built by `cluster_reads` and `run_folder_reads`. What could not be read is part of the look: a table without nodes says why
instead of showing none.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot_operator.cli.jobs.stored_job import StoredJob
from surefoot_operator.cli.local.progress import Happened
from surefoot_operator.job_snapshot import NodeSeen, WorkerSeen


@dataclass(frozen=True, slots=True)
class HolderLook:
    """A node's holders as their pod or processes stand."""

    node: str
    running: bool


@dataclass(frozen=True, slots=True)
class JobView:
    """One job and its surroundings at one moment."""

    now: float
    stored: StoredJob
    workers: tuple[WorkerSeen, ...] = ()
    nodes: tuple[NodeSeen, ...] | None = ()
    """None: they may not be read."""
    holders: tuple[HolderLook, ...] | None = ()
    """None: they may not be read."""
    events: tuple[Happened, ...] = ()
    """Oldest first."""
    free_nodes: int | None = None
    unread: tuple[str, ...] = ()
    """What could not be read, and why: a sentence each."""
