"""Cuts a stream of pieces into chunks, and finds chunks by bytes.

Pure. No block straddles a chunk, so every block can be read and verified from one place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from surefoot.geometry.tiling import Tiling
from surefoot.protocol.records import CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """`length` bytes from `offset` of chunk `chunk`; they are the stream's bytes from `stream_start` on."""

    chunk: int
    offset: int
    length: int
    stream_start: int


def chunk_starts(tilings: Iterable[Tiling], limit: int = CHUNK_BYTES) -> tuple[int, ...]:
    """Stream offsets at which chunks begin, when the pieces stand one behind the other; each chunk ≤ `limit` bytes."""
    starts: list[int] = []
    room, position = 0, 0
    for tiling in tilings:
        done = 0
        while done < tiling.size_bytes:
            if tiling.size_bytes - done <= room:
                room -= tiling.size_bytes - done
                done = tiling.size_bytes
                continue
            fits = tiling.block_start(tiling.block_at(done + room)) - done  # whole blocks that still go in
            if fits > 0:
                done += fits
            elif room == limit:
                largest = tiling.block_bytes(tiling.block_at(done))
                raise ValueError(f"a block of {largest} bytes is larger than a chunk of {limit}: use smaller tiles")
            starts.append(position + done)
            room = limit
        position += tiling.size_bytes
    return tuple(starts)


def chunk_ranges(starts: Sequence[int], stream_bytes: int, begin: int, end: int) -> list[ChunkRange]:
    """The chunk ranges that hold the stream's bytes from `begin` to `end`."""
    if not 0 <= begin <= end <= stream_bytes:
        raise ValueError(f"bytes {begin} to {end} are not in a stream of {stream_bytes} bytes")
    found: list[ChunkRange] = []
    chunk = bisect_right(starts, begin) - 1
    while begin < end:
        stop = min(end, starts[chunk + 1] if chunk + 1 < len(starts) else stream_bytes)
        found.append(ChunkRange(chunk, begin - starts[chunk], stop - begin, begin))
        begin, chunk = stop, chunk + 1
    return found
