"""Computes the allowed, target and possible sizes of a world.

Pure.
"""

from __future__ import annotations

from surefoot_operator.api.spec import TrainingJobSpec
from surefoot_operator.api.spec_limits import allowed_sizes


def target_size(spec: TrainingJobSpec) -> int:
    """Returns the number of workers that should exist.

    Workers that should exist: `replicas`, or the largest allowed number below it if it is none.
    """
    sizes = allowed_sizes(spec)
    return max((size for size in sizes if size <= spec.replicas), default=sizes[0])


def largest_size(spec: TrainingJobSpec, available: int, tied: int | None = None) -> int:
    """The largest allowed world out of `available` workers, never beyond the target; 0 if there is none.

    `tied`: the one size that what was saved can be restored by (`ties`); None: any.
    """
    most = min(available, target_size(spec))
    return max((size for size in allowed_sizes(spec) if size <= most and tied in (None, size)), default=0)


def is_allowed(spec: TrainingJobSpec, workers: int) -> bool:
    return workers in allowed_sizes(spec)
