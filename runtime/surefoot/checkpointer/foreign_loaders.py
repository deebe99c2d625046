"""Refuses third-party loaders whose state does not hold their full position.

A shuffle buffer holds rows that were read and not handed out yet: a state without them loses those rows at each restart.
A batch that a prefetcher took counts as consumed in the state of a loader that knows nothing of steps, and is lost too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from surefoot.errors import ConfigurationError

_INNER = ("base_dataloader", "dataset", "_ex_iterable", "ex_iterable", "ex_iterables")
"""Where a loader keeps what it reads from: torch's, Accelerate's, Hugging Face's."""
_DEEPEST = 32


def refuse_shuffle_buffers(objects: Mapping[str, Any], anew: Collection[str]) -> None:
    """Raises ConfigurationError for a loader with a shuffle buffer.

    One that `anew` names, or that buffers a single row, is allowed.
    """
    for name, subject in objects.items():
        rows = 0 if name in anew else buffered_rows(subject)
        if rows > 1:
            raise ConfigurationError(
                f"{name} ({type(subject).__name__}) shuffles in a buffer of {rows} rows that is not part of its state:"
                " the rows in it would be lost at each restart. Shuffle its shards alone (shuffle(buffer_size=1)), or"
                " shuffle when the data set is written, or give an ElasticLoader a map-style data set, or accept with"
                f" Checkpointer(anew=({name!r},)) that samples are lost"
            )


def buffered_rows(subject: Any, deepest: int = _DEEPEST) -> int:
    """Rows of the largest Hugging Face shuffle buffer beneath; 0: none."""
    found = 0
    if "BufferShuffled" in type(subject).__name__:
        size = getattr(subject, "buffer_size", 0)
        found = size if isinstance(size, int) else 0
    if deepest == 0 or isinstance(subject, str | bytes | Mapping):
        return found
    own = getattr(subject, "__dict__", {})
    for inner in (own[name] for name in _INNER if name in own):
        for one in inner if isinstance(inner, list | tuple) and len(inner) <= _DEEPEST else (inner,):
            found = max(found, buffered_rows(one, deepest - 1))
    return found


class PrefetchCheck:
    """Checks torchdata's loaders for prefetched batches once, after a job's first step."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._loaders = {n: o for n, o in objects.items() if type(o).__module__.startswith("torchdata.")}

    def first_step_ends(self) -> None:
        """Raises ConfigurationError where more batches were taken than a step uses."""
        for name, loader in self._loaders.items():
            taken = getattr(getattr(loader, "_iterator", None), "_num_yielded", None)
            said = getattr(loader, "batches_per_step", 1)
            if isinstance(taken, int) and taken > said:
                raise ConfigurationError(
                    f"{taken} batches were taken from {name} ({type(loader).__name__}) before the first step ended, and"
                    " its state counts them all: what a prefetcher took ahead would be lost at each restart. If the step"
                    f" trained on all of them, set {name}.batches_per_step = {taken}; else take it without a prefetcher,"
                    " or give an ElasticLoader with batches_per_step=1"
                )
