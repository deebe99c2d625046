"""Decides which checkpoints are complete, fully replicated, and to restore from.

Pure, over what holders and the persistent tier were read to have. Called by the operator when it changes the world, by
whoever computes the watermark, and by library mode. A silent tier is unknown, never empty: callers say who answered,
nothing here guesses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

from surefoot.protocol import bounds
from surefoot.protocol.bounds import has_every_rank
from surefoot.protocol.checkpoints.records import Layout, Piece, RankManifest
from surefoot.protocol.identities import Checkpoint, MemoryServerInstance
from surefoot.protocol.text import short_repr

# ---- coverage --------------------------------------------------------------------------------------------------------
# Checks whether rank layouts cover every tensor exactly once. Pure; done once per set of layout digests. A global plan
# could promise this; checking what was really saved needs none, so pipeline and expert parallel ranks, which never see
# each other's tensors, need no common plan.


def uncovered(layouts: Iterable[Layout]) -> str | None:
    """Describes the first tensor that is not covered exactly once, or None."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for layout in layouts:
        for tensor in layout.tensors:
            if shapes.setdefault(tensor.name, tensor.shape) != tensor.shape:
                return f"tensor {tensor.name} has shape {shapes[tensor.name]} on one rank and {tensor.shape} on another"
            if dtypes.setdefault(tensor.name, tensor.dtype) != tensor.dtype:
                return f"tensor {tensor.name} has dtype {dtypes[tensor.name]} on one rank and {tensor.dtype} on another"
            pieces[tensor.name].extend(tensor.pieces)
    for name, shape in shapes.items():
        problem = _gap_or_overlap(shape, pieces[name])
        if problem:
            return f"tensor {name} of shape {shape}: {problem}"
    return None


def _gap_or_overlap(shape: tuple[int, ...], pieces: Sequence[Piece]) -> str | None:
    if any(len(p.offsets) != len(shape) or len(p.lengths) != len(shape) for p in pieces):
        return "a piece has another number of dimensions"
    if any(n < 0 for p in pieces for n in p.lengths):
        return "a piece has a negative length"
    wanted, found = prod(shape), sum(prod(p.lengths) for p in pieces)
    if wanted == 0:
        return None
    if found != wanted:
        return f"{short_repr(found)} of {short_repr(wanted)} elements saved"
    full = [p for p in pieces if prod(p.lengths)]  # where a piece without elements lies means nothing
    if any(o < 0 or o + n > s for p in full for o, n, s in zip(p.offsets, p.lengths, shape, strict=True)):
        return "a piece reaches beyond it"
    return _overlap_of(shape, full)


def _overlap_of(shape: tuple[int, ...], boxes: list[Piece]) -> str | None:
    """Whether some of the boxes overlap, which lie inside the shape and together have as many elements.

    A sum of boxes is known by its corners, each counted with the sign of its parity: exactly those of the whole are
    left if, and only if, every element is in one box. No box is compared with another, so a record that was written to
    be slow is not; dimensions that no box is cut along add nothing.
    """
    cut = [d for d, n in enumerate(shape) if any(box.lengths[d] != n for box in boxes)]
    if not cut:
        return None if len(boxes) == 1 else "two pieces overlap"  # two saves of a 0-d tensor too
    if len(boxes) << len(cut) > bounds.MAX_COVERAGE_CORNERS:
        return f"{len(boxes)} pieces are cut along {len(cut)} dimensions, which are too many corners to compare"
    corners: dict[tuple[int, ...], int] = defaultdict(int)
    whole = Piece((0,) * len(shape), shape, shape, 0)
    for box, weight in ((whole, -1), *((box, 1) for box in boxes)):
        ends = [((o := box.offsets[d], 1), (o + box.lengths[d], -1)) for d in cut]
        for corner in product(*ends):
            corners[tuple(at for at, _ in corner)] += weight * prod(sign for _, sign in corner)
    return "two pieces overlap" if any(corners.values()) else None


# ---- lineage ---------------------------------------------------------------------------------------------------------
# Follows the chain of epochs that led to the present one. A checkpoint counts only if it is on it. Used to choose the
# restore point, to retain and drop, and to count samples along the history that was kept.


@dataclass(frozen=True, slots=True)
class LineageEntry:
    """An epoch's parent checkpoint (None: step 0) and its ranks.

    A parent may be an older job's (`Checkpoint.imported`): it is a plain parent whose epoch has no entry here.
    """

    generation: int
    parent: Checkpoint | None
    world_size: int


Lineage = tuple[LineageEntry, ...]
"""Entries in the order of their epochs; not every number need be there, a claim may be overtaken by another."""


def entry_of(lineage: Lineage, epoch: int) -> LineageEntry | None:
    """The entry of `epoch`, or None where that epoch was never committed."""
    return next((entry for entry in reversed(lineage) if entry.generation == epoch), None)


def on_lineage(lineage: Lineage, checkpoint: Checkpoint, epoch: int) -> bool:
    """Whether `checkpoint` is part of the history that `epoch` stands on.

    It is if that epoch saved it, or branched from it, or if it lies on the parent's lineage no later than the
    branching point. Saves of an overtaken world after the branching point are not: the world went another way.
    """
    entry = entry_of(lineage, epoch)
    bound: int | None = None  # steps above this were cut off by a later branch
    while entry is not None:
        begin = entry.parent.step if entry.parent else 0
        if checkpoint.generation == entry.generation:
            return checkpoint.step > begin and (bound is None or checkpoint.step <= bound)
        if entry.parent is None:
            return False
        bound = entry.parent.step if bound is None else min(bound, entry.parent.step)
        if checkpoint == entry.parent:
            return checkpoint.step <= bound  # also where its own epoch's entry was pruned
        entry = _before(lineage, entry)
    return False


def _before(lineage: Lineage, entry: LineageEntry) -> LineageEntry | None:
    """The entry that `entry` branched from. Epochs only grow, so a damaged record cannot lead round in a circle."""
    if entry.parent is None or entry.parent.generation >= entry.generation:
        return None
    return entry_of(lineage, entry.parent.generation)


def newest_checkpoint(checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    """The checkpoint of one lineage with the highest step; steps are unique."""
    return max(checkpoints, key=lambda checkpoint: (checkpoint.step, checkpoint.generation), default=None)


def generation_at(lineage: Lineage, epoch: int, step: int) -> int | None:
    """The epoch whose execution of `step` counts in `epoch`'s history.

    The first step is 1. None if no epoch has executed it.
    """
    entry = entry_of(lineage, epoch)
    while entry is not None:
        if entry.parent is None or step > entry.parent.step:
            return entry.generation
        entry = _before(lineage, entry)
    return None


def ancestry(lineage: Lineage, epoch: int) -> tuple[int, ...]:
    """The epochs whose steps count in the history of `epoch`, itself first."""
    found, entry = list[int](), entry_of(lineage, epoch)
    while entry is not None:
        found.append(entry.generation)
        entry = _before(lineage, entry)
    return tuple(found)


def first_step(lineage: Lineage) -> int:
    """The first step that this job ran itself in its present history.

    1, or the one after the older job's checkpoint that it began from.
    """
    entry = lineage[-1] if lineage else None
    while entry is not None:
        if entry.parent is not None and entry.parent.imported:
            return entry.parent.step + 1
        entry = _before(lineage, entry)
    return 1


def pruned(lineage: Lineage, oldest_needed: Checkpoint | None, epoch: int) -> Lineage:
    """Removes entries that no retained checkpoint needs: status stays bounded.

    Keeps every entry from `oldest_needed`'s epoch on that `epoch` descends from; with None keeps all.
    """
    if oldest_needed is None:
        return lineage
    chain: set[int] = set()
    entry = entry_of(lineage, epoch)
    while entry is not None:
        chain.add(entry.generation)
        if entry.generation <= oldest_needed.generation:
            break
        entry = _before(lineage, entry)
    return tuple(entry for entry in lineage if entry.generation in chain)


def describe_lineage(lineage: Sequence[LineageEntry]) -> str:
    """`1@0x3 > 2@40x2`: epoch, the step it branched from, its world."""
    return " > ".join(f"{e.generation}@{e.parent.step if e.parent else 0}x{e.world_size}" for e in lineage)


# ---- completeness ----------------------------------------------------------------------------------------------------

Covers = Mapping[frozenset[str], bool]
"""For each set of layout digests that was checked: whether together they cover every tensor exactly once."""


@dataclass(frozen=True, slots=True)
class UnreadRecord:
    """Names one record that a listing could not read, and `why`.

    `silent`: the tier did not give it, so it may be good; else it was read, and is damaged or gone. It is a manifest of
    `checkpoint`, or the layout record `digest`.
    """

    reason: str
    silent: bool
    checkpoint: Checkpoint | None = None
    digest: str | None = None

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class TierReading:
    """Holds the index entries that were read, by tier.

    Those of sealed holders, and manifests in the persistent tier (None: not read, unknown).
    """

    servers: Mapping[MemoryServerInstance, tuple[RankManifest, ...]]
    persistent: tuple[RankManifest, ...] | None
    _cache: dict[Checkpoint, dict[int, list[RankManifest]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _having: dict[Checkpoint, dict[int, dict[MemoryServerInstance, RankManifest]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    _layouts: dict[Checkpoint, frozenset[str] | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _copies: dict[Checkpoint, tuple[Mapping[MemoryServerInstance, str], int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def manifests(self) -> Mapping[Checkpoint, Mapping[int, list[RankManifest]]]:
        """Maps checkpoint and rank to all manifests seen; computed once."""
        if not self._cache:
            found: dict[tuple[int, int], dict[int, list[RankManifest]]] = defaultdict(lambda: defaultdict(list))
            for source in (*self.servers.values(), self.persistent or ()):
                for manifest in source:
                    save = manifest.save
                    found[save.generation, save.step][save.rank].append(manifest)
            self._cache.update({Checkpoint(*key): dict(ranks) for key, ranks in found.items()})
        return self._cache

    def having(self) -> Mapping[Checkpoint, Mapping[int, Mapping[MemoryServerInstance, RankManifest]]]:
        """Maps checkpoint and rank to holders with their manifests; computed once."""
        if not self._having:
            found: dict[tuple[int, int], dict[int, dict[MemoryServerInstance, RankManifest]]] = defaultdict(
                lambda: defaultdict(dict)
            )
            for holder, manifests in self.servers.items():
                for manifest in manifests:
                    save = manifest.save
                    found[save.generation, save.step][save.rank][holder] = manifest
            self._having.update({Checkpoint(*key): dict(ranks) for key, ranks in found.items()})
        return self._having


def layouts_to_check(reading: TierReading) -> set[frozenset[str]]:
    """Sets of layout digests, one per checkpoint with all ranks.

    `Covers` must answer whether each set covers all tensors.
    """
    wanted = set()
    for ranks in reading.manifests().values():
        if has_every_rank(ranks, next(iter(ranks.values()))[0].world_size):
            wanted.add(frozenset(m.layout for copies in ranks.values() for m in copies))
    return wanted


def is_complete(ranks: Mapping[int, list[RankManifest]], covers: Covers) -> bool:
    """Returns whether every rank's save is there and covers each tensor once.

    All must agree on the size of the world. Two manifests of one rank that describe different bytes make the checkpoint
    incomplete: somebody wrote twice.
    """
    layouts = _agreed_layouts(ranks)
    return layouts is not None and covers.get(layouts, False)


def _agreed_layouts(ranks: Mapping[int, list[RankManifest]]) -> frozenset[str] | None:
    """The layouts of a checkpoint whose ranks are all there and agree; None: they are not, or do not."""
    if not ranks:
        return None
    world = next(iter(ranks.values()))[0].world_size
    if not has_every_rank(ranks, world):
        return None
    for copies in ranks.values():
        if any(m.world_size != world or not m.same_bytes_as(copies[0]) for m in copies):
            return None
    return frozenset(copies[0].layout for copies in ranks.values())


def complete_checkpoints(
    reading: TierReading, lineage: Lineage, epoch: int, bad: frozenset[Checkpoint], covers: Covers
) -> list[Checkpoint]:
    """Complete checkpoints on the lineage of `epoch`, oldest first, none of `bad`."""
    found = [
        checkpoint
        for checkpoint, ranks in reading.manifests().items()
        if checkpoint not in bad
        and on_lineage(lineage, checkpoint, epoch)
        and _world_size_matches(lineage, checkpoint, len(ranks))
        and (layouts := _layouts_of(reading, checkpoint, ranks)) is not None
        and covers.get(layouts, False)
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def _layouts_of(
    reading: TierReading, checkpoint: Checkpoint, ranks: Mapping[int, list[RankManifest]]
) -> frozenset[str] | None:
    """`_agreed_layouts`, worked out once a reading: every round asks, and what was read seldom changes."""
    if checkpoint not in reading._layouts:
        reading._layouts[checkpoint] = _agreed_layouts(ranks)
    return reading._layouts[checkpoint]


def _world_size_matches(lineage: Lineage, checkpoint: Checkpoint, ranks: int) -> bool:
    """Whether the manifests' world is that epoch's: manifests that agree among themselves may still be of another
    world."""
    entry = entry_of(lineage, checkpoint.generation)
    return entry is None or entry.world_size == ranks


def copies_of(checkpoint: Checkpoint, reading: TierReading, domains: Mapping[MemoryServerInstance, str]) -> int:
    """Counts failure domains with a rank's save; the minimum over ranks."""
    counted = reading._copies.get(checkpoint)
    if counted is None or counted[0] is not domains:
        ranks = reading.having().get(checkpoint, {})
        world = max((manifest.world_size for copies in ranks.values() for manifest in copies.values()), default=0)
        copies = [len({domains.get(h, h.node) for h in holders}) for holders in ranks.values()]
        counted = reading._copies[checkpoint] = (domains, min(copies) if has_every_rank(ranks, world) else 0)
    return counted[1]


def complete_persistent(
    persistent: Iterable[RankManifest], lineage: Lineage, epoch: int, bad: frozenset[Checkpoint], covers: Covers
) -> list[Checkpoint]:
    """Checkpoints that the persistent tier alone completes, oldest first."""
    return complete_checkpoints(TierReading({}, tuple(persistent)), lineage, epoch, bad, covers)


def effective_replicas(replicas: int, live_domains: int) -> int:
    """R_eff: `replicas`, at most one per live failure domain, at least 1."""
    return max(1, min(replicas, live_domains))


def watermark(
    reading: TierReading,
    lineage: Lineage,
    epoch: int,
    bad: frozenset[Checkpoint],
    covers: Covers,
    domains: Mapping[MemoryServerInstance, str],
    replicas_effective: int,
) -> Checkpoint | None:
    """W: the newest fully replicated checkpoint on the lineage.

    Read from the indexes: a fact about the holders, not a decision.
    """
    candidates = complete_checkpoints(reading, lineage, epoch, bad, covers)
    return newest_checkpoint(c for c in candidates if copies_of(c, reading, domains) >= replicas_effective)
