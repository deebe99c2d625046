"""Watches one child process by its pidfd, so that its exit is noticed at once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable

_CODE_SECONDS = 1.0
"""How long to wait for the exit code from the process that reaps the child; if that has ended, SIGKILL is assumed."""
_LIVING_SECONDS = 10.0
"""The same while the reaping process runs: on a busy machine it may be slow, and "killed" would be wrong."""


class Child:
    """Watches a child; `exited` resolves with its exit code (−N for signal N) once it has ended.

    `forget` is called with the pid then; `reaper_lives` returns whether the process that reaps it can still report the code.
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
        self._assumption_timer: asyncio.TimerHandle | None = None
        try:
            self._pidfd: int | None = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended and was reaped already: its code will be reported
            self._pidfd = None
            self._await_exit_code()
        else:
            asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)

    def kill(self) -> None:
        """Sends SIGKILL, since a process inside a gloo collective handles no other signal."""
        if self._pidfd is not None and not self.exited.done():
            try:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has just ended

    def set_exit_code(self, code: int) -> None:
        """Sets the exit code, as reported by the process that reaped the child."""
        if self._assumption_timer is not None:
            self._assumption_timer.cancel()
        self._close()
        self._forget(self.pid)
        if not self.exited.done():
            self.exited.set_result(code)

    def _on_exit(self) -> None:
        self._close()
        self._await_exit_code()

    def _await_exit_code(self) -> None:
        loop = asyncio.get_running_loop()
        self._assumption_timer = loop.call_later(_CODE_SECONDS, self._assume_killed, loop.time() + _LIVING_SECONDS)

    def _assume_killed(self, deadline_seconds: float) -> None:
        """Waits longer while the reaping process runs; else assumes that the child was killed together with it."""
        loop = asyncio.get_running_loop()
        if self._reaper_lives() and loop.time() < deadline_seconds:
            self._assumption_timer = loop.call_later(_CODE_SECONDS, self._assume_killed, deadline_seconds)
        else:
            self.set_exit_code(-int(signal.SIGKILL))

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

    def _await_exit_code(self) -> None:
        self.set_exit_code(self._process.wait())
