"""Reads one checkpoint into memory at any world size, every byte verified.

One reader a rank and restore.
`values` and `read` raise Unreadable only after every copy answered and failed; a silent tier is waited for. `heal`
afterwards rewrites what was found damaged.
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
from surefoot.restore.read_plan import ReadPlan, WantedBox, plan
from surefoot.tiers import SupportsLayoutCopies, Tier
from surefoot.tiers.tier import chunk_from, stream_from, table_from, values_from

log = logging.getLogger(__name__)


# ---- checkpoint layouts ----------------------------------------------------------------------------------------------
# Loads the layouts of one checkpoint's ranks, as few as needed. One record tells most or all of the others
# (`format.layouts`); where it does not, records are read, in the end all of them.


class LayoutCache:
    """Reads and derives layouts, and caches them; for one thread."""

    def __init__(self, copies: CopySelector) -> None:
        self._copies = copies
        self._families: list[LayoutFamily] = []
        self._streams: dict[int, Stream] = {}
        self._by_digest: dict[str, Stream] = {}
        self._read_all = False
        self.records_read = 0
        """How many layout records this took."""

    def stream(self, rank: int) -> Stream:
        """One rank's stream, derived from a known family, else read."""
        if rank not in self._streams:
            self._streams[rank] = self._stream_from_known(rank) or self._read(rank)
        return self._streams[rank]

    def all(self) -> Mapping[int, Stream]:
        """Every rank's stream, each from its record."""
        for rank in range(self._copies.world_size):
            if rank not in self._streams:
                self._streams[rank] = self._read(rank)
        return self._streams

    def tensors(self, own: int, every: bool = False) -> dict[str, TensorLayout]:
        """Lists the checkpoint's tensors by name, with those local to rank `own`.

        Families are enough for most; `every` reads all records.
        """
        found: dict[str, TensorLayout] = {}
        while self._next_family():
            pass
        if own < self._copies.world_size:
            found |= {t.name: t for t in self.stream(own).layout.tensors}
        streams = [f.layout for f in self._families if not every] or [s.layout for s in self.all().values()]
        for layout in streams:
            for tensor in layout.tensors:
                found.setdefault(tensor.name, tensor)
        return found

    def plan(self, wanted: Sequence[WantedBox]) -> ReadPlan:
        """Plans the reads from the layouts of the ranks that families name.

        If those do not suffice, from all. Raises StateMismatch where the checkpoint lacks what is wanted.
        """
        try:
            ranks = self._ranks(wanted)
            if ranks is not None:
                return plan(wanted, {rank: self.stream(rank) for rank in sorted(ranks)})
        except StateMismatch:
            pass  # said again, of the whole checkpoint, if it is true
        return plan(wanted, self.all())

    def _ranks(self, wanted: Sequence[WantedBox]) -> set[int] | None:
        """Ranks that saved part of what is wanted; None where no family covers some tensor."""
        found: set[int] = set()
        for want in wanted:
            family = self._family_of(want.name)
            if family is None:
                owner = _owner(want.name)
                if owner is None or owner >= self._copies.world_size:
                    return None
                found.add(owner)
                continue
            found |= family.savers(want.name, want.box) or {family.of}
        return found

    def _family_of(self, name: str) -> LayoutFamily | None:
        if _owner(name) is not None:
            return None
        while True:
            for family in self._families:
                if name in family:
                    return family
            if not self._next_family():
                return None

    def _next_family(self) -> bool:
        """Reads the layout of the first rank that no known family describes; False if none helps."""
        if self._read_all:
            return False
        world = self._copies.world_size
        known = any(family.everywhere(world) for family in self._families)
        rank = None if known else next((r for r in range(world) if not any(f.has(r) for f in self._families)), None)
        if rank is not None:
            stream = self._streams[rank] = self._read(rank)
            if stream.layout.spread is not None:
                self._families.append(LayoutFamily(stream.layout, rank))
                return True
            self._families.clear()  # one rank's tensors follow no rule: all records are read
        self._read_all = True
        return False

    def _stream_from_known(self, rank: int) -> Stream | None:
        name = self._copies.manifest(rank).layout
        if name in self._by_digest:
            return self._by_digest[name]
        for family in self._families:
            if family.has(rank):
                try:
                    stream = family.stream(rank)
                except (ValueError, ProtocolError, StateMismatch):
                    continue  # a record that says nonsense is no reason not to read the right one
                if stream.digest == name:
                    self._by_digest[name] = stream
                    return stream
        return None

    def _read(self, rank: int) -> Stream:
        name = self._copies.manifest(rank).layout
        if name not in self._by_digest:
            try:
                self._by_digest[name], _ = self._copies.first_good(rank, "layout", stream_from)
            except Unreadable:
                found = self._copies.read_from_any(rank, stream_from)
                if found is None:
                    raise
                self._by_digest[name] = found
            self.records_read += 1
        return self._by_digest[name]


def _owner(name: str) -> int | None:
    """The rank that keeps this tensor to itself."""
    first, _, rest = name.partition("/")
    number = rest.partition("/")[0]
    return int(number) if first == "local" and number.isdecimal() else None


# ---- rewriting damaged parts -----------------------------------------------------------------------------------------
# Rewrites damaged copies from good ones after a restore. A part is written again only with its own bytes, verified once
# more, so doing it twice, or on several ranks at once, is harmless. What cannot be healed here is told, and left to
# repair.


def heal(copies: CopySelector, stream_of: Callable[[int], Stream], writer_epoch: int) -> list[str]:
    """A sentence for each damage: what, where, and whether it is healed."""
    told = []
    # a tier cuts its parts by the layout and takes chunks by the digest table: without these it takes none
    found = sorted(copies.damages(), key=lambda damage: (damage.part != "layout", damage.part != "digest table"))
    for damage in [*found, *copies.damaged_entries()]:
        source = copies.sources[damage.source]
        what = f"{damage.part} of {damage.save} at {source.name} was damaged or missing"
        if not source.heals:
            told.append(f"{what}; it was read from another copy and is left as it is")
            continue
        try:
            _rewrite(copies, stream_of(damage.save.rank), damage, writer_epoch)
        except SurefootError as problem:
            metrics.fallbacks.labels("heal_failed").inc()
            told.append(f"{what}; it was read from another copy, and rewriting it failed: {problem}")
        else:
            metrics.fallbacks.labels("healed").inc()
            told.append(f"{what}; it was read from another copy and is healed")
    for sentence in told:
        log.warning("%s", sentence)
    return told


def _rewrite(copies: CopySelector, stream: Stream, damage: Damage, writer_epoch: int) -> None:
    save, rank = damage.save, damage.save.rank
    target = copies.connections.connection_to(damage.source)
    manifest = copies.manifest(rank)
    if damage.part != "index entry" and all(m.save != save for m in target.manifests()):
        raise ChunkMissing(f"{target.name} has dropped {save} meanwhile")
    match damage.part.split():
        case ["layout"]:
            target.put_layout(manifest.layout, stream.text)
            if isinstance(target, SupportsLayoutCopies):
                target.commit(manifest, writer_epoch, stream.layout.chunk_lengths())  # which writes the save's own
        case ["values"]:
            values, _ = copies.first_good(rank, damage.part, values_from)
            target.put_values(save, values)
        case ["digest", "table"]:
            table, _ = copies.first_good(rank, damage.part, table_from)
            target.put_digests(save, table)
        case ["chunk", number]:
            target.put_chunk(save, int(number), _good_chunk(copies, stream, rank, int(number)))
        case _:
            target.commit(manifest, writer_epoch, stream.layout.chunk_lengths())


def _good_chunk(copies: CopySelector, stream: Stream, rank: int, number: int) -> memoryview:
    table, _ = copies.first_good(rank, "digest table", table_from)
    read = partial(_chunk, stream=stream, table=table, number=number)
    data, _ = copies.first_good(rank, f"chunk {number}", read)
    return data


def _chunk(tier: Tier, manifest: RankManifest, stream: Stream, table: bytes, number: int) -> memoryview:
    return chunk_from(tier, manifest, stream, table, number)


# ---- reader ----------------------------------------------------------------------------------------------------------

_MIN_LOGGED_RATIO = 0.01
"""Of the bytes, for a source to be named."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """`reader` is the rank that reads: readers balance over copies by it."""

    reader: int = 0
    threads: int = 4
    """At most; there are no more than sources to read from, or two."""
    patience_seconds: float | None = None
    """How long to wait for tiers that do not answer, from the last answer; None waits until this process is killed (the
    operator decides)."""


@dataclass(frozen=True, slots=True)
class ReadSummary:
    """Reports a read's bytes, sources and number of damaged parts."""

    read_bytes: int
    by_kind: Mapping[str, int]
    fallbacks: int
    peers_kinds: frozenset[str] = frozenset()

    @property
    def source(self) -> str:
        """Names the tiers that the bytes came from (`protocol.checkpoints.save_state`).

        What peers read counts for the tier they had it from. A tier that gave next to nothing (counters that every rank
        has) is left out, except the persistent one.
        """
        least = sum(self.by_kind.values()) * _MIN_LOGGED_RATIO
        named = {kind for kind, size in self.by_kind.items() if size and (size >= least or kind == "persistent")}
        return join_sources((named - {PEER}) | self.peers_kinds) or "none"


class CheckpointReader:
    """Reads one checkpoint; a context manager that closes its connections."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        catalogue: Catalogue,
        options: ReadOptions | None = None,
        staged: Mapping[int, StagedStream] | None = None,
    ) -> None:
        """`staged`: streams of rank saves in this machine's own memory, read first and verified like any other."""
        self._staged = staged or {}
        self._options = options or ReadOptions()
        self._copies = CopySelector(checkpoint, catalogue, self._options.reader, self._options.patience_seconds)
        self.layouts = LayoutCache(self._copies)
        self._tables: dict[int, bytes] = {}

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._copies.stop()
        self._copies.connections.close()

    @property
    def world_size(self) -> int:
        """Ranks of the world that saved it."""
        return self._copies.world_size

    def manifest(self, rank: int) -> RankManifest:
        return self._copies.manifest(rank)

    def values(self, rank: int) -> bytes:
        """The blob of plain values of one rank."""
        values, number = self._copies.first_good(rank, "values", values_from)
        metrics.restore_bytes.labels(self._copies.sources[number].kind).inc(len(values))
        return values

    def plan(self, destinations: Sequence[Destination]) -> ReadPlan:
        """Plans what `read` would read.

        Raises StateMismatch where the checkpoint lacks what is wanted.
        """
        return self.layouts.plan([d.wanted_box() for d in destinations])

    def read(self, destinations: Sequence[Destination], common: Sequence[CommonDestinations] = ()) -> ReadSummary:
        """Fills the destinations.

        `common`: those that other ranks want too and share the reading of; each in one group at most. Raises the first
        error of any thread; what was placed by then is undefined.
        """
        began = time.monotonic()
        shared = {number for one in common for number in one.numbers}
        alone = self._reading([d for number, d in enumerate(destinations) if number not in shared])
        together = [self._reading([destinations[number] for number in one.numbers]) for one in common]
        outcomes = [
            self._exchanged(reading, one.peers) for reading, one in zip(together, common, strict=True)
        ]  # in the order of all groups, and before anybody reads alone: peers wait
        left = [replace(r, ranges=tuple(o.missing)) for r, o in zip(together, outcomes, strict=True)]
        by_kind = sum((Counter(o.by_kind) for o in outcomes), Counter(self._fetched(alone)))
        for reading in left:
            by_kind += self._fetched(reading)
        seconds = time.monotonic() - began
        for kind, size in by_kind.items():
            metrics.restore_bytes.labels(kind).inc(size)
        everything = [alone, *together]
        restored = ReadSummary(
            read_bytes=sum(r.length for reading in everything for r in reading.ranges),
            by_kind=dict(by_kind),
            fallbacks=len(self._copies.damages()),
            peers_kinds=frozenset().union(*(o.peers_kinds for o in outcomes)),
        )
        metrics.restore_seconds.labels(restored.source).observe(seconds)
        return restored

    def heal(self, writer_epoch: int) -> list[str]:
        """Rewrites damaged parts from good copies; returns a sentence for each.

        Never raises.
        """
        return heal(self._copies, self.layouts.stream, writer_epoch)

    def _reading(self, destinations: Sequence[Destination]) -> PlannedReads:
        wanted = tuple(d.wanted_box() for d in destinations)
        planned = self.layouts.plan(wanted)
        parts = {rank: self._part(rank) for rank in {r.rank for r in planned.ranges}}
        return PlannedReads(wanted, planned.ranges, parts, tuple(placer_of(d) for d in destinations))

    def _exchanged(self, reading: PlannedReads, peers: Peers) -> ExchangeOutcome:
        try:
            return Exchange(self._copies, reading, peers).run(self._options.threads)
        finally:
            peers.close()

    def _fetched(self, reading: PlannedReads) -> Counter[str]:
        fetch = Fetch(self._copies, reading.parts, reading.placers, reading.ranges)
        fetch.run(self._options.threads)
        return Counter(fetch.by_kind)

    def _part(self, rank: int) -> SavedPart:
        stream, staged = self.layouts.stream(rank), self._staged.get(rank)
        if staged is not None and (staged.layout, len(staged.stream)) != (stream.digest, stream.layout.stream_bytes):
            staged = None
        if staged is None:
            return SavedPart(stream, self._table(rank))
        return SavedPart(stream, self._table(rank), staged.stream, staged.own)

    def _table(self, rank: int) -> bytes:
        if rank not in self._tables:
            self._tables[rank], _ = self._copies.first_good(rank, "digest table", table_from)
        return self._tables[rank]
