"""A leader's own clock: some seconds wrong from its start, and too fast or too slow while that lasts."""

from __future__ import annotations

from simulator.engine import Engine


class LeaderClock:
    """Shows time that never goes back."""

    def __init__(self, engine: Engine, skew_seconds: float, drift: float) -> None:
        self._engine = engine
        self._shown, self._since, self._rate = engine.now + skew_seconds, engine.now, 1.0 + drift

    def read(self) -> float:
        """Seconds by it, never below 0."""
        return max(0.0, self._shown + (self._engine.now - self._since) * self._rate)

    def drift(self, drift: float) -> None:
        """From now on it goes by that share faster than time; it does not jump."""
        self._shown, self._since, self._rate = self.read(), self._engine.now, 1.0 + drift
