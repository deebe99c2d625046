"""What the exhaustive search is about, and the project's pure rules on it: each rank save of a scope is one bit.

Used by `simulator.exhaustive` alone. Every answer of a rule is kept, since the same question comes a thousand times.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from simulator.choosing import restore_point
from simulator.tiers import manifest
from surefoot.protocol.checkpoints.completeness import (
    Lineage,
    LineageEntry,
    TierReading,
    complete_in_persistent_tier,
    find_watermark,
    is_on_lineage,
)
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.checkpoints.retention import RetentionInputs, memory_saves_to_delete
from surefoot.protocol.identities import Checkpoint, MemoryServerInstance, RankSave

UP, AWAY = 0, 1
UNREAD = -1
NOBODY = 99


@dataclass(frozen=True, slots=True)
class Scope:
    """How small the world is, and which rules are off (`off` names them)."""

    name: str
    ranks: int
    epochs: int
    steps: int
    faults: int
    holders: int = 2
    replicas: int = 2
    keep: int = 1
    persistent: bool = False
    late_drops: bool = True
    """Drops reach even a holder that was away when they were sent."""
    off: frozenset[str] = frozenset()


class Side(NamedTuple):
    """One holder: its instance, whether the leader reaches it, fence, index, and what faults took of it."""

    instance: int
    away: int
    fence: int
    index: int
    lost: int
    pending: int
    """Saves on their way here."""
    read: int
    """What the claiming leader read after sealing, or UNREAD."""
    given_up: bool
    named: int
    """The oldest epoch whose world knows this instance: older ones do not write here."""


class Drop(NamedTuple):
    """Calls on their way to one holder, for the rank saves of one checkpoint there."""

    side: int
    instance: int
    saves: int
    writer: int


class State(NamedTuple):
    epoch: int
    claimed: bool
    lineage: tuple[tuple[int, tuple[int, int] | None], ...]
    steps: tuple[int, ...]
    """Last step of each epoch's world, or UNREAD before it has restored."""
    sides: tuple[Side, ...]
    persistent: int
    listed: int
    floor: tuple[int, int] | None
    recorded: bool
    proposals: frozenset[tuple[tuple[int, int] | None, bool]]
    """Parents that leaders decided for and did not write yet; whether every holder was read for it."""
    drops: frozenset[Drop]
    safe: tuple[int, int] | None
    """Newest checkpoint of the lineage that a leader rightly took for Full: older ones may go, this one may not."""
    faults: int


class Found(Exception):
    """A violation, and the way to it."""


class Rulebook:
    """The rules of one scope, on bits."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.saves = [
            RankSave(e, s, r)
            for e in range(1, scope.epochs + 1)
            for s in range(1, scope.steps + 1)
            for r in range(scope.ranks)
        ]
        self.bit = {save: 1 << i for i, save in enumerate(self.saves)}
        self.records = [manifest(save, scope.ranks, "i", hash((save.step, save.rank)), 0.0) for save in self.saves]
        self.masks = [self.mask((e, s)) for e in range(1, scope.epochs + 1) for s in range(1, scope.steps + 1)]
        self.covers = {frozenset({self.records[0].layout}): True}
        self.ids = tuple(MemoryServerInstance(f"n{i}", "h") for i in range(scope.holders))
        self.domains = {h: h.node for h in self.ids}
        self.choose = lru_cache(maxsize=None)(self._choose)
        self.water = lru_cache(maxsize=None)(self._water)
        self.gone = lru_cache(maxsize=None)(self._gone)
        self.durable = lru_cache(maxsize=None)(self._durable)
        self.on = lru_cache(maxsize=None)(lambda lineage, c, e: is_on_lineage(self.lineage(lineage), Checkpoint(*c), e))

    def entries(self, mask: int) -> tuple[RankManifest, ...]:
        return tuple(m for i, m in enumerate(self.records) if mask >> i & 1)

    def lineage(self, key: tuple[tuple[int, tuple[int, int] | None], ...]) -> Lineage:
        return tuple(LineageEntry(e, Checkpoint(*p) if p else None, self.scope.ranks) for e, p in key)

    def mask(self, checkpoint: tuple[int, int]) -> int:
        return sum(self.bit[RankSave(*checkpoint, r)] for r in range(self.scope.ranks))

    def _choose(self, reads: tuple[int, ...], listed: int, lineage: tuple, floor: tuple[int, int] | None) -> object:  # type: ignore[type-arg]
        readings = {h: self.entries(read) for h, read in zip(self.ids, reads, strict=True) if read != UNREAD}
        reading = TierReading(readings, self.entries(listed) if listed != UNREAD else None)
        chosen = restore_point(reading, self.lineage(lineage), Checkpoint(*floor) if floor else None, self.covers)
        return (chosen.generation, chosen.step) if chosen else None

    def _water(self, masks: tuple[tuple[int, int], ...], lineage: tuple, epoch: int, copies: int) -> Checkpoint | None:  # type: ignore[type-arg]
        reading = TierReading({self.ids[i]: self.entries(mask) for i, mask in masks}, None)
        return find_watermark(reading, self.lineage(lineage), epoch, frozenset(), self.covers, self.domains, copies)

    def _durable(self, mask: int, lineage: tuple, epoch: int) -> Checkpoint | None:  # type: ignore[type-arg]
        found = complete_in_persistent_tier(self.entries(mask), self.lineage(lineage), epoch, frozenset(), self.covers)
        return found[-1] if found else None

    def _gone(
        self,
        mask: int,
        lineage: tuple,
        epoch: int,
        water: Checkpoint | None,
        floor: tuple[int, int] | None,  # type: ignore[type-arg]
    ) -> int:
        key = self.lineage(lineage)
        standing = RetentionInputs(
            key, epoch, False, key[-1].parent, water, Checkpoint(*floor) if floor else None, None, frozenset()
        )
        return sum(self.bit[s] for s in memory_saves_to_delete(self.entries(mask), standing, self.scope.keep))

    def names(self, mask: int) -> list[RankSave]:
        return [save for save in self.saves if mask & self.bit[save]]


def swapped(mask: int) -> int:
    """Neighbouring bits change places; UNREAD stays what it is."""
    return mask if mask == UNREAD else (mask & 0x5555555555) << 1 | (mask >> 1) & 0x5555555555


SCOPES = (
    Scope("one rank, three epochs, one step, one fault", 1, 3, 1, 1),
    Scope("one rank, two epochs, one step, two faults", 1, 2, 1, 2),
    Scope("one rank, two epochs, two steps, one fault", 1, 2, 2, 1),
    Scope("two ranks, two epochs, one step, one fault", 2, 2, 1, 1),
    Scope("one rank, persistent tier, two epochs, one step, one fault", 1, 2, 1, 1, persistent=True),
    Scope("one rank, two epochs, two steps, two faults", 1, 2, 2, 2),
    Scope("one rank, three epochs, two steps, no fault", 1, 3, 2, 0),
    Scope("two ranks, two epochs, one step, two faults", 2, 2, 1, 2),
    Scope("two ranks, persistent tier, two epochs, one step, one fault", 2, 2, 1, 1, persistent=True),
    Scope("three ranks, two epochs, one step, no fault", 3, 2, 1, 0),
    Scope("one rank, persistent tier, two epochs, two steps, one fault", 1, 2, 2, 1, persistent=True),
)
