"""Builds HTML and SVG elements whose text is always escaped.

Pure. What a page shows was written by others, as names, messages and exceptions of programs: a string can only become text, never an
element, so that none of them runs in the browser of whoever looks.
"""

from __future__ import annotations

import html
from dataclasses import dataclass

from surefoot.protocol.plain import plain, shorten

LONGEST_TEXT = 2000
"""Characters of one piece of foreign text: a hang's stacks would fill a page."""

_VOID = frozenset({"meta", "br"})


@dataclass(frozen=True, slots=True)
class Markup:
    """Finished markup; only `element` and constants of this package make it."""

    text: str


Child = str | Markup | None
Attribute = str | float | None


def element(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """Builds one element; strings are escaped, None is left out.

    Args:
        name: the element's name.
        children: text, or elements.
        attributes: `class_` is class, `stroke_width` is stroke-width; numbers have two decimals.
    """
    told = "".join(f' {_key(key)}="{_value(value)}"' for key, value in attributes.items() if value is not None)
    if name in _VOID:
        return Markup(f"<{name}{told}>")
    return Markup(f"<{name}{told}>{joined(*children).text}</{name}>")


def joined(*children: Child) -> Markup:
    """Joins text and elements in order."""
    return Markup(
        "".join(one.text if isinstance(one, Markup) else _escaped(one) for one in children if one is not None)
    )


def decimal(value: float) -> str:
    """Writes at most two decimals, none that say nothing."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def _escaped(text: str) -> str:
    return html.escape(plain(shorten(text, LONGEST_TEXT)), quote=True)


def _value(value: str | float) -> str:
    return html.escape(plain(value), quote=True) if isinstance(value, str) else decimal(value)


def _key(name: str) -> str:
    return name.rstrip("_").replace("_", "-")
