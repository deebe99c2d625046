"""Defines `Tier`, the protocol of places that store rank saves.

Synchronous and thread-compatible (one thread at a time per instance; open several for parallel streams). Every call has
a timeout and raises errors of `surefoot.errors`: TierUnavailable (no answer; the call may have been executed), TierFull,
ChunkMissing (the tier answered that it does not have it), Fenced (the job has a newer generation). A `Tier` verifies no
digests; the verified reads below and `restore.fetch` do.

docs/format.md explains saves, layouts and chunks; sizes and offsets are in bytes.
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
    """A place that stores the rank saves of one job.

    Raises:
        TierUnavailable: Any method; the call may have been executed.
    """

    @property
    def name(self) -> str:
        """Name of the tier in messages and metrics: `memory:node-1` or `persistent`."""
        ...

    def put_layout(self, digest: str, text: str) -> None:
        """Stores a layout record.

        Args:
            digest: Digest of the text, by which it is read.
            text: The record's JSON.

        Raises:
            TierFull: The tier has no space.
        """
        ...

    def put_chunk(self, save: RankSave, index: int, data: memoryview) -> None:
        """Writes a chunk, at once or at the commit.

        Chunks must be passed in order; a chunk may be written again with the same bytes only.

        Args:
            save: The rank save that the chunk belongs to.
            index: Index of the chunk, from 0.
            data: At most CHUNK_BYTES; not read after the call returns.

        Raises:
            TierFull: The tier has no space.
        """
        ...

    def put_values(self, save: RankSave, data: bytes) -> None:
        """Writes the save's plain values, as `put_chunk` writes chunks."""
        ...

    def put_digests(self, save: RankSave, data: bytes) -> None:
        """Writes the save's digest table, as `put_chunk` writes chunks."""
        ...

    def commit(self, manifest: RankManifest, writer_generation: int, chunk_lengths: tuple[int, ...]) -> None:
        """Makes a rank save visible if all its parts exist. A repetition with the same bytes succeeds.

        Args:
            manifest: Description of the save, which becomes the index entry.
            writer_epoch: The generation that writes; the tier rejects it once it knows a newer one.
            chunk_lengths: Bytes of each chunk.

        Raises:
            Fenced: The job has a newer generation.
            ChunkMissing: A part is missing or has another length.
        """
        ...

    def manifests(self) -> tuple[RankManifest, ...]:
        """Lists the manifests of every visible rank save of the job; those that cannot be read are named by `damaged`."""
        ...

    def damaged(self) -> tuple[str, ...]:
        """Names the index entries that the last `manifests()` could not read."""
        ...

    def read_layout(self, digest: str) -> str:
        """Reads the layout record of a digest; raises ChunkMissing if it does not exist."""
        ...

    def read_values(self, save: RankSave) -> bytes:
        """Reads the plain values of a save (JSON); raises as `read_layout` does."""
        ...

    def read_digests(self, save: RankSave, offset: int, length: int) -> bytes:
        """Reads a part of the digest table; raises as `read_chunk` does."""
        ...

    def read_chunk(self, save: RankSave, index: int, offset: int, length: int) -> bytes | memoryview:
        """Reads a part of a chunk.

        Args:
            save: The rank save that the chunk belongs to.
            index: Index of the chunk, from 0.
            offset: First byte within the chunk.
            length: Number of bytes to read.

        Returns:
            Exactly `length` bytes.

        Raises:
            ChunkMissing: The chunk does not exist or is shorter.
        """
        ...

    def delete_save(self, save: RankSave, writer_generation: int, chunks: int) -> None:
        """Deletes a rank save, its index entry first; succeeds if the save does not exist.

        Args:
            save: The rank save to delete.
            writer_epoch: The generation that deletes; the tier rejects it once it knows a newer one.
            chunks: Number of its chunks.

        Raises:
            Fenced: The job has a newer generation.
        """
        ...

    def close(self) -> None:
        """Closes the connections."""
        ...


@runtime_checkable
class SupportsParts(Protocol):
    """Extends `Tier` by writing parts, which consist of several chunks, concurrently."""

    max_concurrent_parts: int
    """Number of threads that may call `put_part` or `has_part` concurrently."""
    chunks_per_part: int
    """Number of chunks in a part, counted from chunk 0; the last part may have fewer."""

    def list_parts(self, save: RankSave) -> Mapping[int, int]:
        """Returns the size of each part that an earlier attempt wrote."""
        ...

    def has_part(self, save: RankSave, part: int, chunks: Sequence[memoryview]) -> bool:
        """Whether the tier has exactly these bytes, by its own checksum.

        Args:
            save: The rank save that the part belongs to.
            part: Index of the part, from 0.
            chunks: Its chunks in order.
        """
        ...

    def put_part(self, save: RankSave, part: int, chunks: Sequence[memoryview]) -> None:
        """Writes a part, with the arguments of `has_part`; raises as `put_chunk` does."""
        ...


@runtime_checkable
class CommitsOnce(Protocol):
    """Marks a tier in which a committed save is never replaced by another one.

    Writing a part of a committed save is allowed only with the save's own bytes, which repairs a damaged part. Other bytes
    raise SaveExists.
    """

    def has_committed(self, manifest: RankManifest) -> bool:
        """Whether this save is committed here and no part of it is missing.

        Raises:
            SaveExists: Another save is committed under its name.
        """
        ...


@runtime_checkable
class SupportsPartCopy(Protocol):
    """Extends `SupportsParts` by copying parts between saves within the tier."""

    def copy_part(self, source: RankSave, save: RankSave, part: int) -> bool:
        """Copies a part of another save, as `copy_chunk` does a chunk; `at_once` threads may call it concurrently."""
        ...


@runtime_checkable
class SupportsListingByCheckpoint(Protocol):
    """Extends `Tier` by listing one checkpoint, for tiers in which every listed save costs time."""

    def manifests_of(self, checkpoint: Checkpoint) -> tuple[RankManifest, ...]:
        """Lists the rank saves of one checkpoint; `damaged` then refers to that checkpoint only."""
        ...


@runtime_checkable
class SupportsLayoutCopies(Protocol):
    """Extends `Tier` by a copy of the layout record next to each rank save."""

    def read_layout_of(self, manifest: RankManifest) -> str:
        """Reads the shared layout record, or the save's own copy if the shared one is damaged or missing."""
        ...


@runtime_checkable
class SupportsPipelinedWrites(Protocol):
    """Extends `Tier` by sending chunks before earlier ones are stored."""

    def send_chunk(self, save: RankSave, index: int, data: memoryview) -> None:
        """Sends a chunk, with the arguments of `put_chunk`; an error may be that of an earlier chunk."""
        ...

    def wait_stored(self) -> None:
        """Waits until every chunk sent is stored; raises as `put_chunk` does.

        No other method may be called between the first `send_chunk` and this one.
        """
        ...


@runtime_checkable
class SupportsChunkCopy(Protocol):
    """Extends `Tier` by copying chunks between saves within the tier."""

    def copy_chunk(self, source: RankSave, save: RankSave, index: int) -> bool:
        """Copies a chunk of another save.

        Args:
            source: The rank save to copy from.
            save: The rank save to write.
            index: Index of the chunk in both, from 0.

        Returns:
            False if `source` does not have the chunk, because it may have been deleted.

        Raises:
            CopyUnsupported: The tier never copies for this account.
        """
        ...


@runtime_checkable
class SupportsPipelinedReads(Protocol):
    """Extends `Tier` by reads that are requested ahead of time."""

    def request_chunk(self, save: RankSave, index: int, offset: int, length: int) -> None:
        """Requests a part of a chunk, with the arguments of `read_chunk`, and returns at once.

        Requested parts must be received in the same order. Any other call, or an error, cancels all requests.
        """
        ...

    def receive_chunk(self, save: RankSave, index: int, into: memoryview) -> None:
        """Receives the oldest requested part; raises as `read_chunk` does.

        Args:
            save: The rank save of the request.
            index: Index of the requested chunk.
            into: Memory to fill, as long as the requested part.
        """
        ...


# ---- verified reads --------------------------------------------------------------------------------------------------
# Reads parts of a rank save from one copy and verifies them: the layout by its digest, the digest table and the values
# by the manifest, and every block by the digest table. A mismatch raises Corrupt, which names the part and the tier.
# Used by uploads and repairs (`uploader`) and by restores.


def read_stream(tier: Tier, manifest: RankManifest) -> Stream:
    """Reads and verifies the layout of a rank save."""
    try:
        text = (
            tier.read_layout_of(manifest)
            if isinstance(tier, SupportsLayoutCopies)
            else tier.read_layout(manifest.layout)
        )
        stream = read_layout(manifest.layout, text)
    except (Corrupt, ProtocolError) as error:
        raise Corrupt(f"layout {manifest.layout} at {tier.name} is damaged: {error}") from error
    manifest_sizes = (manifest.stream_bytes, manifest.chunks, manifest.digests_bytes)
    layout_sizes = (stream.layout.stream_bytes, len(stream.layout.chunk_starts), stream.blocks * DIGEST_BYTES)
    if manifest_sizes != layout_sizes:
        raise Corrupt(f"the manifest of {manifest.save} and its layout {manifest.layout} describe different bytes")
    return stream


def read_digest_table(tier: Tier, manifest: RankManifest) -> bytes:
    """Reads and verifies the digest table of a rank save."""
    table = bytes(tier.read_digests(manifest.save, 0, manifest.digests_bytes))
    check_digests(manifest, table, tier.name)
    return table


def read_verified_values(tier: Tier, manifest: RankManifest) -> bytes:
    """Reads and verifies the plain values of a rank save (JSON)."""
    values = tier.read_values(manifest.save)
    check_values(manifest, values, tier.name)
    return values


def is_listed(tier: Tier, save: RankSave) -> bool:
    """Whether a tier's index lists a rank save; False if the tier does not answer.

    This separates an incomplete save from an absent one: a part that is missing although its save is listed never
    reappears, while a save that is no longer listed was deleted, or its memory server restarted, since the index was read.
    """
    try:
        manifests = (
            tier.manifests_of(save.checkpoint) if isinstance(tier, SupportsListingByCheckpoint) else tier.manifests()
        )
    except TierError:
        return False
    return any(manifest.save == save for manifest in manifests)


def read_verified_chunk(tier: Tier, manifest: RankManifest, stream: Stream, table: bytes, index: int) -> memoryview:
    """Reads a whole chunk and verifies every block of it."""
    data = memoryview(tier.read_chunk(manifest.save, index, 0, stream.layout.chunk_lengths()[index]))
    check_blocks(data, manifest, stream, table, (tier.name, index, stream.blocks_of_chunk(index)))
    return data


def check_blocks(
    data: memoryview, manifest: RankManifest, stream: Stream, table: bytes, origin: tuple[str, int, range]
) -> None:
    """Raises Corrupt unless `data` is exactly these blocks; `origin` is (place, chunk, blocks)."""
    place, chunk, blocks = origin
    expected_digests = table[blocks.start * DIGEST_BYTES : blocks.stop * DIGEST_BYTES]
    bad = first_bad_block(data, stream.edges, blocks, expected_digests)
    if bad is not None:
        raise Corrupt(f"chunk {chunk} of {manifest.save} at {place} does not match its digest (block {bad})")


# ---- request bodies --------------------------------------------------------------------------------------------------
# Presents several pieces of memory as one request body, without copying them. Used by `s3` for each write.


class RequestBody:
    """Several pieces of memory as a binary file, from which an HTTP client sends; it can be rewound for a retry."""

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self._pieces = [memoryview(piece).cast("B") for piece in pieces]
        self._size = sum(len(piece) for piece in self._pieces)
        self._position = 0

    def __len__(self) -> int:
        return self._size

    def checksum(self) -> str:
        """Returns the CRC-32 in base64, as the S3 protocol requires."""
        crc = 0
        for piece in self._pieces:
            crc = crc32(piece, crc)
        return b64encode(crc.to_bytes(4, "big")).decode()

    def to_bytes(self) -> bytes:
        return b"".join(self._pieces)

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def read(self, size: int | None = -1) -> memoryview | bytes:
        """Reads to the end of the current piece whatever `size` is: clients ask for 16 KiB, and send any length."""
        if size == 0:
            return b""
        skipped = 0
        for piece in self._pieces:
            if self._position < skipped + len(piece):
                piece_rest = piece[self._position - skipped :]
                self._position = skipped + len(piece)
                return piece_rest
            skipped += len(piece)
        return b""
