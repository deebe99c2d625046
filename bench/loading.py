"""What our loaders cost beside torch's own DataLoader: the same samples, collation and number of worker processes.

`python -m bench.loading [--samples 40000] [--rounds 9] [--out FILE]`. Map-style loaders stand open side by side and take
turns of 50 batches, 20 a round (`bench.loading_turns`); a ratio is that of neighbouring turns, torch's over ours.
`ratio`, of wall time, decides on a quiet machine. On a busy one `undisturbed_cpu_ratio` does: of the CPU time of each one's
lower decile of turns. `torch again`, a second DataLoader, says what a ratio is worth there. `begin` is from a loader's
making to its first batch and its workers' end. Of lines each round reads as many once with each loader, one behind the
other, the first one in turn. CPU time is of the process and its workers.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

import surefoot
from bench.loading_turns import Reader, alternated, summed_up
from surefoot.data.sources import TextLines

BATCH = 64
LINE = "a line of text that is about as long as lines of text are, number {}\n"
FILES = 8
LINES = 8
"""A line costs a tenth of a tensor, and beginning to read as much: so many times as many are there, and are read."""

TURN = 50
"""Batches: some ten times as many as are loaded ahead, in tens of milliseconds."""

TURNS_A_ROUND = 20

IN_TURN = "torch, lines in turn"
"""The peer of `default lanes`, which read as many places."""

Batches = Callable[[], Iterable[Any]]
"""Makes a loader, whose time to begin is part of what is measured."""


class Lines(IterableDataset[str]):
    """What people write: a worker's part of the files, line by line."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __iter__(self) -> Iterator[str]:
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        while True:
            for path in self.paths[number::workers]:
                with path.open() as lines:
                    for line in lines:
                        yield line.rstrip("\n")


class LinesInTurn(IterableDataset[str]):
    """What people write who want neighbours of a batch from different places: a line of each of them in turn."""

    def __init__(self, paths: list[Path], places: int) -> None:
        self.parts = [(path, number, places // len(paths)) for path in paths for number in range(places // len(paths))]

    def __iter__(self) -> Iterator[str]:
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        open_ones = [_part(*part) for part in self.parts[number::workers]]
        while True:
            yield from map(next, open_ones)


def _part(path: Path, number: int, parts: int) -> Iterator[str]:
    """The lines of one part of a file, pass after pass."""
    size = path.stat().st_size
    begin, stop = size * number // parts, size * (number + 1) // parts
    while True:
        with path.open("rb") as lines:
            lines.seek(begin)
            at = begin + (len(lines.readline()) if number else 0)
            for line in lines:
                if at >= stop:
                    break
                at += len(line)
                yield line.decode().rstrip("\n")


def tensors(samples: int, workers: int) -> dict[str, Batches]:
    """A map-style dataset of small tensors, shuffled, pass after pass."""
    data: Dataset[Any] = TensorDataset(torch.randn(samples, 32), torch.arange(samples))

    def passes() -> Iterator[Any]:
        loader = DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
        while True:
            yield from loader

    def elastic_sampler() -> Any:
        return surefoot.ElasticSampler(samples, BATCH, rank=0, num_replicas=1)

    return {
        "torch": passes,
        "surefoot": lambda: surefoot.ElasticLoader(data, BATCH, num_workers=workers, rank=0, num_replicas=1),
        "sampler": lambda: DataLoader(data, batch_sampler=elastic_sampler(), num_workers=workers),
        "torch again": passes,
    }


def lines(samples: int, workers: int, folder: Path) -> dict[str, Batches]:
    """Lines of text files in the order in which they stand, as an IterableDataset cannot shuffle."""
    paths = [folder / f"{number}.txt" for number in range(FILES)]
    for path in paths:
        path.write_text("".join(LINE.format(number) for number in range(LINES * samples // FILES)))
    source = TextLines([str(path) for path in paths])
    options: dict[str, Any] = {"shuffle": False, "lane_groups": 2, "rank": 0, "num_replicas": 1, "collate_fn": list}
    return {
        "torch": lambda: DataLoader(Lines(paths), batch_size=BATCH, num_workers=workers, collate_fn=list),
        IN_TURN: lambda: DataLoader(LinesInTurn(paths, BATCH), batch_size=BATCH, num_workers=workers, collate_fn=list),
        "surefoot": lambda: surefoot.ElasticStream(source, BATCH, num_workers=workers, lanes=1, **options),
        "default lanes": lambda: surefoot.ElasticStream(source, BATCH, num_workers=workers, **options),
        "default lanes, window": lambda: surefoot.ElasticStream(
            source, BATCH, num_workers=workers, shuffle_window=256, **options
        ),
    }


def spent() -> float:
    """CPU seconds of this process and of those of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def timed(make: Batches, batches: int) -> tuple[float, float]:
    """Wall and CPU seconds of so many batches, from the loader's making to its workers' end."""
    wall, cpu = time.perf_counter(), spent()
    found = iter(make())
    assert sum(1 for _ in islice(found, batches)) == batches
    took = time.perf_counter() - wall
    del found
    return took, spent() - cpu


def in_turns(kinds: dict[str, Batches], rounds: int) -> dict[str, Any]:
    """Figures of kinds that stand open side by side, and of their beginnings."""
    readers = {name: Reader.begun(make) for name, make in kinds.items()}
    alternated(readers, TURN, TURNS_A_ROUND)  # warms up
    found = summed_up(alternated(readers, TURN, rounds * TURNS_A_ROUND), "torch", TURN * BATCH)
    readers.clear()
    for name, make in kinds.items():
        pairs = [timed(make, 1) for _ in range(rounds)]
        found[name]["begin_seconds"] = spread([wall for wall, _ in pairs])
        found[name]["begin_cpu_seconds"] = spread([cpu for _, cpu in pairs])
    return found


def in_rounds(kinds: dict[str, Batches], batches: int, rounds: int) -> dict[str, Any]:
    """Of each kind samples a second and CPU microseconds a sample; of ours the ratio to its peer's in the same round."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for number in range(rounds + 1):
        names = list(kinds) if number % 2 else list(reversed(kinds))
        for name in names:
            taken[name].append(timed(kinds[name], batches))
    found: dict[str, Any] = {}
    for name, all_pairs in taken.items():
        pairs = all_pairs[1:]  # the first round warms up
        found[name] = {
            "samples_per_second": spread([batches * BATCH / wall for wall, _ in pairs]),
            "cpu_microseconds_per_sample": spread([cpu / batches / BATCH * 1e6 for _, cpu in pairs]),
        }
        if not name.startswith("torch"):
            peer = IN_TURN if name.startswith("default lanes") else "torch"
            beside = list(zip(taken[peer][1:], pairs, strict=True))
            found[name]["ratio"] = spread([theirs[0] / ours[0] for theirs, ours in beside])
            found[name]["cpu_ratio"] = spread([theirs[1] / ours[1] for theirs, ours in beside])
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {
        "median": round(statistics.median(values), 3),
        "least": round(min(values), 3),
        "most": round(max(values), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.loading", description=__doc__)
    parser.add_argument("--samples", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    batches = LINES * options.samples // BATCH
    found: dict[str, Any] = {"samples": options.samples, "rounds": options.rounds, "load": [os.getloadavg()[0]]}
    with tempfile.TemporaryDirectory() as folder:
        for workers in (0, 2):
            found[f"tensors, {workers} workers"] = in_turns(tensors(options.samples, workers), options.rounds)
            texts = lines(options.samples, workers, Path(folder))
            found[f"lines, {workers} workers"] = in_rounds(texts, batches, options.rounds)
            for name in (f"tensors, {workers} workers", f"lines, {workers} workers"):
                for kind, figures in found[name].items():
                    print(f"{name}, {kind}: {json.dumps(figures)}", flush=True)
    found["load"].append(os.getloadavg()[0])
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
