"""What layouts cost: bytes read over bytes needed, beside DCP's; records and ranks looked at, however large the world."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from support.spreads import Held, entries
from surefoot.format.layouts import Family, Stream
from surefoot.geometry import Box
from surefoot.geometry.sharding import Cut, Grid, ShardingRule, shard_box
from surefoot.protocol.checkpoints.records import Layout
from surefoot.restore.read_plan import Wanted, plan
from surefoot.state import save_plan, structure_of

Shape = tuple[int, ...]

PAIRS = [(2, 3), (2, 4), (4, 3), (1, 8), (8, 1), (4, 2), (3, 4)]


def held(shapes: dict[str, Shape], rule: ShardingRule, rank: int) -> list[Held]:
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
        rank: Stream(save_plan(entries(held({"w": shape}, sharded(*before), rank)), rank).layout)
        for rank in range(before[0])
    }
    read = needed = 0
    for rank in range(after[0]):
        box = shard_box(shape, after[1], after[0], rank)
        planned = plan([Wanted("w", "float32", shape, box, 4)], streams)
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
    return ShardingRule(Grid.of(range(world), (world // 8, 8)) if kind == "hsdp" else Grid.world(world), cuts)


@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "ddp"])
def test_what_a_rank_looks_at_does_not_grow_with_the_world(kind: str) -> None:
    shapes = model(300)
    sizes, ranks = {}, {}
    for world in (256, 2048, 16384):
        mine = save_plan(entries(held(shapes, cut(world, kind), world // 2)), world // 2)
        family = Family(Layout.from_json(mine.layout_json), world // 2)
        sizes[world] = len(mine.layout_json)
        wanted = held(shapes, cut(world // 2, kind), world // 32)
        wanted = [h for h in wanted if h.box.volume]
        assert wanted, "the rank holds something"
        ranks[world] = {rank for h in wanted for rank in family.savers(h.name, h.box)}
        streams = {rank: family.stream(rank) for rank in ranks[world]}
        planned = plan([Wanted(h.name, "float32", h.shape, h.box, 4) for h in wanted], streams)
        assert planned.read_bytes <= 1.05 * planned.wanted_bytes + 16384 * len(shapes)
        again = entries(held(shapes, cut(world, kind), world // 2))
        assert structure_of(again) == mine.structure, "known again without planning"
    assert max(sizes.values()) <= 1.2 * sizes[256]
    assert max(map(len, ranks.values())) <= 64


def test_replicas_save_equal_shares_at_any_size() -> None:
    shapes = model(90)
    for world in (2, 3, 8, 64):
        rule = ShardingRule.replicated(Grid.world(world))
        loads = [save_plan(entries(held(shapes, rule, rank)), rank).layout.stream_bytes for rank in range(world)]
        assert sum(loads) == sum(prod(s) * 4 for s in shapes.values())
        assert max(loads) - min(loads) <= 2 * 256 * 1024, world
        assert np.mean(loads) > 0
    hybrid = [save_plan(entries(held(shapes, cut(16, "hsdp"), r)), r).layout.stream_bytes for r in range(16)]
    assert sum(hybrid) == sum(prod(s) * 4 for s in shapes.values())
    assert max(hybrid) - min(hybrid) <= 4 * 256 * 1024
