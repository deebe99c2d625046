"""Computes block digests: xxh3_64, 8 little-endian bytes each, in stream order.

Called by the drain (to make the table) and by restore (to check what it read). Nothing here keeps state, so any
number of threads may hash parts of one stream; buffers are read where they lie.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from itertools import pairwise

from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

DIGEST_BYTES = 8


def digest(data: bytes | memoryview) -> str:
    """xxh3_64 as 16 hex digits: of layouts, digest tables and values."""
    return xxh3_64_hexdigest(data)


def block_digests(stream: memoryview, edges: Sequence[int], blocks: range) -> bytes:
    """Computes the digest table of these blocks of a stream.

    `edges[i]` is where block i begins, `edges[i + 1]` where it ends.
    """
    return _little_endian(_digests(stream, edges[blocks.start : blocks.stop + 1], 0)).tobytes()


def first_bad_block(data: memoryview, edges: Sequence[int], blocks: range, table: bytes) -> int | None:
    """Finds the first of adjacent blocks that does not match `table`.

    None if all match. `table` holds the digests of just these blocks. Raises ValueError if it has another number of
    them, or `data` another length: that is the caller's mistake, not a damaged copy.
    """
    bounds = edges[blocks.start : blocks.stop + 1]
    if len(table) != len(blocks) * DIGEST_BYTES or (blocks and len(data) != bounds[-1] - bounds[0]):
        raise ValueError(f"{len(data)} bytes are not those of blocks {blocks.start} to {blocks.stop}")
    if not blocks:
        return None
    found, wanted = _digests(data, bounds, bounds[0]), _little_endian(array("Q", table))
    if found == wanted:
        return None
    return next(number for number, one, other in zip(blocks, found, wanted, strict=True) if one != other)


def _digests(data: memoryview, bounds: Sequence[int], origin: int) -> array[int]:
    """Digests the blocks between these bounds; the loop that everything saved and restored goes through, so it is
    short."""
    one = xxh3_64_intdigest
    if origin:
        return array("Q", [one(data[a - origin : b - origin]) for a, b in pairwise(bounds)])
    return array("Q", [one(data[a:b]) for a, b in pairwise(bounds)])


def _little_endian(table: array[int]) -> array[int]:
    if sys.byteorder == "big":
        table.byteswap()
    return table
