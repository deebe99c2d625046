"""Cuts a tensor into contiguous boxes no larger than a byte limit.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from surefoot.geometry.box import Box

ALIGNED = 32
"""Bands of several rows are a multiple of this many, as tiles are: a tile is then seldom read for two bands."""


def bands(shape: tuple[int, ...], itemsize: int, limit_bytes: int) -> Iterator[Box]:
    """Boxes of at most `limit_bytes` (or one element), in row-major order; one empty box for an empty tensor."""
    if prod(shape) * itemsize <= limit_bytes or not shape:
        yield Box.whole(shape)
        return
    row = prod(shape[1:]) * itemsize
    if row > limit_bytes:
        for index in range(shape[0]):
            for inner in bands(shape[1:], itemsize, limit_bytes):
                yield Box((index, *inner.offsets), (1, *inner.lengths))
        return
    rows = limit_bytes // row
    rows = rows // ALIGNED * ALIGNED or rows
    rest = (0,) * (len(shape) - 1)
    for start in range(0, shape[0], rows):
        yield Box((start, *rest), (min(rows, shape[0] - start), *shape[1:]))
