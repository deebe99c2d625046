"""Layouts as descriptors: what each rank of a world holds of a few tensors, without ranks, tensors or torch's groups.

Each kind gives, for a world of N, every rank's entries (rules, or flat ranges), and the oracle's arrays say what their
bytes must be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from surefoot.format.layouts import Stream
from surefoot.geometry import Box
from surefoot.geometry.box import flat_boxes
from surefoot.geometry.sharding import Cut, Grid, ShardingRule
from surefoot.state import Entry, save_plan
from surefoot.state.entries import LocalBox, Sharing, TensorLocation

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Held:
    """One box that a rank holds."""

    name: str
    shape: tuple[int, ...]
    box: Box
    same: Grid | None
    sharing: Sharing
    rule: ShardingRule | None = None


def by_rule(rule_of: Callable[[str, int], ShardingRule], shapes: Shapes, world: int, rank: int) -> list[Held]:
    found = []
    for name, shape in shapes.items():
        rule = rule_of(name, len(shape))
        if rule.grid.coordinate(rank) is None:
            continue
        sharing: Sharing = "lowest" if name.startswith("buffer") else "split"
        parts = [p.box for p in rule.parts(shape, rank)] or [Box((0,) * len(shape), (0,) * len(shape))]
        found += [Held(name, shape, box, rule.same(rank), sharing, rule) for box in parts]
    return found


def _cut(ndim: int, dimension: int, factor: int = 1) -> Cut | None:
    return (min(dimension, ndim - 1), factor) if ndim else None


def replicated(shapes: Shapes, world: int, rank: int) -> list[Held]:
    return by_rule(lambda name, n: ShardingRule.replicated(Grid.world_size(world)), shapes, world, rank)


def sharded(dimension: int) -> Callable[[Shapes, int, int], list[Held]]:
    def kind(shapes: Shapes, world: int, rank: int) -> list[Held]:
        return by_rule(lambda name, n: ShardingRule(Grid.of(range(world)), (_cut(n, dimension),)), shapes, world, rank)

    return kind


def _two(world: int) -> Grid:
    outer = next(n for n in (2, 3, 1) if world % n == 0)
    return Grid.of(range(world), (outer, world // outer))


def hybrid(shapes: Shapes, world: int, rank: int) -> list[Held]:
    return by_rule(lambda name, n: ShardingRule(_two(world), (None, _cut(n, 0))), shapes, world, rank)


def fsdp_over_tp(shapes: Shapes, world: int, rank: int) -> list[Held]:
    """Rows cut by tensor parallelism and again by FSDP, or columns by the one and rows by the other."""

    def rule(name: str, n: int) -> ShardingRule:
        grid = _two(world)
        if name.endswith("b") or n < 2:
            return ShardingRule(grid, (_cut(n, 0, grid.sizes[1]), _cut(n, 0)))
        return ShardingRule(grid, (_cut(n, 0), _cut(n, 1)))

    return by_rule(rule, shapes, world, rank)


def experts(shapes: Shapes, world: int, rank: int) -> list[Held]:
    """Tensors whose name ends in b are spread over half of the ranks, twice; the rest is the same everywhere."""
    grid = _two(world)
    rules = {
        True: lambda n: ShardingRule(grid, (None, _cut(n, 0))),
        False: lambda n: ShardingRule.replicated(Grid.world_size(world)),
    }
    return by_rule(lambda name, n: rules[name.endswith("b")](n), shapes, world, rank)


def pipeline(shapes: Shapes, world: int, rank: int) -> list[Held]:
    """Each tensor on one stage; the ranks of a stage are replicas."""
    stages = 2 if world % 2 == 0 else 1
    size = world // stages
    names = sorted(shapes)

    def rule(name: str, n: int) -> ShardingRule:
        stage = names.index(name) % stages
        return ShardingRule.replicated(Grid.of(range(stage * size, (stage + 1) * size)))

    return by_rule(rule, shapes, world, rank)


def flat(shapes: Shapes, world: int, rank: int) -> list[Held]:
    """FSDP1 and ZeRO: everything end to end, cut into equal ranges that respect no tensor."""
    total = sum(prod(s) for s in shapes.values())
    size = -(-total // world)
    begin, position, found = rank * size, 0, []
    for name, shape in shapes.items():
        low, high = max(position, begin), min(position + prod(shape), begin + size)
        for box in flat_boxes(shape, low - position, high - position) if low < high else ():
            found.append(Held(name, shape, box, Grid.alone(rank), "split"))
        if prod(shape) == 0 and rank == 0:
            found.append(Held(name, shape, Box.whole(shape), Grid.alone(rank), "split"))
        position += prod(shape)
    return found


def partitioned(shapes: Shapes, world: int, rank: int) -> list[Held]:
    """Whole tensors, each on one rank (torch's ZeroRedundancyOptimizer)."""
    return [
        Held(name, shape, Box.whole(shape), Grid.alone(rank), "split")
        for number, (name, shape) in enumerate(shapes.items())
        if number % world == rank
    ]


KINDS: dict[str, Callable[[Shapes, int, int], list[Held]]] = {
    "replicated (plain, DDP, compiled)": replicated,
    "FSDP2": sharded(0),
    "tensor parallel": sharded(1),
    "HSDP": hybrid,
    "FSDP over TP": fsdp_over_tp,
    "experts": experts,
    "pipeline": pipeline,
    "flat (FSDP1, ZeRO)": flat,
    "partitioned (ZeRO-1)": partitioned,
}


def entries(held: list[Held], dtype: str = "float32") -> list[Entry]:
    """As a program would give them; there is no memory behind them."""
    nothing = torch.empty(0)
    return [
        Entry(
            h.name,
            nothing,
            dtype,
            TensorLocation(h.shape, h.box, h.same, h.rule),
            h.sharing,
            window=LocalBox(h.box.offsets),
        )
        for h in held
    ]


def stream(held: list[Held], rank: int) -> Stream:
    """The layout that a rank would save by."""
    return Stream(save_plan(entries(held), rank).layout)


def data_of(stream: Stream, wholes: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of a stream, cut from whole tensors block by block."""
    out = bytearray()
    for placed in stream.pieces:
        for number in range(placed.tiling.blocks):
            block = placed.tiling.block_box(number)
            at = tuple(
                slice(p + o, p + o + n)
                for p, o, n in zip(placed.piece.offsets, block.offsets, block.lengths, strict=True)
            )
            out += wholes[placed.tensor.name][at].tobytes()
    return bytes(out)
