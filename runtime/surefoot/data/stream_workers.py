"""`read_ahead` reads a stream in worker processes of torch's DataLoader.

A message between two processes costs as much as reading thousands of lines: of small batches many travel in one. It
loads torch, so it is imported where workers are wanted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from surefoot.data.lanes import LaneCursor
from surefoot.data.sample_order import sample_generator
from surefoot.data.stream_reading import Read, Recipe, StepReader

MESSAGE_SECONDS = 0.004
"""What a message's batches take to be read, at most: whoever waits for a slow one gets it as soon as it is read."""
MOST_STEPS = 64
_GROWTH = 4
_REMEMBERED = 8
_LOOKED_AT = 4
"""Elements of a batch that are looked at to tell what it holds."""


class Asked(NamedTuple):
    """`Asked` tells a worker its number and how many steps to read."""

    reader: int
    steps: int


class Message(NamedTuple):
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
        self._told: deque[Message] = deque(maxlen=_REMEMBERED)
        self._steps = 1

    def tell(self, message: Message) -> None:
        """Takes note of what a message took."""
        self._told.append(message)

    def __iter__(self) -> Iterator[Asked]:
        while True:
            self._steps = self._wanted()
            for reader in range(self._readers):
                yield Asked(reader, self._steps)

    def _wanted(self) -> int:
        if not self._told or not all(message.plain for message in self._told):
            return 1
        seconds = sum(message.seconds for message in self._told)
        steps = sum(len(message.reads) for message in self._told)
        fit = int(MESSAGE_SECONDS * steps / seconds) if seconds > 0 else MOST_STEPS
        return max(1, min(fit, _GROWTH * self._steps, MOST_STEPS))


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
    loader: DataLoader[Message] = DataLoader(
        StepsOfWorker(StepReader(recipe, slots, cursors), first, readers),  # type: ignore[arg-type]  # map-style by protocol
        batch_size=None,
        sampler=size,
        collate_fn=_as_it_is,  # type: ignore[arg-type]  # without batch_size it is given what the dataset gives
        # else its workers' seed is drawn from the global generator, once more in each life of a program
        generator=sample_generator(recipe.seed, first),
        **options,
    )
    return _in_turn(iter(loader), readers, size)


def _in_turn(found: Iterator[Message], readers: int, size: MessageSize) -> Iterator[Read]:
    """Yields each reader's batches in turn, which is the order of steps. Readers answer in turn."""
    waiting = [deque[Read]() for _ in range(readers)]
    answers = zip(count(), found, strict=False)
    for step in count():
        while not waiting[step % readers]:
            number, message = next(answers)
            waiting[number % readers].extend(message.reads)
            size.tell(message)
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

    def __getitem__(self, asked: Asked) -> Message:
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
        return Message(reads, time.perf_counter() - begin, all(is_plain(data) for data, _, _ in reads))


def is_plain(data: Any) -> bool:
    """Tells whether data is text, bytes, numbers and arrays alone.

    Of lists the first elements are looked at.
    """
    if data is None or isinstance(data, str | bytes | bytearray | int | float):
        return True
    if isinstance(data, dict):
        return all(map(is_plain, data.values()))
    if isinstance(data, list | tuple):
        return all(map(is_plain, data[:_LOOKED_AT]))
    return type(data).__module__ == "numpy"


def _as_it_is(message: Message) -> Message:
    return message
