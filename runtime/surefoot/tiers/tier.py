"""Defines `Tier`, the protocol of places that keep rank saves.

Synchronous and thread-compatible (one thread at a time per instance; open more for parallel streams). Every call has
a time limit and raises from `surefoot.errors`: TierUnavailable (unknown, maybe it happened), TierFull, ChunkMissing
(it answered: not there), Fenced (a newer epoch rules). Nothing here verifies digests; `restore.fetch` does.

The save, layout and chunk that a method takes are named in docs/format.md; sizes and offsets are bytes.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable
from zlib import crc32

from surefoot.errors import Corrupt, ProtocolError, TierError
from surefoot.format.layouts import DIGEST_BYTES, Stream, first_bad_block, read_layout
from surefoot.format.manifests import check_digests, check_values
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, RankSave


class Tier(Protocol):
    """One place that keeps the rank saves of one job.

    Raises:
        TierUnavailable: any method; the call may have happened.
    """

    @property
    def name(self) -> str:
        """Names the tier in messages and metrics: `memory:node-1`, `persistent`."""
        ...

    def put_layout(self, digest: str, text: str) -> None:
        """Keeps a layout record.

        Args:
            digest: Of the text; the same digest always has the same text.
            text: The record's JSON.

        Raises:
            TierFull: The tier has no room.
        """
        ...

    def put_chunk(self, save: RankSave, index: int, data: memoryview) -> None:
        """Writes a chunk, by the time of the commit at the latest.

        Chunks come in their order; one is written again only with the same bytes.

        Args:
            save: The rank save that the chunk belongs to.
            index: The chunk's number, from 0.
            data: At most CHUNK_BYTES; not read any more when the call returns.

        Raises:
            TierFull: The tier has no room.
        """
        ...

    def put_values(self, save: RankSave, data: bytes) -> None:
        """Writes the save's plain values, as `put_chunk` writes chunks."""
        ...

    def put_digests(self, save: RankSave, data: bytes) -> None:
        """Writes the save's digest table, as `put_chunk` writes chunks."""
        ...

    def commit(self, manifest: RankManifest, writer_epoch: int, chunk_lengths: tuple[int, ...]) -> None:
        """Makes a rank save visible if every part of it is there.

        Repeating it with the same bytes is success.

        Args:
            manifest: Describes the save; it becomes the index entry.
            writer_epoch: The epoch that writes: of two only the newer may.
            chunk_lengths: Bytes of each chunk.

        Raises:
            Fenced: A newer epoch rules this job.
            ChunkMissing: A part is not there or has another length.
        """
        ...

    def manifests(self) -> tuple[RankManifest, ...]:
        """Lists every visible rank save of the job.

        Returns:
            A manifest of each; one that cannot be read is left out, and named by `damaged`.
        """
        ...

    def damaged(self) -> tuple[str, ...]:
        """Names the index entries that the last `manifests()` could not read."""
        ...

    def read_layout(self, digest: str) -> str:
        """Reads the layout record of a digest.

        Raises:
            ChunkMissing: It is not there.
        """
        ...

    def read_values(self, save: RankSave) -> bytes:
        """Reads the plain values of a save; raises as `read_layout`."""
        ...

    def read_digests(self, save: RankSave, offset: int, length: int) -> bytes:
        """Reads a part of the digest table; raises as `read_chunk`."""
        ...

    def read_chunk(self, save: RankSave, index: int, offset: int, length: int) -> bytes | memoryview:
        """Reads a part of a chunk.

        Args:
            save: The rank save that the chunk belongs to.
            index: The chunk's number, from 0.
            offset: First byte within the chunk.
            length: How many bytes are wanted.

        Returns:
            Exactly `length` bytes.

        Raises:
            ChunkMissing: The chunk is not there or ends before.
        """
        ...

    def drop(self, save: RankSave, writer_epoch: int, chunks: int) -> None:
        """Removes a rank save: its index entry first, then its data.

        A save that is not there is success.

        Args:
            save: The rank save to remove.
            writer_epoch: The epoch that removes: of two only the newer may.
            chunks: How many chunks it has.

        Raises:
            Fenced: A newer epoch rules this job.
        """
        ...

    def close(self) -> None:
        """Closes connections; nothing that was committed is lost."""
        ...


@runtime_checkable
class SupportsParts(Protocol):
    """Extends `Tier` by parts of several chunks, several at once."""

    at_once: int
    """How many threads may call `put_part` or `has_part` at once."""
    together: int
    """Chunks of a part, counted from chunk 0; the last part has what is left."""

    def list_parts(self, save: RankSave) -> Mapping[int, int]:
        """Returns the bytes of each part that an earlier try wrote."""
        ...

    def has_part(self, save: RankSave, part: int, chunks: Sequence[memoryview]) -> bool:
        """Decides by the tier's own checksum whether just these bytes are here.

        Args:
            save: The rank save that the part belongs to.
            part: The part's number, from 0.
            chunks: Its chunks in their order.
        """
        ...

    def put_part(self, save: RankSave, part: int, chunks: Sequence[memoryview]) -> None:
        """Writes a whole part; takes what `has_part` takes.

        Raises as `put_chunk` does.
        """
        ...


@runtime_checkable
class CommitsOnce(Protocol):
    """Extends `Tier` where nothing is written under a committed name.

    Each write of a part of a committed save is compared first: its own bytes mend what is damaged, others are refused
    with SaveExists.
    """

    def has(self, manifest: RankManifest) -> bool:
        """Decides whether this save is committed here, and no part of it is missing.

        Raises:
            SaveExists: Another save is committed under its name.
        """
        ...


@runtime_checkable
class SupportsPartCopy(Protocol):
    """Extends `ManyStreams` by copying parts between its own saves."""

    def copy_part(self, source: RankSave, save: RankSave, part: int) -> bool:
        """Copies a whole part of another save, as `copy_chunk` does a chunk.

        `at_once` threads may call it.
        """
        ...


@runtime_checkable
class SupportsListingByCheckpoint(Protocol):
    """Extends `Tier` where each rank save in a listing costs time."""

    def manifests_of(self, checkpoint: Checkpoint) -> tuple[RankManifest, ...]:
        """Lists the rank saves of one checkpoint.

        `damaged` then speaks of it alone.
        """
        ...


@runtime_checkable
class SupportsLayoutCopies(Protocol):
    """Extends `Tier` by layout records beside rank saves."""

    def read_layout_of(self, manifest: RankManifest) -> str:
        """Reads the shared layout record, or the save's own instead.

        The save's own is read where the shared one is damaged or gone.
        """
        ...


@runtime_checkable
class SupportsPipelinedWrites(Protocol):
    """Extends `Tier` by chunks that are sent while others are stored."""

    def send_chunk(self, save: RankSave, index: int, data: memoryview) -> None:
        """Sends a chunk; an error may be the previous one's.

        Takes what `put_chunk` takes.
        """
        ...

    def wait_stored(self) -> None:
        """Returns when every chunk sent is stored; raises as `put_chunk`.

        Nothing else may be called between the first `send_chunk` and this.
        """
        ...


@runtime_checkable
class SupportsChunkCopy(Protocol):
    """Extends `Tier` by copying chunks between its own saves."""

    def copy_chunk(self, source: RankSave, save: RankSave, index: int) -> bool:
        """Copies a chunk of another save.

        Args:
            source: The rank save that has the bytes.
            save: The rank save that is written.
            index: The chunk's number in both, from 0.

        Returns:
            Whether it did; `source` may have been dropped.

        Raises:
            CopyRefused: It never does for this account.
        """
        ...


@runtime_checkable
class SupportsPipelinedReads(Protocol):
    """Extends `Tier` by reads that are asked for before they are taken."""

    def request_chunk(self, save: RankSave, index: int, offset: int, length: int) -> None:
        """Asks for a part of a chunk and returns.

        Takes what `read_chunk` takes. What was asked for is taken in the same order, before anything else is read. Any
        other call, or an error, forgets what was asked for.
        """
        ...

    def receive_chunk(self, save: RankSave, index: int, into: memoryview) -> None:
        """Fills `into` with the oldest part asked for; raises as `read_chunk`.

        Args:
            save: The rank save that was asked for.
            index: The chunk that was asked for.
            into: As long as the part that was asked for.
        """
        ...


# ---- verified reads --------------------------------------------------------------------------------------------------
# Reads parts of a rank save from one copy and verifies them. What does not match raises Corrupt that names part and
# place. The parts and their guards: the layout by its own name, digest table and values by the manifest, every block by
# the table. Used by promotion and repair (`uploader`) and by restore.


def stream_from(tier: Tier, manifest: RankManifest) -> Stream:
    """The layout of a rank save."""
    try:
        text = (
            tier.read_layout_of(manifest)
            if isinstance(tier, SupportsLayoutCopies)
            else tier.read_layout(manifest.layout)
        )
        stream = read_layout(manifest.layout, text)
    except (Corrupt, ProtocolError) as error:
        raise Corrupt(f"layout {manifest.layout} at {tier.name} is damaged: {error}") from error
    described = (manifest.stream_bytes, manifest.chunks, manifest.digests_bytes)
    found = (stream.layout.stream_bytes, len(stream.layout.chunk_starts), stream.blocks * DIGEST_BYTES)
    if described != found:
        raise Corrupt(f"the manifest of {manifest.save} and its layout {manifest.layout} describe different bytes")
    return stream


def table_from(tier: Tier, manifest: RankManifest) -> bytes:
    """The digest table."""
    table = bytes(tier.read_digests(manifest.save, 0, manifest.digests_bytes))
    check_digests(manifest, table, tier.name)
    return table


def values_from(tier: Tier, manifest: RankManifest) -> bytes:
    """The blob of plain values."""
    values = tier.read_values(manifest.save)
    check_values(manifest, values, tier.name)
    return values


def is_listed(tier: Tier, save: RankSave) -> bool:
    """Whether a tier's index names a rank save.

    Tells a hole from an absent save: a part that is missing under its index entry never comes back, whereas an index
    without the entry is that of a save dropped, or of a holder restarted, since it was read.
    """
    try:
        named = (
            tier.manifests_of(save.checkpoint) if isinstance(tier, SupportsListingByCheckpoint) else tier.manifests()
        )
    except TierError:
        return False
    return any(manifest.save == save for manifest in named)


def chunk_from(tier: Tier, manifest: RankManifest, stream: Stream, table: bytes, index: int) -> memoryview:
    """A whole chunk, every block of it verified."""
    data = memoryview(tier.read_chunk(manifest.save, index, 0, stream.layout.chunk_lengths()[index]))
    check_blocks(data, manifest, stream, table, (tier.name, index, stream.blocks_of_chunk(index)))
    return data


def check_blocks(
    data: memoryview, manifest: RankManifest, stream: Stream, table: bytes, what: tuple[str, int, range]
) -> None:
    """Raises Corrupt unless `data` is exactly these blocks; `what` is (place, chunk, blocks)."""
    place, chunk, blocks = what
    wanted = table[blocks.start * DIGEST_BYTES : blocks.stop * DIGEST_BYTES]
    bad = first_bad_block(data, stream.edges, blocks, wanted)
    if bad is not None:
        raise Corrupt(f"chunk {chunk} of {manifest.save} at {place} does not match its digest (block {bad})")


# ---- bodies of uploads -----------------------------------------------------------------------------------------------
# Presents several pieces of memory as one request body, without copies. Made by `s3` for each write.


class Body:
    """Gives an HTTP client pieces of memory as a file.

    Enough of a binary file for it, which may begin again for another try. Nothing is copied.
    """

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self._pieces = [memoryview(piece).cast("B") for piece in pieces]
        self._size = sum(len(piece) for piece in self._pieces)
        self._at = 0

    def __len__(self) -> int:
        return self._size

    def checksum(self) -> str:
        """Base64 of the CRC-32, as the protocol wants it."""
        found = 0
        for piece in self._pieces:
            found = crc32(piece, found)
        return b64encode(found.to_bytes(4, "big")).decode()

    def whole(self) -> bytes:
        return b"".join(self._pieces)

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> memoryview | bytes:
        """Reads the rest of the piece it stands in.

        However little was asked for: clients ask for 16 KiB, and send what comes.
        """
        if size == 0:
            return b""
        skipped = 0
        for piece in self._pieces:
            if self._at < skipped + len(piece):
                found = piece[self._at - skipped :]
                self._at = skipped + len(piece)
                return found
            skipped += len(piece)
        return b""
