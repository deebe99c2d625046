r"""Escapes and shortens foreign text for terminals, logs, events and status.

Pure. The message of a program's exception may contain escape sequences that clear the screen, forge a log line or set
the window title, or direction overrides that disguise a name. They are written visibly instead: `\x1b`, `\u202e`.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")

MAX_SHOWN_CHARACTERS = 100
"""Characters of a foreign input that an error or log line repeats."""

# C0 except tab and newline, DEL, C1, direction overrides and isolates, uncommon line ends, half surrogate pairs
_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def escape_control_characters(text: str) -> str:
    """Replaces control characters by visible escapes; tabs and newlines stay."""
    return _CONTROL_CHARACTERS.sub(_escaped, text)


def is_plain_json(text: str) -> bool:
    """Returns whether this JSON text surely has no character to escape; a quick test that is false in doubt."""
    if "\\u" in text or "\\b" in text or "\\f" in text or "\\r" in text:
        return False
    return "\x7f" not in text if text.isascii() else _CONTROL_CHARACTERS.search(text) is None


def _escaped(match: re.Match[str]) -> str:
    """Returns the visible escape of one control character."""
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


def shorten(text: str, characters: int = MAX_SHOWN_CHARACTERS) -> str:
    """Shortens a text to `characters` by leaving out its middle."""
    half = characters // 2
    return text if len(text) <= characters else f"{text[:half]}…{text[-half + 1 :]}"


def count_of(count: int, noun: str) -> str:
    """Returns a count with its noun, as `1 rank` or `3 ranks`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def join_names(names: Sequence[object], max_names: int = 8) -> str:
    """Joins the first `most` names with commas and counts the others."""
    text = ", ".join(map(str, names[:max_names]))
    return text if len(names) <= max_names else f"{text} and {len(names) - max_names} more"


def short_repr(value: object, characters: int = MAX_SHOWN_CHARACTERS) -> str:
    """Returns the `repr` of a value, shortened to `characters`, without formatting all of it.

    Errors repeat the input that they reject and go to a log: an input of megabytes would fill both.
    """
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = brief.maxlong = characters
    try:
        return shorten(brief.repr(value), characters)
    except ValueError:
        return "a number of thousands of digits"  # Python refuses to convert such an integer to text


def format_bytes(size_bytes: int) -> str:
    """Formats a size with three digits and a decimal unit: `1.20 GB`, `512 bytes`."""
    value, unit = float(size_bytes), 0
    while abs(value) >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    if unit == 0:
        return f"{size_bytes} bytes"
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {_UNITS[unit]}"
