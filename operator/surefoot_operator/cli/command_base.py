"""Prints whole lines to the terminal without control characters."""

from __future__ import annotations

import sys
import time

from surefoot.protocol.plain import plain


def say(line: str) -> None:
    """Prints a line to standard output and flushes it."""
    print(plain(line), flush=True)


def clock() -> str:
    """The time of day that stands before a line."""
    return time.strftime("%H:%M:%S")


def warn(line: str) -> None:
    """Prints a line to standard error."""
    print(plain(line), file=sys.stderr, flush=True)
