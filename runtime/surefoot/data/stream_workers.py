"""`read_ahead` reads a stream in worker processes of torch's DataLoader.

A message between two processes costs as much as reading thousands of lines: of small batches many travel in one. It
loads torch, so it is imported where workers are wanted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import DataLoader

from surefoot.data.data_source import DataSource
from surefoot.data.lanes import Lane, LaneAssignment, LaneCursor, Prepare, SourceReader
from surefoot.data.length_grouping import Grouping
from surefoot.data.sample_order import sample_generator, sample_seed
from surefoot.data.stream_state import LaneCursors, LaneGroup, StreamShape

if TYPE_CHECKING:
    import torch


# ---- stream reading --------------------------------------------------------------------------------------------------
# `StepReader` reads a stream's batches, in the trainer or in workers. Of n workers each reads every n-th step, whole:
# no other process reads its lanes. With each batch come the cursors behind it, so that what was read ahead and never
# trained on counts for nothing.

Read = tuple[Any, LaneCursors, int]
"""Collated data, the cursors of its lanes behind it, and tokens of groups."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """`Recipe` holds all that batches follow from, alike on all ranks.

    It is picklable if its parts are, and is what worker processes get.
    """

    sources: Sequence[DataSource]
    weights: Sequence[float]
    assignments: Sequence[LaneAssignment]
    shape: StreamShape
    window: int
    pack: int | None
    grouping: Grouping | None
    prepare: Prepare | None
    collate: Callable[[list[Any]], Any]
    skip_bad: int
    seed: int

    def lane(self, number: int) -> Lane:
        """Returns a reader of that lane, at its begin."""
        readers = [
            SourceReader(source, dealing, number, self.window, self.prepare, self.grouping)
            for source, dealing in zip(self.sources, self.assignments, strict=True)
        ]
        return Lane(readers, self.weights, sample_seed(self.seed, number), self.pack, self.grouping is not None)


class StepReader:
    """`StepReader` reads the batches of some slots, at every `stride`-th step."""

    def __init__(self, recipe: Recipe, slots: Sequence[int], cursors: Mapping[int, LaneCursor]) -> None:
        self._recipe, self._slots, self._cursors = recipe, slots, cursors
        self._lane_groups: dict[int, LaneGroup] = {}

    def batches(self, first: int, stride: int) -> Iterator[Read]:
        """Yields batches from step `first` on, without end."""
        return (self._batch(step) for step in count(first, stride))

    def _batch(self, step: int) -> Read:
        items, told = self._lane_group(step).step()
        if (grouping := self._recipe.grouping) is not None:
            return [self._recipe.collate(group) for group in items], told, grouping.tokens(items)
        return self._recipe.collate(items), told, 0

    def _lane_group(self, step: int) -> LaneGroup:
        shape, number = self._recipe.shape, step % self._recipe.shape.lane_groups
        if number not in self._lane_groups:
            lanes = {lane: self._recipe.lane(lane) for lane in (shape.lane(step, slot) for slot in self._slots)}
            for at, lane in lanes.items():
                if at in self._cursors:
                    lane.seek(self._cursors[at])
            self._lane_groups[number] = LaneGroup(lanes, shape.items_per_lane, self._recipe.skip_bad)
        return self._lane_groups[number]


def read_in_process(
    recipe: Recipe, slots: Sequence[int], cursors: Mapping[int, LaneCursor], first: int
) -> Iterator[Read]:
    """Yields the batches from step `first` on, read when asked for."""
    return StepReader(recipe, slots, cursors).batches(first, 1)


class Transform:
    """`Transform` calls the script's transform with a generator from a seed."""

    def __init__(self, transform: Callable[[Any, torch.Generator], Any]) -> None:
        self._transform = transform

    def __call__(self, sample: Any, seed: int) -> Any:
        import torch

        generator = torch.Generator()
        generator.manual_seed(seed)
        return self._transform(sample, generator)


def stacked(rows: list[Any]) -> Any:
    """Returns packed rows as one tensor."""
    import numpy as np
    import torch

    return torch.from_numpy(np.stack(rows))


# ---- stream workers --------------------------------------------------------------------------------------------------

MESSAGE_SECONDS = 0.004
"""What a message's batches take to be read, at most: whoever waits for a slow one gets it as soon as it is read."""
MAX_STEPS = 64
_GROWTH = 4
_REMEMBERED = 8
_CHECKED_SAMPLES = 4
"""Elements of a batch that are looked at to tell what it holds."""


class ReadRequest(NamedTuple):
    """`Asked` tells a worker its number and how many steps to read."""

    reader: int
    steps: int


class WorkerBatches(NamedTuple):
    """`Message` is a worker's answer: batches of its next steps.

    `plain`: none of them has a tensor. Those travel in memory of their own, each with a descriptor, of which a process
    may have a thousand: with them a message has one batch, as torch's DataLoader has it.
    """

    reads: list[Read]
    seconds: float
    plain: bool


class MessageSize:
    """`MessageSize` decides how many batches the next messages have.

    All readers are asked for as many in a round: if one got ahead of the others, its batches would pile up.
    """

    def __init__(self, readers: int) -> None:
        self._readers = readers
        self._recent: deque[WorkerBatches] = deque(maxlen=_REMEMBERED)
        self._steps = 1

    def observe(self, message: WorkerBatches) -> None:
        """Takes note of what a message took."""
        self._recent.append(message)

    def __iter__(self) -> Iterator[ReadRequest]:
        while True:
            self._steps = self._next_size()
            for reader in range(self._readers):
                yield ReadRequest(reader, self._steps)

    def _next_size(self) -> int:
        if not self._recent or not all(message.plain for message in self._recent):
            return 1
        seconds = sum(message.seconds for message in self._recent)
        steps = sum(len(message.reads) for message in self._recent)
        fit = int(MESSAGE_SECONDS * steps / seconds) if seconds > 0 else MAX_STEPS
        return max(1, min(fit, _GROWTH * self._steps, MAX_STEPS))


def read_ahead(
    recipe: Recipe, slots: Sequence[int], cursors: Mapping[int, LaneCursor], first: int, options: Mapping[str, Any]
) -> Iterator[Read]:
    """Yields the batches from step `first` on, read by workers.

    Args:
        recipe: what batches follow from.
        slots: this rank's.
        cursors: of lanes that are not at their begin.
        first: the step to begin with.
        options: the DataLoader's `num_workers`, `pin_memory` and the like.
    """
    readers = max(1, options["num_workers"])
    size = MessageSize(readers)
    loader: DataLoader[WorkerBatches] = DataLoader(
        StepsOfWorker(StepReader(recipe, slots, cursors), first, readers),  # type: ignore[arg-type]  # map-style by protocol
        batch_size=None,
        sampler=size,
        collate_fn=_as_it_is,  # type: ignore[arg-type]  # without batch_size it is given what the dataset gives
        # else its workers' seed is drawn from the global generator, once more in each life of a program
        generator=sample_generator(recipe.seed, first),
        **options,
    )
    return _in_turn(iter(loader), readers, size)


def _in_turn(found: Iterator[WorkerBatches], readers: int, size: MessageSize) -> Iterator[Read]:
    """Yields each reader's batches in turn, which is the order of steps. Readers answer in turn."""
    waiting = [deque[Read]() for _ in range(readers)]
    answers = zip(count(), found, strict=False)
    for step in count():
        while not waiting[step % readers]:
            number, message = next(answers)
            waiting[number % readers].extend(message.reads)
            size.observe(message)
        yield waiting[step % readers].popleft()


class StepsOfWorker:
    """`StepsOfWorker` reads every n-th step, as one of n readers.

    A data set by torch's protocol: each worker process has a copy, and is one reader, as a DataLoader asks its workers in
    turn.
    """

    def __init__(self, reader: StepReader, first: int, readers: int) -> None:
        self._reader, self._first, self._readers = reader, first, readers
        self._number: int | None = None
        self._found: Iterator[Read] = iter(())
        self._error: Exception | None = None
        """What ended the last message before its time: raised where its step comes."""

    def __getitem__(self, asked: ReadRequest) -> WorkerBatches:
        """Returns the batches of the next steps; fewer before one that cannot be read."""
        if self._number is None:
            self._number = asked.reader
            self._found = self._reader.batches(self._first + asked.reader, self._readers)
        assert asked.reader == self._number, "a worker that reads for two would read samples of others"
        if self._error is not None:
            raise self._error
        reads, begin = list[Read](), time.perf_counter()
        while len(reads) < asked.steps:
            try:
                reads.append(next(self._found))
            except Exception as error:
                if not reads:
                    raise
                self._error = error
                break
        return WorkerBatches(reads, time.perf_counter() - begin, all(is_plain(data) for data, _, _ in reads))


def is_plain(data: Any) -> bool:
    """Tells whether data is text, bytes, numbers and arrays alone.

    Of lists the first elements are looked at.
    """
    if data is None or isinstance(data, str | bytes | bytearray | int | float):
        return True
    if isinstance(data, dict):
        return all(map(is_plain, data.values()))
    if isinstance(data, list | tuple):
        return all(map(is_plain, data[:_CHECKED_SAMPLES]))
    return type(data).__module__ == "numpy"


def _as_it_is(message: WorkerBatches) -> WorkerBatches:
    return message
