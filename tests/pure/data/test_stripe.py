"""Lanes that are read in runs: what that saves, how far it goes, and that nothing of it shows."""

from __future__ import annotations

import json
import pickle
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from support.shards import Numbers, World
from surefoot.data.data_source import BadSample, DataShard
from surefoot.data.stream import ElasticStream
from surefoot.data.stream_state import LanesBehind, LanesRead


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
    stream = ElasticStream(source, 4, collate=list, rank=0, world=1)
    counts = []
    for _ in islice(stream, 60):
        counts.append(len(source.read))
    waiting = [read - 4 * step for step, read in enumerate(counts, 1)]
    assert max(waiting) == 4 * (most - 1)


def test_what_is_prepared_is_not_read_ahead() -> None:
    source = Counting(400, str)
    for _ in islice(ElasticStream(source, 4, collate=list, transform=lambda x, _: x, rank=0, world=1), 30):
        pass
    assert len(source.read) == 120


def test_a_bad_sample_ahead_is_met_at_its_own_step() -> None:
    source = Counting(400, lambda number: BadSample(ValueError("torn")) if number == 13 else number)
    stream = ElasticStream(source, 1, shuffle=False, collate=list, rank=0, world=1)
    found = iter(stream)
    assert [next(found).data for _ in range(13)] == [[number] for number in range(13)]
    with pytest.raises(Exception, match="sample 13 of shard is bad"):
        next(found)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with fewer cores
@pytest.mark.parametrize("window", [1, 6])
def test_workers_tell_the_cursors_that_one_process_has(window: int) -> None:
    told = []
    for workers in (0, 2):
        options: dict[str, Any] = {"window": window, "stripes": 2, "workers": workers, "collate": list}
        world = World(lambda r, w, o=options: ElasticStream(Numbers((90, 31, 8)), 5, rank=r, world=w, **o), 2)  # type: ignore[misc]
        steps = [world.step() for _ in range(25)]
        told.append(json.dumps([steps, [state["lanes"] for state in world.states()]]))
    assert told[0] == told[1]


def test_cursors_are_pickled_as_they_are() -> None:
    numbers = array("q", [3, 20, 21, 1, 0, 0, 40, 1, 0, 4, 19, 19, 0, 0, 1, 7, 1, 0])
    behind = LanesBehind(LanesRead(numbers, array("q", [5, 4]), 6, {3: 1}), 2)
    again = pickle.loads(pickle.dumps(behind))
    assert again.plain() == behind.plain() == [[3, 17, 18, 1, 0, 0, 37, 1, 0], [4, 17, 17, 0, 0, 1, 5, 1, 0]]
    assert (again.first, len(again), again.bad) == (3, 2, {3: 1})
