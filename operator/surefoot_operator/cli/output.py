"""Prints whole lines to the terminal without control characters."""

from __future__ import annotations

import sys

from surefoot.protocol.plain import plain


def say(line: str) -> None:
    """Prints a line to standard output and flushes it."""
    print(plain(line), flush=True)


def warn(line: str) -> None:
    """Prints a line to standard error."""
    print(plain(line), file=sys.stderr, flush=True)
