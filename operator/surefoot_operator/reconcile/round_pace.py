"""Paces one job's rounds: what is gathered, how long it sleeps.

Pure; owned by `reconcile.reconciler`. Two thousand agents that stop one after another would have the job planned for each few of
them, and the plans would take the event loop from the very words that they wait for. A thousand jobs that wait, looked at
every two seconds in case something was missed, took a third of a core to find nothing.
"""

from __future__ import annotations

GATHERING_SECONDS = 0.005
"""Several messages of one happening come within so long: they are answered by one plan."""
COSTS_GATHERED = 6.0
"""While words keep coming they are gathered for so many times what a decision takes: it leaves the loop to them meanwhile."""
MOST_GATHERING_SECONDS = 0.15
"""And no longer, whatever a decision takes: a busy machine makes it look dear."""
STILL_SECONDS = 10.0
"""A job that nobody speaks of is looked at this often: what is older than 15 s says nothing to whoever leaves a node."""
EVENED = 0.4
"""Share of such a sleep that is left to chance: a thousand that began together would be looked at together for all time, and
whoever is spoken of meanwhile would wait behind them."""


class RoundPace:
    """Remembers the last decision's cost and the looks that found nothing."""

    def __init__(self) -> None:
        self._decision_seconds = 0.0
        self._still = 0

    def decided(self, seconds: float) -> None:
        """Takes note of how long the newest decision took."""
        self._decision_seconds = seconds

    def looked(self, heard: bool, still: bool) -> None:
        """Counts the looks in a row that found nothing.

        Args:
            heard: Somebody had said something since the last.
            still: The look changed nothing and had nothing done.
        """
        self._still = 0 if heard or not still else self._still + 1

    @property
    def gathering_seconds(self) -> float:
        """How long words that keep coming are gathered."""
        return max(GATHERING_SECONDS, min(COSTS_GATHERED * self._decision_seconds, MOST_GATHERING_SECONDS))

    def sleep_seconds(self, longest_seconds: float, chance: float) -> float:
        """Returns how long to sleep if nothing is heard.

        `longest_seconds`, and twice as long after each look that found nothing, up to STILL_SECONDS; the last of it as
        `chance`, between 0 and 1, has it.
        """
        still = min(longest_seconds * 2.0 ** min(self._still, 10), STILL_SECONDS)
        return max(longest_seconds, still * (1.0 - EVENED * chance))
