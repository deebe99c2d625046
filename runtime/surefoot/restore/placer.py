"""Copies verified blocks into the caller's strided memory, without torch.

Elements are moved as whole numbers of their size, so bfloat16 and float8 need no support by numpy. Memory that the host
does not write, a device's, gets them box by box through a buffer: never is all of a tensor in both places.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from surefoot.format.dtypes import itemsize
from surefoot.geometry import Box
from surefoot.restore.read_plan import Wanted
from surefoot.restore.segments import Segment

_CARRIERS: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("c16"),
}


class BoxReceiver(Protocol):
    """Takes a destination that the host cannot write, in parts.

    Several threads use it.
    """

    def room(self, size_bytes: int) -> memoryview:
        """Gives memory for one part, of a chunk at most.

        It is this thread's until it asks again.
        """
        ...

    def take(self, part: Box) -> None:
        """Copies what was written to `room`, row-major, to its place.

        Returns when that memory may be written again.
        """
        ...


@dataclass(frozen=True, slots=True)
class Destination:
    """Describes where one box of a tensor goes.

    `memory` is writable, or takes the box in parts; `strides` are in bytes (None: row-major without gaps). A tensor may
    have several destinations, and their boxes may overlap.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    memory: memoryview | BoxReceiver
    strides: tuple[int, ...] | None = None

    def wanted(self) -> Wanted:
        return Wanted(self.name, self.dtype, self.shape, self.box, itemsize(self.dtype))


class Placer:
    """Places segments into one destination from any thread.

    Segments of a plan never share elements of it, so no lock is needed.
    """

    def __init__(self, destination: Destination, memory: memoryview) -> None:
        self._carrier = _CARRIERS[itemsize(destination.dtype)]
        self._box, self._given = destination.box, destination.strides
        self._origin = destination.box.offsets
        self._memory = memory.cast("B") if memory.nbytes else memory

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        whole: npt.NDArray[Any] = np.ndarray(self._box.lengths, self._carrier, self._memory, strides=self._given)
        return whole.strides

    def place(self, segment: Segment, data: memoryview) -> None:
        """Copies the wanted part of a segment's blocks from its bytes."""
        if self._given is None and segment.take.lengths == segment.block == self._box.lengths:
            self._memory[:] = data  # one block is all of it: what follows would take longer than the copy
            return
        blocks = np.frombuffer(data, self._carrier).reshape(segment.rows, segment.count, *segment.block)
        taken = blocks[(slice(None), slice(None), *_slices(segment.take))]
        strides = self._strides
        start = sum(
            (o - begin) * stride for o, begin, stride in zip(segment.place.offsets, self._origin, strides, strict=True)
        )
        # over the same memory: a dimension along which blocks lie side by side becomes (block, element)
        shape: list[int] = []
        steps: list[int] = []
        order: list[int] = []
        for d, (length, stride) in enumerate(zip(segment.take.lengths, strides, strict=True)):
            if d == segment.along or d == len(strides) - 1:
                order.append(0 if d == segment.along else 1)
                shape.append(segment.rows if d == segment.along else segment.count)
                steps.append(length * stride)
            order.append(2 + d)
            shape.append(length)
            steps.append(stride)
        if segment.along < 0:
            taken, order = taken[0], [axis - 1 for axis in order]
        if not strides:
            taken = taken[0]
            order = []
        into: npt.NDArray[Any] = np.ndarray(shape, self._carrier, self._memory, start, steps)
        into[...] = taken.transpose(order)


class RelayPlacer:
    """Places segments into one destination by way of its receiver's buffers."""

    def __init__(self, destination: Destination, receiver: BoxReceiver) -> None:
        self._destination, self._receiver = destination, receiver
        self._itemsize = itemsize(destination.dtype)

    def place(self, segment: Segment, data: memoryview) -> None:
        """Hands the wanted part of a segment's blocks over."""
        part = replace(self._destination, box=segment.place)
        room = self._receiver.room(segment.place.volume * self._itemsize)
        Placer(part, room).place(segment, data)
        self._receiver.take(segment.place.relative_to(self._destination.box.offsets))


AnyPlacer = Placer | RelayPlacer


def placer_of(destination: Destination) -> AnyPlacer:
    """What places segments into a destination."""
    memory = destination.memory
    return Placer(destination, memory) if isinstance(memory, memoryview) else RelayPlacer(destination, memory)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))
