"""Puts verified blocks where they belong: strided copies into memory that the caller describes. No torch.

Elements are moved as whole numbers of their size, so bfloat16 and float8 need no support by numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from surefoot.format.dtypes import itemsize
from surefoot.geometry import Box
from surefoot.restore.plan import Segment, Wanted

_CARRIERS: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("c16"),
}


@dataclass(frozen=True, slots=True)
class Destination:
    """Where one box of one tensor goes: writable bytes, with strides in bytes (None: row-major without gaps).

    The same tensor may have several destinations; boxes of different destinations may overlap.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    memory: memoryview
    strides: tuple[int, ...] | None = None

    def wanted(self) -> Wanted:
        return Wanted(self.name, self.dtype, self.shape, self.box, itemsize(self.dtype))


class Placer:
    """One destination, ready to take segments from any thread: segments of a plan never share elements of it."""

    def __init__(self, destination: Destination) -> None:
        self._carrier = _CARRIERS[itemsize(destination.dtype)]
        self._origin = destination.box.offsets
        memory = destination.memory.cast("B") if destination.memory.nbytes else destination.memory
        self._array: npt.NDArray[Any] = np.ndarray(
            destination.box.lengths, self._carrier, memory, strides=destination.strides
        )

    def place(self, segment: Segment, data: memoryview) -> None:
        """Copies the wanted part of the segment's blocks; `data` is exactly the segment's bytes."""
        blocks = np.frombuffer(data, self._carrier).reshape(segment.count, *segment.block)
        taken = blocks[(slice(None), *_slices(segment.take))]
        into = self._array[(*_slices(segment.place.relative_to(self._origin)), ...)]  # a view, also of a 0-d one
        if segment.count == 1:
            into[...] = taken[0]
            return
        width = segment.take.lengths[-1]
        # the last dimension as (block, element), over the same memory
        shape = (*into.shape[:-1], segment.count, width)
        strides = (*into.strides[:-1], width * into.strides[-1], into.strides[-1])
        split = np.lib.stride_tricks.as_strided(into, shape, strides)
        split[...] = np.moveaxis(taken, 0, -2)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))
