"""Judges a step's loss, or gradient norm, by the steps before it.

Pure; trainers judge each of their steps by it. A fixed limit would miss a loss that doubles at 2 and call every first
step at 11 a spike; mean and standard deviation would be moved by the very spike that they should show.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

WINDOW_STEPS = 64
"""Steps that a value is compared with. What has lasted for half of them is the new normal."""

FEWEST_STEPS = 16
"""Of fewer nothing is said: the first steps of a training fall by more than anything later rises."""

DEVIATIONS = 10.0
"""Robust standard deviations above the median from which on a value is out of band."""

_OF_MAD = 1.4826  # of a normal distribution: standard deviation over median absolute deviation
_LEAST_SHARE = 0.01
"""A deviation is at least this share of the median: losses that are equal to the last digit have none."""

Oddity = Literal["", "not-finite", "spike"]
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
        if len(self.values) < FEWEST_STEPS:
            return None
        median = statistics.median(self.values)
        deviation = _OF_MAD * statistics.median(abs(value - median) for value in self.values)
        deviation = max(deviation, _LEAST_SHARE * abs(median))
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
class OddSteps:
    """The newest unbroken run of odd steps; `last` 0: there was none."""

    last: int = 0
    since: int = 0
    kind: Oddity = ""
    text: str = ""

    @classmethod
    def of_saved(cls, values: Mapping[str, Any]) -> OddSteps:
        """Reads what a checkpoint says of steps before it.

        One of an older version says nothing.
        """
        found = {name: values[name] for name in ("last", "since", "kind", "text") if name in values}
        return cls(**found)

    @property
    def saved(self) -> dict[str, Any]:
        """The same as plain values; none if no step was odd."""
        return asdict(self) if self.last else {}

    @property
    def told(self) -> dict[str, Any]:
        """The same as fields of `Progress`."""
        return {"odd_step": self.last, "odd_since": self.since, "odd_kind": self.kind, "odd_text": self.text}

    def followed_by(self, step: int, kind: Oddity, text: str) -> OddSteps:
        """Adds a step; a run has the worst kind of its steps."""
        if not kind:
            return self
        goes_on = self.last == step - 1
        worst: Oddity = "not-finite" if goes_on and self.kind == "not-finite" else kind
        return OddSteps(step, self.since if goes_on else step, worst, text)


NONE_ODD = OddSteps()
"""Of a run that has just begun."""
