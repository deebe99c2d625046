"""Turns agents' tier failures into events, without repeats.

Whoever failed is asked again within seconds, for as long as it takes. Called by `loop` once a round; pure but for
what it remembers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from surefoot_operator.names import TIER_FAILED
from surefoot_operator.policy.actions import Event

log = logging.getLogger(__name__)

QUIET_SECONDS = 60.0
MOST_TOLD = 3
"""Events within that time. A tier that is gone fails for every rank of the world, and one of them says why."""


class TierFailureEvents:
    """One job's."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}

    def events(self, sentences: Iterable[str], now: float) -> tuple[Event, ...]:
        """Those that are news."""
        self._told = {sentence: at for sentence, at in self._told.items() if now - at < QUIET_SECONDS}
        events = []
        for sentence in sentences:
            if sentence in self._told or len(self._told) >= MOST_TOLD:
                log.debug("%s", sentence)
                continue
            self._told[sentence] = now
            events.append(Event(TIER_FAILED, sentence, warning=True))
        return tuple(events)
