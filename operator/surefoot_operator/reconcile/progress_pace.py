"""Bounds how often statuses that only report progress are written.

Made by the composition root, shared by each job's `build_snapshot`. Each job by itself writes progress seconds apart; a thousand
jobs whose pods come at once still wrote hundreds of statuses a second, which kept the API server from making the pods.
"""

from __future__ import annotations

RETRY_SECONDS = 1.0
"""Whoever may not write now asks again after so long, with what has become of it meanwhile."""


class ProgressPace:
    """Allows so many writes a second, and a burst after a pause.

    Of all jobs together.
    """

    def __init__(self, per_second: float = 30.0, burst: int = 60) -> None:
        self._per_second, self._burst = per_second, float(burst)
        self._left, self._counted_at = float(burst), float("-inf")

    def wait_seconds(self, now: float) -> float:
        """Returns 0 if one may write now, else the wait.

        Args:
            now: Seconds of a clock that only grows.
        """
        self._left = min(self._burst, self._left + max(0.0, now - self._counted_at) * self._per_second)
        self._counted_at = now
        if self._left < 1.0:
            return RETRY_SECONDS
        self._left -= 1.0
        return 0.0
