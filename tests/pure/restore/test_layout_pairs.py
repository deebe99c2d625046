"""Every pair of layouts over one to eight ranks, on descriptors: what one world saved gives the other, element by element.

The oracle is brute force: whole arrays, cut with numpy. Real ranks are tests/integration/test_layouts.py's."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.fakes.fake_tiers import MemoryPlace
from support.saves import put_save
from support.spreads import KINDS, data_of, stream
from surefoot.format.layouts import LayoutFamily, Stream
from surefoot.geometry import Box
from surefoot.protocol.checkpoints.completeness import describe_uncovered_tensor
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.restore import CheckpointReader, Destination, ReadOptions, SaveSource, read_catalogue
from surefoot.restore.read_plan import WantedBox, plan_reads

SHAPES = {"a": (7, 5), "b": (11, 3), "buffer": (4,), "c.b": (13,), "d": (), "e": (0, 3), "f.b": (3, 5, 2)}
WHOLES = {n: np.arange(prod(s), dtype=np.float32).reshape(s) + 1000 * i for i, (n, s) in enumerate(SHAPES.items())}
SIZES = range(1, 9)


def streams(kind: str, world: int) -> dict[int, Stream]:
    return {rank: stream(KINDS[kind](SHAPES, world, rank), rank) for rank in range(world)}


def put_together(saved: dict[int, Stream], wanted: list[WantedBox]) -> list[np.ndarray]:
    """What a plan's segments bring, block by block."""
    bytes_of = {rank: data_of(one, WHOLES) for rank, one in saved.items()}
    found = [np.full(w.box.lengths, np.nan, np.float32) for w in wanted]
    for r in plan_reads(wanted, saved).ranges:
        for s in r.segments:
            size = prod(s.block_shape) * 4
            for number in range(s.count):
                raw = bytes_of[r.rank][s.start + number * size : s.start + (number + 1) * size]
                block = np.frombuffer(raw, np.float32).reshape(s.block_shape)
                taken = block[
                    tuple(slice(o, o + n) for o, n in zip(s.wanted_part.offsets, s.wanted_part.lengths, strict=True))
                ]
                want = wanted[s.box_index]
                at = [p - w for p, w in zip(s.location.offsets, want.box.offsets, strict=True)]
                if at:
                    at[-1] += number * taken.shape[-1]
                found[s.box_index][tuple(slice(o, o + n) for o, n in zip(at, taken.shape, strict=True))] = taken
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_layout_covers_everything_once_at_every_size(kind: str) -> None:
    for world in SIZES:
        assert describe_uncovered_tensor(one.layout for one in streams(kind, world).values()) is None


@pytest.mark.gate_only
@pytest.mark.parametrize(("before", "after"), list(product(KINDS, KINDS)))
def test_every_pair_of_layouts_at_eight_pairs_of_sizes(before: str, after: str) -> None:
    # each size before meets another after; over the pairs of kinds, every size meets every other
    number = list(product(KINDS, KINDS)).index((before, after))
    for n in SIZES:
        m = (n + number) % 8 + 1
        saved = streams(before, n)
        for rank in range(m):
            held = KINDS[after](SHAPES, m, rank)
            wanted = [WantedBox(h.name, "float32", h.shape, h.box, 4) for h in held]
            for h, found in zip(held, put_together(saved, wanted), strict=True):
                at = tuple(slice(o, o + k) for o, k in zip(h.box.offsets, h.box.lengths, strict=True))
                assert np.array_equal(found, WHOLES[h.name][at]), (n, m, rank, h)


RULED = [kind for kind in KINDS if not kind.startswith(("flat", "partitioned"))]


@pytest.mark.parametrize("kind", RULED)
def test_one_layout_tells_all_others_of_its_family(kind: str) -> None:
    for world in SIZES:
        saved = streams(kind, world)
        for teller, one in saved.items():
            family = LayoutFamily(one.layout, teller)
            mine = {t.name for t in one.layout.tensors}
            for rank, other in saved.items():
                alike = {t.name for t in other.layout.tensors} == mine
                assert family.has(rank) == alike
                if alike:
                    assert family.stream(rank).digest == other.digest


@pytest.mark.parametrize("kind", RULED)
def test_whoever_saved_part_of_a_box_is_named(kind: str) -> None:
    for world in (1, 3, 4, 8):
        saved = streams(kind, world)
        family = LayoutFamily(saved[0].layout, 0)
        for after in (2, 5):
            for rank in range(after):
                for h in KINDS["FSDP2"](SHAPES, after, rank):
                    if h.name not in family or not h.box.volume:
                        continue
                    having = {
                        r
                        for r, one in saved.items()
                        for p in one.pieces
                        if p.tensor.name == h.name
                        and all(
                            max(a, b) < min(a + m, b + n)
                            for a, m, b, n in zip(
                                h.box.offsets, h.box.lengths, p.piece.offsets, p.piece.lengths, strict=True
                            )
                        )
                    }
                    assert having <= family.savers(h.name, h.box)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(list(KINDS)), st.integers(1, 8), st.sampled_from(list(KINDS)), st.integers(1, 8), st.data())
def test_a_reader_brings_generated_tensors_back(before: str, n: int, after: str, m: int, data: st.DataObject) -> None:
    """Through tiers, digests and the reader, which looks at as few layouts as it can."""
    dimensions = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    shapes = {f"t{i}.{'ab'[i % 2]}": s for i, s in enumerate(data.draw(st.lists(dimensions, min_size=1, max_size=4)))}
    wholes = {name: np.random.default_rng(1).random(s, np.float32) for name, s in shapes.items()}
    place = MemoryPlace("memory:one")
    for rank in range(n):
        one = stream(KINDS[before](shapes, n, rank), rank)
        put_save(place.tier(), RankSave(1, 5, rank), n, one, data_of(one, wholes))
    rank = data.draw(st.integers(0, m - 1))
    held = KINDS[after](shapes, m, rank)
    found = [np.zeros(h.box.lengths, np.float32) for h in held]
    wanted = [
        Destination(h.name, "float32", h.shape, h.box, memoryview(a.reshape(-1).view(np.uint8)))
        for h, a in zip(held, found, strict=True)
        if a.size
    ]
    catalogue = read_catalogue([SaveSource("memory:one", "memory", place.tier)])
    with CheckpointReader(Checkpoint(1, 5), catalogue, ReadOptions(patience_seconds=1)) as reader:
        reader.read(wanted)
        if before in ("FSDP2", "HSDP", "tensor parallel", "FSDP over TP"):
            assert reader.layouts.records_read <= 1
    for h, a in zip(held, found, strict=True):
        at = tuple(slice(o, o + k) for o, k in zip(h.box.offsets, h.box.lengths, strict=True))
        assert np.array_equal(a, wholes[h.name][at]), h


@pytest.mark.parametrize(
    ("kind", "records"), [("FSDP2", 1), ("HSDP", 1), ("experts", 1), ("pipeline", 2), ("flat (FSDP1, ZeRO)", 4)]
)
def test_every_tensor_is_known_from_few_records(kind: str, records: int) -> None:
    place = MemoryPlace("memory:one")
    for rank in range(4):
        one = stream(KINDS[kind](SHAPES, 4, rank), rank)
        put_save(place.tier(), RankSave(1, 5, rank), 4, one, data_of(one, WHOLES))
    catalogue = read_catalogue([SaveSource("memory:one", "memory", place.tier)])
    with CheckpointReader(Checkpoint(1, 5), catalogue, ReadOptions(patience_seconds=1)) as reader:
        found = reader.layouts.list_tensors(own_rank=3)
        assert {name: tensor.shape for name, tensor in found.items()} == SHAPES
        assert reader.layouts.records_read == records


def test_a_tensor_that_one_rank_has_more_than_the_others_is_found_when_all_are_asked() -> None:
    place = MemoryPlace("memory:one")
    more = {**SHAPES, "odd": (2, 2)}
    wholes = {**WHOLES, "odd": np.ones((2, 2), np.float32)}
    for rank in range(2):
        held = KINDS["FSDP2"](SHAPES, 2, rank)
        if rank == 1:
            held = [*held, *[h for h in KINDS["partitioned (ZeRO-1)"](more, 1, 0) if h.name == "odd"]]
        one = stream(held, rank)
        put_save(place.tier(), RankSave(1, 5, rank), 2, one, data_of(one, wholes))
    catalogue = read_catalogue([SaveSource("memory:one", "memory", place.tier)])
    with CheckpointReader(Checkpoint(1, 5), catalogue, ReadOptions(patience_seconds=1)) as reader:
        assert "odd" not in reader.layouts.list_tensors(own_rank=0)
        assert "odd" in reader.layouts.list_tensors(own_rank=0, read_all=True)
        found = np.zeros((2, 2), np.float32)
        where = memoryview(found.reshape(-1).view(np.uint8))
        reader.read([Destination("odd", "float32", (2, 2), Box.whole((2, 2)), where)])
        assert found.all()
