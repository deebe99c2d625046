"""Chooses lazy or eager copies by their measured cost.

Behind it they cost a digest in the call and whatever nobody found the time for until the next optimizer step. Where no
core is to spare that is all of them, and the dearer copy at that: copying inside the call, with the cores that the
training leaves idle there, then holds it up for less. Pure; times are given. Used by `stager`.
"""

from __future__ import annotations

LEAST_BYTES = 8 * 1024 * 1024
"""Below this the times say nothing, and copies stay behind."""

TRY_EVERY = 16
"""One in so many saves tries the other way: a neighbour that left has freed a core, one that came has taken it."""


class Timing:
    """Keeps the last measured cost of either way, in seconds per byte."""

    def __init__(self) -> None:
        self._behind: float | None = None
        self._inside: float | None = None
        self._saves = 0

    def choose(self, size_bytes: int) -> bool:
        """Whether the next save copies so many bytes behind the training."""
        self._saves += 1
        if size_bytes < LEAST_BYTES or self._behind is None:
            return True
        if self._inside is None:
            return False
        return (self._behind <= self._inside) != (self._saves % TRY_EVERY == 0)

    def saw(self, behind: bool, size_bytes: int, call_seconds: float, join_seconds: float) -> None:
        """Records a save's cost in the call and before the next step.

        Lazy copies that ended in time are not compared until eager ones were measured: their cost is less than any
        copy's.
        """
        if size_bytes < LEAST_BYTES:
            return
        if not behind:
            self._inside = call_seconds / size_bytes
        elif self._inside is not None or join_seconds > call_seconds:
            self._behind = (call_seconds + join_seconds) / size_bytes
