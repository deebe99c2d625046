"""Decides which replica takes, asks for and gives up which shard.

Pure; called by `shard_election`. What replicas know of each other are the leases alone: who holds which, and who has
asked for it. A replica asks only while it runs, so nothing is given up to one that is dead; and only where the other
leads two more than itself, so that each hand-over brings both nearer and none is ever taken back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

STEP_SECONDS = 0.6
"""A free lease is left so long for each shard that one leads: longer than between two looks of somebody who leads none."""
LONGEST_SECONDS = 1.2
"""And never longer: so much later than a lease's expiry a shard is led at the latest, whoever takes it."""


@dataclass(frozen=True, slots=True)
class ShardSeen:
    """A shard's lease as one replica sees it."""

    holder: str = ""
    """Who leads it; empty: nobody, as far as this replica sees."""
    asked_by: str = ""
    """Who has asked its holder to hand it over; empty: nobody."""


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """How many shards there are, and shall be.

    `wanted`: by whoever leads shard 0.
    """

    shards: int = 1
    wanted: int = 1

    @property
    def is_changing(self) -> bool:
        """Whether who leads shard 0 gathers all shards."""
        return self.wanted != self.shards


def patience_seconds(me: str, shard: int, seen: Mapping[int, ShardSeen], layout: ShardLayout) -> float:
    """Returns how long `me` leaves a lease alone once it is free.

    Infinite: another is to have it, as the layout changes.
    """
    if layout.is_changing and shard != 0:
        return 0.0 if seen[0].holder == me else math.inf
    if seen[shard].asked_by == me:
        return 0.0
    held = sum(one.holder == me for one in seen.values())
    if seen[shard].asked_by:
        return LONGEST_SECONDS  # it was given up for somebody
    return min(held * STEP_SECONDS, LONGEST_SECONDS)


def shard_to_ask_for(me: str, seen: Mapping[int, ShardSeen], layout: ShardLayout) -> int | None:
    """Chooses the shard that `me` asks for; None: none.

    The last one of whoever leads most, so that shard 0 stays where it is if it can.
    """
    if layout.is_changing:
        return None
    held = Counter(one.holder for one in seen.values() if one.holder)
    others = sorted((-count, holder) for holder, count in held.items() if holder != me)
    if not others or -others[0][0] < held[me] + 2:
        return None
    most = others[0][1]
    return max(shard for shard, one in seen.items() if one.holder == most)


def why_give_up(me: str, shard: int, seen: Mapping[int, ShardSeen], layout: ShardLayout) -> str:
    """Says why `me` hands this shard over now; empty: it keeps it."""
    if layout.is_changing and shard != 0 and seen[0].holder not in ("", me):
        return f"{seen[0].holder} gathers the shards, of which there will be {layout.wanted}"
    asker = seen[shard].asked_by
    held = Counter(one.holder for one in seen.values())
    if asker and asker != me and held[me] >= held[asker] + 2:
        return f"{asker} leads {held[asker]} shards and asked for it, this replica leads {held[me]}"
    return ""
