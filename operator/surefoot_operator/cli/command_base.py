"""Defines what all commands share: printing lines, exit codes, errors and stop requests.

Lines are printed without control characters, because they quote texts of programs and clusters.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, TextIO

from surefoot.protocol.text import escape_control_characters


def say(line: str) -> None:
    """Prints a line to standard output and flushes it."""
    print(escape_control_characters(line), flush=True)


def clock() -> str:
    """Returns the local time of day, for the start of a printed line."""
    return time.strftime("%H:%M:%S")


def warn(line: str) -> None:
    """Prints a line to standard error."""
    print(escape_control_characters(line), file=sys.stderr, flush=True)


class LastingOutput:
    """Standard output of a command that must outlive its reader, such as `| head` or a closed terminal.

    The first error of writing is reported once on standard error, and all further output is dropped.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise error
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        with contextlib.suppress(OSError):  # standard error may have gone with it
            warn("surefoot: the output has no reader any longer; the run continues, Ctrl-C stops it")


# ---- cli errors ------------------------------------------------------------------------------------------------------
# Defines the errors that end a command, and its exit codes.

EXIT_OK = 0
EXIT_FAILED = 1
"""The command, the job or a check failed."""
EXIT_USAGE = 2
"""The arguments are wrong or cannot be met; nothing was started."""
EXIT_DIFFERS = 3
"""The job completed, but samples were lost, repeated or not recorded, or the comparison was not possible."""
EXIT_INTERRUPTED = 130


class RunError(Exception):
    """The command failed. For `surefoot local`, all processes have ended before this is printed."""


class UsageError(Exception):
    """The request cannot be met; nothing was started."""


# ---- stop request ----------------------------------------------------------------------------------------------------
# Delivers Ctrl-C, SIGTERM and SIGHUP to long-running commands as a flag that their loops read. The interpreter raises
# KeyboardInterrupt wherever the main thread happens to be. Inside a `__del__` or a callback of a library that exception
# is printed and dropped, and the command runs on (seen in redis-py's `AbstractConnection.__del__`, 6 of 400 signals). A
# flag cannot be dropped.

Handler = Callable[[int, FrameType | None], object] | signal.Handlers


class StopRequest:
    """Flag that the user asked this command to stop, with a wait that such a request ends early."""

    def __init__(self) -> None:
        self._wakeup_fd, self._signal_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.requested = False

    def wait(self, seconds: float) -> bool:
        """Waits `seconds`, or until a stop is requested; returns whether one is."""
        if not self.requested:
            select.select([self._wakeup_fd], [], [], seconds)
        return self.requested

    def raise_if_requested(self) -> None:
        """Raises KeyboardInterrupt if a stop is requested, at a point where the caller can handle it."""
        if self.requested:
            raise KeyboardInterrupt

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal: sets the flag.

        A second signal raises KeyboardInterrupt at once, for a user whose command is stuck in a call that does not
        return.
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

    Signals that are already ignored stay ignored, because `nohup` and a shell's `&` start commands that way.
    """
    request = StopRequest()
    handled_signals = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    try:
        with _signal_handler(request.on_signal, handled_signals):
            yield request
    finally:
        request.close()


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignores stop signals while the context lasts, so that a second Ctrl-C does not stop the clean-up."""
    with _signal_handler(signal.SIG_IGN, _STOP_SIGNALS):
        yield


@contextlib.contextmanager
def _signal_handler(handler: Handler, numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Sets a handler for some signals while the context lasts, then restores the previous ones."""
    previous_handlers = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous_handler in previous_handlers.items():
            signal.signal(number, previous_handler)
