"""Compares two looks at trainers that make no step.

Pure. A stack alone says little: a rank that reads or computes for long shows it as well, and one that computes in a loop
of two lines shows the same one twice as often as not. One that shows the same stack twice, while it and its children
neither read, write nor compute, hangs or waits for one that does.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.protocol.hangs import Collective
from surefoot.protocol.rank_places import RankPlace

_IO_BYTES = 1 << 20
"""Less is what threads of a library say to each other while the program stands."""
_CPU_SHARE = 0.05
"""Of a core; not that of ranks that wait in a collective, which spin."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What processes have done since they began."""

    io_bytes: int = 0
    """Read and written, of the trainers and their children."""
    cpu_seconds: float = 0.0
    """Of trainers that wait for no other rank, and of all trainers' children, as a loader's workers."""


@dataclass(frozen=True, slots=True)
class Look:
    """Where all living local ranks stand, at one moment."""

    at: float
    places: tuple[RankPlace, ...]
    activity: Activity
    collectives: tuple[Collective, ...] = ()
    """What they are in or made last; empty where a rank could not say."""


def stands_still(before: Look, after: Look) -> bool:
    """Whether nothing has moved between two looks."""
    wrote = after.activity.io_bytes - before.activity.io_bytes
    computed = after.activity.cpu_seconds - before.activity.cpu_seconds
    called = bool(before.collectives and after.collectives) and before.collectives != after.collectives
    return (
        after.places == before.places
        and not called
        and 0 <= wrote < _IO_BYTES
        and 0.0 <= computed <= _CPU_SHARE * (after.at - before.at)
    )
