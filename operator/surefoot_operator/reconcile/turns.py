"""Lets jobs reconcile in turns, with room for everything else in between.

Made by the composition root, shared by each job's `build_snapshot`. A thousand rounds that wait for nothing would otherwise
follow each other within one pass of the event loop: for seconds no lease is renewed, no agent heard, no probe answered.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

SLICE_SECONDS = 0.02
"""Rounds begin for so long in one pass of the event loop; the round that is begun last may take longer."""


class Turns:
    """Limits rounds under way to `at_once`.

    In one pass of the event loop only a slice of them begins.
    """

    def __init__(self, at_once: int = 1, slice_seconds: float = SLICE_SECONDS) -> None:
        self._places, self._slice_seconds = asyncio.Semaphore(at_once), slice_seconds
        self._began: float | None = None
        """When the first round of the present pass began."""

    async def __aenter__(self) -> None:
        await self._places.acquire()
        try:
            while not self._may_begin():  # noqa: ASYNC110  the next pass is what is waited for, and it comes at once
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._places.release()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._places.release()

    def _may_begin(self) -> bool:
        loop = asyncio.get_running_loop()
        if self._began is None:
            self._began = loop.time()
            loop.call_soon(self._pass_over)  # behind all that is ready in this pass
            return True
        return loop.time() - self._began < self._slice_seconds

    def _pass_over(self) -> None:
        self._began = None
