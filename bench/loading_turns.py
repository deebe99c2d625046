"""`alternated` reads from several loaders in short turns, each with its own worker processes, all open at once.

Whole passes one behind the other last half a second, in which a busy machine changes by more than two loaders differ. In
turns of some milliseconds both meet the same machine; CPU time, read of each loader's own workers, does not count what
others ran meanwhile; and a second loader of torch's, in its own turns, says how far apart two alike ones come out.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any


@dataclass(frozen=True, slots=True)
class Turn:
    """`Turn` is what some batches cost: seconds of wall time and of CPU."""

    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Reader:
    """`Reader` is an endless iterator of batches and the worker processes behind it."""

    batches: Iterator[Any]
    workers: tuple[int, ...]

    @classmethod
    def begun(cls, make: Callable[[], Iterable[Any]]) -> Reader:
        """Makes a loader and takes its first batch, by which its workers are there."""
        before = {process.pid for process in multiprocessing.active_children()}
        batches = iter(make())
        next(batches)
        return cls(batches, tuple(p.pid for p in multiprocessing.active_children() if p.pid and p.pid not in before))

    def workers_cpu(self) -> float:
        """CPU seconds of the workers since they began: Linux' clock of another process."""
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in self.workers)

    def take(self, batches: int) -> Turn:
        """Takes so many batches; the CPU time is this process' alone."""
        wall, cpu = time.perf_counter(), time.process_time()
        assert sum(1 for _ in islice(self.batches, batches)) == batches
        return Turn(time.perf_counter() - wall, time.process_time() - cpu)


def alternated(readers: Mapping[str, Reader], batches: int, turns: int) -> dict[str, list[Turn]]:
    """So many turns of each reader, in another order each round, as a neighbour's workers are busy a little longer.

    What workers still prepare when their turn is over is theirs: their CPU time is read from one turn's begin to the next.
    """
    names, chance = list(readers), random.Random(turns)
    found: dict[str, list[Turn]] = {name: [] for name in names}
    begun: dict[str, list[float]] = {name: [] for name in names}
    for number in range(turns + 1):
        for name in chance.sample(names, len(names)):
            begun[name].append(readers[name].workers_cpu())
            if number < turns:
                found[name].append(readers[name].take(batches))
    return {
        name: [
            Turn(one.wall, one.cpu + after - before)
            for one, before, after in zip(found[name], begun[name], begun[name][1:], strict=False)
        ]
        for name in names
    }


def summed_up(turns: Mapping[str, Sequence[Turn]], peer: str, samples: int) -> dict[str, Any]:
    """Of each kind its rate, and theirs over ours in the same round; a turn has so many samples. Pure."""
    found: dict[str, Any] = {}
    for name, mine in turns.items():
        found[name] = {
            "samples_per_second": spread([samples / one.wall for one in mine]),
            "cpu_microseconds_per_sample": spread([one.cpu / samples * 1e6 for one in mine]),
        }
        if name != peer:
            both = list(zip(turns[peer], mine, strict=True))
            found[name]["ratio"] = spread([theirs.wall / ours.wall for theirs, ours in both])
            found[name]["cpu_ratio"] = spread([theirs.cpu / ours.cpu for theirs, ours in both])
            found[name]["undisturbed_cpu_ratio"] = round(_undisturbed(turns[peer]) / _undisturbed(mine), 3)
    return found


def _undisturbed(turns: Sequence[Turn]) -> float:
    """CPU seconds of the lower decile's turn: caches that others emptied cost most turns up to twice the CPU time."""
    return statistics.quantiles([one.cpu for one in turns], n=10)[0]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, and between what the middle half of the turns lies."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 3), "lower_quartile": round(low, 3), "upper_quartile": round(high, 3)}
