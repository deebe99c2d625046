"""Tests of `data.stream_state`."""

from __future__ import annotations

import json
import pickle
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.shards import Numbers, World, trained_on
from surefoot.data.data_source import BadSample, DataError, DataShard
from surefoot.data.lanes import Cursor, Lane, LaneAssignment, LaneCursor, ShardRange, SourceReader
from surefoot.data.stream import ElasticStream
from surefoot.data.stream_state import LaneCursors, LaneRun, decode_ranges, encode_ranges, packed, unpacked
from surefoot.errors import ConfigurationError, StateMismatch
from surefoot.format.values import encode_values

# ---- elastic stream --------------------------------------------------------------------------------------------------
# Streams at any world size: each sample once a pass, in the undisturbed order, whatever is killed and resized when.

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=64).map(tuple)
lives = st.lists(st.tuples(st.integers(1, 16), st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=6)
"""Of each: world size, steps up to its checkpoint, steps behind it that a kill undoes."""


def build(source: Any, rank: int, world: int, **options: Any) -> ElasticStream:
    return ElasticStream(source, rank=rank, num_replicas=world, collate_fn=list, **options)


def undisturbed(source: Any, steps: int, **options: Any) -> list[Any]:
    """What one rank alone draws, flat."""
    return [x for batch in islice(build(source, 0, 1, **options), steps) for x in batch.data]


@settings(max_examples=60, deadline=None)
@given(
    lengths,
    st.booleans(),
    st.integers(0, 2**40),
    st.integers(1, 12),
    st.sampled_from([1, 2, 3, 6]),
    st.sampled_from([(1, 1), (4, 1), (1, 3), (4, 8)]),
    lives,
)
def test_a_global_batch_sees_the_undisturbed_order_through_kills_and_resizes(
    sizes: tuple[int, ...], known: bool, seed: int, lanes: int, stripes: int, run: tuple[int, int], worlds: list[Any]
) -> None:
    source, (window, per_lane) = Numbers(sizes, known), run
    batch = lanes * per_lane
    options: dict[str, Any] = {
        "global_batch_size": batch,
        "lanes": lanes,
        "seed": seed,
        "lane_groups": stripes,
        "shuffle_window": window,
    }
    if (sum(sizes) if known else len(sizes)) < lanes * stripes:
        with pytest.raises(ConfigurationError, match="lanes are to read it"):
            build(source, 0, 1, **options)
        return
    seen = trained_on(lambda r, w: build(source, r, w, **options), worlds)
    assert seen == undisturbed(source, len(seen) // batch, **options)


@settings(max_examples=60, deadline=None)
@given(lengths, st.booleans(), st.integers(0, 2**40), st.integers(1, 12), st.sampled_from([1, 5]))
def test_each_pass_has_every_sample_once(
    sizes: tuple[int, ...], known: bool, seed: int, lanes: int, window: int
) -> None:
    if (sum(sizes) if known else len(sizes)) < lanes:
        return
    passes: dict[int, list[int]] = {}
    stream = build(Numbers(sizes, known), 0, 1, global_batch_size=lanes, seed=seed, shuffle_window=window)
    stream.count_by_step()
    for batch in stream:
        stream.end_step()
        turns = [lane[4] for lane in stream.state_dict()["lanes"]]
        for sample, turn in zip(batch.data, turns, strict=True):
            passes.setdefault(turn, []).append(sample)
        if min(turns) >= 2:
            break
    for turn in (0, 1):
        assert sorted(passes[turn]) == list(range(sum(sizes)))


@settings(max_examples=60, deadline=None)
@given(lengths, st.booleans(), st.integers(0, 2**40), st.sampled_from([1, 2, 3]), st.sampled_from([1, 4]), lives)
def test_a_batch_a_rank_has_every_sample_once_a_pass_through_kills_and_resizes(
    sizes: tuple[int, ...], known: bool, seed: int, stripes: int, window: int, worlds: list[Any]
) -> None:
    source = Numbers(sizes, known)
    have = sum(sizes) if known else len(sizes)
    worlds = [(min(world, have // stripes), kept, undone) for world, kept, undone in worlds if have >= stripes]
    passes: dict[int, Counter[int]] = {}
    states: list[Any] = []

    def count(mine: World) -> None:
        drawn, _ = mine.step()
        for stream, part in zip(mine.streams, drawn, strict=True):
            lanes = {lane[0]: lane for lane in stream.state_dict()["lanes"]}
            step = stream.state_dict()["batches"] - 1
            turn = lanes[stream.shape.lane(step, stream.rank)][4]
            passes.setdefault(turn, Counter()).update(part)

    options = {"batch_size": 1, "seed": seed, "lane_groups": stripes, "shuffle_window": window}
    for world, kept, undone in worlds:
        mine = World(lambda r, w: build(source, r, w, **options), world, states)
        for _ in range(kept):
            count(mine)
        states = mine.states()
        for _ in range(undone):
            mine.step()
    if worlds:  # the last world goes on until it is two passes further
        world = worlds[-1][0]
        mine = World(lambda r, w: build(source, r, w, **options), world, states)
        for _ in range(5000):
            turns = [lane[4] for s in mine.streams for lane in s.state_dict()["lanes"]]
            if len(turns) == world * stripes and min(turns) >= 2:
                break
            count(mine)
        for turn in (0, 1):
            assert passes[turn] == Counter(range(sum(sizes))), turn


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(0, 2**40), st.integers(1, 6), st.integers(1, 11), st.sampled_from([1, 3]), lives)
def test_packed_rows_are_the_undisturbed_run_s(
    sizes: tuple[int, ...], seed: int, batch: int, length: int, window: int, worlds: list[Any]
) -> None:
    source = Numbers(sizes, value=lambda number: [number] * (number % 5))
    if sum(sizes) < max(batch, 5):
        return
    options: dict[str, Any] = {
        "global_batch_size": batch,
        "seed": seed,
        "shuffle_window": window,
        "sequence_length": length,
    }
    if sum(sizes) < 2 * batch:
        return  # lanes that have the one sample without tokens alone
    seen = [row.tolist() for row in trained_on(lambda r, w: build(source, r, w, **options), worlds)]
    assert seen == [row.tolist() for row in undisturbed(source, len(seen) // batch, **options)]
    assert all(len(row) == length for row in seen)


@settings(max_examples=60, deadline=None)
@given(lengths, lengths, st.integers(0, 2**40), st.integers(1, 4), lives)
def test_a_mixture_is_the_undisturbed_run_s(
    one: tuple[int, ...], other: tuple[int, ...], seed: int, batch: int, worlds: list[Any]
) -> None:
    sources = [Numbers(one), Numbers(other, value=lambda number: -1 - number)]
    if min(sum(one), sum(other)) < batch:
        return
    options: dict[str, Any] = {"global_batch_size": batch, "seed": seed, "weights": [3, 1]}
    seen = trained_on(lambda r, w: build(sources, r, w, **options), worlds)
    assert seen == undisturbed(sources, len(seen) // batch, **options)


def test_a_mixture_takes_from_each_source_by_its_weight() -> None:
    sources = [Numbers((500,)), Numbers((500,), value=lambda number: -1 - number)]
    drawn = undisturbed(sources, 500, global_batch_size=8, weights=[3, 1])
    assert 0.22 < sum(x < 0 for x in drawn) / len(drawn) < 0.28


@settings(max_examples=100, deadline=None)
@given(
    lengths,
    st.booleans(),
    st.integers(0, 2**40),
    st.sampled_from([1, 4]),
    st.sets(st.integers(0, 80)),
    st.lists(st.integers(1, 9), max_size=30),
)
def test_samples_in_runs_are_those_drawn_one_by_one(
    sizes: tuple[int, ...], known: bool, seed: int, window: int, bad: set[int], runs: list[int]
) -> None:
    source = Numbers(sizes, known, value=lambda n: BadSample(ValueError("torn")) if n in bad else n)
    if len(bad) >= sum(sizes):
        return
    dealing = LaneAssignment(tuple(shard.samples for shard in source.shards()), seed, 1)

    def reader() -> SourceReader:
        return SourceReader(source, dealing, 0, window)

    one_by_one, lane = reader(), Lane([reader()], [1.0], seed)
    left_out = 0
    for count in runs:
        drawn = [one_by_one.draw(1000) for _ in range(count)]
        left_out += sum(one.bad_samples for one in drawn)
        assert lane.items(count, 1000) == [one.sample for one in drawn]
        mine = lane.cursor()
        assert (mine.bad_samples, mine.sources[0]) == (left_out, one_by_one.cursor)
        lane = Lane([reader()], [1.0], seed)  # whoever takes it over
        lane.seek(mine)


def _odd(number: int) -> Any:
    return BadSample(ValueError("torn")) if number % 10 == 3 else number


def test_bad_samples_are_left_out_counted_and_bounded() -> None:
    source = Numbers((50, 50), value=_odd)
    stream = build(source, 0, 1, global_batch_size=5, max_bad_samples=10)
    seen = [x for batch in islice(stream, 18) for x in batch.data]
    assert sorted(seen) == [n for n in range(100) if n % 10 != 3]
    assert stream.bad_samples_skipped == 10
    with pytest.raises(DataError, match=r"1\d bad samples|sample \d+ of shard-\d is bad \(ValueError: torn\)"):
        list(islice(stream, 20))
    with pytest.raises(DataError, match=r"of shard-\d is bad \(ValueError: torn\).*max_bad_samples"):
        list(islice(build(source, 0, 1, global_batch_size=5), 20))


def test_a_transform_that_fails_names_the_sample() -> None:
    def transform(sample: int, _: Any) -> int:
        return 1 // (sample % 7)

    with pytest.raises(DataError, match=r"sample [07] of shard-0 is bad \(ZeroDivisionError"):
        list(islice(build(Numbers((10,)), 0, 1, global_batch_size=2, transform=transform), 6))


def test_another_pass_has_another_order() -> None:
    stream = undisturbed(Numbers((6,) * 20), 40, global_batch_size=6, shuffle_window=4)
    assert sorted(stream[:120]) == sorted(stream[120:]) == list(range(120))
    assert stream[:120] != stream[120:]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"seed": 2}, "seed"),
        ({"shuffle_window": 3}, "shuffle_window"),
        ({"lanes": 2}, "lanes"),
        ({"global_batch_size": 8}, "global_batch_size"),
        ({"lane_groups": 2}, "lane_groups"),
        ({"sequence_length": 9}, "sequence_length"),
    ],
)
def test_a_state_of_another_order_is_refused_by_name(options: dict[str, Any], name: str) -> None:
    source, had = Numbers((40, 40)), {"global_batch_size": 4}
    state = build(source, 0, 1, **had).state_dict()
    with pytest.raises(StateMismatch, match=f"the stream's {name} is"):
        build(source, 0, 1, **{**had, **options}).load_state_dict(state)


def test_a_shard_that_changed_is_named() -> None:
    state = build(Numbers((40, 40, 7)), 0, 1, global_batch_size=4).state_dict()
    with pytest.raises(StateMismatch, match="shard shard-1 of it is another"):
        build(Numbers((40, 41, 7)), 0, 1, global_batch_size=4).load_state_dict(state)
    with pytest.raises(StateMismatch, match="another number of them"):
        build(Numbers((40, 40)), 0, 1, global_batch_size=4).load_state_dict(state)


def test_a_shard_that_became_shorter_is_named_when_it_is_read() -> None:
    class Cut(Numbers):
        def open(self, shard: int, start: int) -> Any:
            return islice(super().open(shard, start), 3)

    with pytest.raises(DataError, match=r"shard-0 ends at sample \d, and 8 were counted"):
        list(islice(build(Cut((8,)), 0, 1, global_batch_size=1, shuffle_window=4), 8))


def test_either_a_global_batch_or_one_of_each_rank() -> None:
    for options in ({}, {"global_batch_size": 4, "batch_size": 2}):
        with pytest.raises(ConfigurationError, match=r"either global_batch_size= .* or batch_size="):
            build(Numbers((9,)), 0, 1, **options)
    with pytest.raises(ConfigurationError, match="must be a multiple"):
        build(Numbers((9,)), 0, 1, global_batch_size=4, lanes=3)
    with pytest.raises(ConfigurationError, match="multiple of them"):
        build(Numbers((9,)), 0, 1, global_batch_size=1, num_workers=2, lane_groups=3)


def test_weights_of_uneven_shares_make_the_global_mean() -> None:
    streams = [build(Numbers((40,)), rank, 3, global_batch_size=8) for rank in range(3)]
    batches = [next(iter(stream)) for stream in streams]
    mean = sum(b.weight * sum(b.data) / len(b.data) for b in batches) / 3
    whole = undisturbed(Numbers((40,)), 1, global_batch_size=8)
    assert mean == pytest.approx(sum(whole) / 8, rel=1e-12)


def test_a_rank_without_lanes_takes_part_with_weight_nought_and_takes_over_exactly() -> None:
    source = Numbers((30,))
    mine = World(lambda r, w: build(source, r, w, global_batch_size=2), 3)
    seen = [x for _ in range(4) for part in mine.step()[0] for x in part]
    again = World(lambda r, w: build(source, r, w, global_batch_size=2), 3, mine.states())
    seen += [x for _ in range(4) for part in again.step()[0] for x in part]
    assert seen == undisturbed(source, 8, global_batch_size=2)


def test_the_state_of_a_thousand_ranks_and_ten_thousand_shards_is_small() -> None:
    source, world = Numbers((1000,) * 10_000), 1024
    streams = [build(source, rank, world, global_batch_size=world) for rank in (0, 511, 1023)]
    first, middle, last = [_begun(stream).state_dict() for stream in streams]
    lanes = _bytes(first["lanes"] + middle["lanes"] + last["lanes"]) / 3 * world
    assert _bytes({**first, "lanes": []}) + lanes < 64 * 1024, "all that the world's state says"
    assert _bytes(middle) < 512, "what one rank saves of it, the first excepted"


@pytest.mark.gate_only
@pytest.mark.parametrize(("known", "window"), [(True, 64), (False, 1)])
def test_what_worlds_of_a_thousand_ranks_left_of_a_pass_is_small(known: bool, window: int) -> None:
    source, chance, states = Numbers((1000,) * 10_000, known), random.Random(3), list[dict[str, Any]]()
    for world in (1024, 1000, 1024):
        stream = build(source, 0, world, batch_size=4, shuffle_window=window)
        if states:
            stream.load_state_dicts(states, 0, world)
        first, dealing = stream.state_dict(), stream._assignments(world, stream._left)[0]
        states = [{**first, **({} if rank == 0 else {"left": None, "checks": None})} for rank in range(world)]
        for rank, state in enumerate(states):
            state["lanes"] = [[rank, *_anywhere(dealing, rank, window, chance).plain()]]
        lanes = _bytes([state["lanes"] for state in states])
        assert _bytes({**first, "lanes": []}) + lanes < 64 * 1024, "all that the world's state says"
        assert _bytes(states[-1]) < 512, "what one rank saves of it, the first excepted"


def _anywhere(dealing: LaneAssignment, lane: int, window: int, chance: random.Random) -> LaneCursor:
    turn = dealing.first + (chance.random() < 0.3)
    if not (mine := dealing.ranges(turn, lane)):
        return LaneCursor(12345, 12345, 0, (Cursor(turn),))
    number = chance.randrange(len(mine))
    start = chance.randrange(mine[number].start, mine[number].stop or 1000)
    return LaneCursor(12345, 12345, 0, (Cursor(turn, number, start, chance.randrange(window)),))


def _bytes(told: Any) -> int:
    return len(encode_values({"of": told}, lambda *_: None))


@given(st.lists(st.integers(-(2**70), 2**70)))
def test_packed_integers_come_back(numbers: list[int]) -> None:
    assert unpacked(packed(numbers)) == numbers


def test_what_was_left_comes_back_as_it_was_saved() -> None:
    lengths, extents = (5, None, 7), [ShardRange(2, 3, 6, 1, 4), ShardRange(1, 2, None), ShardRange(0, 0, 5)]
    assert decode_ranges(encode_ranges({4: extents}, lengths), lengths) == {4: extents}


def test_a_rank_s_state_without_what_the_first_one_tells_is_refused() -> None:
    mine = World(lambda r, w: build(Numbers((30,)), r, w, global_batch_size=4), 2)
    with pytest.raises(StateMismatch, match="in the state of the stream's rank 0 alone"):
        mine.streams[1].load_state_dict(mine.states()[1])


def _begun(stream: ElasticStream) -> ElasticStream:
    next(iter(stream))
    return stream


@pytest.mark.gate_only
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with fewer cores
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_worker_processes_read_ahead_what_does_not_count(workers: int) -> None:
    source = Numbers((30, 30, 30))
    options: dict[str, Any] = {"global_batch_size": 4, "lane_groups": 6, "shuffle_window": 3}
    seen: list[int] = []
    states: list[Any] = []
    for world in (2, 1):  # read by workers, and gone on from in another world without any
        mine = World(lambda r, w: build(source, r, w, num_workers=workers if w == 2 else 0, **options), world, states)
        for _ in range(9):
            seen += [x for part in mine.step()[0] for x in part]
        states = mine.states()
    assert seen == undisturbed(source, 18, **options)


# ---- stripe ----------------------------------------------------------------------------------------------------------
# Lanes that are read in runs: what that saves, how far it goes, and that nothing of it shows.


@dataclass
class Counting:
    """Counts what was read of its one shard."""

    samples: int
    make: Callable[[int], Any]
    read: list[int] = field(default_factory=list)

    def shards(self) -> Sequence[DataShard]:
        return [DataShard("shard", self.samples, "")]

    def open(self, shard: int, start: int) -> Iterator[Any]:
        for number in range(start, self.samples):
            self.read.append(number)
            yield self.make(number)


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (str, 64),
        (lambda number: {"text": "x" * 100, "label": number}, 64),
        (lambda number: np.zeros(2048), 4),
        (lambda number: torch.zeros(2048, dtype=torch.float64), 4),
        (lambda number: b"x" * (8 << 10), 8),
        (lambda number: {"image": b"x" * (1 << 20)}, 1),
        (lambda number: [[b"x" * 20_000]], 3),
        (lambda number: object(), 1),
    ],
)
def test_a_lane_reads_no_more_ahead_than_its_samples_are_small(make: Callable[[int], Any], most: int) -> None:
    source = Counting(400, make)
    stream = ElasticStream(source, 4, collate_fn=list, rank=0, num_replicas=1)
    counts = []
    for _ in islice(stream, 60):
        counts.append(len(source.read))
    waiting = [read - 4 * step for step, read in enumerate(counts, 1)]
    assert max(waiting) == 4 * (most - 1)


def test_what_is_prepared_is_not_read_ahead() -> None:
    source = Counting(400, str)
    for _ in islice(ElasticStream(source, 4, collate_fn=list, transform=lambda x, _: x, rank=0, num_replicas=1), 30):
        pass
    assert len(source.read) == 120


def test_a_bad_sample_ahead_is_met_at_its_own_step() -> None:
    source = Counting(400, lambda number: BadSample(ValueError("torn")) if number == 13 else number)
    stream = ElasticStream(source, 1, shuffle=False, collate_fn=list, rank=0, num_replicas=1)
    found = iter(stream)
    assert [next(found).data for _ in range(13)] == [[number] for number in range(13)]
    with pytest.raises(Exception, match="sample 13 of shard is bad"):
        next(found)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with fewer cores
@pytest.mark.parametrize("window", [1, 6])
def test_workers_tell_the_cursors_that_one_process_has(window: int) -> None:
    told = []
    for workers in (0, 2):
        options: dict[str, Any] = {
            "shuffle_window": window,
            "lane_groups": 2,
            "num_workers": workers,
            "collate_fn": list,
        }
        world = World(lambda r, w, o=options: ElasticStream(Numbers((90, 31, 8)), 5, rank=r, num_replicas=w, **o), 2)  # type: ignore[misc]
        steps = [world.step() for _ in range(25)]
        told.append(json.dumps([steps, [state["lanes"] for state in world.states()]]))
    assert told[0] == told[1]


def test_cursors_are_pickled_as_they_are() -> None:
    numbers = array("q", [3, 20, 21, 1, 0, 0, 40, 1, 0, 4, 19, 19, 0, 0, 1, 7, 1, 0])
    behind = LaneCursors(LaneRun(numbers, array("q", [5, 4]), 6, {3: 1}), 2)
    again = pickle.loads(pickle.dumps(behind))
    assert again.plain() == behind.plain() == [[3, 17, 18, 1, 0, 0, 37, 1, 0], [4, 17, 17, 0, 0, 1, 5, 1, 0]]
    assert (again.first, len(again), again.bad) == (3, 2, {3: 1})
