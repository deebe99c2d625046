"""Computes the strided copies that tile a tensor into blocks.

Arithmetic only. A piece's blocks stand in row-major order of tiles and the tiles at the far edges are clipped. So all
full tiles are one strided copy, and each combination of clipped dimensions is one more: at most 2^n for n dimensions,
and in practice the main area, the right edge, the bottom edge and the corner. Used by `host_copies`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod


@dataclass(frozen=True, slots=True)
class Region:
    """One strided copy: tiles of equal extent.

    `counts` tiles of `extents` elements. `corner` is the first element in the source; `start` the first in the
    piece's stream. `tile_strides` and `element_strides` are the stream's, in elements; the source's follow from its
    own strides (a tile step along d is extents[d] source elements, since only the last tile of a row is clipped).
    """

    counts: tuple[int, ...]
    extents: tuple[int, ...]
    corner: tuple[int, ...]
    start: int
    tile_strides: tuple[int, ...]
    element_strides: tuple[int, ...]


@lru_cache(maxsize=4096)
def regions(lengths: tuple[int, ...], tile: tuple[int, ...]) -> tuple[Region, ...]:
    """The regions of a piece; together they cover each element once."""
    return tuple(_regions(lengths, tile))


def _regions(lengths: tuple[int, ...], tile: tuple[int, ...]) -> Iterator[Region]:
    choices = []
    for n, t in zip(lengths, tile, strict=True):
        whole, rest = divmod(n, t)
        # (number of tiles, extent of each, index of the first)
        choices.append([(c, e, first) for c, e, first in ((whole, t, 0), (1, rest, whole)) if c and e])
    for chosen in product(*choices):
        counts = tuple(c for c, _, _ in chosen)
        extents = tuple(e for _, e, _ in chosen)
        corner = tuple(first * t for (_, _, first), t in zip(chosen, tile, strict=True))
        # Stepping one element row further in dimension d skips, in the stream, the band of all later dimensions,
        # as high as the tiles chosen in the earlier ones.
        bands = tuple(prod(extents[:d]) * prod(lengths[d + 1 :]) for d in range(len(lengths)))
        yield Region(
            counts=counts,
            extents=extents,
            corner=corner,
            start=sum(c * band for c, band in zip(corner, bands, strict=True)),
            tile_strides=tuple(e * band for e, band in zip(extents, bands, strict=True)),
            element_strides=tuple(prod(extents[d + 1 :]) for d in range(len(lengths))),
        )


def bands(
    lengths: tuple[int, ...], tile: tuple[int, ...], itemsize: int, limit_bytes: int
) -> Iterator[tuple[slice, ...]]:
    """Yields parts of a piece in stream order, about `limit_bytes` each.

    Each has whole tiles, at least one, and is contiguous in the stream, laid out as a piece of its own: rows of tiles
    along dimension 0, and of a row that is larger than the limit, stretches of its tiles along the next dimension.
    """
    if 0 not in lengths:
        yield from _bands(lengths, tile, itemsize, limit_bytes)


def _bands(
    lengths: tuple[int, ...], tile: tuple[int, ...], scale: int, limit_bytes: int
) -> Iterator[tuple[slice, ...]]:
    """`scale` is what one element of these dimensions stands for, in bytes."""
    if not lengths:
        yield ()
        return
    row_bytes = scale * prod(lengths[1:])
    if row_bytes * tile[0] <= limit_bytes or len(lengths) == 1:
        rows = max(1, limit_bytes // (row_bytes * tile[0])) * tile[0]
        rest = tuple(slice(0, n) for n in lengths[1:])
        for first in range(0, lengths[0], rows):
            yield slice(first, min(first + rows, lengths[0])), *rest
        return
    for first in range(0, lengths[0], tile[0]):
        last = min(first + tile[0], lengths[0])
        for rest in _bands(lengths[1:], tile[1:], scale * (last - first), limit_bytes):
            yield slice(first, last), *rest
