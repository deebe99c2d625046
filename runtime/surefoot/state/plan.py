"""What this rank saves of each tensor, and where it lies in the rank's stream: worked out once per structure.

Every rank computes its own part alone; together they cover each tensor once. Used by `checkpointer`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from surefoot.format.dtypes import itemsize
from surefoot.format.layouts import TensorParts, build_layout, layout_digest
from surefoot.geometry import Box
from surefoot.geometry.shares import Shape, split_replicated
from surefoot.protocol.records import Layout
from surefoot.state.entries import Entry


@dataclass(frozen=True, slots=True)
class Portion:
    """One piece of a tensor in the stream: `within` is its box counted from this rank's part of the tensor."""

    name: str
    within: Box
    tile: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SavePlan:
    """A layout with its record and name, and the portions to copy."""

    structure: tuple[object, ...]
    layout: Layout
    layout_json: str
    digest: str
    portions: tuple[Portion, ...]


def structure_of(entries: Sequence[Entry]) -> tuple[object, ...]:
    """Equal for equal plans; cheap enough to ask at every save."""
    return tuple((e.name, e.tensor.dtype, e.place, e.sharing) for e in entries)


def save_plan(entries: Sequence[Entry], rank: int) -> SavePlan:
    """The plan of `rank`."""
    mine = _shares(entries, rank)
    parts = []
    for entry in entries:
        box = mine.get(entry.name)
        parts.append(TensorParts(entry.name, entry.dtype, entry.place.shape, () if box is None else (box,)))
    layout = build_layout(parts)
    corner = {entry.name: entry.place.box.offsets for entry in entries}
    portions = []
    for tensor in layout.tensors:
        for piece in tensor.pieces:
            size = prod(piece.lengths) * itemsize(tensor.dtype)
            within = Box(piece.offsets, piece.lengths).relative_to(corner[tensor.name])
            portions.append(Portion(tensor.name, within, piece.tile, piece.stream_offset, piece.stream_offset + size))
    text = layout.to_json()
    return SavePlan(structure_of(entries), layout, text, layout_digest(text), tuple(portions))


def _shares(entries: Sequence[Entry], rank: int) -> dict[str, Box]:
    """The box of each tensor that this rank saves; absent means none of it."""
    mine: dict[str, Box] = {}
    together: dict[tuple[int, ...], list[Entry]] = defaultdict(list)
    for entry in entries:
        group = entry.place.group
        if entry.place.box.volume == 0:
            continue
        if len(group) == 1 or (entry.sharing == "lowest" and rank == group[0]):
            mine[entry.name] = entry.place.box
        elif entry.sharing == "split":
            together[group].append(entry)
    for group, members in together.items():
        shapes = [Shape(e.name, e.place.box.lengths, itemsize(e.dtype)) for e in members]
        corners = {e.name: e.place.box.offsets for e in members}
        for name, box in split_replicated(shapes, len(group), group.index(rank)).items():
            offsets = tuple(o + c for o, c in zip(box.offsets, corners[name], strict=True))
            mine[name] = Box(offsets, box.lengths)
    return mine
