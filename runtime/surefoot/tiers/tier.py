"""Defines `Tier`, the protocol of places that keep rank saves.

Synchronous and thread-compatible (one thread at a time per instance; open more for parallel streams). Every call has
a time limit and raises from `surefoot.errors`: TierUnavailable (unknown, maybe it happened), TierFull, ChunkMissing
(it answered: not there), Fenced (a newer epoch rules). Nothing here verifies digests; `restore.fetch` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.protocol.records import RankManifest


class Tier(Protocol):
    """One place of one job."""

    @property
    def name(self) -> str:
        """For messages and metrics: `memory:node-1`, `persistent`."""
        ...

    def put_layout(self, digest: str, text: str) -> None:
        """Keeps a layout record; the same digest always has the same text."""
        ...

    def put_chunk(self, save: RankSave, index: int, data: memoryview) -> None:
        """Writes chunk `index` (≤ CHUNK_BYTES), by the time of the commit at the latest. `data` is not read any more when
        it returns. Chunks come in their order; written again only with the same bytes."""
        ...

    def put_values(self, save: RankSave, data: bytes) -> None: ...

    def put_digests(self, save: RankSave, data: bytes) -> None: ...

    def commit(self, manifest: RankManifest, writer_epoch: int, chunk_lengths: tuple[int, ...]) -> None:
        """Makes the rank save visible, if all of it is there. Repeating it with the same bytes is success.

        Raises Fenced if `writer_epoch` is overtaken; ChunkMissing if a part is not there or has another length.
        """
        ...

    def manifests(self) -> tuple[RankManifest, ...]:
        """Every visible rank save of the job. A manifest that cannot be read is left out and counted in `damaged`."""
        ...

    def damaged(self) -> tuple[str, ...]:
        """Names of index entries that the last `manifests()` could not read."""
        ...

    def read_layout(self, digest: str) -> str: ...

    def read_values(self, save: RankSave) -> bytes: ...

    def read_digests(self, save: RankSave, offset: int, length: int) -> bytes: ...

    def read_chunk(self, save: RankSave, index: int, offset: int, length: int) -> bytes | memoryview:
        """Exactly `length` bytes from `offset` of chunk `index`; fewer there is ChunkMissing."""
        ...

    def drop(self, save: RankSave, writer_epoch: int, chunks: int) -> None:
        """Index entry first, then the data. Absent is success. Raises Fenced."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class ManyStreams(Protocol):
    """What a tier offers beside `Tier` if it stores several chunks as one part, and several parts at once."""

    at_once: int
    """How many threads may call `put_part` or `has_part` at once."""
    together: int
    """Chunks of a part, counted from chunk 0; the last part has what is left."""

    def kept(self, save: RankSave) -> Mapping[int, int]:
        """Bytes of the parts that an earlier try has put here already, by their number."""
        ...

    def has_part(self, save: RankSave, part: int, chunks: Sequence[memoryview]) -> bool:
        """Whether just these bytes are here, by the checksum that the tier keeps of what it received."""
        ...

    def put_part(self, save: RankSave, part: int, chunks: Sequence[memoryview]) -> None:
        """Writes a whole part, in one piece; as `put_chunk` raises."""
        ...


@runtime_checkable
class ByCheckpoint(Protocol):
    """What a tier offers beside `Tier` where each rank save that it is asked about costs a request."""

    def manifests_of(self, checkpoint: Checkpoint) -> tuple[RankManifest, ...]:
        """As `manifests`, of this checkpoint alone; `damaged` then speaks of it alone too."""
        ...


@runtime_checkable
class LayoutCopies(Protocol):
    """What a tier offers beside `Tier` if it keeps a layout record with each rank save too."""

    def read_layout_of(self, manifest: RankManifest) -> str:
        """As `read_layout`; where the record that all share is not good, the save's own."""
        ...


@runtime_checkable
class WritesAhead(Protocol):
    """What a tier offers beside `Tier` if it can take a chunk while it still stores the one before."""

    def send_chunk(self, save: RankSave, index: int, data: memoryview) -> None:
        """As `put_chunk`; an error may be that of the chunk before. `data` is not read any more when it returns."""
        ...

    def settle(self) -> None:
        """Returns when every chunk sent is stored; raises as `put_chunk`. Nothing else is called between."""
        ...


@runtime_checkable
class ReadsAhead(Protocol):
    """What a tier offers beside `Tier` if it can be asked for the next bytes while the last ones are being used."""

    def ask_chunk(self, save: RankSave, index: int, offset: int, length: int) -> None:
        """Sends the request and returns. What was asked for is taken in the same order, before anything else is read;
        any other call, or an error, forgets what was asked for."""
        ...

    def take_chunk(self, save: RankSave, index: int, into: memoryview) -> None:
        """Fills `into` with what was asked for longest ago; as `read_chunk` raises."""
        ...
