"""Waits for a tier that is silent, for as long as the steps at stake are worth.

The rule is pure. A start that gave up after a moment of throttling would repeat steps that nobody had lost; one that
waited for ever would stand before a disk that is broken.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TypeVar

from surefoot.errors import TierUnavailable
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.timeouts import Backoff

log = logging.getLogger(__name__)
T = TypeVar("T")

MIN_SECONDS, MAX_SECONDS = 10.0, 900.0
AWAY_SECONDS = 20.0
"""For a tier that says nothing at all: no step is lost where the start then fails."""
MISSING_SECONDS = 10.0
"""For a checkpoint that its record names and no listing shows: caches of listings live for seconds."""
UNKNOWN_STEP_SECONDS = 1.0
_MAX_STEPS = 10**9
"""A number from a folder's name: a larger one would not even fit a float."""
_WAITS = Backoff(0.5, 10.0)


def worth_seconds(lost_steps: int, step_seconds: float | None) -> float:
    """How long to wait before so many steps are done again: as long as they took, within bounds."""
    if step_seconds is None or not math.isfinite(step_seconds) or step_seconds <= 0:
        step_seconds = UNKNOWN_STEP_SECONDS
    return min(MAX_SECONDS, max(MIN_SECONDS, min(lost_steps, _MAX_STEPS) * step_seconds))


def step_seconds_of(manifests: Iterable[RankManifest]) -> float | None:
    """Seconds a step took between the last two saves of one epoch; None where there are no two."""
    by_epoch: dict[int, dict[int, float]] = defaultdict(dict)
    for manifest in manifests:
        by_epoch[manifest.save.epoch][manifest.save.step] = manifest.saved_at
    for _, saved_at in sorted(by_epoch.items(), reverse=True):
        if len(saved_at) > 1:
            (first, began), (last, ended) = sorted(saved_at.items())[-2:]
            return (ended - began) / (last - first)
    return None


class Patience:
    """Waits between two looks, and logs whenever the time waited has doubled."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._began: float | None = None
        self._tries, self._next_line = 0, 0.0

    def wait(self, reason: str, seconds: float) -> bool:
        """Waits for a moment; False once `seconds` have passed since the first call."""
        now = self._clock()
        self._began = now if self._began is None else self._began
        spent = now - self._began
        if spent >= seconds:
            return False
        if spent >= self._next_line:
            log.warning("%s: retried for up to %.0f s, %.0f s have passed", reason, seconds, spent)
            self._next_line = max(1.0, 2 * spent)
        self._tries += 1
        self._sleep(min(_WAITS.seconds(self._tries, random.random()), seconds - spent))
        return True


def answered(place: str, read: Callable[[], T]) -> T:
    """Asks a tier until it answers; raises its last word where that takes too long."""
    patience = Patience()
    while True:
        try:
            return read()
        except TierUnavailable as away:
            if not patience.wait(f"{place} does not answer: {away}", AWAY_SECONDS):
                raise
