"""Reads one checkpoint into memory, every byte verified, at any world size. One reader a rank and restore.

`values` and `read` raise Unreadable only after every copy answered and failed; a silent tier is waited for. `heal`
afterwards rewrites what was found damaged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from surefoot import metrics
from surefoot.drain import verified
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.records import RankManifest
from surefoot.protocol.sources import joined
from surefoot.restore.catalogue import Catalogue
from surefoot.restore.copies import Copies
from surefoot.restore.fetch import Fetch, Part, Staged
from surefoot.restore.heal import heal
from surefoot.restore.layouts import Layouts
from surefoot.restore.place import Destination, Placer
from surefoot.restore.plan import ReadPlan

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """`reader` is the rank that reads: readers balance over copies by it."""

    reader: int = 0
    threads: int = 4
    """At most; there are no more than sources to read from, or two."""
    patience_seconds: float | None = None
    """How long to wait for tiers that do not answer; None waits until this process is killed (the operator decides)."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a read took. `source`: staging, memory, persistent or mixed."""

    wanted_bytes: int
    read_bytes: int
    by_kind: Mapping[str, int]
    seconds: float
    fallbacks: int

    @property
    def source(self) -> str:
        return joined(kind for kind, size in self.by_kind.items() if size) or "none"


class CheckpointReader:
    """One checkpoint, open for reading. Closes its connections at the end of the `with`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        catalogue: Catalogue,
        options: ReadOptions | None = None,
        staged: Mapping[int, Staged] | None = None,
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
        """What `read` would read. Raises StateMismatch where the checkpoint has not what is wanted."""
        return self.layouts.plan([d.wanted() for d in destinations])

    def read(self, destinations: Sequence[Destination]) -> Restored:
        """Fills the destinations. Raises the first error of any thread; what was placed by then is undefined."""
        began = time.monotonic()
        planned = self.plan(destinations)
        parts = {rank: self._part(rank) for rank in {r.rank for r in planned.ranges}}
        fetch = Fetch(self._copies, parts, [Placer(d) for d in destinations], planned.ranges)
        fetch.run(self._options.threads)
        seconds = time.monotonic() - began
        for kind, size in fetch.by_kind.items():
            metrics.restore_bytes.labels(kind).inc(size)
        damaged = len(self._copies.damages())
        restored = Restored(planned.wanted_bytes, planned.read_bytes, dict(fetch.by_kind), seconds, damaged)
        metrics.restore_seconds.labels(restored.source).observe(seconds)
        return restored

    def heal(self, writer_epoch: int) -> list[str]:
        """Rewrites what was found damaged, from good copies; a sentence for each damage found. Never raises."""
        return heal(self._copies, self.layouts.stream, writer_epoch)

    def _part(self, rank: int) -> Part:
        stream, staged = self.layouts.stream(rank), self._staged.get(rank)
        if staged is not None and (staged.layout, len(staged.stream)) != (stream.digest, stream.layout.stream_bytes):
            staged = None
        return Part(stream, self._table(rank), staged.stream if staged is not None else None)

    def _table(self, rank: int) -> bytes:
        if rank not in self._tables:
            self._tables[rank], _ = self._copies.first_good(rank, "digest table", verified.table_from)
        return self._tables[rank]
