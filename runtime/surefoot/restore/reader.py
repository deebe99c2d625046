"""Reads one checkpoint into memory at any world size and verifies every byte.

Each rank uses one reader per restore. `values` and `read` raise Unreadable only after every copy answered and failed;
they wait for a tier that does not answer. Afterwards, `heal` rewrites the parts that were found damaged.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType

from surefoot import metrics
from surefoot.errors import ChunkMissing, ProtocolError, StateMismatch, SurefootError, Unreadable
from surefoot.format.layouts import LayoutFamily, Stream
from surefoot.protocol.checkpoints.records import RankManifest, TensorLayout
from surefoot.protocol.checkpoints.save_state import join_sources
from surefoot.protocol.identities import Checkpoint
from surefoot.restore.catalogue import Catalogue
from surefoot.restore.copy_choice import CopySelector, Damage
from surefoot.restore.exchange import PEER, CommonDestinations, Exchange, ExchangeOutcome, Peers, PlannedReads
from surefoot.restore.fetch import Destination, Fetch, SavedPart, StagedStream, placer_of
from surefoot.restore.read_plan import ReadPlan, WantedBox, plan_reads
from surefoot.tiers import SupportsLayoutCopies, Tier
from surefoot.tiers.tier import read_digest_table, read_stream, read_verified_chunk, read_verified_values

log = logging.getLogger(__name__)


# ---- checkpoint layouts ----------------------------------------------------------------------------------------------
# Loads the layouts of one checkpoint's ranks, with as few reads as possible. Most or all layouts can be derived from
# one record (`format.layouts`); where that fails, further records are read, in the worst case all of them.


class RankLayouts:
    """Reads or derives the layouts of a checkpoint's ranks, and caches them; for one thread."""

    def __init__(self, copies: CopySelector) -> None:
        self._copies = copies
        self._families: list[LayoutFamily] = []
        self._streams: dict[int, Stream] = {}
        self._by_digest: dict[str, Stream] = {}
        self._read_all = False
        self.records_read = 0
        """Number of layout records read."""

    def stream_of(self, rank: int) -> Stream:
        """Returns one rank's stream, derived from a family if possible, otherwise read."""
        if rank not in self._streams:
            self._streams[rank] = self._derive_stream(rank) or self._read_record(rank)
        return self._streams[rank]

    def read_all(self) -> Mapping[int, Stream]:
        """Returns every rank's stream, reading the records of those that are not cached."""
        for rank in range(self._copies.world_size):
            if rank not in self._streams:
                self._streams[rank] = self._read_record(rank)
        return self._streams

    def list_tensors(self, own_rank: int, read_all: bool = False) -> dict[str, TensorLayout]:
        """Lists the checkpoint's tensors by name, including those that are private to rank `own`.

        Families usually suffice for that; `every` reads all records.
        """
        tensors_by_name: dict[str, TensorLayout] = {}
        while self._read_next_family():
            pass
        if own_rank < self._copies.world_size:
            tensors_by_name |= {t.name: t for t in self.stream_of(own_rank).layout.tensors}
        layouts = [f.layout for f in self._families if not read_all] or [s.layout for s in self.read_all().values()]
        for layout in layouts:
            for tensor in layout.tensors:
                tensors_by_name.setdefault(tensor.name, tensor)
        return tensors_by_name

    def plan_reads(self, boxes: Sequence[WantedBox]) -> ReadPlan:
        """Plans the reads from the layouts of the ranks that families name, or else of all ranks.

        Raises StateMismatch if the checkpoint lacks a wanted element.
        """
        try:
            ranks = self._saving_ranks(boxes)
            if ranks is not None:
                return plan_reads(boxes, {rank: self.stream_of(rank) for rank in sorted(ranks)})
        except StateMismatch:
            pass  # the plan of the whole checkpoint below raises it again if it is true
        return plan_reads(boxes, self.read_all())

    def _saving_ranks(self, boxes: Sequence[WantedBox]) -> set[int] | None:
        """Returns the ranks that saved parts of the wanted boxes; None if no family has one of the tensors."""
        ranks: set[int] = set()
        for want in boxes:
            family = self._family_of(want.name)
            if family is None:
                owner = _private_owner(want.name)
                if owner is None or owner >= self._copies.world_size:
                    return None
                ranks.add(owner)
                continue
            ranks |= family.savers(want.name, want.box) or {family.of}
        return ranks

    def _family_of(self, name: str) -> LayoutFamily | None:
        if _private_owner(name) is not None:
            return None
        while True:
            for family in self._families:
                if name in family:
                    return family
            if not self._read_next_family():
                return None

    def _read_next_family(self) -> bool:
        """Reads the layout of the first rank that no family describes; False if that gives no further family."""
        if self._read_all:
            return False
        world_size = self._copies.world_size
        is_complete = any(family.everywhere(world_size) for family in self._families)
        undescribed_ranks = (r for r in range(world_size) if not any(f.has(r) for f in self._families))
        rank = None if is_complete else next(undescribed_ranks, None)
        if rank is not None:
            stream = self._streams[rank] = self._read_record(rank)
            if stream.layout.spread is not None:
                self._families.append(LayoutFamily(stream.layout, rank))
                return True
            self._families.clear()  # a rank's tensors follow no rule, so all records must be read
        self._read_all = True
        return False

    def _derive_stream(self, rank: int) -> Stream | None:
        name = self._copies.manifest_of(rank).layout
        if name in self._by_digest:
            return self._by_digest[name]
        for family in self._families:
            if family.has(rank):
                try:
                    stream = family.stream(rank)
                except (ValueError, ProtocolError, StateMismatch):
                    continue  # the family's record contradicts itself: read this rank's own record instead
                if stream.digest == name:
                    self._by_digest[name] = stream
                    return stream
        return None

    def _read_record(self, rank: int) -> Stream:
        name = self._copies.manifest_of(rank).layout
        if name not in self._by_digest:
            try:
                self._by_digest[name], _ = self._copies.read_first_intact(rank, "layout", read_stream)
            except Unreadable:
                stream = self._copies.read_from_any(rank, read_stream)
                if stream is None:
                    raise
                self._by_digest[name] = stream
            self.records_read += 1
        return self._by_digest[name]


def _private_owner(name: str) -> int | None:
    """Returns the rank to which a tensor is private, from its name "local/RANK/…"; None: it is private to none."""
    prefix, _, remainder = name.partition("/")
    rank_text = remainder.partition("/")[0]
    return int(rank_text) if prefix == "local" and rank_text.isdecimal() else None


# ---- rewriting damaged parts -----------------------------------------------------------------------------------------
# Rewrites damaged copies from intact ones after a restore. A part is only ever rewritten with its own bytes, which are
# verified again, so healing twice, or on several ranks at once, is harmless. Damage that cannot be healed is logged,
# and left to the repair.


def heal_damages(copies: CopySelector, stream_of: Callable[[int], Stream], writer_generation: int) -> list[str]:
    """Rewrites damaged parts from intact copies; returns a sentence for each: the part, its place and the outcome."""
    sentences = []
    # Layout and digest table first: a tier needs them to divide a save into parts and to accept its chunks.
    damages = sorted(copies.list_damages(), key=lambda damage: (damage.part != "layout", damage.part != "digest table"))
    for damage in [*damages, *copies.find_damaged_entries()]:
        source = copies.sources[damage.source]
        fault = f"{damage.part} of {damage.save} at {source.name} was damaged or missing"
        if not source.is_healed:
            sentences.append(f"{fault}; it was read from another copy, and this one is not changed")
            continue
        try:
            _rewrite_part(copies, stream_of(damage.save.rank), damage, writer_generation)
        except SurefootError as problem:
            metrics.fallbacks.labels("heal_failed").inc()
            sentences.append(f"{fault}; it was read from another copy, but rewriting it failed: {problem}")
        else:
            metrics.fallbacks.labels("healed").inc()
            sentences.append(f"{fault}; it was read from another copy and is healed")
    for sentence in sentences:
        log.warning("%s", sentence)
    return sentences


def _rewrite_part(copies: CopySelector, stream: Stream, damage: Damage, writer_generation: int) -> None:
    save, rank = damage.save, damage.save.rank
    target = copies.connections.connection_to(damage.source)
    manifest = copies.manifest_of(rank)
    if damage.part != "index entry" and all(m.save != save for m in target.manifests()):
        raise ChunkMissing(f"{target.name} has deleted {save} in the meantime")
    match damage.part.split():
        case ["layout"]:
            target.put_layout(manifest.layout, stream.text)
            if isinstance(target, SupportsLayoutCopies):
                target.commit(
                    manifest, writer_generation, stream.layout.chunk_lengths()
                )  # writes the save's own copy of it
        case ["values"]:
            values, _ = copies.read_first_intact(rank, damage.part, read_verified_values)
            target.put_values(save, values)
        case ["digest", "table"]:
            table, _ = copies.read_first_intact(rank, damage.part, read_digest_table)
            target.put_digests(save, table)
        case ["chunk", index]:
            target.put_chunk(save, int(index), _read_intact_chunk(copies, stream, rank, int(index)))
        case _:
            target.commit(manifest, writer_generation, stream.layout.chunk_lengths())


def _read_intact_chunk(copies: CopySelector, stream: Stream, rank: int, index: int) -> memoryview:
    table, _ = copies.read_first_intact(rank, "digest table", read_digest_table)
    read = partial(_read_chunk, stream=stream, table=table, index=index)
    data, _ = copies.read_first_intact(rank, f"chunk {index}", read)
    return data


def _read_chunk(tier: Tier, manifest: RankManifest, stream: Stream, table: bytes, index: int) -> memoryview:
    return read_verified_chunk(tier, manifest, stream, table, index)


# ---- reader ----------------------------------------------------------------------------------------------------------

_MIN_LOGGED_RATIO = 0.01
"""Smallest share of the bytes with which a source is named."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Settings of a `CheckpointReader`."""

    reader_rank: int = 0
    """The rank that reads, by which readers distribute themselves over copies."""
    max_threads: int = 4
    """Largest number of threads; there are never more than sources to read from, or two."""
    patience_seconds: float | None = None
    """How long after the last answer to wait for tiers that do not answer; None: until this process is killed (the
    operator decides)."""


@dataclass(frozen=True, slots=True)
class ReadSummary:
    """The result of a read."""

    read_bytes: int
    """Bytes read, including those that peers read."""
    bytes_by_kind: Mapping[str, int]
    """Bytes by kind of source: staging, memory, persistent or peer."""
    damage_count: int
    """Number of damaged or missing parts that were read from another copy."""
    peer_kinds: frozenset[str] = frozenset()
    """Kinds of sources from which the peers read."""

    @property
    def source(self) -> str:
        """Names the tiers that the bytes came from (`protocol.checkpoints.save_state`).

        Bytes from peers count for the tier from which the peers read them. A tier with almost no bytes (counters that
        every rank has) is omitted, except the persistent one.
        """
        min_bytes = sum(self.bytes_by_kind.values()) * _MIN_LOGGED_RATIO
        kinds = {
            kind for kind, size in self.bytes_by_kind.items() if size and (size >= min_bytes or kind == "persistent")
        }
        return join_sources((kinds - {PEER}) | self.peer_kinds) or "none"


class CheckpointReader:
    """Reads one checkpoint; a context manager that closes its connections."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        catalogue: Catalogue,
        options: ReadOptions | None = None,
        staged: Mapping[int, StagedStream] | None = None,
    ) -> None:
        """Creates a reader.

        Args:
            checkpoint: The checkpoint to read.
            catalogue: The copies.
            options: None: the defaults.
            staged: Saves in this machine's staging memory by rank, read first and verified like any other copy.
        """
        self._staged = staged or {}
        self._options = options or ReadOptions()
        self._copies = CopySelector(checkpoint, catalogue, self._options.reader_rank, self._options.patience_seconds)
        self.layouts = RankLayouts(self._copies)
        self._tables: dict[int, bytes] = {}

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all waits and closes the connections."""
        self._copies.stop()
        self._copies.connections.close()

    @property
    def world_size(self) -> int:
        """World size with which the checkpoint was saved."""
        return self._copies.world_size

    def manifest_of(self, rank: int) -> RankManifest:
        return self._copies.manifest_of(rank)

    def read_values(self, rank: int) -> bytes:
        """Reads the plain values of one rank (JSON)."""
        values, index = self._copies.read_first_intact(rank, "values", read_verified_values)
        metrics.restore_bytes.labels(self._copies.sources[index].kind).inc(len(values))
        return values

    def plan_reads(self, destinations: Sequence[Destination]) -> ReadPlan:
        """Plans the reads that `read` would make; raises StateMismatch if the checkpoint lacks a wanted element."""
        return self.layouts.plan_reads([d.wanted_box() for d in destinations])

    def read(self, destinations: Sequence[Destination], common: Sequence[CommonDestinations] = ()) -> ReadSummary:
        """Fills the destinations.

        Args:
            destinations: Where to write; a destination may be in one group of `common` at most.
            common: Groups of destinations that other ranks want too, and whose reads they share.

        Raises:
            SurefootError: The first error of any thread; the content of the destinations is undefined then.
        """
        start = time.monotonic()
        # Plan the destinations that only this rank reads, and those of each group.
        shared_numbers = {index for group in common for index in group.destination_indexes}
        own_reading = self._plan_reads([d for index, d in enumerate(destinations) if index not in shared_numbers])
        group_readings = [
            self._plan_reads([destinations[index] for index in group.destination_indexes]) for group in common
        ]
        # Exchange in the order of all groups, and before any direct read, because peers wait.
        outcomes = [
            self._run_exchange(reading, group.peers) for reading, group in zip(group_readings, common, strict=True)
        ]
        # Read the unshared parts, and those that the exchanges did not bring, directly.
        remaining = [replace(r, ranges=tuple(o.missing_reads)) for r, o in zip(group_readings, outcomes, strict=True)]
        by_kind = sum((Counter(o.bytes_by_kind) for o in outcomes), Counter(self._fetch(own_reading)))
        for reading in remaining:
            by_kind += self._fetch(reading)
        seconds = time.monotonic() - start
        for kind, size in by_kind.items():
            metrics.restore_bytes.labels(kind).inc(size)
        summary = ReadSummary(
            read_bytes=sum(r.length for reading in [own_reading, *group_readings] for r in reading.ranges),
            bytes_by_kind=dict(by_kind),
            damage_count=len(self._copies.list_damages()),
            peer_kinds=frozenset().union(*(o.peer_kinds for o in outcomes)),
        )
        metrics.restore_seconds.labels(summary.source).observe(seconds)
        return summary

    def heal(self, writer_generation: int) -> list[str]:
        """Rewrites damaged parts from intact copies; returns a sentence for each. Errors are in the sentences."""
        return heal_damages(self._copies, self.layouts.stream_of, writer_generation)

    def _plan_reads(self, destinations: Sequence[Destination]) -> PlannedReads:
        boxes = tuple(d.wanted_box() for d in destinations)
        read_plan = self.layouts.plan_reads(boxes)
        parts = {rank: self._saved_part(rank) for rank in {r.rank for r in read_plan.ranges}}
        return PlannedReads(boxes, read_plan.ranges, parts, tuple(placer_of(d) for d in destinations))

    def _run_exchange(self, reading: PlannedReads, peers: Peers) -> ExchangeOutcome:
        try:
            return Exchange(self._copies, reading, peers).run(self._options.max_threads)
        finally:
            peers.close()

    def _fetch(self, reading: PlannedReads) -> Counter[str]:
        fetch = Fetch(self._copies, reading.parts_by_rank, reading.placers, reading.ranges)
        fetch.run(self._options.max_threads)
        return Counter(fetch.bytes_by_kind)

    def _saved_part(self, rank: int) -> SavedPart:
        stream, staged = self.layouts.stream_of(rank), self._staged.get(rank)
        if staged is not None and (staged.layout_digest, len(staged.stream)) != (
            stream.digest,
            stream.layout.stream_bytes,
        ):
            staged = None
        if staged is None:
            return SavedPart(stream, self._digest_table(rank))
        return SavedPart(stream, self._digest_table(rank), staged.stream, staged.is_own)

    def _digest_table(self, rank: int) -> bytes:
        if rank not in self._tables:
            self._tables[rank], _ = self._copies.read_first_intact(rank, "digest table", read_digest_table)
        return self._tables[rank]
