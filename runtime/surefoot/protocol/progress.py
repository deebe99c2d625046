"""Defines a rank's progress in one epoch, from trainer to operator.

Pure. A field of it is written by whoever knows it, merged over a worker's ranks here, and read by whoever decides;
everything between passes the value on whole. A reset is `Progress()`: a field that a reset forgets would describe an
older world.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from surefoot.protocol.checkpoints.save_state import NO_CLOSED_STEPS, ClosedSteps

# ---- loss anomalies --------------------------------------------------------------------------------------------------
# Judges a step's loss, or gradient norm, by the steps before it. Pure; trainers judge each of their steps by it. A
# fixed limit would miss a loss that doubles at 2 and call every first step at 11 a spike; mean and standard deviation
# would be moved by the very spike that they should show.

WINDOW_STEPS = 64
"""Steps that a value is compared with. What has lasted for half of them is the new normal."""

MIN_STEPS = 16
"""Of fewer nothing is said: the first steps of a training fall by more than anything later rises."""

DEVIATIONS = 10.0
"""Robust standard deviations above the median from which on a value is out of band."""

_OF_MAD = 1.4826  # of a normal distribution: standard deviation over median absolute deviation
_MIN_SHARE = 0.01
"""A deviation is at least this share of the median: losses that are equal to the last digit have none."""

AnomalyKind = Literal["", "not-finite", "spike"]
"""What is wrong with a step's numbers; empty: nothing."""


@dataclass(frozen=True, slots=True)
class RecentValues:
    """The finite values of the last steps, oldest first."""

    values: tuple[float, ...] = ()

    def followed_by(self, value: float) -> RecentValues:
        """Adds the newest value; one that is no number is left out."""
        return RecentValues((*self.values, value)[-WINDOW_STEPS:]) if math.isfinite(value) else self

    def limit(self) -> float | None:
        """The upper end of the band; None: not known yet."""
        if len(self.values) < MIN_STEPS:
            return None
        median = statistics.median(self.values)
        deviation = _OF_MAD * statistics.median(abs(value - median) for value in self.values)
        deviation = max(deviation, _MIN_SHARE * abs(median))
        return median + DEVIATIONS * deviation if deviation > 0 else None


def spike_text(name: str, value: float, before: RecentValues) -> str:
    """Says how far a value is out of band, if it is.

    Args:
        name: Of the value, for the sentence.
        value: Of the present step; what is not finite is out of any band that is known.
        before: Those of earlier steps.
    """
    limit = before.limit()
    if limit is None or value <= limit:
        return ""
    median = statistics.median(before.values)
    return f"{name} {value:.4g}, where the last {len(before.values)} steps had a median of {median:.4g} and at most {limit:.4g} is in band"


@dataclass(frozen=True, slots=True)
class AnomalyRun:
    """The newest unbroken run of odd steps; `last` 0: there was none."""

    last: int = 0
    since: int = 0
    kind: AnomalyKind = ""
    text: str = ""

    @classmethod
    def of_saved(cls, values: Mapping[str, Any]) -> AnomalyRun:
        """Reads what a checkpoint says of steps before it; nothing if none was odd."""
        found = {name: values[name] for name in ("last", "since", "kind", "text") if name in values}
        return cls(**found)

    @property
    def saved(self) -> dict[str, Any]:
        """The same as plain values; none if no step was odd."""
        return asdict(self) if self.last else {}

    @property
    def progress_fields(self) -> dict[str, Any]:
        """The same as fields of `Progress`."""
        return {"odd_step": self.last, "odd_since": self.since, "odd_kind": self.kind, "odd_text": self.text}

    def followed_by(self, step: int, kind: AnomalyKind, text: str) -> AnomalyRun:
        """Adds a step; a run has the worst kind of its steps."""
        if not kind:
            return self
        goes_on = self.last == step - 1
        worst: AnomalyKind = "not-finite" if goes_on and self.kind == "not-finite" else kind
        return AnomalyRun(step, self.since if goes_on else step, worst, text)


NO_ANOMALIES = AnomalyRun()
"""Of a run that has just begun."""


# ---- activity of a rank ----------------------------------------------------------------------------------------------
# Counts how often a rank is found at work of its own. Pure; trainers tell it, the operator compares. Steps of
# synchronous training end for all ranks at once, so their length tells nobody who is slow: the slow one is who seldom
# waits while all others wait for it.


class RankActivity(NamedTuple):
    """Looks at one rank's main thread, as totals of an epoch.

    Two of them make a window. A tuple, as messages carry one of each rank: names would be most of it.
    """

    rank: int
    work: int
    """What it works on, as a number (elements of its model): ranks of unlike work are not compared."""
    observations: int
    busy_observations: int
    """Looks that found it doing something, in place of waiting for other ranks."""
    samples: int
    """What it consumed; 0: not known."""
    lines: tuple[tuple[int, int, int], ...] = ()
    """Lines of its training loop, of the function that is called there, and how many of `own` found it so; 0 and 0: in any
    other. What all ranks do, as to load data, is left out."""

    @property
    def share(self) -> float:
        """The part of its time in which it waits for nobody."""
        return self.busy_observations / self.observations if self.observations else 0.0


def subtract(before: RankActivity, now: RankActivity) -> RankActivity | None:
    """Subtracts an earlier total; None if it is of another count."""
    if (before.rank, before.work) != (now.rank, now.work):
        return None
    looks, own, samples = (
        now.observations - before.observations,
        now.busy_observations - before.busy_observations,
        now.samples - before.samples,
    )
    if min(looks, own, looks - own, samples) < 0:
        return None
    told = line_totals((before,))
    lines = ((*line, count - told.get(line, 0)) for line, count in line_totals((now,)).items())
    return RankActivity(now.rank, now.work, looks, own, samples, tuple(one for one in lines if one[-1] > 0))


def add(one: RankActivity, other: RankActivity) -> RankActivity:
    """Adds two windows of the same rank."""
    return RankActivity(
        one.rank, one.work, one.observations + other.observations, one.busy_observations + other.busy_observations, one.samples + other.samples,
        tuple((*line, count) for line, count in sorted(line_totals((one, other)).items())),
    )  # fmt: skip


def line_totals(paces: Iterable[RankActivity]) -> dict[tuple[int, int], int]:
    """How often any of them was found in each line."""
    found: dict[tuple[int, int], int] = {}
    for pace in paces:
        for line, called, count in pace.lines:
            found[line, called] = found.get((line, called), 0) + count
    return found


# ---- progress --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of one rank, or of a worker; None: not reported yet."""

    step: int = 0
    """Last finished step; of a worker, of all its ranks."""
    loss: float | None = None
    step_seconds: float | None = None
    restored: bool = False
    interval_exponent: int = 0
    """Saving has backed off to every k·2^level steps."""
    stall_seconds: float | None = None
    """How long the last save held the training up."""
    restored_from: str | None = None
    """A word of `protocol.checkpoints.save_state`; None before."""
    save_bytes: int = 0
    """What one save takes; 0: not known yet."""
    no_staging_reason: str = ""
    """Why a rank has no memory to stage saves in; empty: each has."""
    closed_steps: ClosedSteps = NO_CLOSED_STEPS
    """Which saves are not there, and never will be."""
    exited_ranks: tuple[int, ...] = ()
    """Ranks that ended with code 0, said before anybody can be hurt by it."""
    loss_is_finite: bool | None = None
    """Whether the losses of the last step that told any are numbers, on every rank."""
    epochs: float | None = None
    """Passes over the data that are consumed, the share of the present one included; of a worker, the mean of its ranks."""
    step_samples: int | None = None
    """Samples that the last step consumed; of a worker, of all its ranks."""
    pause_reason: str = ""
    """Why no step is to be expected now, in the script's own word ("evaluation"); empty: one is."""
    pause_seconds: float | None = None
    """How long that may take, where the script said so."""
    anomaly_step: int = 0
    """The newest step whose loss or gradient norm was no number, or out of its band; 0: none."""
    anomaly_since_step: int = 0
    """The first step of the unbroken run of such steps that `odd_step` belongs to."""
    anomaly_kind: AnomalyKind = ""
    """What was wrong at `odd_step`; of a worker, the worst of its ranks."""
    anomaly_text: str = ""
    """The same for people, with the numbers."""
    final_save_step: int = 0
    """The step whose state the program had saved, or tried to, when it ended; of a worker, of all its ranks; 0: none."""
    activities: tuple[RankActivity, ...] = ()
    """How often its ranks were found at work in this epoch; empty: nothing new."""

    def merge_over(self, before: Progress) -> Progress:
        """Merges this report over an earlier one of the same epoch.

        Steps and restores are never taken back, and a loss stays until the next.
        """
        kept: dict[str, Any] = {
            "step": max(self.step, before.step),
            "restored": self.restored or before.restored,
            "restored_from": self.restored_from or before.restored_from,
            "step_seconds": before.step_seconds if self.step_seconds is None else self.step_seconds,
            "loss": before.loss if self.loss is None else self.loss,
            "loss_is_finite": before.loss_is_finite if self.loss_is_finite is None else self.loss_is_finite,
            "epochs": before.epochs if self.epochs is None else self.epochs,
            "step_samples": before.step_samples if self.step_samples is None else self.step_samples,
        }
        if all(getattr(self, name) == value for name, value in kept.items()):
            return self  # nearly always
        return replace(self, **kept)


NO_PROGRESS = Progress()
"""Of an epoch that has just begun."""


def of_worker(ranks: Sequence[Progress]) -> Progress:
    """Merges the progress of one worker's ranks.

    They step together: times are the first one's.
    """
    if not ranks:
        return NO_PROGRESS
    told = [rank.loss_is_finite for rank in ranks if rank.loss_is_finite is not None]
    odd = max(ranks, key=lambda rank: (rank.anomaly_kind == "not-finite", rank.anomaly_step))
    samples = [rank.step_samples for rank in ranks if rank.step_samples is not None]
    return replace(
        ranks[0],
        step=min(rank.step for rank in ranks),
        interval_exponent=max(rank.interval_exponent for rank in ranks),
        closed_steps=min((rank.closed_steps for rank in ranks), key=lambda settled: settled.closed_up_to),
        loss_is_finite=all(told) if told else None,
        epochs=mean_epochs(ranks),
        step_samples=sum(samples) if samples else None,
        anomaly_step=max(rank.anomaly_step for rank in ranks),
        anomaly_since_step=odd.anomaly_since_step,
        anomaly_kind=odd.anomaly_kind,
        anomaly_text=odd.anomaly_text,
        final_save_step=min(rank.final_save_step for rank in ranks),
        activities=tuple(pace for rank in ranks for pace in rank.activities),
    )


def mean_epochs(told: Sequence[Progress]) -> float | None:
    """Averages the passes of ranks or workers; None if none reports any."""
    passes = [one.epochs for one in told if one.epochs is not None]
    return sum(passes) / len(passes) if passes else None
