"""`StepReader` reads a stream's batches, in the trainer or in workers.

Of n workers each reads every n-th step, whole: no other process reads its lanes. With each batch come the cursors
behind it, so that what was read ahead and never trained on counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from surefoot.data.data_source import DataSource
from surefoot.data.extents import Dealing
from surefoot.data.lanes import Lane, LaneCursor
from surefoot.data.length_grouping import Grouping
from surefoot.data.sample_order import sample_seed
from surefoot.data.source_reading import Prepare, SourceReader
from surefoot.data.stream_state import StreamShape
from surefoot.data.stripe import LanesBehind, Stripe

if TYPE_CHECKING:
    import torch

Read = tuple[Any, LanesBehind, int]
"""Collated data, the cursors of its lanes behind it, and tokens of groups."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """`Recipe` holds all that batches follow from, alike on all ranks.

    It is picklable if its parts are, and is what worker processes get.
    """

    sources: Sequence[DataSource]
    weights: Sequence[float]
    dealings: Sequence[Dealing]
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
            for source, dealing in zip(self.sources, self.dealings, strict=True)
        ]
        return Lane(readers, self.weights, sample_seed(self.seed, number), self.pack, self.grouping is not None)


class StepReader:
    """`StepReader` reads the batches of some slots, at every `stride`-th step."""

    def __init__(self, recipe: Recipe, slots: Sequence[int], cursors: Mapping[int, LaneCursor]) -> None:
        self._recipe, self._slots, self._cursors = recipe, slots, cursors
        self._stripes: dict[int, Stripe] = {}

    def batches(self, first: int, stride: int) -> Iterator[Read]:
        """Yields batches from step `first` on, without end."""
        return (self._batch(step) for step in count(first, stride))

    def _batch(self, step: int) -> Read:
        items, told = self._stripe(step).step()
        if (grouping := self._recipe.grouping) is not None:
            return [self._recipe.collate(group) for group in items], told, grouping.tokens(items)
        return self._recipe.collate(items), told, 0

    def _stripe(self, step: int) -> Stripe:
        shape, number = self._recipe.shape, step % self._recipe.shape.stripes
        if number not in self._stripes:
            lanes = {lane: self._recipe.lane(lane) for lane in (shape.lane(step, slot) for slot in self._slots)}
            for at, lane in lanes.items():
                if at in self._cursors:
                    lane.seek(self._cursors[at])
            self._stripes[number] = Stripe(lanes, shape.per_lane, self._recipe.skip_bad)
        return self._stripes[number]


def read_here(recipe: Recipe, slots: Sequence[int], cursors: Mapping[int, LaneCursor], first: int) -> Iterator[Read]:
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
