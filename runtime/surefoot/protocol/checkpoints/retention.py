"""Decides which checkpoints may be deleted.

Pure. The leader of the operator uses it, and while no operator leads, the agent that is the GC owner.

Invariant 1: a complete checkpoint on the lineage is deleted only after a newer one on it is fully replicated (by the
indexes that were read) or complete in the persistent tier. The functions return what *may* be deleted. A caller deletes
it only from the memory server instances that it read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import TypeVar

from surefoot.protocol.checkpoints.completeness import Lineage, is_on_lineage
from surefoot.protocol.checkpoints.placement import UNKNOWN_TOPOLOGY, Path, Topology
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, MemoryServerInstance, RankSave

H = TypeVar("H")
"""Identifies a memory server."""


@dataclass(frozen=True, slots=True)
class RetentionInputs:
    """The present state of the job, as far as the rules of retention depend on it."""

    lineage: Lineage
    """Lineage of the present generation."""
    generation: int
    """The present generation."""
    is_claimed: bool
    """Whether the generation is only claimed: then nothing is deleted, since the restore point is being chosen."""
    parent: Checkpoint | None
    """Checkpoint that the generation restored; None: it started at step 0."""
    watermark: Checkpoint | None
    """Newest fully replicated checkpoint; None: there is none."""
    persistent: Checkpoint | None
    """Newest checkpoint that is complete in the persistent tier; None: there is none."""
    pinned: Checkpoint | None
    """Checkpoint that is being uploaded; None: there is none."""
    unreadable: frozenset[Checkpoint]
    """Checkpoints of which every copy of some part is missing or corrupt."""
    unrecoverable: frozenset[Checkpoint] = frozenset()
    """Checkpoints of this generation that can never become complete, because some rank never saved its part."""
    superseded: frozenset[Checkpoint] = frozenset()
    """Checkpoints that protect nothing: any loss of a certain newer one also loses them (`superseded_checkpoints`)."""

    known_good: frozenset[Checkpoint] = frozenset()
    """Checkpoints that newer ones do not replace: the last one before a loss anomaly, the last known good one, and the
    next that may become known good (`last_good`, `last_good_and_required`)."""

    @property
    def protected_step(self) -> int:
        """Step of the newest protected checkpoint, which supersedes older ones; 0: nothing is protected."""
        return max((c.step for c in (self.watermark, self.persistent) if c is not None), default=0)


def memory_saves_to_delete(entries: Iterable[RankManifest], inputs: RetentionInputs, keep: int) -> list[RankSave]:
    """Returns the rank saves that may be deleted from one fenced memory server.

    On the lineage: saves older than the protected checkpoint, except of the newest `keep` checkpoints (the protected
    one included), and saves of any age that can never become complete; but never the parent before W is newer, and
    never the pinned checkpoint. Off the lineage: saves of older generations. Nothing while the generation is claimed.
    """
    return list(saves_to_delete_by_server({0: tuple(entries)}, inputs, keep).get(0, ()))


def saves_to_delete_by_server(
    readings: Mapping[H, tuple[RankManifest, ...]], inputs: RetentionInputs, keep: int
) -> dict[H, tuple[RankSave, ...]]:
    """Returns `memory_drops` for many memory servers; servers without any are left out.

    Most servers have the same checkpoints, and each set is decided only once: for two thousand servers this would
    otherwise take longer than the rest of a reconcile.
    """
    decisions: dict[frozenset[tuple[int, int]], set[tuple[int, int]]] = {}
    drops = {}
    for server, entries in readings.items():
        saves = [m.save for m in entries]
        checkpoint_keys = frozenset([(s.generation, s.step) for s in saves])
        deletable_keys = decisions.get(checkpoint_keys)
        if deletable_keys is None:
            deletable_keys = decisions[checkpoint_keys] = {
                (c.generation, c.step) for c in deletable_checkpoints(checkpoint_keys, inputs, keep)
            }
        if deletable_keys:
            drops[server] = tuple(sorted(s for s in saves if (s.generation, s.step) in deletable_keys))
    return drops


def deletable_checkpoints(
    checkpoint_keys: Iterable[tuple[int, int]], inputs: RetentionInputs, keep: int
) -> set[Checkpoint]:
    """Decides which checkpoints may be deleted from one memory server.

    Args:
        checkpoint_keys: Generation and step of the checkpoints that the server has saves of.
        inputs: The present state of the job.
        keep: Number of checkpoints to retain, the protected one included.
    """
    if inputs.is_claimed:
        return set()
    checkpoints = [Checkpoint(*key) for key in checkpoint_keys]
    on_the_lineage = sorted(
        (c for c in checkpoints if is_on_lineage(inputs.lineage, c, inputs.generation)), key=lambda c: c.step
    )
    # these could not be restored, so they are deleted below and do not count among the newest `keep`
    unrestorable = inputs.unreadable | inputs.unrecoverable
    superseded = [
        c
        for c in on_the_lineage
        if (c.step < inputs.protected_step or c in inputs.superseded) and c not in unrestorable
    ]
    retained_count = max(0, keep - 1)
    # the newest `keep` - 1 superseded ones stay in addition to the protected one
    deletable = set(superseded[: len(superseded) - retained_count] if retained_count else superseded)
    deletable |= {c for c in on_the_lineage if c in inputs.unreadable and c.step < inputs.protected_step}
    deletable |= {c for c in on_the_lineage if c in inputs.unrecoverable}
    # off the lineage, only saves of older generations are certainly useless
    deletable |= {c for c in checkpoints if c not in on_the_lineage and c.generation < inputs.generation}
    return deletable - _always_retained(inputs)


def superseded_checkpoints(
    readings: Mapping[MemoryServerInstance, Iterable[RankManifest]], newer: Iterable[Checkpoint]
) -> frozenset[Checkpoint]:
    """Returns the checkpoints that protect nothing, given the complete checkpoints `newer`.

    For such a checkpoint, every memory server with a save of some rank has that rank's save of a certain newer
    checkpoint, too, at the same world size. So any loss of servers that takes the newer one also takes the older. This
    depends neither on R nor on which servers are alive.
    """
    servers_by_rank: dict[Checkpoint, dict[int, set[MemoryServerInstance]]] = {}
    world_sizes: dict[Checkpoint, int] = {}
    for server, entries in readings.items():
        for manifest in entries:
            servers_by_rank.setdefault(manifest.save.checkpoint, {}).setdefault(manifest.save.rank, set()).add(server)
            world_sizes[manifest.save.checkpoint] = manifest.world_size
    # a newer checkpoint that was not read from any server cannot supersede another one
    candidates = [newer_one for newer_one in newer if newer_one in servers_by_rank]
    return frozenset(
        checkpoint
        for checkpoint, ranks in servers_by_rank.items()
        if any(
            newer_one.step > checkpoint.step
            and world_sizes[newer_one] == world_sizes[checkpoint]
            and all(servers <= servers_by_rank[newer_one].get(rank, set()) for rank, servers in ranks.items())
            for newer_one in candidates
        )
    )


def _always_retained(inputs: RetentionInputs) -> set[Checkpoint]:
    """Returns the checkpoints to retain in any case: the parent until it is passed, the pinned and the good ones."""
    return {
        c for c in (inputs.parent, inputs.pinned) if c is not None and not _is_passed(c, inputs)
    } | inputs.known_good


def _is_passed(checkpoint: Checkpoint, inputs: RetentionInputs) -> bool:
    """Returns whether a protected checkpoint is newer, so that the parent may be deleted; the pinned one never may."""
    return checkpoint != inputs.pinned and inputs.protected_step > checkpoint.step


def last_checkpoint_before_anomaly(
    complete: Iterable[Checkpoint], manifests: Iterable[RankManifest]
) -> Checkpoint | None:
    """Returns the newest checkpoint without a loss anomaly if newer ones have one; all must be of one lineage.

    None if the newest checkpoint has no anomaly, or if all have one.
    """
    anomalous = anomalous_checkpoints(manifests)
    by_step = sorted(set(complete), key=lambda c: c.step)
    good = [c for c in by_step if c not in anomalous]
    return good[-1] if good and good[-1] != by_step[-1] else None


def anomalous_checkpoints(manifests: Iterable[RankManifest]) -> frozenset[Checkpoint]:
    """Returns the checkpoints whose step had a loss anomaly on some rank."""
    return frozenset(m.save.checkpoint for m in manifests if m.suspect)


@dataclass(frozen=True, slots=True)
class LossHistory:
    """Progress of a generation, and its last loss anomaly."""

    step: int
    """Last step that every rank finished."""
    anomaly_step: int
    """Newest step with a loss anomaly on some rank; 0: none."""
    later_steps: int
    """Number of steps without an anomaly that must follow a checkpoint before it is known good."""

    def is_known_good(self, checkpoint: Checkpoint) -> bool:
        """Returns whether later steps show that a checkpoint is good."""
        return self.anomaly_step < checkpoint.step and checkpoint.step + self.later_steps <= self.step


def find_known_good(
    complete: Iterable[Checkpoint],
    anomalous: frozenset[Checkpoint],
    history: LossHistory,
    earlier_good: Checkpoint | None = None,
) -> tuple[Checkpoint | None, frozenset[Checkpoint]]:
    """Finds the last known good checkpoint, and the checkpoints to retain because of it.

    A loss becomes NaN some steps after the weights were damaged, so the newest checkpoint may already be damaged.

    Args:
        complete: Complete checkpoints of one lineage.
        anomalous: Those of them that have a loss anomaly and can never be good.
        history: What the steps since then have shown.
        earlier_good: The last known good checkpoint so far; None: none.

    Returns:
        The newest known good checkpoint, else `earlier_good`. And those to retain: this one, and the oldest that may become
        known good next; without a known good one, the oldest of all, which is the most likely to be good.
    """
    by_step = sorted(set(complete) - anomalous, key=lambda c: c.step)
    earlier_good_step = earlier_good.step if earlier_good is not None else 0
    # a checkpoint that a known good one grew from is good as well
    good = [c for c in by_step if history.is_known_good(c) or c.step <= earlier_good_step]
    newest_good = good[-1] if good else None
    after_step = max(history.anomaly_step, newest_good.step if newest_good is not None else 0)
    next_candidate = next((c for c in by_step if c.step > after_step), None)
    oldest_needed = newest_good if newest_good is not None else next(iter(by_step), None)
    # a known good checkpoint that is incomplete in this reading may have parts on an unreachable server: retain it
    retained = frozenset(
        c
        for c in (
            earlier_good if newest_good != earlier_good and earlier_good not in by_step else None,
            oldest_needed,
            next_candidate,
        )
        if c is not None
    )
    return max((c for c in (newest_good, earlier_good) if c is not None), key=lambda c: c.step, default=None), retained


def milestone_checkpoints(complete: Iterable[Checkpoint], every_steps: int) -> frozenset[Checkpoint]:
    """Returns the first checkpoint at or after each multiple of `every_steps`.

    The step of the multiple need not be saved. The choice is final, since newer checkpoints have higher steps.
    """
    first: dict[int, Checkpoint] = {}
    for checkpoint in sorted(set(complete), key=lambda c: c.step):
        first.setdefault(checkpoint.step // every_steps, checkpoint)
    first.pop(0, None)
    return frozenset(first.values())


def persistent_checkpoints_to_delete(
    complete: Iterable[Checkpoint],
    present: Iterable[Checkpoint],
    inputs: RetentionInputs,
    keep: int,
    retained: frozenset[Checkpoint] = frozenset(),
    possibly_good: frozenset[Checkpoint] = frozenset(),
) -> list[Checkpoint]:
    """Returns the checkpoints that may be deleted from the persistent tier, oldest first.

    Parts of checkpoints that never became complete are deleted once a newer one is complete, unless they are pinned.

    Args:
        complete: Checkpoints on the lineage that are complete there.
        present: All checkpoints of which anything is there.
        inputs: The present state of the job.
        keep: Number of newest complete checkpoints to retain.
        retained: Further complete checkpoints to retain.
        unjudged: Checkpoints that could not be read, and are retained because they may be good.
    """
    if inputs.is_claimed:
        return []
    by_step = sorted(set(complete), key=lambda c: c.step)
    if not by_step:
        return []
    # `keep` of 0 would leave nothing to restore
    to_retain = set(by_step[-max(1, keep) :]) | (retained & set(by_step)) | possibly_good | _always_retained(inputs)
    newest = by_step[-1]
    return sorted(
        (
            c
            for c in set(present) | set(by_step)
            if c not in to_retain and (c.step < newest.step) and c.generation <= inputs.generation
        ),
        key=lambda c: (c.step, c.generation),
    )


@dataclass(frozen=True, slots=True)
class Repair:
    """A rank save that is to be copied to a memory server that lacks it."""

    save: RankSave
    """The rank save to copy."""
    source: MemoryServerInstance
    """Memory server to read from."""
    target: MemoryServerInstance
    """Memory server to write to."""


def plan_repairs(
    readings: dict[MemoryServerInstance, tuple[RankManifest, ...]],
    domains: dict[MemoryServerInstance, str],
    checkpoint: Checkpoint,
    replicas_effective: int,
    evacuated_domains: frozenset[str] = frozenset(),
    topology: Topology = UNKNOWN_TOPOLOGY,
) -> list[Repair]:
    """Plans the next copies towards full replication of a checkpoint, at most one for each rank.

    A copy in a failure domain that is being evacuated only serves as a source. Targets are servers in failure domains
    without a copy, if possible in zones or racks without one; the emptiest first, so that a returned node fills up.

    Args:
        readings: Index entries by memory server.
        domains: Failure domain of each of these servers.
        checkpoint: The checkpoint to replicate.
        replicas_effective: Number of failure domains that each rank's save should be in.
        evacuated_domains: Failure domains that are being evacuated.
        topology: Locations of the nodes.
    """
    planned: list[Repair] = []
    paths = topology.differing_paths(server.node for server in readings)
    racks = {server: paths[server.node][:1] for server in readings}
    servers_by_load = _ServersByLoad(readings, domains, evacuated_domains, racks)
    servers_by_save: dict[RankSave, set[MemoryServerInstance]] = {}
    size_by_save: dict[RankSave, int] = {}
    for server, entries in readings.items():
        for manifest in entries:
            if manifest.save.checkpoint == checkpoint:
                servers_by_save.setdefault(manifest.save, set()).add(server)
                size_by_save[manifest.save] = manifest.stream_bytes
    for save, servers in sorted(servers_by_save.items()):
        domains_with_copy = {domains[server_with_copy] for server_with_copy in servers} - evacuated_domains
        if len(domains_with_copy) >= replicas_effective:
            continue
        # one copy per save and call: the caller plans again once these are made
        target = servers_by_load.take_emptiest(
            domains_with_copy,
            {racks[server_with_copy] for server_with_copy in servers if domains[server_with_copy] in domains_with_copy},
            size_by_save[save],
        )
        if target is not None:
            planned.append(Repair(save, min(servers), target))
    return planned


class _ServersByLoad:
    """Memory servers by rack and load, from which the emptiest suitable one is taken without scanning all."""

    def __init__(
        self,
        readings: Mapping[MemoryServerInstance, tuple[RankManifest, ...]],
        domains: Mapping[MemoryServerInstance, str],
        evacuated_domains: frozenset[str],
        racks: Mapping[MemoryServerInstance, Path],
    ) -> None:
        self._servers: dict[str, list[tuple[int, MemoryServerInstance]]] = {}
        self._domains: dict[Path, list[tuple[int, MemoryServerInstance, str]]] = {}
        rack_of: dict[str, Path] = {}
        for server, entries in readings.items():
            if domains[server] not in evacuated_domains:
                load = sum(m.stream_bytes for m in entries)
                self._servers.setdefault(domains[server], []).append((load, server))
                rack_of[domains[server]] = racks[server]
        # a heap of servers per domain, of domains per rack, and of racks: each by its emptiest server
        for domain, loaded in self._servers.items():
            heapify(loaded)
            self._domains.setdefault(rack_of[domain], []).append((*loaded[0], domain))
        for emptiest in self._domains.values():
            heapify(emptiest)
        self._racks = [(*emptiest[0][:2], rack) for rack, emptiest in self._domains.items()]
        heapify(self._racks)

    def take_emptiest(
        self, excluded_domains: Set[str], avoided_racks: Set[Path], size_bytes: int
    ) -> MemoryServerInstance | None:
        """Takes the emptiest server outside of the `excluded_domains`, and adds to its load; None: there is none.

        Prefers racks that are not in `avoided_racks`.
        """
        # first the emptiest rack that has no copy, then the emptier ones that have one
        racks = []
        while self._racks and self._racks[0][2] in avoided_racks:
            racks.append(heappop(self._racks)[2])
        if self._racks:
            racks.insert(0, heappop(self._racks)[2])
        server = next(
            (
                candidate
                for rack in racks
                if (candidate := self._take_from_rack(rack, excluded_domains, size_bytes)) is not None
            ),
            None,
        )
        for rack in racks:
            heappush(self._racks, (*self._domains[rack][0][:2], rack))
        return server

    def _take_from_rack(self, rack: Path, excluded_domains: Set[str], size_bytes: int) -> MemoryServerInstance | None:
        """Takes the emptiest server of one rack outside of the `excluded_domains`."""
        emptiest = self._domains[rack]
        skipped = []
        while emptiest and emptiest[0][2] in excluded_domains:
            skipped.append(heappop(emptiest))
        server = None
        if emptiest:
            load, server, domain = heappop(emptiest)
            loaded = self._servers[domain]
            heapreplace(loaded, (load + size_bytes, server))
            heappush(emptiest, (*loaded[0], domain))
        for entry in skipped:
            heappush(emptiest, entry)
        return server
