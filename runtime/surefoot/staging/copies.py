"""Prepared copies of one tensor's piece into a slot: a short list of strided copies, run by whichever thread is free.

The arrays behind a copy alias the live tensor and the slot; preparing costs microseconds and running releases the GIL.
Used by `ordering` (to run) and `checkpointer` (to prepare).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from surefoot.staging.arena import Bytes
from surefoot.staging.blocks import Region, bands, regions

BAND_BYTES = 4 * 1024 * 1024
"""Largest copy on the CPU: whoever waits for a copy under way waits for no more than this much."""

DEVICE_BAND_BYTES = 64 * 1024 * 1024
"""Largest scratch on a device, where blocks are put in order before one contiguous copy to the host."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def elements(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as elements of a type that every library can copy (bfloat16, float8, bool: bits are bits)."""
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    word = _WORDS[plain.element_size()]
    return plain if plain.dtype == word else plain.view(word)


@dataclass(frozen=True, slots=True)
class Copy:
    """One strided copy between host arrays; `size_bytes` is what it moves."""

    source: np.ndarray[Any, Any]
    target: np.ndarray[Any, Any]

    @property
    def size_bytes(self) -> int:
        return self.target.nbytes

    def run(self) -> None:
        np.copyto(self.target, self.source)


def copies_of(source: torch.Tensor, tile: tuple[int, ...], target: Bytes) -> list[Copy]:
    """The copies that lay `source`, cut into tiles, into `target` (exactly the piece's bytes). Host tensors only."""
    array = elements(source).numpy()
    if array.nbytes != target.size:
        raise ValueError(f"a piece of {array.nbytes} bytes was given {target.size} bytes of stream")
    if array.size == 0:
        return []
    if array.ndim == 0 or target.size <= BAND_BYTES:
        return [_strided(array, region, target) for region in regions(array.shape, tile)]
    return [
        _strided(array[first : first + rows], region, part)
        for first, rows, part in _banded(array, tile, target)
        for region in regions((rows, *array.shape[1:]), tile)
    ]


def _banded(array: np.ndarray[Any, Any], tile: tuple[int, ...], target: Bytes) -> Iterator[tuple[int, int, Bytes]]:
    row_bytes = array.nbytes // array.shape[0]
    for first, rows in bands(array.shape, tile, array.itemsize, BAND_BYTES):
        yield first, rows, target[first * row_bytes : (first + rows) * row_bytes]


def _strided(array: np.ndarray[Any, Any], region: Region, target: Bytes) -> Copy:
    size = array.itemsize
    shape = (*region.counts, *region.extents)
    corner = array[tuple(slice(c, None) for c in region.corner)] if region.corner else array
    tile_strides = tuple(s * e for s, e in zip(array.strides, region.extents, strict=True))
    source = np.lib.stride_tricks.as_strided(corner, shape, (*tile_strides, *array.strides), writeable=False)
    strides = tuple(s * size for s in (*region.tile_strides, *region.element_strides))
    laid: np.ndarray[Any, Any] = np.ndarray(
        shape, dtype=array.dtype, buffer=target.data, offset=region.start * size, strides=strides
    )
    return Copy(source, laid)


def copy_from_device(source: torch.Tensor, tile: tuple[int, ...], target: Bytes) -> None:
    """Enqueues the piece on the current stream: blocks are put in order on the device, then copied as one run.

    `target` should be pinned; the caller records an event behind this and waits for it before reading `target`.
    """
    flat = elements(source)
    if flat.numel() == 0:
        return
    if flat.dim() == 0:
        torch.from_numpy(target).copy_(flat.reshape(1).view(torch.uint8), non_blocking=True)
        return
    row_bytes = target.size // flat.shape[0]
    for first, rows in bands(tuple(flat.shape), tile, flat.element_size(), DEVICE_BAND_BYTES):
        scratch = torch.empty(rows * row_bytes // flat.element_size(), dtype=flat.dtype, device=flat.device)
        band = flat[first : first + rows]
        for region in regions(tuple(band.shape), tile):
            offset = band.storage_offset() + sum(c * s for c, s in zip(region.corner, band.stride(), strict=True))
            steps = tuple(s * e for s, e in zip(band.stride(), region.extents, strict=True))
            shape = (*region.counts, *region.extents)
            laid = scratch.as_strided(shape, (*region.tile_strides, *region.element_strides), region.start)
            laid.copy_(band.as_strided(shape, (*steps, *band.stride()), offset))
        part = torch.from_numpy(target[first * row_bytes : (first + rows) * row_bytes])
        part.copy_(scratch.view(torch.uint8), non_blocking=True)
