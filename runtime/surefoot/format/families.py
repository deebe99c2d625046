"""Derives the layouts of all ranks from the layout of one.

A layout record says how each tensor is spread over the ranks. So a reader needs one record, not one of each rank: it
asks here which ranks saved a box, and what those ranks' streams look like. Each answer is checked by the digest in that
rank's manifest; where it differs (another version, other tensors) the record itself is read. Used by `restore`.
"""

from __future__ import annotations

from collections import defaultdict

from surefoot.format.dtypes import itemsize
from surefoot.format.layouts import Stream, TensorParts, build_layout
from surefoot.geometry import Box
from surefoot.geometry.grids import Grid
from surefoot.geometry.save_division import HeldBox, Sharers, Sharing, saved_boxes, shared
from surefoot.geometry.sharding import ShardingRule
from surefoot.protocol.checkpoints.records import Layout, Spread, SpreadRule, TensorLayout, tensor_json

OWN = -1
"""In place of a rule: every rank has such a tensor of its own, with the rank in its name."""

MOST_KNOWN = 64
"""How many different holdings are remembered."""

MOST_BOXES = 4096
"""Of how many boxes of different tensors the holders are."""


def spread_rule(rule: ShardingRule) -> SpreadRule:
    """A rule as records have it."""
    return rule.grid.base, rule.grid.sizes, rule.grid.strides, rule.grid.listed, rule.cuts


class Family:
    """Derives all ranks' layouts from the layout of rank `of`.

    ValueError for a layout without a Spread.
    """

    def __init__(self, layout: Layout, of: int) -> None:
        if layout.spread is None or len(layout.spread.of) != len(layout.tensors):
            raise ValueError("this layout does not say how its tensors are spread")
        self.layout = layout
        self._spread, self.of = layout.spread, of
        self._rules = [ShardingRule(Grid(*rule[:4]), rule[4]) for rule in self._spread.rules]
        self._number = {tensor.name: i for i, tensor in enumerate(layout.tensors)}
        self._lowest = frozenset(self._spread.lowest)
        self._known: dict[tuple[tuple[Grid, ...], int | None], _Held] = {}
        self._holders: dict[tuple[int, tuple[int, ...], Box], list[tuple[Grid, int | None]]] = {}

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
        """The stream of a rank that holds these tensors and no others."""
        held = self._held(rank)
        boxes: dict[str, list[Box]] = defaultdict(list)
        for number, box in saved_boxes(held.holdings, rank, held.groups):
            boxes[held.holdings[number].name].append(box)
        parts = []
        for name, mine in boxes.items():
            tensor = held.tensors[name]
            parts.append(TensorParts(name, tensor.dtype, tensor.shape, tuple(sorted(mine, key=lambda b: b.offsets))))
        return held.with_nothing_else(build_layout(parts), self._spread)

    def savers(self, name: str, wanted: Box) -> set[int]:
        """Ranks that saved elements of `wanted` (and perhaps a few neighbours that did not)."""
        number = self._number[name]
        found: set[int] = set()
        for group, alone in self._holding(self._spread.of[number], self.layout.tensors[number].shape, wanted):
            if alone is not None or number in self._lowest:
                found.add(group.at(0) if alone is None else alone)
                continue
            held = self._held(group.at(0))
            sharers = held.groups[group]
            for place in held.places(group)[name]:
                holding = held.holdings[sharers.numbers[place]]
                shared_box = wanted.intersect(holding.box)
                if shared_box is not None:
                    members = sharers.shares.members(place, shared_box.relative_to(holding.box.offsets))
                    found.update(group.at(member) for member in members)
        return found

    def _holding(self, which: int, shape: tuple[int, ...], wanted: Box) -> list[tuple[Grid, int | None]]:
        """Groups of ranks that hold elements of `wanted`, and the rank of those that are one; many tensors are alike."""
        key = (which, shape, wanted)
        if key not in self._holders:
            if len(self._holders) >= MOST_BOXES:
                self._holders.clear()
            groups = self._rules[which].holders(shape, wanted)
            self._holders[key] = [(group, group.at(0) if group.count == 1 else None) for group in groups]
        return self._holders[key]

    def _held(self, rank: int) -> _Held:
        """What a rank holds; ranks that hold the same share one object."""
        sames = tuple(rule.same(rank) for rule in self._rules)
        key = (sames, rank if OWN in self._spread.of else None)
        if key not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._work_out(rank, sames)
        return self._known[key]

    def _work_out(self, rank: int, sames: tuple[Grid, ...]) -> _Held:
        holdings: list[HeldBox] = []
        tensors: dict[str, TensorLayout] = {}
        boxes: dict[tuple[int, tuple[int, ...]], list[Box]] = {}  # many tensors have one shape
        for number, (tensor, which) in enumerate(zip(self.layout.tensors, self._spread.of, strict=True)):
            size = itemsize(tensor.dtype)
            if which == OWN:
                name = tensor.name.replace(f"local/{self.of}/", f"local/{rank}/", 1)
                tensors[name] = tensor
                holdings.append(HeldBox(name, Box.whole(tensor.shape), size, Grid.alone(rank), "lowest"))
                continue
            tensors[tensor.name] = tensor
            if (which, tensor.shape) not in boxes:
                boxes[which, tensor.shape] = [part.box for part in self._rules[which].parts(tensor.shape, rank)]
            sharing: Sharing = "lowest" if number in self._lowest else "split"
            holdings += [HeldBox(tensor.name, b, size, sames[which], sharing) for b in boxes[which, tensor.shape]]
        return _Held(holdings, tensors, shared(holdings))


class _Held:
    """The holdings of one rank, and of all that hold the same."""

    def __init__(self, holdings: list[HeldBox], tensors: dict[str, TensorLayout], groups: dict[Grid, Sharers]) -> None:
        self.holdings, self.tensors, self.groups = holdings, tensors, groups
        self._places: dict[Grid, dict[str, list[int]]] = {}
        names = sorted(tensors)
        self._number = {name: i for i, name in enumerate(names)}
        self._empty = [TensorLayout(name, tensors[name].dtype, tensors[name].shape, ()) for name in names]
        self._texts = [tensor_json(tensor) for tensor in self._empty]

    def with_nothing_else(self, some: Layout, spread: Spread) -> Stream:
        """The layout of a rank that saves this much. Most tensors have no piece on most ranks: those are written once."""
        tensors, texts = self._empty.copy(), self._texts.copy()
        for tensor in some.tensors:
            number = self._number[tensor.name]
            tensors[number], texts[number] = tensor, tensor_json(tensor)
        layout = Layout(tuple(tensors), some.chunk_starts, some.stream_bytes, spread)
        return Stream(layout, layout.to_json(texts))

    def places(self, group: Grid) -> dict[str, list[int]]:
        """Where each name stands among what the group shares."""
        if group not in self._places:
            found: dict[str, list[int]] = defaultdict(list)
            for place, number in enumerate(self.groups[group].numbers):
                found[self.holdings[number].name].append(place)
            self._places[group] = found
        return self._places[group]
