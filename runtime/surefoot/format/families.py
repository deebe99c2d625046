"""The layouts of all ranks that hold the same tensors, worked out from one of them.

A layout record says how each tensor is spread over the ranks. So a reader needs one record, not one of each rank: it
asks here which ranks saved a box, and what those ranks' streams look like. Each answer is checked by the digest in that
rank's manifest; where it differs (another version, other tensors) the record itself is read. Used by `restore`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache

from surefoot.format.dtypes import itemsize
from surefoot.format.layouts import Stream, TensorParts, build_layout
from surefoot.geometry import Box
from surefoot.geometry.grids import Grid
from surefoot.geometry.rules import Rule
from surefoot.geometry.saving import Holding, Sharers, saved_boxes, shared
from surefoot.protocol.records import Layout, SpreadRule, TensorLayout

OWN = -1
"""In place of a rule: every rank has such a tensor of its own, with the rank in its name."""


def spread_rule(rule: Rule) -> SpreadRule:
    """A rule as records have it."""
    return rule.grid.base, rule.grid.sizes, rule.grid.strides, rule.grid.listed, rule.cuts


class Family:
    """What the layout of rank `of` says about all ranks. Only for layouts that say how they are spread."""

    def __init__(self, layout: Layout, of: int) -> None:
        if layout.spread is None or len(layout.spread.of) != len(layout.tensors):
            raise ValueError("this layout does not say how its tensors are spread")
        self.layout = layout
        self._spread, self.of = layout.spread, of
        self._rules = [Rule(Grid(*rule[:4]), rule[4]) for rule in self._spread.rules]
        self._number = {tensor.name: i for i, tensor in enumerate(layout.tensors)}
        self._lowest = frozenset(self._spread.lowest)
        self._groups = lru_cache(maxsize=256)(self._group)

    def __contains__(self, name: str) -> bool:
        number = self._number.get(name)
        return number is not None and self._spread.of[number] != OWN

    def has(self, rank: int) -> bool:
        """Whether that rank may hold all of these tensors."""
        return all(rule.grid.coordinate(rank) is not None for rule in self._rules)

    def everywhere(self, world: int) -> bool:
        """Whether that is so of every rank of a world."""
        return all(rule.grid.count >= world for rule in self._rules)

    def stream(self, rank: int) -> Stream:
        """What the stream of that rank looks like if it holds these tensors and no others."""
        held = list(self._held(rank))
        saved = saved_boxes([holding for _, holding in held], rank)
        boxes: dict[str, list[Box]] = defaultdict(list)
        for number, box in saved:
            boxes[held[number][1].name].append(box)
        parts = {
            holding.name: TensorParts(
                holding.name, tensor.dtype, tensor.shape, tuple(sorted(boxes[holding.name], key=lambda b: b.offsets))
            )
            for tensor, holding in held
        }
        return Stream(build_layout(parts.values(), self._spread))

    def savers(self, name: str, wanted: Box) -> set[int]:
        """Ranks that saved elements of `wanted` (and perhaps a few neighbours that did not)."""
        number = self._number[name]
        tensor, rule = self.layout.tensors[number], self._rules[self._spread.of[number]]
        found: set[int] = set()
        for group in rule.holders(tensor.shape, wanted):
            if group.count == 1 or number in self._lowest:
                found.add(group.at(0))
                continue
            holdings, sharers, places = self._groups(group)
            for place in places[name]:
                holding = holdings[sharers.numbers[place]]
                shared_box = wanted.intersect(holding.box)
                if shared_box is not None:
                    members = sharers.shares.members(place, shared_box.relative_to(holding.box.offsets))
                    found.update(group.at(member) for member in members)
        return found

    def _group(self, group: Grid) -> tuple[list[Holding], Sharers, dict[str, list[int]]]:
        """What a group's members share, the same seen from each of them: its holdings, and where each name is."""
        holdings = [holding for _, holding in self._held(group.at(0))]
        sharers = shared(holdings)[group]
        places: dict[str, list[int]] = defaultdict(list)
        for place, number in enumerate(sharers.numbers):
            places[holdings[number].name].append(place)
        return holdings, sharers, places

    def _held(self, rank: int) -> Iterator[tuple[TensorLayout, Holding]]:
        for number, (tensor, which) in enumerate(zip(self.layout.tensors, self._spread.of, strict=True)):
            size = itemsize(tensor.dtype)
            if which == OWN:
                name = tensor.name.replace(f"local/{self.of}/", f"local/{rank}/", 1)
                yield tensor, Holding(name, Box.whole(tensor.shape), size, Grid.alone(rank), "lowest")
                continue
            rule = self._rules[which]
            same, sharing = rule.same(rank), "lowest" if number in self._lowest else "split"
            parts = [part.box for part in rule.parts(tensor.shape, rank)]
            nothing = Box((0,) * len(tensor.shape), (0,) * len(tensor.shape))
            for box in parts or [nothing]:
                yield tensor, Holding(tensor.name, box, size, same, sharing)  # type: ignore[arg-type]
