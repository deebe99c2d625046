"""`stream_shape` and its neighbours refuse arguments that no stream can have.

Called by `stream` before it reads a sample: a shape that ranks cannot share out would fail in the middle of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from surefoot.data.data_source import DataShard, DataSource
from surefoot.data.length_grouping import Grouping
from surefoot.data.stream_state import StreamShape
from surefoot.errors import ConfigurationError


def stream_shape(
    world: int, global_batch: int | None, batch_size: int | None, lanes: int | None, stripes: int
) -> StreamShape:
    """Returns how many lanes there are, and each one's samples a step.

    Raises:
        ConfigurationError: not exactly one of `global_batch` and `batch_size` is given, or lanes do not fit it.
    """
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
    """Raises ConfigurationError for numbers too small, or stripes no multiple of workers."""
    if window < 1 or (pack is not None and pack < 1) or skip_bad < 0 or shape.stripes < 1:
        raise ConfigurationError(f"window={window}, pack={pack}, skip_bad={skip_bad}: 1, 1 and 0 are the least")
    if workers and shape.stripes % workers:
        raise ConfigurationError(
            f"stripes={shape.stripes} cannot be shared out among workers={workers}: give a multiple of them."
            " Stripes are part of the order and stay as they are; workers may be any divisor of them"
        )


def check_shards(kind: str, shards: Sequence[DataShard], lanes: int) -> None:
    """Raises ConfigurationError where a lane would have nothing to read."""
    known = all(shard.samples is not None for shard in shards)
    have, what = (
        (sum(shard.samples or 0 for shard in shards), "samples") if known else (len(shards), "shards of unknown length")
    )
    if have < lanes:
        raise ConfigurationError(
            f"{kind} has {have} {what}, and {lanes} lanes are to read it: each needs one. Give fewer lanes="
            " (or stripes=, or ranks where batch_size= is given), or divide the source into more shards"
        )


def grouping_of(
    max_tokens: int | None, max_samples: int | None, length: Callable[[Any], int], window: int, pack: int | None
) -> Grouping | None:
    """Returns how samples are grouped by length; None where they are not.

    Raises:
        ConfigurationError: a bound below 1, no window to group in, or packed rows too.
    """
    if max_tokens is None and max_samples is None:
        return None
    if min(1 if most is None else most for most in (max_tokens, max_samples)) < 1:
        raise ConfigurationError(f"max_tokens={max_tokens}, max_samples={max_samples}: 1 is the least")
    if window < 2 or pack is not None:
        raise ConfigurationError(
            f"groups of like length with window={window}, pack={pack}: they are cut out of windows of some hundred samples"
            " that are sorted (give window=), and packed rows have one length already"
        )
    return Grouping(max_tokens, max_samples, length)


def as_sources(given: Any) -> list[DataSource]:
    """Returns one source or several as a list; none raises ConfigurationError."""
    found = list(given) if isinstance(given, list | tuple) else [given]
    if not found:
        raise ConfigurationError("ElasticStream was given no source")
    return found


def checked_weights(weights: Sequence[float] | None, sources: int) -> list[float]:
    """Returns a weight above 0 for each source; equal by default.

    Raises:
        ConfigurationError: another number of them, or one that is not above 0.
    """
    found = [1.0] * sources if weights is None else [float(weight) for weight in weights]
    if len(found) != sources or min(found) <= 0:
        raise ConfigurationError(f"weights={found} of {sources} sources: one for each, above 0")
    return found
