"""Digests of blocks: xxh3_64, packed as 8 little-endian bytes each, in the order of the stream.

Called by the drain (to make the table) and by restore (to check what it read). Nothing here keeps state, so any
number of threads may hash parts of one stream; buffers are read where they lie.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

DIGEST_BYTES = 8


def digest(data: bytes | memoryview) -> str:
    """xxh3_64 as 16 hex digits: names layouts, and guards digest tables and values in the manifest."""
    return xxh3_64_hexdigest(data)


def block_digests(stream: memoryview, edges: Sequence[int], blocks: range) -> bytes:
    """The table of these blocks of a stream; `edges[i]` is where block i begins, `edges[i + 1]` where it ends."""
    table = array("Q", [xxh3_64_intdigest(stream[edges[i] : edges[i + 1]]) for i in blocks])
    return _little_endian(table).tobytes()


def first_bad_block(data: memoryview, edges: Sequence[int], blocks: range, table: bytes) -> int | None:
    """Which of these blocks, lying in `data` one behind the other, does not match `table`; None if all do.

    `table` holds the digests of just these blocks. Raises ValueError if it has another number of them, or `data`
    another length: that is the caller's mistake, not a damaged copy.
    """
    if blocks and len(data) != edges[blocks.stop] - edges[blocks.start]:
        raise ValueError(f"{len(data)} bytes are not those of blocks {blocks.start} to {blocks.stop}")
    begin = edges[blocks.start] if blocks else 0
    for number, wanted in zip(blocks, _little_endian(array("Q", table)), strict=True):
        if xxh3_64_intdigest(data[edges[number] - begin : edges[number + 1] - begin]) != wanted:
            return number
    return None


def _little_endian(table: array[int]) -> array[int]:
    if sys.byteorder == "big":
        table.byteswap()
    return table
