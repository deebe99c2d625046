"""Decides what may be deleted, and when.

Pure; the leader decides with it, and the agent of group rank 0 when no leader does.

Invariant 1: a complete checkpoint on the lineage goes only after a newer one on it is complete at full replication (as
read from the holders) or complete in the persistent tier. Everything here returns what *may* go; whoever sends the
drops names the holder instances that were read, and nobody else's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import TypeVar

from surefoot.protocol.checkpoints.completeness import Lineage, on_lineage
from surefoot.protocol.checkpoints.placement import UNKNOWN_TOPOLOGY, Path, Topology
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, MemoryServerInstance, RankSave

H = TypeVar("H")


@dataclass(frozen=True, slots=True)
class RetentionInputs:
    """Everything the rules need to know about the present, as one value.

    `protected` is the newest checkpoint known to be safe: the watermark W, or a newer one complete in the persistent
    tier; None while nothing is. `claimed` is true while a change of the world is under way: then nothing goes.
    """

    lineage: Lineage
    generation: int
    claimed: bool
    parent: Checkpoint | None
    watermark: Checkpoint | None
    persistent: Checkpoint | None
    pinned: Checkpoint | None
    unreadable: frozenset[Checkpoint]
    unrecoverable: frozenset[Checkpoint] = frozenset()
    """Of this epoch: some rank never saved its part and never will, so they protect nothing, now or later."""
    superseded: frozenset[Checkpoint] = frozenset()
    """Whatever loses a newer complete one loses these as well: see `outlived`."""

    known_good: frozenset[Checkpoint] = frozenset()
    """What newer ones do not replace, as they are not better: the last before suspects, the last that is proven to be
    good, and the next that may come to be (`last_good`, `proven`)."""

    @property
    def protected_step(self) -> int:
        """Steps below this are superseded; 0 while nothing is protected."""
        return max((c.step for c in (self.watermark, self.persistent) if c is not None), default=0)


def memory_drops(entries: Iterable[RankManifest], standing: RetentionInputs, keep: int) -> list[RankSave]:
    """Rank saves of one sealed holder that may go.

    Of the lineage: those older than what is protected, beyond the newest `keep` (the protected one counts as one),
    and of any age those that can never become complete; never the parent before W has passed it, never the pinned one.
    Off the lineage: those of older epochs. Nothing while Claimed: the restore point is being chosen.
    """
    return list(drops_by_server({0: tuple(entries)}, standing, keep).get(0, ()))


def drops_by_server(
    readings: Mapping[H, tuple[RankManifest, ...]], standing: RetentionInputs, keep: int
) -> dict[H, tuple[RankSave, ...]]:
    """`memory_drops` of many holders; those without any are left out.

    Most hold the same checkpoints, and what goes of those is decided once: two thousand holders would else take longer
    than all other decisions of a round.
    """
    decided: dict[frozenset[tuple[int, int]], set[tuple[int, int]]] = {}
    found = {}
    for holder, entries in readings.items():
        saves = [m.save for m in entries]
        held = frozenset([(s.generation, s.step) for s in saves])
        gone = decided.get(held)
        if gone is None:
            gone = decided[held] = {(c.generation, c.step) for c in deletable_checkpoints(held, standing, keep)}
        if gone:
            found[holder] = tuple(sorted(s for s in saves if (s.generation, s.step) in gone))
    return found


def deletable_checkpoints(held: Iterable[tuple[int, int]], standing: RetentionInputs, keep: int) -> set[Checkpoint]:
    """Decides which checkpoints may go from one holder.

    `held`: those that it has saves of, as (epoch, step).
    """
    if standing.claimed:
        return set()
    found = [Checkpoint(*key) for key in held]
    on = sorted((c for c in found if on_lineage(standing.lineage, c, standing.generation)), key=lambda c: c.step)
    worthless = standing.unreadable | standing.unrecoverable
    superseded = [
        c for c in on if (c.step < standing.protected_step or c in standing.superseded) and c not in worthless
    ]
    spared = max(0, keep - 1)
    gone = set(superseded[: len(superseded) - spared] if spared else superseded)
    gone |= {c for c in on if c in standing.unreadable and c.step < standing.protected_step}
    gone |= {c for c in on if c in standing.unrecoverable}
    gone |= {c for c in found if c not in on and c.generation < standing.generation}
    return gone - _must_stay(standing)


def superseded_checkpoints(
    readings: Mapping[MemoryServerInstance, Iterable[RankManifest]], newer: Iterable[Checkpoint]
) -> frozenset[Checkpoint]:
    """Finds checkpoints that protect nothing beside one of `newer`.

    `newer` are complete; needs neither R nor who is alive. Every holder that was read and has a rank save of such a one
    has that rank of the newer one too, in a world of the same ranks. So holders that die and take the newer one along
    take the older one along.
    """
    having: dict[Checkpoint, dict[int, set[MemoryServerInstance]]] = {}
    worlds: dict[Checkpoint, int] = {}
    for holder, entries in readings.items():
        for m in entries:
            having.setdefault(m.save.checkpoint, {}).setdefault(m.save.rank, set()).add(holder)
            worlds[m.save.checkpoint] = m.world_size
    candidates = [n for n in newer if n in having]
    return frozenset(
        c
        for c, ranks in having.items()
        if any(
            n.step > c.step
            and worlds[n] == worlds[c]
            and all(holders <= having[n].get(rank, set()) for rank, holders in ranks.items())
            for n in candidates
        )
    )


def _must_stay(standing: RetentionInputs) -> set[Checkpoint]:
    """The parent and the pinned one, and the good ones, whatever is newer."""
    return {
        c for c in (standing.parent, standing.pinned) if c is not None and not _passed(c, standing)
    } | standing.known_good


def _passed(checkpoint: Checkpoint, standing: RetentionInputs) -> bool:
    """The parent may go once what is protected is newer; the pinned one never."""
    return checkpoint != standing.pinned and standing.protected_step > checkpoint.step


def last_good(complete: Iterable[Checkpoint], manifests: Iterable[RankManifest]) -> Checkpoint | None:
    """The newest checkpoint that is not suspect, where newer ones are.

    `complete` are of one lineage. None if the newest of all is good, or all are suspect.
    """
    suspect = anomalous_checkpoints(manifests)
    order = sorted(set(complete), key=lambda c: c.step)
    good = [c for c in order if c not in suspect]
    return good[-1] if good and good[-1] != order[-1] else None


def anomalous_checkpoints(manifests: Iterable[RankManifest]) -> frozenset[Checkpoint]:
    """Checkpoints of steps that were odd on some rank."""
    return frozenset(m.save.checkpoint for m in manifests if m.suspect)


@dataclass(frozen=True, slots=True)
class LossHistory:
    """How far a world got, and its last odd step.

    `step`: finished by every rank. `odd_step`: the newest whose loss was no number, or out of band, on any; 0: none.
    `later_steps`: so many must have followed a checkpoint, none of them odd, before it counts as good.
    """

    step: int
    anomaly_step: int
    later_steps: int

    def is_known_good(self, checkpoint: Checkpoint) -> bool:
        """Whether later steps show a checkpoint to be good."""
        return self.anomaly_step < checkpoint.step and checkpoint.step + self.later_steps <= self.step


def last_good_and_required(
    complete: Iterable[Checkpoint], suspect: frozenset[Checkpoint], sound: LossHistory, known: Checkpoint | None = None
) -> tuple[Checkpoint | None, frozenset[Checkpoint]]:
    """Finds the last good checkpoint, and what must stay for it.

    A loss that turns NaN tells of a state that was spoiled some steps before: the newest checkpoint may have it.

    Args:
        complete: Those of one lineage that can be read.
        suspect: Of these, what can never be good.
        sound: What the steps since have shown.
        known: The last that was proven before.

    Returns:
        The newest that is proven, else `known`; and to be kept: it, and the oldest that may come to be proven next. Where
        none is proven the oldest of all stays: it is good, or as near to it as anything.
    """
    order = sorted(set(complete) - suspect, key=lambda c: c.step)
    since_known = known.step if known is not None else 0
    good = [c for c in order if sound.is_known_good(c) or c.step <= since_known]  # what a good one grew from is good
    last = good[-1] if good else None
    since = max(sound.anomaly_step, last.step if last is not None else 0)
    coming = next((c for c in order if c.step > since), None)
    least = last if last is not None else next(iter(order), None)
    # a part of what was proven may lie on a holder that is silent: it is not complete as read, and comes back
    kept = frozenset(
        c for c in (known if last != known and known not in order else None, least, coming) if c is not None
    )
    return max((c for c in (last, known) if c is not None), key=lambda c: c.step, default=None), kept


def milestone_checkpoints(complete: Iterable[Checkpoint], every_steps: int) -> frozenset[Checkpoint]:
    """The first checkpoint at or after each multiple of `every_steps`.

    The multiple itself need not be saved. One that is the first stays the first: newer ones have higher steps.
    """
    first: dict[int, Checkpoint] = {}
    for checkpoint in sorted(set(complete), key=lambda c: c.step):
        first.setdefault(checkpoint.step // every_steps, checkpoint)
    first.pop(0, None)
    return frozenset(first.values())


def persistent_drops(
    complete: Iterable[Checkpoint],
    seen: Iterable[Checkpoint],
    standing: RetentionInputs,
    keep: int,
    also: frozenset[Checkpoint] = frozenset(),
    unjudged: frozenset[Checkpoint] = frozenset(),
) -> list[Checkpoint]:
    """Checkpoints of the persistent tier that may go, oldest first.

    `complete` lie on the lineage and are complete there; `seen` is everything found there. The newest `keep` complete
    ones stay, those of `also`, and what could not be read (`unjudged`: it may be good). Parts of checkpoints that never
    became complete go once a newer one is complete, unless they are being uploaded (pinned).
    """
    if standing.claimed:
        return []
    order = sorted(set(complete), key=lambda c: c.step)
    if not order:
        return []
    stay = set(order[-max(1, keep) :]) | (also & set(order)) | unjudged | _must_stay(standing)
    newest = order[-1]
    return sorted(
        (
            c
            for c in set(seen) | set(order)
            if c not in stay and (c.step < newest.step) and c.generation <= standing.generation
        ),
        key=lambda c: (c.step, c.generation),
    )


@dataclass(frozen=True, slots=True)
class Repair:
    """Copies one rank save to a holder that lacks it."""

    save: RankSave
    source: MemoryServerInstance
    target: MemoryServerInstance


def plan_repairs(
    readings: dict[MemoryServerInstance, tuple[RankManifest, ...]],
    domains: dict[MemoryServerInstance, str],
    wanted: Checkpoint,
    replicas_effective: int,
    leaving: frozenset[str] = frozenset(),
    topology: Topology = UNKNOWN_TOPOLOGY,
) -> list[Repair]:
    """Plans copies until `wanted` is fully replicated, one per rank at once.

    Copies in failure domains that are `leaving` count only as sources. Targets are holders in failure domains that have
    none yet, if possible in zones or racks that have none, the emptiest first, so that a returned node fills up.
    """
    planned: list[Repair] = []
    standing = topology.differing(holder.node for holder in readings)
    racks = {holder: standing[holder.node][:1] for holder in readings}
    room = _ServersByLoad(readings, domains, leaving, racks)
    having: dict[RankSave, set[MemoryServerInstance]] = {}
    size: dict[RankSave, int] = {}
    for holder, entries in readings.items():
        for m in entries:
            if m.save.checkpoint == wanted:
                having.setdefault(m.save, set()).add(holder)
                size[m.save] = m.stream_bytes
    for save, holders in sorted(having.items()):
        taken = {domains[h] for h in holders} - leaving
        if len(taken) >= replicas_effective:
            continue
        target = room.take(taken, {racks[h] for h in holders if domains[h] in taken}, size[save])
        if target is not None:
            planned.append(Repair(save, min(holders), target))
    return planned


class _ServersByLoad:
    """Holders by rack and by what they hold, the emptiest first: one is found without a look at all others."""

    def __init__(
        self,
        readings: Mapping[MemoryServerInstance, tuple[RankManifest, ...]],
        domains: Mapping[MemoryServerInstance, str],
        leaving: frozenset[str],
        racks: Mapping[MemoryServerInstance, Path],
    ) -> None:
        self._servers: dict[str, list[tuple[int, MemoryServerInstance]]] = {}
        self._domains: dict[Path, list[tuple[int, MemoryServerInstance, str]]] = {}
        rack_of: dict[str, Path] = {}
        for holder, entries in readings.items():
            if domains[holder] not in leaving:
                load = sum(m.stream_bytes for m in entries)
                self._servers.setdefault(domains[holder], []).append((load, holder))
                rack_of[domains[holder]] = racks[holder]
        for domain, loaded in self._servers.items():
            heapify(loaded)
            self._domains.setdefault(rack_of[domain], []).append((*loaded[0], domain))
        for emptiest in self._domains.values():
            heapify(emptiest)
        self._racks = [(*emptiest[0][:2], rack) for rack, emptiest in self._domains.items()]
        heapify(self._racks)

    def take(self, taken: Set[str], racks_taken: Set[Path], size_bytes: int) -> MemoryServerInstance | None:
        """The emptiest holder outside of the failure domains `taken`, which gets so much more; None: there is none.

        In another rack than those taken, where there is one.
        """
        passed = []
        while self._racks and self._racks[0][2] in racks_taken:
            passed.append(heappop(self._racks)[2])
        if self._racks:
            passed.insert(0, heappop(self._racks)[2])
        found = next((holder for rack in passed if (holder := self._of(rack, taken, size_bytes)) is not None), None)
        for rack in passed:
            heappush(self._racks, (*self._domains[rack][0][:2], rack))
        return found

    def _of(self, rack: Path, taken: Set[str], size_bytes: int) -> MemoryServerInstance | None:
        emptiest = self._domains[rack]
        passed = []
        while emptiest and emptiest[0][2] in taken:
            passed.append(heappop(emptiest))
        found = None
        if emptiest:
            load, found, domain = heappop(emptiest)
            loaded = self._servers[domain]
            heapreplace(loaded, (load + size_bytes, found))
            heappush(emptiest, (*loaded[0], domain))
        for one in passed:
            heappush(emptiest, one)
        return found
