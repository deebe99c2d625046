"""Divides what several ranks hold alike into equal shares to save.

Pure. Every rank computes its own share alone, and all must come to the same answer, so nothing here depends on anything
but its arguments. ByteCheckpoint (NSDI'25) and DCP assign whole tensors to the least loaded rank; here what is shared
is laid end to end and cut at equal distances. A cut is moved to the nearest row, and small tensors are never cut. So a
rank's share costs two searches, however many ranks there are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, prod

from surefoot.geometry.box import Box
from surefoot.geometry.flat import flat_boxes, flat_hull

WHOLE_BYTES = 256 * 1024
"""Tensors below this size are saved by one rank."""

UNIT_BYTES = 64 * 1024
"""Cuts fall between rows of at most this size, or between as many elements."""

MANY = 64
LEAST_BYTES = 64 * 1024 * 1024
"""More than MANY ranks share only as long as each gets this much: smaller shares cost more than they save."""


def chunked(length: int, parts: int, index: int) -> tuple[int, int]:
    """Computes start and length of a part as `torch.chunk` does.

    Equal parts, the last ones less.
    """
    size = ceil(length / parts)
    start = min(index * size, length)
    return start, min(size, length - start)


def shard_box(shape: tuple[int, ...], dimension: int, parts: int, index: int) -> Box:
    """Computes what a rank holds of a tensor sharded along one dimension.

    Rank `index` of `parts`, in FSDP2's and `Shard`'s layout.
    """
    start, length = chunked(shape[dimension], parts, index)
    offsets, lengths = [0] * len(shape), list(shape)
    offsets[dimension], lengths[dimension] = start, length
    return Box(tuple(offsets), tuple(lengths))


@dataclass(frozen=True, slots=True)
class ShareShape:
    """A tensor, as far as sharing it out needs to know it."""

    lengths: tuple[int, ...]
    itemsize: int

    @property
    def size_bytes(self) -> int:
        return prod(self.lengths) * self.itemsize

    @property
    def unit(self) -> int:
        """Counts elements between two places where a tensor may be cut.

        All of them for a small tensor.
        """
        if self.size_bytes < WHOLE_BYTES:
            return prod(self.lengths)
        unit = 1
        for n in reversed(self.lengths):
            if unit * n * self.itemsize > UNIT_BYTES:
                return unit * max(1, UNIT_BYTES // (unit * self.itemsize))
            unit *= n
        return unit


class Shares:
    """Divides tensors that several ranks hold among them.

    In an order that all `members` know.

    `reserved` bytes are already the first member's own task.
    """

    def __init__(self, tensors: Sequence[ShareShape], members: int, reserved: int = 0) -> None:
        self._tensors = tensors
        self._members = members
        self._reserved = reserved
        self._ends = list(accumulate(t.size_bytes for t in tensors))
        self._total = self._ends[-1] if self._ends else 0
        self.sharers = min(members, max(MANY, (self._total + reserved) // LEAST_BYTES))
        """How many of the members save anything."""

    def of(self, member: int) -> list[tuple[int, Box]]:
        """The boxes a member saves: (number of the tensor, box), in order."""
        sharer = self._sharer(member)
        if sharer is None:
            return []
        (first, begin), (last, end) = self._cut(sharer), self._cut(sharer + 1)
        found = []
        for number in range(first, min(last + 1, len(self._tensors))):
            lengths = self._tensors[number].lengths
            stop = end if number == last else prod(lengths)
            found += [(number, box) for box in flat_boxes(lengths, begin if number == first else 0, stop)]
        return found

    def members(self, number: int, box: Box) -> list[int]:
        """Members that save elements of `box` of that tensor (and perhaps a few that save only what lies between
        them)."""
        low, high = flat_hull(self._tensors[number].lengths, box)
        first = bisect_right(range(self.sharers + 1), (number, low), key=self._cut) - 1
        last = bisect_left(range(self.sharers + 1), (number, high), key=self._cut)
        found = range(max(0, first), min(last, self.sharers))
        return [self._member(sharer) for sharer in found]

    def _member(self, sharer: int) -> int:
        """Sharers are spread over the members, so that neighbours on a node do not all save or all idle."""
        return sharer * self._members // self.sharers

    def _sharer(self, member: int) -> int | None:
        sharer = -(-member * self.sharers // self._members)
        return sharer if sharer < self.sharers and self._member(sharer) == member else None

    def _cut(self, sharer: int) -> tuple[int, int]:
        """Where a share begins: (number of the tensor, element of it)."""
        position = self._position(sharer)
        number = bisect_right(self._ends, position)
        if number == len(self._tensors):
            return number, 0
        tensor = self._tensors[number]
        unit = tensor.unit * tensor.itemsize
        within = position - (self._ends[number] - tensor.size_bytes)
        element = (within + unit // 2) // unit * tensor.unit
        return (number, element) if element < prod(tensor.lengths) else (number + 1, 0)

    def _position(self, sharer: int) -> int:
        """The byte at which a share would begin if cuts could fall anywhere."""
        even = (self._total + self._reserved) // self.sharers
        if sharer == 0 or self._total == 0:
            return 0 if sharer == 0 else self._total
        if sharer >= self.sharers:
            return self._total
        if self._reserved < even:
            return (self._total + self._reserved) * sharer // self.sharers - self._reserved
        return self._total * (sharer - 1) // (self.sharers - 1)
