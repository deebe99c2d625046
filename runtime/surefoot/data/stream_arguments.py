"""Refuses arguments of an `ElasticStream` that could not be read as they are given.

Called by `stream` before anything is opened: a shape that ranks cannot share out would be found in the middle of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surefoot.data.source import DataSource
from surefoot.data.stream_state import StreamShape
from surefoot.errors import ConfigurationError


def stream_shape(
    world: int, global_batch: int | None, batch_size: int | None, lanes: int | None, stripes: int
) -> StreamShape:
    """How many lanes there are, and how many samples each gives a step."""
    if (global_batch is None) == (batch_size is None):
        raise ConfigurationError(
            "give ElasticStream either global_batch= (samples a step, at any world size: the order depends on the seed"
            " alone) or batch_size= (samples a step and rank: the order depends on the worlds too)"
        )
    if global_batch is None:
        assert batch_size is not None  # one of them is given
        if lanes is not None or batch_size < 1:
            raise ConfigurationError(
                f"batch_size={batch_size}, lanes={lanes}: at least 1, and lanes go with global_batch"
            )
        return StreamShape(world, batch_size, stripes)
    slots = global_batch if lanes is None else lanes
    if global_batch < 1 or slots < 1 or global_batch % slots:
        raise ConfigurationError(f"global_batch={global_batch} in lanes={slots}: it must be a multiple of them")
    return StreamShape(slots, global_batch // slots, stripes)


def check_numbers(shape: StreamShape, window: int, pack: int | None, skip_bad: int, workers: int) -> None:
    """Raises for numbers below their least, and for stripes that workers cannot share out."""
    if window < 1 or (pack is not None and pack < 1) or skip_bad < 0 or shape.stripes < 1:
        raise ConfigurationError(f"window={window}, pack={pack}, skip_bad={skip_bad}: 1, 1 and 0 are the least")
    if workers and shape.stripes % workers:
        raise ConfigurationError(
            f"stripes={shape.stripes} cannot be shared out among workers={workers}: give a multiple of them."
            " Stripes are part of the order and stay as they are; workers may be any divisor of them"
        )


def as_sources(given: Any) -> list[DataSource]:
    """One source or several, as a list."""
    found = list(given) if isinstance(given, list | tuple) else [given]
    if not found:
        raise ConfigurationError("ElasticStream was given no source")
    return found


def checked_weights(weights: Sequence[float] | None, sources: int) -> list[float]:
    """A weight above 0 for each source; alike where none are given."""
    found = [1.0] * sources if weights is None else [float(weight) for weight in weights]
    if len(found) != sources or min(found) <= 0:
        raise ConfigurationError(f"weights={found} of {sources} sources: one for each, above 0")
    return found
