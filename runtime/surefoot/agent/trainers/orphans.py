"""Reaps and kills the processes that ended trainers leave behind.

The kernel hands them to the agent, which is a subreaper. A data loader's worker may linger harmlessly, but a
torchrun's workers train and write into staging memory: a worker counts as stopped only when they are gone too. Used by
`supervisor` when an epoch's last rank has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable

from surefoot import metrics
from surefoot.linux_process import children

_SWEEP_SECONDS = 10.0
_LOOK_SECONDS = 0.01
_log = logging.getLogger(__name__)


class Orphans:
    """Treats every child process that is not in `own` as an orphan."""

    def __init__(self, own: Callable[[], set[int]]) -> None:
        self._own = own

    def reap(self) -> set[int]:
        """Buries the dead ones; those that live."""
        living: set[int] = set()
        for pid in children(os.getpid()) - self._own():
            try:
                dead, _ = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue
            if not dead:
                living.add(pid)
        return living

    async def sweep(self) -> None:
        """Kills every orphan, and what becomes one thereby, until none is left."""
        deadline = time.monotonic() + _SWEEP_SECONDS
        while living := self.reap():
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                metrics.fallbacks.labels(what="orphans_left").inc()
                _log.error("processes %s of ended trainers do not die: the kernel holds them", sorted(living))
                return
            await asyncio.sleep(_LOOK_SECONDS)
