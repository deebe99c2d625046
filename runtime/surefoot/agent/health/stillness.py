"""Measures for how long this process stood still.

Used by `pair_check`. A machine that is paused, and a process that is stopped, sees others' time run out: what a deadline says then is
said of the pause, and not of the node that was waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

TICK_SECONDS = 0.25


class Stillness:
    """Ticks on the event loop from `async with` to its end.

    `longest_seconds` is the worst delay of a tick.
    """

    def __init__(self) -> None:
        self.longest_seconds = 0.0
        self._ticking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._ticking = asyncio.create_task(self._tick(asyncio.get_running_loop().time() + TICK_SECONDS))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking

    async def _tick(self, due: float) -> None:
        """`due` is of the first tick: this task may begin late, too."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                await asyncio.sleep(TICK_SECONDS)
            finally:  # a deadline may end the wait in the same turn of the loop that comes late
                self.longest_seconds = max(self.longest_seconds, loop.time() - due)
            due = loop.time() + TICK_SECONDS
