"""Prints whole lines to the terminal without control characters."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

from surefoot.protocol.text import escape_control_characters


def say(line: str) -> None:
    """Prints a line to standard output and flushes it."""
    print(escape_control_characters(line), flush=True)


def clock() -> str:
    """The time of day that stands before a line."""
    return time.strftime("%H:%M:%S")


def warn(line: str) -> None:
    """Prints a line to standard error."""
    print(escape_control_characters(line), file=sys.stderr, flush=True)


# ---- cli errors ------------------------------------------------------------------------------------------------------
# Defines the errors that end a command, and its exit codes.

EXIT_OK = 0
EXIT_FAILED = 1
"""The job, or the run under it, failed."""
EXIT_USAGE = 2
"""What was asked cannot be: nothing was started."""
EXIT_DIFFERS = 3
"""The job completed, and samples were lost, repeated or not recorded, or the comparison could not be made."""
EXIT_INTERRUPTED = 130


class RunError(Exception):
    """The run cannot continue; its processes have ended before this is printed."""


class UsageError(Exception):
    """The request cannot be met; nothing was started."""


# ---- stop request ----------------------------------------------------------------------------------------------------
# Delivers Ctrl-C, SIGTERM and SIGHUP to long-running commands as a flag that their loops read. The interpreter raises
# KeyboardInterrupt wherever the main thread happens to be. Inside a `__del__` or a callback of a library that exception
# is printed and dropped, and the command runs on (seen in redis-py's `AbstractConnection.__del__`, 6 of 400 signals). A
# flag cannot be dropped.

Handler = Callable[[int, FrameType | None], object] | signal.Handlers


class StopRequest:
    """Whether the user asked this command to stop, and a wait that such a request ends early."""

    def __init__(self) -> None:
        self._wakeup_fd, self._signal_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.requested = False

    def wait(self, seconds: float) -> bool:
        """Waits `seconds`, or until a stop is requested; returns whether one is."""
        if not self.requested:
            select.select([self._wakeup_fd], [], [], seconds)
        return self.requested

    def raise_if_requested(self) -> None:
        """Raises KeyboardInterrupt at a place that the caller chose, where nothing can swallow it."""
        if self.requested:
            raise KeyboardInterrupt

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal: sets the flag.

        A second signal raises KeyboardInterrupt at once, for a user whose command is stuck in a call that does not return.
        """
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        os.write(self._signal_fd, b"!")

    def close(self) -> None:
        os.close(self._wakeup_fd)
        os.close(self._signal_fd)


_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turns SIGINT, SIGTERM and SIGHUP into a StopRequest while the context lasts; main thread only.

    A signal that the parent process had this command ignore stays ignored: `nohup` and a shell's `&` mean it.
    """
    request = StopRequest()
    heeded = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    try:
        with _handled_by(request.on_signal, heeded):
            yield request
    finally:
        request.close()


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignores stop signals while the context lasts.

    A second Ctrl-C must not stop the clean-up that the first one began.
    """
    with _handled_by(signal.SIG_IGN, _STOP_SIGNALS):
        yield


@contextlib.contextmanager
def _handled_by(handler: Handler, numbers: Iterable[signal.Signals]) -> Iterator[None]:
    former = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in former.items():
            signal.signal(number, before)
