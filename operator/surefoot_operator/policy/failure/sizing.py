"""Computes the allowed, target and possible sizes of a world.

Pure.
"""

from __future__ import annotations

from bisect import bisect_right

from surefoot_operator.api.spec import TrainingJobSpec
from surefoot_operator.api.spec_limits import allowed_sizes


def target_size(spec: TrainingJobSpec) -> int:
    """Returns the number of workers that should exist.

    `replicas`, or the largest allowed number below it.
    """
    sizes = allowed_sizes(spec)
    return sizes[max(0, bisect_right(sizes, spec.replicas) - 1)]


def largest_size(spec: TrainingJobSpec, available: int, tied: int | None = None) -> int:
    """The largest allowed world of `available` workers; 0: none.

    Never beyond the target. `tied`: the only size that the checkpoint can be restored at; None: any.
    """
    sizes, most = allowed_sizes(spec), min(available, target_size(spec))
    if tied is not None:
        return tied if tied <= most and tied in sizes else 0
    fitting = bisect_right(sizes, most)
    return sizes[fitting - 1] if fitting else 0


def is_allowed(spec: TrainingJobSpec, workers: int) -> bool:
    return workers in allowed_sizes(spec)
