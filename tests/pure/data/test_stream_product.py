"""Streams read ahead by worker processes, killed and resized at random: a tally by hand finds each sample once a pass."""

from __future__ import annotations

import json
import pickle
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from support.shards import Numbers, World
from surefoot.data import stream_workers
from surefoot.data.stream import ElasticStream

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with fewer cores
Life = tuple[int, int, int, int]
"""World size, worker processes of each rank, steps up to its checkpoint, steps behind it that a kill undoes."""


def lives(ranks: int, workers: int) -> st.SearchStrategy[list[Life]]:
    one = st.tuples(st.integers(1, ranks), st.integers(0, workers), st.integers(1, 6), st.integers(0, 3))
    return st.lists(one, min_size=2, max_size=4)


SHARDS = st.lists(st.integers(1, 4), min_size=1, max_size=64)
BOUNDS: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much],
}


class Tally:
    """What was trained on in each pass: no cursor of a stream is believed but for the number of the pass."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._seen: dict[int, Counter[int]] = defaultdict(Counter)

    def count(self, turn: int, samples: list[int]) -> None:
        self._seen[turn].update(samples)
        twice = [sample for sample, times in self._seen[turn].items() if times > 1]
        assert not twice, f"samples {twice} came again in pass {turn}"

    def check_whole(self, turn: int) -> None:
        missing = set(range(self._samples)) - set(self._seen[turn])
        assert not missing, f"samples {missing} never came in pass {turn}"


def trained(source: Numbers, run: list[Life], window: int, fixed_batch: int | None) -> None:
    """Each life goes on from the states of the one before; the last one until no lane is in the first two passes."""
    samples, states = sum(source.lengths), list[Any]()
    tally = Tally(samples)
    shape: dict[str, Any] = {"global_batch_size": fixed_batch} if fixed_batch else {"batch_size": 1}

    def world_of(ranks: int, workers: int) -> World:
        def build(rank: int, world: int) -> ElasticStream:
            return ElasticStream(
                source,
                rank=rank,
                num_replicas=world,
                lane_groups=6,
                shuffle_window=window,
                num_workers=workers,
                collate_fn=list,
                **shape,
            )

        return World(build, ranks, states)

    def step(world: World) -> None:
        drawn, _ = world.step()
        for stream, part in zip(world.streams, drawn, strict=True):
            state = stream.state_dict()
            turns, number = {lane[0]: lane[4] for lane in state["lanes"]}, state["batches"] - 1
            slots = stream.shape.slots_of_rank(stream.rank, stream.num_replicas) if part else ()
            for slot, sample in zip(slots, part, strict=True):
                tally.count(turns[stream.shape.lane(number, slot)], [sample])

    for ranks, workers, kept, undone in run:
        world = world_of(ranks, workers)
        for _ in range(kept):
            step(world)
        states = json.loads(json.dumps(world.states()))
        for _ in range(undone):
            world.step()
        del world  # its worker processes end here
    world = world_of(1, 0)
    for _ in range(4 * samples + 100):
        step(world)
    standing = [lane[4] for lane in world.streams[0].state_dict()["lanes"]]
    assert len(standing) == world.streams[0].shape.lanes
    for turn in range(min(standing)):
        tally.check_whole(turn)
    assert min(standing) >= 2


def product(source: Numbers, run: list[Life], window: int, fixed_batch: int | None) -> None:
    readers = fixed_batch or max(life[0] for life in run)
    assume((sum(source.lengths) if source.known else len(source.lengths)) >= 6 * readers)
    trained(source, run, window, fixed_batch)


class ReadAhead:
    """As torch's DataLoader: each worker has a copy of the data set, and is asked for two messages beyond what came."""

    def __init__(self, dataset: Any, num_workers: int, sampler: Any, **_: Any) -> None:
        self._dataset, self._workers, self._sampler = dataset, num_workers, sampler

    def __iter__(self) -> Iterator[Any]:
        copies = [pickle.loads(pickle.dumps(self._dataset)) for _ in range(self._workers)]
        asked = zip(cycle(range(self._workers)), iter(self._sampler), strict=False)
        waiting = deque(copies[worker][key] for worker, key in islice(asked, 2 * self._workers))
        for worker, key in asked:
            yield pickle.loads(pickle.dumps(waiting.popleft()))
            waiting.append(copies[worker][key])


@pytest.mark.gate_only
@settings(max_examples=25, **BOUNDS)
@given(SHARDS, st.booleans(), lives(16, 3), st.sampled_from([1, 4]), st.sampled_from([None, 2, 5, 16]))
def test_each_sample_comes_once_a_pass_over_ranks_shards_and_workers(
    sizes: list[int], known: bool, run: list[Life], window: int, fixed_batch: int | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_workers, "DataLoader", ReadAhead)
        product(Numbers(tuple(sizes), known), run, window, fixed_batch)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@settings(max_examples=25, **BOUNDS)
@given(SHARDS, lives(16, 3), st.sampled_from([1, 4]), st.sampled_from([None, 2, 5, 16]))
def test_each_sample_comes_once_a_pass_whatever_processes_had_read_ahead(
    sizes: list[int], run: list[Life], window: int, fixed_batch: int | None
) -> None:
    product(Numbers(tuple(sizes)), run, window, fixed_batch)
