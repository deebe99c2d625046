"""Reads one checkpoint into memory at any world size, every byte verified.

One reader a rank and restore.
`values` and `read` raise Unreadable only after every copy answered and failed; a silent tier is waited for. `heal`
afterwards rewrites what was found damaged.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from surefoot import metrics
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.checkpoints.sources import joined
from surefoot.protocol.identities import Checkpoint
from surefoot.restore.catalogue import Catalogue
from surefoot.restore.checkpoint_layouts import Layouts
from surefoot.restore.copy_choice import Copies
from surefoot.restore.exchange import PEER, Common, Exchange, ExchangeOutcome, Peers, PlannedReads
from surefoot.restore.fetch import Fetch, SavedPart, StagedStream
from surefoot.restore.heal import heal
from surefoot.restore.placer import Destination, placer_of
from surefoot.restore.read_plan import ReadPlan
from surefoot.tiers import verified

log = logging.getLogger(__name__)

_WORTH_A_WORD = 0.01
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
        """Names the tiers that the bytes came from (`protocol.checkpoints.sources`).

        What peers read counts for the tier they had it from. A tier that gave next to nothing (counters that every rank
        has) is left out, except the persistent one.
        """
        least = sum(self.by_kind.values()) * _WORTH_A_WORD
        named = {kind for kind, size in self.by_kind.items() if size and (size >= least or kind == "persistent")}
        return joined((named - {PEER}) | self.peers_kinds) or "none"


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
        self._copies = Copies(checkpoint, catalogue, self._options.reader, self._options.patience_seconds)
        self.layouts = Layouts(self._copies)
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
    def world(self) -> int:
        """Ranks of the world that saved it."""
        return self._copies.world

    def manifest(self, rank: int) -> RankManifest:
        return self._copies.manifest(rank)

    def values(self, rank: int) -> bytes:
        """The blob of plain values of one rank."""
        values, number = self._copies.first_good(rank, "values", verified.values_from)
        metrics.restore_bytes.labels(self._copies.sources[number].kind).inc(len(values))
        return values

    def plan(self, destinations: Sequence[Destination]) -> ReadPlan:
        """Plans what `read` would read.

        Raises StateMismatch where the checkpoint lacks what is wanted.
        """
        return self.layouts.plan([d.wanted() for d in destinations])

    def read(self, destinations: Sequence[Destination], common: Sequence[Common] = ()) -> ReadSummary:
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
        wanted = tuple(d.wanted() for d in destinations)
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
            self._tables[rank], _ = self._copies.first_good(rank, "digest table", verified.table_from)
        return self._tables[rank]
