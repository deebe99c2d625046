"""Cuts a stream of pieces into chunks.

Pure. No block straddles a chunk, so every block can be read and verified from one place.
"""

from __future__ import annotations

from collections.abc import Iterable

from surefoot.geometry.tiling import Tiling
from surefoot.protocol.checkpoints.records import CHUNK_BYTES


def chunk_starts(tilings: Iterable[Tiling], limit: int = CHUNK_BYTES) -> tuple[int, ...]:
    """Cuts pieces that stand one behind the other into chunks.

    Returns:
        Stream offsets in bytes at which chunks begin; each chunk has at most `limit` bytes.
    """
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
