"""Plans which parts of tensors this rank saves, and where.

Once per structure. Every rank computes its own part alone; together they cover each tensor once. Used by
`checkpointer`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter

from surefoot.format.layouts import OWN, TensorParts, build_layout, itemsize, layout_digest, spread_rule
from surefoot.geometry import Box
from surefoot.geometry.sharding import saved_boxes
from surefoot.protocol.checkpoints.records import Layout, Spread, SpreadRule
from surefoot.state.entries import Entry


@dataclass(frozen=True, slots=True)
class PieceRange:
    """Locates one piece in the stream, bytes `start` to `stop`.

    `within` is its box relative to the corner of its entry.
    """

    name: str
    entry: int
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
    portions: tuple[PieceRange, ...]


def structure_of(entries: Sequence[Entry]) -> tuple[object, ...]:
    """Equal for equal plans; cheap enough to ask at every save."""
    return tuple(tuple(map(attrgetter(asked), entries)) for asked in ("name", "dtype", "location", "sharing"))


def save_plan(entries: Sequence[Entry], rank: int) -> SavePlan:
    """The plan of `rank`."""
    mine = saved_boxes([entry.held_box() for entry in entries], rank)
    parts = tensor_parts(entries, mine)
    layout = build_layout(parts, spread_of(entries))
    source = {(entries[number].name, box.offsets, box.lengths): number for number, box in mine}
    portions = []
    alike: dict[tuple[tuple[int, ...], ...], Box] = {}  # a model has many tensors of one shape
    for tensor in layout.tensors:
        for piece in tensor.pieces:
            size = prod(piece.lengths) * itemsize(tensor.dtype)
            number = source[tensor.name, piece.offsets, piece.lengths]
            corner = entries[number].location.box.offsets
            within = alike.get((piece.offsets, piece.lengths, corner))
            if within is None:
                within = Box(piece.offsets, piece.lengths).relative_to(corner)
                alike[piece.offsets, piece.lengths, corner] = within
            stop = piece.stream_offset + size
            portions.append(PieceRange(tensor.name, number, within, piece.tile, piece.stream_offset, stop))
    text = layout.to_json()
    return SavePlan(structure_of(entries), layout, text, layout_digest(text), tuple(portions))


def tensor_parts(entries: Sequence[Entry], mine: Sequence[tuple[int, Box]]) -> list[TensorParts]:
    """Lists each tensor once, with the boxes that this rank saves, sorted."""
    boxes: dict[str, list[Box]] = defaultdict(list)
    for number, box in mine:
        boxes[entries[number].name].append(box)
    found = {}
    for entry in entries:
        if entry.name not in found:
            kept = tuple(sorted(boxes[entry.name], key=lambda b: b.offsets))
            found[entry.name] = TensorParts(entry.name, entry.dtype, entry.location.shape, kept)
    return list(found.values())


def spread_of(entries: Sequence[Entry]) -> Spread | None:
    """Collects the sharding rules of all entries.

    None if some tensor has no rule (flat parameters).
    """
    rules: dict[SpreadRule, int] = {}
    of: dict[str, int] = {}
    lowest = set()
    for entry in entries:
        if entry.location.rule is None:
            return None
        if entry.sharing == "lowest":
            lowest.add(entry.name)
        rule = spread_rule(entry.location.rule)
        of[entry.name] = OWN if entry.sharing == "local" else rules.setdefault(rule, len(rules))
    names = sorted(of)
    return Spread(tuple(rules), tuple(of[n] for n in names), tuple(i for i, n in enumerate(names) if n in lowest))
