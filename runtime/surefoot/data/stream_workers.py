"""`read_ahead` reads a stream in worker processes of torch's DataLoader.

It loads torch, so it is imported where workers are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from surefoot.data.lanes import LaneCursor
from surefoot.data.order import sample_generator
from surefoot.data.stream_reading import Read, Recipe, StepReader


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
    loader: DataLoader[Read] = DataLoader(
        _Steps(recipe, slots, cursors, first),
        batch_size=None,
        collate_fn=_as_it_is,  # type: ignore[arg-type]  # without batch_size it is given what the dataset gives
        # else its workers' seed is drawn from the global generator, once more in each life of a program
        generator=sample_generator(recipe.seed, first),
        **options,
    )
    return iter(loader)


class _Steps(IterableDataset[Read]):
    """Worker w of n reads steps first + w, first + w + n, …: the order in which the DataLoader asks them."""

    def __init__(self, recipe: Recipe, slots: Sequence[int], cursors: Mapping[int, LaneCursor], first: int) -> None:
        self._reader = StepReader(recipe, slots, cursors)
        self._first = first

    def __iter__(self) -> Iterator[Read]:
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        return self._reader.batches(self._first + number, workers)


def _as_it_is(read: Read) -> Read:
    return read
