"""Plans which parts of tensors this rank saves, and where.

A plan is computed once per structure of the state. Every rank computes its own part alone; together the parts cover
each tensor once. Used by `checkpointer`.
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

    `entry` is the entry's index; `within` is the piece's box relative to the corner of that entry.
    """

    name: str
    entry: int
    within: Box
    tile: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Contains a layout, its JSON and digest, and the pieces to copy."""

    structure: tuple[object, ...]
    layout: Layout
    layout_json: str
    digest: str
    portions: tuple[PieceRange, ...]


def structure_of(entries: Sequence[Entry]) -> tuple[object, ...]:
    """Returns a key that is equal for equal plans, cheap enough to compute at every save."""
    return tuple(tuple(map(attrgetter(attribute), entries)) for attribute in ("name", "dtype", "location", "sharing"))


def save_plan(entries: Sequence[Entry], rank: int) -> SavePlan:
    """Computes the plan of `rank`."""
    own_boxes = saved_boxes([entry.held_box() for entry in entries], rank)
    parts = tensor_parts(entries, own_boxes)
    layout = build_layout(parts, spread_of(entries))
    entry_by_box = {
        (entries[entry_number].name, box.offsets, box.lengths): entry_number for entry_number, box in own_boxes
    }
    portions = []
    boxes_within_entries: dict[tuple[tuple[int, ...], ...], Box] = {}  # a model has many tensors of one shape
    for tensor in layout.tensors:
        for piece in tensor.pieces:
            size = prod(piece.lengths) * itemsize(tensor.dtype)
            entry_number = entry_by_box[tensor.name, piece.offsets, piece.lengths]
            corner = entries[entry_number].location.box.offsets
            within = boxes_within_entries.get((piece.offsets, piece.lengths, corner))
            if within is None:
                within = Box(piece.offsets, piece.lengths).relative_to(corner)
                boxes_within_entries[piece.offsets, piece.lengths, corner] = within
            stop = piece.stream_offset + size
            portions.append(PieceRange(tensor.name, entry_number, within, piece.tile, piece.stream_offset, stop))
    layout_json = layout.to_json()
    return SavePlan(structure_of(entries), layout, layout_json, layout_digest(layout_json), tuple(portions))


def tensor_parts(entries: Sequence[Entry], own_boxes: Sequence[tuple[int, Box]]) -> list[TensorParts]:
    """Lists each tensor once, with the boxes that this rank saves, sorted."""
    boxes: dict[str, list[Box]] = defaultdict(list)
    for entry_number, box in own_boxes:
        boxes[entries[entry_number].name].append(box)
    parts_by_name = {}
    for entry in entries:
        if entry.name not in parts_by_name:
            sorted_boxes = tuple(sorted(boxes[entry.name], key=lambda b: b.offsets))
            parts_by_name[entry.name] = TensorParts(entry.name, entry.dtype, entry.location.shape, sorted_boxes)
    return list(parts_by_name.values())


def spread_of(entries: Sequence[Entry]) -> Spread | None:
    """Collects the sharding rules of all entries.

    Returns None if some tensor has no rule (flat parameters).
    """
    rules: dict[SpreadRule, int] = {}
    rule_numbers: dict[str, int] = {}
    lowest_rank_names = set()
    for entry in entries:
        if entry.location.rule is None:
            return None
        if entry.sharing == "lowest":
            lowest_rank_names.add(entry.name)
        rule = spread_rule(entry.location.rule)
        rule_numbers[entry.name] = OWN if entry.sharing == "local" else rules.setdefault(rule, len(rules))
    names = sorted(rule_numbers)
    return Spread(
        tuple(rules),
        tuple(rule_numbers[n] for n in names),
        tuple(i for i, n in enumerate(names) if n in lowest_rank_names),
    )
