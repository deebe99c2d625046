"""Tests of `geometry.sharding`."""

from __future__ import annotations

from itertools import permutations, product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from support.spreads import Held, entries
from surefoot.format.layouts import LayoutFamily, Stream
from surefoot.geometry import Box
from surefoot.geometry.sharding import Cut, Grid, ShardingRule, shard_box
from surefoot.protocol.checkpoints.records import Layout
from surefoot.restore.read_plan import WantedBox, plan_reads
from surefoot.state import save_plan, structure_of

# ---- rules -----------------------------------------------------------------------------------------------------------
# Grids of ranks and how tensors lie on them: both ways against a brute-force oracle, and against torch's own answer.


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Regular ones (a block of a larger world, its dimensions in any order), and lists of any ranks."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    if draw(st.booleans()):
        ranks = draw(st.lists(st.integers(0, 30), min_size=prod(sizes), max_size=prod(sizes), unique=True))
        return Grid.of(ranks, sizes)
    order = draw(st.sampled_from(list(permutations(range(len(sizes))))))
    world = np.arange(prod(sizes) * 2).reshape(*sizes, 2)[..., draw(st.integers(0, 1))].transpose(order)
    return Grid.of(world.flatten().tolist(), world.shape)


@given(grids())
def test_a_grid_finds_its_ranks_again(grid: Grid) -> None:
    ranks = list(grid.ranks())
    assert len(set(ranks)) == grid.count
    for number, rank in enumerate(ranks):
        coordinate = grid.coordinate(rank)
        assert coordinate is not None
        assert (grid.rank(coordinate), grid.at(number), grid.number(rank)) == (rank, rank, number)
    for stranger in set(range(-2, 70)) - set(ranks):
        assert grid.coordinate(stranger) is None


@given(grids(), st.data())
def test_part_of_a_grid_is_a_grid_of_those_ranks(grid: Grid, data: st.DataObject) -> None:
    fixed = {d: data.draw(st.integers(0, n - 1)) for d, n in enumerate(grid.sizes) if data.draw(st.booleans())}
    kept = [r for r in grid.ranks() if all((grid.coordinate(r) or ())[d] == c for d, c in fixed.items())]
    assert list(grid.only(fixed).ranks()) == kept


def test_large_regular_meshes_stay_small() -> None:
    mesh = np.arange(16384).reshape(2, 1024, 8)
    grid = Grid.of(mesh.flatten().tolist(), mesh.shape)
    assert (grid.strides, grid.listed) == ((8192, 8, 1), ())
    assert grid.only({}) == Grid.world_size(16384)
    assert grid.only({2: 3}) == Grid(3, (2048,), (8,))


@st.composite
def rules(draw: st.DrawFn) -> tuple[ShardingRule, tuple[int, ...]]:
    grid = draw(grids())
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=2)))
    cuts: list[Cut | None] = []
    for _ in grid.sizes:
        kind = draw(st.sampled_from(("same", "shard", "strided")))
        dimension = draw(st.integers(0, len(shape) - 1))
        cuts.append(None if kind == "same" else (dimension, draw(st.integers(1, 4)) if kind == "strided" else 1))
    return ShardingRule(grid, tuple(cuts)), shape


def held(rule: ShardingRule, shape: tuple[int, ...], rank: int) -> np.ndarray:
    """Numbers of the elements that a rank holds, by cutting an array of all of them."""
    whole = np.arange(prod(shape)).reshape(shape)
    coordinate = rule.grid.coordinate(rank)
    assert coordinate is not None
    for d, cut in enumerate(rule.cuts):
        if cut is None:
            continue
        dimension, factor = cut
        taken = []
        for stretch in chunks(list(range(whole.shape[dimension])), factor):
            taken += chunks(stretch, rule.grid.sizes[d])[coordinate[d]]
        whole = whole.take(taken, dimension)
    return whole


def chunks(items: list[int], parts: int) -> list[list[int]]:
    size = max(1, -(-len(items) // parts))
    return [items[i * size : (i + 1) * size] for i in range(parts)]


@given(rules())
def test_the_parts_of_a_rank_are_what_cutting_the_tensor_leaves(
    given_rule: tuple[ShardingRule, tuple[int, ...]],
) -> None:
    rule, shape = given_rule
    whole = np.arange(prod(shape)).reshape(shape)
    for rank in rule.grid.ranks():
        wanted = held(rule, shape, rank)
        assert rule.local_shape(shape, rank) == wanted.shape
        found = np.full(wanted.shape, -1)
        for part in rule.parts(shape, rank):
            place = tuple(slice(o, o + n) for o, n in zip(part.local, part.box.lengths, strict=True))
            source = tuple(slice(o, o + n) for o, n in zip(part.box.offsets, part.box.lengths, strict=True))
            found[place] = whole[source]
        assert np.array_equal(found, wanted)
        for other in rule.same(rank).ranks():
            assert np.array_equal(held(rule, shape, other), wanted)


@given(rules(), st.data())
def test_holders_are_those_who_hold_something_of_the_box(
    given_rule: tuple[ShardingRule, tuple[int, ...]], data: st.DataObject
) -> None:
    rule, shape = given_rule
    offsets = tuple(data.draw(st.integers(0, n)) for n in shape)
    lengths = tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True))
    wanted = set(
        np.arange(prod(shape))
        .reshape(shape)[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
        .flatten()
        .tolist()
    )
    having = {r for r in rule.grid.ranks() if wanted & set(held(rule, shape, r).flatten().tolist())}
    groups = list(rule.servers(shape, Box(offsets, lengths)))
    named = [rank for group in groups for rank in group.ranks()]
    assert len(named) == len(set(named))
    assert set(named) == having


@given(st.data())
def test_torch_says_the_same(data: st.DataObject) -> None:
    pytest.importorskip("torch")
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=2)))
    cuts: list[Cut | None] = []
    placements = []
    for _ in sizes:
        kind, dimension = data.draw(st.sampled_from("rst")), data.draw(st.integers(0, len(shape) - 1))
        factor = data.draw(st.integers(2, 3))
        cuts.append({"r": None, "s": (dimension, 1), "t": (dimension, factor)}[kind])
        placements.append(
            {"r": Replicate(), "s": Shard(dimension), "t": _StridedShard(dimension, split_factor=factor)}[kind]
        )
    rule = ShardingRule(Grid.of(list(range(prod(sizes))), sizes), tuple(cuts))
    for rank, coordinate in enumerate(product(*map(range, sizes))):
        lengths, offsets = _compute_local_shape_and_global_offset(shape, tuple(sizes), list(coordinate), placements)
        assert rule.local_shape(shape, rank) == tuple(lengths)
        if prod(lengths):
            assert rule.parts(shape, rank)[0].box.offsets == tuple(offsets)


def test_a_stranger_to_the_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 9 is not one of"):
        ShardingRule.replicated(Grid.world_size(4)).same(9)


# ---- layout costs ----------------------------------------------------------------------------------------------------
# What layouts cost: bytes read over bytes needed, beside DCP's; records and ranks looked at, however large the world.

Shape = tuple[int, ...]

PAIRS = [(2, 3), (2, 4), (4, 3), (1, 8), (8, 1), (4, 2), (3, 4)]


def held_layout_costs(shapes: dict[str, Shape], rule: ShardingRule, rank: int) -> list[Held]:
    found = []
    for name, shape in shapes.items():
        same = rule.same(rank)
        parts = [p.box for p in rule.parts(shape, rank)] or [Box((0,) * len(shape), (0,) * len(shape))]
        found += [Held(name, shape, box, same, "split", rule) for box in parts]
    return found


def sharded(world: int, dimension: int) -> ShardingRule:
    return ShardingRule(Grid.of(range(world)), ((dimension, 1),))


def ours(shape: Shape, before: tuple[int, int], after: tuple[int, int]) -> float:
    """Bytes read over bytes needed, over all ranks. `before`, `after`: (world, dimension)."""
    streams = {
        rank: Stream(save_plan(entries(held_layout_costs({"w": shape}, sharded(*before), rank)), rank).layout)
        for rank in range(before[0])
    }
    read = needed = 0
    for rank in range(after[0]):
        box = shard_box(shape, after[1], after[0], rank)
        planned = plan_reads([WantedBox("w", "float32", shape, box, 4)], streams)
        read, needed = read + planned.read_bytes, needed + planned.wanted_bytes
    return read / needed


def of_dcp(shape: Shape, before: tuple[int, int], after: tuple[int, int]) -> float:
    """The same of torch's planner: its reader loads every stored chunk whole that a read item touches."""

    def chunks(world: int, dimension: int) -> list[ChunkStorageMetadata]:
        boxes = [shard_box(shape, dimension, world, rank) for rank in range(world)]
        return [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.lengths)) for b in boxes if b.volume]

    stored = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), chunks(*before))
    size = {chunk.offsets: prod(chunk.sizes) for chunk in stored.chunks}
    read = needed = 0
    for wanted in chunks(*after):
        items = create_read_items_for_chunk_list("w", stored, [wanted])
        read += sum(size[item.storage_index.offset] for item in items if item.storage_index.offset is not None)
        needed += prod(wanted.sizes)
    return read / needed


@pytest.mark.parametrize("shape", [(8192, 1024), (8200, 1024), (8192, 4096), (12291, 2052)])
def test_along_the_saved_dimension_hardly_a_byte_too_many_is_read(shape: Shape) -> None:
    for before, after in PAIRS:
        mine, theirs = ours(shape, (before, 0), (after, 0)), of_dcp(shape, (before, 0), (after, 0))
        print(f"{shape} {before}→{after} along 0: {mine:.3f}, DCP {theirs:.2f}")
        assert mine <= 1.05
        assert mine <= theirs + 0.05


@pytest.mark.parametrize("shape", [(1024, 1024), (4096, 4096), (5120, 14336)])
def test_columns_cut_as_tensor_parallelism_cuts_them_are_read_exactly(shape: Shape) -> None:
    for before, after in [(2, 4), (4, 2), (1, 8), (8, 1), (8, 4)]:
        mine, theirs = ours(shape, (before, 1), (after, 1)), of_dcp(shape, (before, 1), (after, 1))
        print(f"{shape} {before}→{after} along 1: {mine:.3f}, DCP {theirs:.2f}")
        assert mine <= 1.05


@pytest.mark.parametrize("shape", [(1024, 1024), (4096, 1024), (4100, 2048), (8192, 4096)])
@pytest.mark.parametrize(("saved", "wanted"), [(0, 1), (1, 0)])
def test_along_another_dimension_little_is_read_twice(shape: Shape, saved: int, wanted: int) -> None:
    for before, after in PAIRS:
        mine, theirs = ours(shape, (before, saved), (after, wanted)), of_dcp(shape, (before, saved), (after, wanted))
        print(f"{shape} {before} along {saved} → {after} along {wanted}: {mine:.3f}, DCP {theirs:.2f}")
        assert mine <= 1.3


def model(tensors: int) -> dict[str, Shape]:
    kinds: list[Shape] = [(4096, 1024), (1024, 2048), (1024,)]
    return {f"model/layer.{i:05d}": kinds[i % 3] for i in range(tensors)}


def cut(world: int, kind: str) -> ShardingRule:
    cuts: tuple[Cut | None, ...] = (None, (0, 1)) if kind == "hsdp" else ((0, 1),) if kind == "fsdp" else (None,)
    return ShardingRule(Grid.of(range(world), (world // 8, 8)) if kind == "hsdp" else Grid.world_size(world), cuts)


@pytest.mark.gate_only
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "ddp"])
def test_what_a_rank_looks_at_does_not_grow_with_the_world(kind: str) -> None:
    shapes = model(300)
    sizes, ranks = {}, {}
    for world in (256, 2048, 16384):
        mine = save_plan(entries(held_layout_costs(shapes, cut(world, kind), world // 2)), world // 2)
        family = LayoutFamily(Layout.from_json(mine.layout_json), world // 2)
        sizes[world] = len(mine.layout_json)
        wanted = held_layout_costs(shapes, cut(world // 2, kind), world // 32)
        wanted = [h for h in wanted if h.box.volume]
        assert wanted, "the rank holds something"
        ranks[world] = {rank for h in wanted for rank in family.savers(h.name, h.box)}
        streams = {rank: family.stream(rank) for rank in ranks[world]}
        planned = plan_reads([WantedBox(h.name, "float32", h.shape, h.box, 4) for h in wanted], streams)
        assert planned.read_bytes <= 1.05 * planned.wanted_bytes + 16384 * len(shapes)
        again = entries(held_layout_costs(shapes, cut(world, kind), world // 2))
        assert structure_of(again) == mine.structure, "known again without planning"
    assert max(sizes.values()) <= 1.2 * sizes[256]
    assert max(map(len, ranks.values())) <= 64


def test_replicas_save_equal_shares_at_any_size() -> None:
    shapes = model(90)
    for world in (2, 3, 8, 64):
        rule = ShardingRule.replicated(Grid.world_size(world))
        loads = [
            save_plan(entries(held_layout_costs(shapes, rule, rank)), rank).layout.stream_bytes for rank in range(world)
        ]
        assert sum(loads) == sum(prod(s) * 4 for s in shapes.values())
        assert max(loads) - min(loads) <= 2 * 256 * 1024, world
        assert np.mean(loads) > 0
    hybrid = [
        save_plan(entries(held_layout_costs(shapes, cut(16, "hsdp"), r)), r).layout.stream_bytes for r in range(16)
    ]
    assert sum(hybrid) == sum(prod(s) * 4 for s in shapes.values())
    assert max(hybrid) - min(hybrid) <= 4 * 256 * 1024
