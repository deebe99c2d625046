"""Reads batches of an elastic stream, in the trainer itself or in worker processes of torch's DataLoader.

A worker reads every n-th step, whole: its lanes are read by nobody else. With each batch comes where its lanes stand
behind it; what was read ahead and never trained on thus counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from surefoot.data.extents import Dealing
from surefoot.data.lanes import Lane, LaneCursor, Prepare, SourceReader
from surefoot.data.order import sample_seed
from surefoot.data.source import DataSource
from surefoot.data.stream_state import StreamShape

Read = tuple[Any, list[list[int]]]
"""Collated data, and the lanes that it is of as plain numbers, where they stand behind it."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What batches are made of, alike on all ranks; picklable if its parts are."""

    sources: Sequence[DataSource]
    weights: Sequence[float]
    dealings: Sequence[Dealing]
    shape: StreamShape
    window: int
    pack: int | None
    prepare: Prepare | None
    collate: Callable[[list[Any]], Any]
    skip_bad: int
    seed: int

    def lane(self, number: int) -> Lane:
        """A reader of that lane, at its begin."""
        readers = [
            SourceReader(source, dealing, number, self.window, self.prepare)
            for source, dealing in zip(self.sources, self.dealings, strict=True)
        ]
        return Lane(readers, self.weights, sample_seed(self.seed, number), self.pack)


class StepReader:
    """The batches of some slots from one step on, every `stride`-th of them."""

    def __init__(self, recipe: Recipe, slots: Sequence[int], cursors: Mapping[int, LaneCursor]) -> None:
        self._recipe, self._slots, self._cursors = recipe, slots, cursors
        self._lanes: dict[int, Lane] = {}

    def batches(self, first: int, stride: int) -> Iterator[Read]:
        """Endless."""
        return (self._batch(step) for step in count(first, stride))

    def _batch(self, step: int) -> Read:
        items, told = [], []
        for slot in self._slots:
            number = self._recipe.shape.lane(step, slot)
            lane = self._lane(number)
            items += [lane.item(self._recipe.skip_bad) for _ in range(self._recipe.shape.per_lane)]
            told.append([number, *lane.cursor().plain()])
        return self._recipe.collate(items), told

    def _lane(self, number: int) -> Lane:
        if number not in self._lanes:
            self._lanes[number] = self._recipe.lane(number)
            if number in self._cursors:
                self._lanes[number].seek(self._cursors[number])
        return self._lanes[number]


def read_here(recipe: Recipe, slots: Sequence[int], cursors: Mapping[int, LaneCursor], first: int) -> Iterator[Read]:
    """The batches from step `first` on, read when they are asked for."""
    return StepReader(recipe, slots, cursors).batches(first, 1)
