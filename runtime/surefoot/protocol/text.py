r"""Escapes and shortens foreign text for terminals, logs, events and status.

Pure. A program's exception may hold escape sequences, which clear a screen, forge a line or set a window's title;
overrides of the direction of text make a name look like another. They are shown as what they are: `\x1b`, `\u202e`.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")

SHOWN_CHARACTERS = 100
"""Of any input, in an error or a log."""

# C0 but tab and newline, DEL, C1, overrides and isolates of direction, line ends that only some know, half characters
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_control_characters(text: str) -> str:
    """`text` with each control character written out. Tabs and newlines stay."""
    return _UNSEEN.sub(_written_out, text)


def is_plain_json(text: str) -> bool:
    """Returns whether this JSON needs no escaping; quick, false in doubt."""
    if "\\u" in text or "\\b" in text or "\\f" in text or "\\r" in text:
        return False
    return "\x7f" not in text if text.isascii() else _UNSEEN.search(text) is None


def _written_out(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


def shorten(text: str, characters: int = SHOWN_CHARACTERS) -> str:
    """`text`, its middle left out where it is longer."""
    half = characters // 2
    return text if len(text) <= characters else f"{text[:half]}…{text[-half + 1 :]}"


def join_names(names: Sequence[object], most: int = 8) -> str:
    """Joins the first `most` names and counts the rest."""
    text = ", ".join(map(str, names[:most]))
    return text if len(names) <= most else f"{text} and {len(names) - most} more"


def short_repr(value: object, characters: int = SHOWN_CHARACTERS) -> str:
    """The `repr` of a value, shortened to `characters` without reading all.

    Whoever refuses an input repeats it in an error, and the error goes to a log: an input of megabytes would fill both.
    """
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = brief.maxlong = characters
    try:
        return shorten(brief.repr(value), characters)
    except ValueError:
        return "a number of thousands of digits"  # Python refuses to write those


def format_bytes(size_bytes: int) -> str:
    """Three digits and a decimal unit: `1.20 GB`, `512 bytes`."""
    value, unit = float(size_bytes), 0
    while abs(value) >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    if unit == 0:
        return f"{size_bytes} bytes"
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {_UNITS[unit]}"
