"""Defines the message that says where ranks without a step are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from surefoot.protocol.codec import since
from surefoot.protocol.hangs import Collective
from surefoot.protocol.rank_places import RankPlace


@dataclass(frozen=True, slots=True)
class StuckRanks:
    """Where every local rank is without a step; without `places`, no more.

    Stack and I/O were the same in two looks, unless something `moves`, or may: no proof of a hang, and yet who is elsewhere.
    """

    SINCE: ClassVar[int] = 3
    epoch: int
    step: int
    """Last step that every local rank had finished."""
    places: tuple[RankPlace, ...] = ()
    moves: bool = False
    collectives: tuple[Collective, ...] = since(3, ())
    """Of all these ranks, where two looks found the same; none where a rank's flight recorder is silent."""
