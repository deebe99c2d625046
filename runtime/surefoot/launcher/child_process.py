"""Watches one child process by pidfd: its death is seen at once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable

_CODE_SECONDS = 1.0
"""How long after a death the exit code may take to come from whoever reaps, and may be dead itself."""
_LIVING_SECONDS = 10.0
"""How long it may take while whoever reaps lives: on a busy machine a second is nothing, and "killed" is a false word."""


class Child:
    """`exited` resolves with the exit code (−N for signal N) once the process is dead.

    `reaper_lives`: whether whoever reaps it can still tell the code.
    """

    def __init__(
        self,
        pid: int,
        forget: Callable[[int], None] = lambda pid: None,
        reaper_lives: Callable[[], bool] = lambda: False,
    ) -> None:
        self.pid = pid
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._forget, self._reaper_lives = forget, reaper_lives
        self._late: asyncio.TimerHandle | None = None
        try:
            self._pidfd: int | None = os.pidfd_open(pid)
        except ProcessLookupError:  # died and was reaped already: its code is on the way
            self._pidfd = None
            self._await_code()
        else:
            asyncio.get_running_loop().add_reader(self._pidfd, self._died)

    def kill(self) -> None:
        """SIGKILL; never anything gentler, because a gloo collective hears nothing gentler."""
        if self._pidfd is not None and not self.exited.done():
            try:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it was faster

    def has_code(self, code: int) -> None:
        """Sets the exit code that whoever reaped the child reports."""
        if self._late is not None:
            self._late.cancel()
        self._close()
        self._forget(self.pid)
        if not self.exited.done():
            self.exited.set_result(code)

    def _died(self) -> None:
        self._close()
        self._await_code()

    def _await_code(self) -> None:
        loop = asyncio.get_running_loop()
        self._late = loop.call_later(_CODE_SECONDS, self._assume, loop.time() + _LIVING_SECONDS)

    def _assume(self, deadline_seconds: float) -> None:
        """Without its reaper it was killed together with it; a reaper that lives is given time."""
        loop = asyncio.get_running_loop()
        if self._reaper_lives() and loop.time() < deadline_seconds:
            self._late = loop.call_later(_CODE_SECONDS, self._assume, deadline_seconds)
        else:
            self.has_code(-int(signal.SIGKILL))

    def _close(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None


class OwnChild(Child):
    """A direct child of the agent, which reaps it itself."""

    def __init__(self, process: subprocess.Popen[bytes], forget: Callable[[int], None]) -> None:
        self._process = process
        super().__init__(process.pid, forget)

    def _await_code(self) -> None:
        self.has_code(self._process.wait())
