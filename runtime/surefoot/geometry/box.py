"""Defines an n-dimensional box of elements inside a tensor.

Pure; everything else in this room is made of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from surefoot.protocol.checkpoints.records import Piece


@dataclass(frozen=True, slots=True)
class Box:
    """Describes a box of a tensor.

    `offsets` and `lengths` have one entry per dimension, in elements. A 0-d tensor is `Box((), ())`, with one element.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.lengths):
            raise ValueError(f"a box has {len(self.offsets)} offsets and {len(self.lengths)} lengths: give one of each")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """The box of everything in a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.lengths)

    @property
    def stops(self) -> tuple[int, ...]:
        """One past the last element, per dimension."""
        return tuple(o + n for o, n in zip(self.offsets, self.lengths, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The elements in both, or None where there are none (also if one of them is empty)."""
        starts = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        stops = tuple(min(a, b) for a, b in zip(self.stops, other.stops, strict=True))
        lengths = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, lengths) if all(n > 0 for n in lengths) else None

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` is in this box."""
        return other.volume == 0 or self.intersect(other) == other

    def relative_to(self, origin: tuple[int, ...]) -> Box:
        """The same elements, counted from `origin` (the offsets of an enclosing box)."""
        return Box(tuple(o - begin for o, begin in zip(self.offsets, origin, strict=True)), self.lengths)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(self.offsets, self.lengths, strict=True)) + "]"


def box_of(piece: Piece) -> Box:
    """The box of a saved piece in its tensor."""
    return Box(piece.offsets, piece.lengths)
