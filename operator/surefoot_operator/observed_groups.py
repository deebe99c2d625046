"""Defines what a snapshot says of a job's pod groups.

Pure values; part of `job_snapshot`. Of a group that nobody could look at nothing is guessed: a worker that is made without its group is
held back by its scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from surefoot_operator.api.spec import Gang


@dataclass(frozen=True, slots=True)
class PodGroup:
    """What a gang scheduler is told of a job's workers."""

    gang: Gang
    min_members: int
    """So many are placed together, or none; what is beyond is placed one by one."""
    queue: str | None = None
    priority_class: str | None = None
    schedule_timeout_seconds: int | None = None
    """All three: None leaves them to the cluster."""


@dataclass(frozen=True, slots=True)
class PodGroupSeen:
    """A job's pod group as its fabric reports it."""

    group: PodGroup
    uid: str
    deleting: bool = False
    message: str = ""
    """Why its scheduler does not place it, in its own words; empty: it said nothing."""


@dataclass(frozen=True, slots=True)
class PodGroupsSeen:
    """A job's pod groups: at most one a gang scheduler."""

    groups: tuple[PodGroupSeen, ...] = ()
    unseen: Mapping[Gang, str] = field(default_factory=dict)
    """Gang schedulers whose groups can neither be looked at nor made, and why."""


@dataclass(frozen=True, slots=True)
class GroupCallSeen:
    """A call for a pod group, under way or refused."""

    gang: Gang
    under_way: bool
    refusal: str = ""
    """What the fabric said the last time; empty: nothing yet."""
    until_seconds: float = 0.0
    """Not asked for again before."""
