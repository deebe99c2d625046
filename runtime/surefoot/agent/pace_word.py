"""Says how often ranks were found at work, now and then.

Used by the agent's `agent_process`. Totals say in seconds what they would say in every heartbeat: of a node of eight ranks they
would be most of it.
"""

from __future__ import annotations

from surefoot.protocol.rank_pace import RankPace

PACE_SECONDS = 2.0
"""From word to word."""


class PaceWord:
    """Lets totals through that are new, once in a while."""

    def __init__(self) -> None:
        self._told: tuple[RankPace, ...] = ()
        self._at: float | None = None

    def due(self, paces: tuple[RankPace, ...], now: float) -> tuple[RankPace, ...]:
        """What the heartbeat of this moment tells of `paces`; empty: nothing."""
        if paces == self._told or (self._at is not None and now - self._at < PACE_SECONDS):
            return ()
        self._told, self._at = paces, now
        return paces
