"""Copies one tensor's piece into a slot, and digests both ends.

The arrays behind a copy alias the live tensor and the slot; preparing costs microseconds and running releases the GIL.
A copy behind the training goes by way of memory of the copying thread's own: what is compared with the digest taken at
the step is what is laid into the slot, whatever becomes of the tensor meanwhile. Used by `stager`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from surefoot.staging.arena import Bytes
from surefoot.staging.blocks import Region, bands, regions

BAND_BYTES = 1024 * 1024
"""Largest copy on the CPU, and what one digest covers: it stays in a core's cache between its two passes, is long enough
for the GIL to be let go, and whoever waits for a copy under way waits for no more than this much."""

PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter)
"""Of tensors that are their memory and nothing else; a subclass may be anything."""

_MOST_VIEWS = 4096

Array = np.ndarray[Any, Any]
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def elements(tensor: torch.Tensor) -> torch.Tensor:
    """Views a tensor as a type that numpy copies, bit by bit."""
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    word = _WORDS[plain.element_size()]
    return plain if plain.dtype == word else plain.view(word)


class Scratch(threading.local):
    """Holds each thread's copy buffer and views of it, between saves."""

    def __init__(self) -> None:
        self._memory: Bytes = np.ones(BAND_BYTES, dtype=np.uint8)  # ones: written, so that the pages are there
        self._views: dict[tuple[Any, ...], tuple[Array, list[Array]]] = {}

    def of(self, copy: Copy) -> tuple[Bytes, Array, list[Array]]:
        """A band's bytes, their array in source order, and its tiled regions."""
        size = copy.target.size
        if size > self._memory.size or len(self._views) > _MOST_VIEWS:
            self._views.clear()
            self._memory = np.ones(max(size, self._memory.size), dtype=np.uint8)
        key = (copy.source.shape, copy.source.dtype, copy.tile)
        if key not in self._views:
            whole = self._memory[:size].view(copy.source.dtype).reshape(copy.source.shape)
            self._views[key] = whole, [_tiles(whole, region) for region in regions(whole.shape, copy.tile)]
        return self._memory[:size], *self._views[key]


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies whole tiles of a piece from the program to its slot."""

    source: Array
    target: Bytes
    tile: tuple[int, ...]
    pairs: tuple[tuple[Array, Array], ...]
    """Strided views of source and target, alike in shape."""
    flat: Bytes | None
    """The source's bytes in its order, where they lie in memory so."""
    straight: bool
    """The target has the source's order."""

    @property
    def size_bytes(self) -> int:
        return self.target.nbytes

    def run(self) -> None:
        """Copies what is there now."""
        for source, target in self.pairs:
            np.copyto(target, source)

    def digest(self, scratch: Scratch) -> int:
        """Digests the source's present bytes, in the source's order."""
        if self.flat is not None:
            return _digest(self.flat)
        landed, whole, _ = scratch.of(self)
        np.copyto(whole, self.source)
        return _digest(landed)

    def run_verified(self, digest: int, scratch: Scratch) -> bool:
        """Copies; returns whether the copied bytes have this digest."""
        if self.straight:
            self.run()
            return _digest(self.target) == digest
        landed, whole, parts = scratch.of(self)
        np.copyto(whole, self.source)
        for (_, target), part in zip(self.pairs, parts, strict=True):
            np.copyto(target, part)
        return _digest(landed) == digest


def copies_of(source: torch.Tensor, tile: tuple[int, ...], target: Bytes) -> list[Copy]:
    """Prepares the copies of a host tensor, cut into tiles, to `target`.

    `target` is exactly the piece's bytes; ValueError if not.
    """
    array: Array = elements(source).numpy()
    if array.nbytes != target.size:
        raise ValueError(f"a piece of {array.nbytes} bytes was given {target.size} bytes of stream")
    if array.size == 0:
        return []
    return [_copy(band, tile, part) for band, part in _banded(array, tile, target)]


def is_straight(shape: tuple[int, ...], tile: tuple[int, ...]) -> bool:
    """Whether a piece's stream has the piece's own order of elements."""
    return all(t >= n for t, n in zip(tile[1:], shape[1:], strict=True))


def _digest(content: Bytes) -> int:
    return xxh3_64_intdigest(content.data)


def _banded(array: Array, tile: tuple[int, ...], target: Bytes) -> Iterator[tuple[Array, Bytes]]:
    if target.size <= BAND_BYTES:
        yield array, target
        return
    start = 0
    for part in bands(array.shape, tile, array.itemsize, BAND_BYTES):
        band = array[part]
        yield band, target[start : start + band.nbytes]
        start += band.nbytes


def _copy(source: Array, tile: tuple[int, ...], target: Bytes) -> Copy:
    flat = source.reshape(-1).view(np.uint8) if source.flags.c_contiguous else None
    straight = is_straight(source.shape, tile)
    if flat is not None and straight:
        return Copy(source, target, tile, ((flat, target),), flat, straight)
    pairs = tuple((_tiles(source, r), _laid(source.dtype, r, target)) for r in regions(source.shape, tile))
    return Copy(source, target, tile, pairs, flat, straight)


def _tiles(array: Array, region: Region) -> Array:
    """Views one region of an array as tiles of elements."""
    corner = array[tuple(slice(c, None) for c in region.corner)] if region.corner else array
    tile_strides = tuple(s * e for s, e in zip(array.strides, region.extents, strict=True))
    shape = (*region.counts, *region.extents)
    return np.lib.stride_tricks.as_strided(corner, shape, (*tile_strides, *array.strides), writeable=False)


def _laid(dtype: np.dtype[Any], region: Region, target: Bytes) -> Array:
    """Views the same region in the stream."""
    size = dtype.itemsize
    strides = tuple(s * size for s in (*region.tile_strides, *region.element_strides))
    shape = (*region.counts, *region.extents)
    return np.ndarray(shape, dtype=dtype, buffer=target.data, offset=region.start * size, strides=strides)
