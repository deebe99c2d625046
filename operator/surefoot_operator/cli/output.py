"""Prints whole lines to the terminal without control characters.

Touches the streams.
"""

from __future__ import annotations

import sys

from surefoot.protocol.plain import plain


def say(line: str) -> None:
    """To standard output, at once."""
    print(plain(line), flush=True)


def warn(line: str) -> None:
    """To standard error."""
    print(plain(line), file=sys.stderr, flush=True)
