"""Sources in memory for tests of elastic streams, and worlds of streams that are killed and resized."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from surefoot.data.data_source import DataShard
from surefoot.data.stream import ElasticStream


@dataclass(frozen=True)
class Numbers:
    """Samples are numbers, each once over all shards."""

    lengths: tuple[int, ...]
    known: bool = True
    value: Callable[[int], Any] = field(default=int)

    def shards(self) -> Sequence[DataShard]:
        return [DataShard(f"shard-{i}", n if self.known else None, str(n)) for i, n in enumerate(self.lengths)]

    def open(self, shard: int, start: int) -> Iterator[Any]:
        first = sum(self.lengths[:shard])
        return (self.value(first + i) for i in range(start, self.lengths[shard]))


class World:
    """All ranks of one world, in one process. `build(rank, world)` makes a stream."""

    def __init__(self, build: Callable[[int, int], ElasticStream], size: int, states: Sequence[Any] = ()) -> None:
        self.streams = [build(rank, size) for rank in range(size)]
        for rank, stream in enumerate(self.streams):
            stream.count_by_step()
            if len(states) == size:
                once = {
                    key: states[0][key] for key in ElasticStream.shared_state_keys
                }  # as a Checkpointer gives it back
                stream.load_state_dict({**states[rank], **once})
            elif states:
                stream.load_state_dicts(states, rank, size)
        self._iterators = [iter(stream) for stream in self.streams]

    def step(self) -> tuple[list[list[Any]], list[tuple[tuple[int, int], ...] | None]]:
        """What each rank trained on, and the positions that it reports."""
        drawn, spans = [], []
        for stream, iterator in zip(self.streams, self._iterators, strict=True):
            batch = next(iterator)
            drawn.append(list(batch.data) if batch.weight else [])
            spans.append(stream.end_step())
        return drawn, spans

    def states(self) -> list[Any]:
        return [stream.state_dict() for stream in self.streams]


def trained_on(build: Callable[[int, int], ElasticStream], lives: Iterable[tuple[int, int, int]]) -> list[Any]:
    """What a run keeps of worlds of so many ranks, steps up to the checkpoint, and steps that a kill undoes.

    What the ledger counts of it is each once.
    """
    seen: list[Any] = []
    states: list[Any] = []
    for size, kept, undone in lives:
        world = World(build, size, states)
        for _ in range(kept):
            begin = len(seen)
            drawn, spans = world.step()
            seen += [one for part in drawn for one in part]
            covered = [at for found in spans for start, stop in found or () for at in range(start, stop)]
            assert covered == list(range(begin, len(seen)))
        states = json.loads(json.dumps(world.states()))
        for _ in range(undone):
            world.step()
    return seen
