"""Defines the progress of one rank or worker in one generation, as it travels from trainer to operator.

Pure. Every field is set by the code that measures it, merged over a worker's ranks here, and read by the code that
decides by it; everything between passes the object on unchanged. A new generation starts with `Progress()`, so that no
field can still describe an older membership.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from surefoot.protocol.checkpoints.save_state import NO_CLOSED_STEPS, ClosedSteps

# ---- loss anomalies --------------------------------------------------------------------------------------------------
# Judges a step's loss or gradient norm by the preceding steps. Trainers judge each of their steps this way. A fixed
# limit would miss a loss that doubles from 2 and would call every first step, at 11, a spike. A mean and a standard
# deviation would be shifted by the very spike that they should show, so median and median absolute deviation are used.

WINDOW_STEPS = 64
"""Steps that a value is compared with. A level that lasts for half of them becomes the new baseline."""

MIN_STEPS = 16
"""Steps needed before a value is judged: in its first steps a loss changes more than by any later spike."""

DEVIATIONS = 10.0
"""Robust standard deviations above the median beyond which a value is a spike."""

# the ratio of standard deviation to median absolute deviation in a normal distribution
_OF_MAD = 1.4826
_MIN_SHARE = 0.01
"""Least deviation as a share of the median: without it losses that are equal to the last digit would make every change a spike."""

AnomalyKind = Literal["", "not-finite", "spike"]
"""How a step's loss or gradient norm was anomalous; empty: it was normal."""


@dataclass(frozen=True, slots=True)
class RecentValues:
    """The finite values of the last steps."""

    values: tuple[float, ...] = ()
    """Oldest first, at most `WINDOW_STEPS`."""

    def with_value(self, value: float) -> RecentValues:
        """Adds the newest value; NaN and infinite values are left out."""
        return RecentValues((*self.values, value)[-WINDOW_STEPS:]) if math.isfinite(value) else self

    def spike_limit(self) -> float | None:
        """Returns the highest value that is no spike; None while there are too few steps or all values are 0."""
        if len(self.values) < MIN_STEPS:
            return None
        median = statistics.median(self.values)
        deviation = _OF_MAD * statistics.median(abs(value - median) for value in self.values)
        # constant losses have a deviation of 0, which would make any change a spike
        deviation = max(deviation, _MIN_SHARE * abs(median))
        return median + DEVIATIONS * deviation if deviation > 0 else None


def describe_spike(name: str, value: float, earlier: RecentValues) -> str:
    """Describes a spike in a sentence; empty if the value is none.

    Args:
        name: The quantity's name, as `loss`.
        value: Its value in the present step; one that is not finite is a spike as soon as there is a limit.
        earlier: The values of earlier steps.
    """
    limit = earlier.spike_limit()
    if limit is None or value <= limit:
        return ""
    median = statistics.median(earlier.values)
    return f"{name} is {value:.4g}: the median of the last {len(earlier.values)} steps is {median:.4g}, and more than {limit:.4g} is a spike"


@dataclass(frozen=True, slots=True)
class AnomalyRun:
    """The newest unbroken run of steps with a loss anomaly."""

    last_step: int = 0
    """Newest step of the run; 0: no step was anomalous."""
    first_step: int = 0
    """First step of the run; 0: no step was anomalous."""
    kind: AnomalyKind = ""
    """Worst anomaly in the run: a value that is not finite is worse than a spike."""
    text: str = ""
    """Description of the newest anomaly, with its numbers."""

    @classmethod
    def from_stored_values(cls, values: Mapping[str, Any]) -> AnomalyRun:
        """Reads the run that a checkpoint stores; an empty mapping means no anomaly."""
        fields = {name: values[name] for name in ("last_step", "first_step", "kind", "text") if name in values}
        return cls(**fields)

    @property
    def stored_values(self) -> dict[str, Any]:
        """The run as a checkpoint stores it; empty without an anomaly."""
        return asdict(self) if self.last_step else {}

    @property
    def progress_fields(self) -> dict[str, Any]:
        """The run as keyword arguments of `Progress`."""
        return {
            "anomaly_step": self.last_step,
            "anomaly_since_step": self.first_step,
            "anomaly_kind": self.kind,
            "anomaly_text": self.text,
        }

    def with_step(self, step: int, kind: AnomalyKind, text: str) -> AnomalyRun:
        """Adds an anomalous step, which extends the run if it follows it directly; an empty `kind` changes nothing."""
        if not kind:
            return self
        extends_run = self.last_step == step - 1
        worst_kind: AnomalyKind = "not-finite" if extends_run and self.kind == "not-finite" else kind
        return AnomalyRun(step, self.first_step if extends_run else step, worst_kind, text)


NO_ANOMALIES = AnomalyRun()
"""The run of a training without any anomalous step yet."""


# ---- activity of a rank ----------------------------------------------------------------------------------------------
# Counts how often a rank is observed working rather than waiting for other ranks. Steps of synchronous training end on
# all ranks at once, so their length does not show which rank is slow: it is the one that seldom waits while all others
# wait for it. Trainers count, the operator compares.


class RankActivity(NamedTuple):
    """Observations of one rank's main thread, as totals of one generation; two totals make a window.

    A tuple, because a message carries one for each rank and field names would be most of its length.
    """

    rank: int
    """Global rank."""
    work: int
    """Size of the rank's work (elements of its model): only ranks with equal work are compared."""
    observations: int
    """How often the rank was observed."""
    busy_observations: int
    """Observations in which it worked and did not wait for other ranks."""
    samples: int
    """Samples that it consumed; 0: unknown."""
    lines: tuple[tuple[int, int, int], ...] = ()
    """Busy observations by place: line in the training loop, line in the function called there (0: none), count.

    Line 0 counts all other places. Work that all ranks do, such as loading data, is left out.
    """

    @property
    def share(self) -> float:
        """Ratio of observations (0 to 1) in which the rank waited for no other; 0 without observations."""
        return self.busy_observations / self.observations if self.observations else 0.0


def subtract_activity(earlier: RankActivity, current: RankActivity) -> RankActivity | None:
    """Returns the activity between two totals; None if they are not of the same count, as after a restart."""
    if (earlier.rank, earlier.work) != (current.rank, current.work):
        return None
    observations, busy_observations, samples = (
        current.observations - earlier.observations,
        current.busy_observations - earlier.busy_observations,
        current.samples - earlier.samples,
    )
    # totals only grow: a smaller one belongs to a restarted rank
    if min(observations, busy_observations, observations - busy_observations, samples) < 0:
        return None
    earlier_counts = count_observations_by_line((earlier,))
    lines = (
        (*line, count - earlier_counts.get(line, 0)) for line, count in count_observations_by_line((current,)).items()
    )
    return RankActivity(
        current.rank,
        current.work,
        observations,
        busy_observations,
        samples,
        tuple(entry for entry in lines if entry[-1] > 0),
    )


def add_activities(first: RankActivity, second: RankActivity) -> RankActivity:
    """Adds two windows of the same rank."""
    return RankActivity(
        first.rank, first.work, first.observations + second.observations, first.busy_observations + second.busy_observations, first.samples + second.samples,
        tuple((*line, count) for line, count in sorted(count_observations_by_line((first, second)).items())),
    )  # fmt: skip


def count_observations_by_line(activities: Iterable[RankActivity]) -> dict[tuple[int, int], int]:
    """Counts the busy observations of several ranks by place: line in the loop, line in the called function."""
    counts: dict[tuple[int, int], int] = {}
    for activity in activities:
        for line, callee_line, count in activity.lines:
            counts[line, callee_line] = counts.get((line, callee_line), 0) + count
    return counts


# ---- progress --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of one rank, or of all ranks of one worker, in the current generation."""

    step: int = 0
    """Last finished step; for a worker, the last one that all its ranks finished; 0: none."""
    loss: float | None = None
    """Training loss of the newest step that reported one; None: none was reported yet."""
    step_seconds: float | None = None
    """Duration of the last step; None: no step was measured yet."""
    restored: bool = False
    """Whether the rank has finished restoring its checkpoint, or had none to restore."""
    interval_exponent: int = 0
    """The rank saves every base interval × 2^interval_exponent steps; above 0 saving has backed off."""
    stall_seconds: float | None = None
    """How long the last save blocked training; None: nothing was saved yet."""
    restored_from: str | None = None
    """Tiers that the restored bytes came from, a value of `protocol.checkpoints.save_state`; None before the restore."""
    save_bytes: int = 0
    """Size of one save; 0: not yet known."""
    no_staging_reason: str = ""
    """Why a rank has no memory for staging its saves; empty: every rank has it."""
    closed_steps: ClosedSteps = NO_CLOSED_STEPS
    """Steps for which the worker can make no further save."""
    exited_ranks: tuple[int, ...] = ()
    """Ranks that exited with code 0. Reported before their peers can fail on the closed connections, so that such a
    failure is traced to this exit."""
    loss_is_finite: bool | None = None
    """Whether every rank's loss was finite in the last step that reported one; None: no step has reported a loss."""
    epochs: float | None = None
    """Data epochs consumed, with the fraction of the present one; for a worker, the mean of its ranks; None: unknown."""
    step_samples: int | None = None
    """Samples that the last step consumed; for a worker, the sum of its ranks; None: unknown."""
    pause_reason: str = ""
    """Why the script expects no steps now, in its own words ("evaluation"); empty: steps are expected."""
    pause_seconds: float | None = None
    """Longest duration of the pause that the script announced; None: no limit was announced."""
    anomaly_step: int = 0
    """Newest step whose loss or gradient norm was not finite or a spike; 0: none."""
    anomaly_since_step: int = 0
    """First step of the unbroken run of anomalous steps that ends at `anomaly_step`; 0: none."""
    anomaly_kind: AnomalyKind = ""
    """Kind of the anomaly at `anomaly_step`; for a worker, the worst of its ranks; empty: none."""
    anomaly_text: str = ""
    """Description of the anomaly at `anomaly_step`, with its numbers; empty: none."""
    final_save_step: int = 0
    """Step whose state the program saved or tried to save as it ended, for a worker the lowest of its ranks; 0: none."""
    activities: tuple[RankActivity, ...] = ()
    """Activity totals of the ranks in this generation; empty: nothing new since the last report."""

    def merge_over(self, earlier: Progress) -> Progress:
        """Merges this report over an earlier one of the same generation.

        Steps and restores are never taken back. A loss, step time, sample count or data pass that is None here stays.
        """
        merged: dict[str, Any] = {
            "step": max(self.step, earlier.step),
            "restored": self.restored or earlier.restored,
            "restored_from": self.restored_from or earlier.restored_from,
            "step_seconds": earlier.step_seconds if self.step_seconds is None else self.step_seconds,
            "loss": earlier.loss if self.loss is None else self.loss,
            "loss_is_finite": earlier.loss_is_finite if self.loss_is_finite is None else self.loss_is_finite,
            "epochs": earlier.epochs if self.epochs is None else self.epochs,
            "step_samples": earlier.step_samples if self.step_samples is None else self.step_samples,
        }
        if all(getattr(self, name) == value for name, value in merged.items()):
            return self  # the usual case, and cheaper than a copy
        return replace(self, **merged)


NO_PROGRESS = Progress()
"""The progress of a generation that has just started."""


def merge_rank_progress(ranks: Sequence[Progress]) -> Progress:
    """Merges the progress of one worker's ranks; fields not merged below, such as times, are the first rank's."""
    if not ranks:
        return NO_PROGRESS
    loss_checks = [rank.loss_is_finite for rank in ranks if rank.loss_is_finite is not None]
    # a value that is not finite outweighs a spike, whichever is newer
    worst = max(ranks, key=lambda rank: (rank.anomaly_kind == "not-finite", rank.anomaly_step))
    samples = [rank.step_samples for rank in ranks if rank.step_samples is not None]
    return replace(
        ranks[0],
        step=min(rank.step for rank in ranks),
        interval_exponent=max(rank.interval_exponent for rank in ranks),
        closed_steps=min((rank.closed_steps for rank in ranks), key=lambda closed: closed.closed_up_to),
        loss_is_finite=all(loss_checks) if loss_checks else None,
        epochs=mean_epochs(ranks),
        step_samples=sum(samples) if samples else None,
        anomaly_step=max(rank.anomaly_step for rank in ranks),
        anomaly_since_step=worst.anomaly_since_step,
        anomaly_kind=worst.anomaly_kind,
        anomaly_text=worst.anomaly_text,
        final_save_step=min(rank.final_save_step for rank in ranks),
        activities=tuple(activity for rank in ranks for activity in rank.activities),
    )


def mean_epochs(reports: Sequence[Progress]) -> float | None:
    """Averages the consumed data epochs of ranks or workers; None if none reports any."""
    epochs = [report.epochs for report in reports if report.epochs is not None]
    return sum(epochs) / len(epochs) if epochs else None
