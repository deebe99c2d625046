"""Decides which checkpoints are complete and fully replicated.

Pure: works on the manifests that were read from memory servers and the persistent tier. The operator calls it when it
assigns a new generation, memory servers' clients to compute the watermark, and library mode to choose a checkpoint. A
tier that did not answer is unknown, never empty: callers pass only readings that succeeded.
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
# Checks that the layouts of all ranks cover every tensor exactly once; done once per set of layout digests. Checking
# the saves themselves needs no global save plan, so that pipeline and expert parallel ranks, which never see each
# other's tensors, can save independently.


def describe_uncovered_tensor(layouts: Iterable[Layout]) -> str | None:
    """Describes the first tensor that is not covered exactly once; None if all are."""
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
        problem = _describe_coverage_fault(shape, pieces[name])
        if problem:
            return f"tensor {name} of shape {shape}: {problem}"
    return None


def _describe_coverage_fault(shape: tuple[int, ...], pieces: Sequence[Piece]) -> str | None:
    """Describes why pieces do not cover a tensor of this shape exactly once; None if they do."""
    if any(len(p.offsets) != len(shape) or len(p.lengths) != len(shape) for p in pieces):
        return "a piece has another number of dimensions"
    if any(n < 0 for p in pieces for n in p.lengths):
        return "a piece has a negative length"
    # the number of elements is cheap to check, and the checks below rely on it
    tensor_elements, saved_elements = prod(shape), sum(prod(p.lengths) for p in pieces)
    if tensor_elements == 0:
        return None
    if saved_elements != tensor_elements:
        return f"{short_repr(saved_elements)} of {short_repr(tensor_elements)} elements saved"
    # then every piece must be inside the tensor, or corners outside could cancel each other
    nonempty_pieces = [p for p in pieces if prod(p.lengths)]  # a piece without elements covers nothing, wherever it is
    if any(o < 0 or o + n > s for p in nonempty_pieces for o, n, s in zip(p.offsets, p.lengths, shape, strict=True)):
        return "a piece extends beyond the tensor"
    return _describe_overlap(shape, nonempty_pieces)


def _describe_overlap(shape: tuple[int, ...], boxes: list[Piece]) -> str | None:
    """Describes an overlap of boxes that are inside the shape and have as many elements in all; None if there is none.

    Adds up the corners of all boxes, each with the sign of its parity. The corners of the whole tensor, and no others,
    remain if and only if every element is in exactly one box. The cost is linear in the number of boxes, so that a
    hostile record cannot make it slow; dimensions along which no box is cut add nothing.
    """
    cut_dimensions = [d for d, n in enumerate(shape) if any(box.lengths[d] != n for box in boxes)]
    if not cut_dimensions:
        return None if len(boxes) == 1 else "two pieces overlap"  # also when a 0-d tensor was saved twice
    if len(boxes) << len(cut_dimensions) > bounds.MAX_COVERAGE_CORNERS:
        return (
            f"{len(boxes)} pieces are cut along {len(cut_dimensions)} dimensions: these are too many corners to compare"
        )
    corners: dict[tuple[int, ...], int] = defaultdict(int)
    tensor_box = Piece((0,) * len(shape), shape, shape, 0)
    for box, weight in ((tensor_box, -1), *((box, 1) for box in boxes)):
        ends = [((o := box.offsets[d], 1), (o + box.lengths[d], -1)) for d in cut_dimensions]
        for corner in product(*ends):
            corners[tuple(at for at, _ in corner)] += weight * prod(sign for _, sign in corner)
    return "two pieces overlap" if any(corners.values()) else None


# ---- lineage ---------------------------------------------------------------------------------------------------------
# Follows the chain of generations that led to the present one. Only checkpoints on it count: for the restore point, for
# retention, and for counting samples along the history that the job kept.


@dataclass(frozen=True, slots=True)
class LineageEntry:
    """A committed generation and the checkpoint that it branched from."""

    generation: int
    """Number of the generation."""
    parent: Checkpoint | None
    """Checkpoint that the generation restored; None: it started at step 0. The source job's (`Checkpoint.imported`) has
    no entry in this lineage."""
    world_size: int
    """Number of ranks of the generation."""


Lineage = tuple[LineageEntry, ...]
"""Entries by ascending generation; numbers of claims that were never committed are missing."""


def lineage_entry_of(lineage: Lineage, generation: int) -> LineageEntry | None:
    """Returns the entry of a generation; None if it was never committed."""
    return next((entry for entry in reversed(lineage) if entry.generation == generation), None)


def is_on_lineage(lineage: Lineage, checkpoint: Checkpoint, generation: int) -> bool:
    """Returns whether a checkpoint is part of the history of a generation.

    It is if the generation saved it or branched from it, or if it is on the parent's lineage and not after the
    branching point. A save after a branching point is not: the job repeated those steps in another generation.
    """
    entry = lineage_entry_of(lineage, generation)
    last_step: int | None = None  # steps above this were cut off by a later branch
    while entry is not None:
        parent_step = entry.parent.step if entry.parent else 0
        # the generation's own saves count from its parent up to the next branch
        if checkpoint.generation == entry.generation:
            return checkpoint.step > parent_step and (last_step is None or checkpoint.step <= last_step)
        if entry.parent is None:
            return False
        # older ones count only up to the earliest branching point passed so far
        last_step = entry.parent.step if last_step is None else min(last_step, entry.parent.step)
        if checkpoint == entry.parent:
            return checkpoint.step <= last_step  # true also if the entry of the checkpoint's own generation was pruned
        entry = _parent_entry(lineage, entry)
    return False


def _parent_entry(lineage: Lineage, entry: LineageEntry) -> LineageEntry | None:
    """Returns the entry that `entry` branched from; a damaged record cannot cause a loop, as generations must decrease."""
    if entry.parent is None or entry.parent.generation >= entry.generation:
        return None
    return lineage_entry_of(lineage, entry.parent.generation)


def newest_checkpoint(checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    """Returns the checkpoint with the highest step; all must be of one lineage, where steps are unique."""
    return max(checkpoints, key=lambda checkpoint: (checkpoint.step, checkpoint.generation), default=None)


def generation_of_step(lineage: Lineage, generation: int, step: int) -> int | None:
    """Returns the generation whose execution of a step counts in the history of `generation`; None: no one has run it.

    Steps count from 1.
    """
    entry = lineage_entry_of(lineage, generation)
    while entry is not None:
        if entry.parent is None or step > entry.parent.step:
            return entry.generation
        entry = _parent_entry(lineage, entry)
    return None


def ancestor_generations(lineage: Lineage, generation: int) -> tuple[int, ...]:
    """Returns the generations whose steps count in the history of a generation, that one first."""
    generations, entry = list[int](), lineage_entry_of(lineage, generation)
    while entry is not None:
        generations.append(entry.generation)
        entry = _parent_entry(lineage, entry)
    return tuple(generations)


def first_own_step(lineage: Lineage) -> int:
    """Returns the first step that this job executed itself: 1, or the step after its initial checkpoint."""
    entry = lineage[-1] if lineage else None
    while entry is not None:
        if entry.parent is not None and entry.parent.is_imported:
            return entry.parent.step + 1
        entry = _parent_entry(lineage, entry)
    return 1


def prune_lineage(lineage: Lineage, oldest_needed: Checkpoint | None, generation: int) -> Lineage:
    """Returns the lineage without the entries that no retained checkpoint needs, so that the status stays bounded.

    Keeps the ancestors of `generation` down to the generation of `oldest_needed`; everything if that is None.
    """
    if oldest_needed is None:
        return lineage
    chain: set[int] = set()
    entry = lineage_entry_of(lineage, generation)
    while entry is not None:
        chain.add(entry.generation)
        if entry.generation <= oldest_needed.generation:
            break
        entry = _parent_entry(lineage, entry)
    return tuple(entry for entry in lineage if entry.generation in chain)


# ---- completeness ----------------------------------------------------------------------------------------------------

Covers = Mapping[frozenset[str], bool]
"""Whether the layouts of a set of digests cover every tensor exactly once; sets that were not checked are missing."""


@dataclass(frozen=True, slots=True)
class UnreadRecord:
    """A manifest or layout record that a listing could not read."""

    reason: str
    """Why it could not be read."""
    is_silent: bool
    """True: the tier did not return it, so it may be intact. False: it was read and is damaged, or it is missing."""
    checkpoint: Checkpoint | None = None
    """Checkpoint of the manifest; None for a layout record."""
    digest: str | None = None
    """Digest of the layout record; None for a manifest."""

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class TierReading:
    """The rank manifests that were read from each tier, with lazily computed views of them."""

    servers: Mapping[MemoryServerInstance, tuple[RankManifest, ...]]
    """Index entries of each memory server that was fenced and read."""
    persistent: tuple[RankManifest, ...] | None
    """Manifests in the persistent tier; None: it was not read, so its contents are unknown."""
    _manifests: dict[Checkpoint, dict[int, list[RankManifest]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _servers: dict[Checkpoint, dict[int, dict[MemoryServerInstance, RankManifest]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    _layout_digests: dict[Checkpoint, frozenset[str] | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _copies: dict[Checkpoint, tuple[Mapping[MemoryServerInstance, str], int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def manifests_by_rank(self) -> Mapping[Checkpoint, Mapping[int, list[RankManifest]]]:
        """Returns all manifests by checkpoint and rank; computed once."""
        if not self._manifests:
            manifests_by_save: dict[tuple[int, int], dict[int, list[RankManifest]]] = defaultdict(
                lambda: defaultdict(list)
            )
            for source in (*self.servers.values(), self.persistent or ()):
                for manifest in source:
                    save = manifest.save
                    manifests_by_save[save.generation, save.step][save.rank].append(manifest)
            self._manifests.update({Checkpoint(*key): dict(ranks) for key, ranks in manifests_by_save.items()})
        return self._manifests

    def servers_by_rank(self) -> Mapping[Checkpoint, Mapping[int, Mapping[MemoryServerInstance, RankManifest]]]:
        """Returns the memory servers with their manifests by checkpoint and rank; computed once."""
        if not self._servers:
            servers_by_save: dict[tuple[int, int], dict[int, dict[MemoryServerInstance, RankManifest]]] = defaultdict(
                lambda: defaultdict(dict)
            )
            for server, manifests in self.servers.items():
                for manifest in manifests:
                    save = manifest.save
                    servers_by_save[save.generation, save.step][save.rank][server] = manifest
            self._servers.update({Checkpoint(*key): dict(ranks) for key, ranks in servers_by_save.items()})
        return self._servers


def layout_sets_to_check(reading: TierReading) -> set[frozenset[str]]:
    """Returns the sets of layout digests that `Covers` must answer for: one per checkpoint with a save of every rank."""
    digest_sets = set()
    for ranks in reading.manifests_by_rank().values():
        if has_every_rank(ranks, next(iter(ranks.values()))[0].world_size):
            digest_sets.add(frozenset(m.layout for copies in ranks.values() for m in copies))
    return digest_sets


def is_complete(ranks: Mapping[int, list[RankManifest]], covers: Covers) -> bool:
    """Returns whether every rank's save exists and together they cover each tensor once.

    All must agree on the world size. A checkpoint is incomplete if two manifests of one rank describe different bytes,
    because then two processes wrote the same save.
    """
    layouts = _agreed_layout_digests(ranks)
    return layouts is not None and covers.get(layouts, False)


def _agreed_layout_digests(ranks: Mapping[int, list[RankManifest]]) -> frozenset[str] | None:
    """Returns the layouts of a checkpoint; None if ranks are missing or manifests disagree."""
    if not ranks:
        return None
    world_size = next(iter(ranks.values()))[0].world_size
    if not has_every_rank(ranks, world_size):
        return None
    # copies of a rank must agree, or a restore could mix two different saves
    for copies in ranks.values():
        if any(m.world_size != world_size or not m.has_same_bytes_as(copies[0]) for m in copies):
            return None
    return frozenset(copies[0].layout for copies in ranks.values())


def complete_checkpoints(
    reading: TierReading, lineage: Lineage, generation: int, unreadable: frozenset[Checkpoint], covers: Covers
) -> list[Checkpoint]:
    """Returns the complete checkpoints on the lineage of a generation, oldest first, without those in `unreadable`."""
    complete = [
        checkpoint
        for checkpoint, ranks in reading.manifests_by_rank().items()
        if checkpoint not in unreadable
        and is_on_lineage(lineage, checkpoint, generation)
        and _world_size_matches(lineage, checkpoint, len(ranks))
        and (layouts := _layout_digests_of(reading, checkpoint, ranks)) is not None
        and covers.get(layouts, False)
    ]
    return sorted(complete, key=lambda checkpoint: checkpoint.step)


def _layout_digests_of(
    reading: TierReading, checkpoint: Checkpoint, ranks: Mapping[int, list[RankManifest]]
) -> frozenset[str] | None:
    """Returns `_agreed_layout_digests`, cached per reading, because every reconcile asks and readings seldom change."""
    if checkpoint not in reading._layout_digests:
        reading._layout_digests[checkpoint] = _agreed_layout_digests(ranks)
    return reading._layout_digests[checkpoint]


def _world_size_matches(lineage: Lineage, checkpoint: Checkpoint, ranks: int) -> bool:
    """Returns whether the number of saved ranks is the generation's world size; agreeing manifests may lie about it."""
    entry = lineage_entry_of(lineage, checkpoint.generation)
    return entry is None or entry.world_size == ranks


def count_copies(checkpoint: Checkpoint, reading: TierReading, domains: Mapping[MemoryServerInstance, str]) -> int:
    """Counts the failure domains that have a rank's save in memory; returns the lowest count over all ranks."""
    cached = reading._copies.get(checkpoint)
    # the cache is valid for one mapping of domains, compared by identity, which costs nothing
    if cached is None or cached[0] is not domains:
        ranks = reading.servers_by_rank().get(checkpoint, {})
        world_size = max(
            (manifest.world_size for domain_counts in ranks.values() for manifest in domain_counts.values()), default=0
        )
        domain_counts = [len({domains.get(server, server.node) for server in servers}) for servers in ranks.values()]
        cached = reading._copies[checkpoint] = (domains, min(domain_counts) if has_every_rank(ranks, world_size) else 0)
    return cached[1]


def complete_in_persistent_tier(
    persistent: Iterable[RankManifest],
    lineage: Lineage,
    generation: int,
    unreadable: frozenset[Checkpoint],
    covers: Covers,
) -> list[Checkpoint]:
    """Returns the checkpoints that are complete in the persistent tier alone, oldest first."""
    return complete_checkpoints(TierReading({}, tuple(persistent)), lineage, generation, unreadable, covers)


def effective_replicas(replicas: int, live_domains: int) -> int:
    """Returns the number of copies that is possible now: `replicas`, but at most one per live failure domain, at least 1."""
    return max(1, min(replicas, live_domains))


def find_watermark(
    reading: TierReading,
    lineage: Lineage,
    generation: int,
    unreadable: frozenset[Checkpoint],
    covers: Covers,
    domains: Mapping[MemoryServerInstance, str],
    replicas_effective: int,
) -> Checkpoint | None:
    """Returns the newest fully replicated checkpoint on the lineage; None if there is none.

    It follows from the indexes of the memory servers alone and decides nothing.
    """
    candidates = complete_checkpoints(reading, lineage, generation, unreadable, covers)
    return newest_checkpoint(c for c in candidates if count_copies(c, reading, domains) >= replicas_effective)
