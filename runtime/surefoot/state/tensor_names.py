"""Encodes keys of any kind as parts of tensor names, without collisions.

`/` parts a name into object, parameter and key; `:` an element of a tensor subclass from it; `~` begins what lies deeper
in a key, and a key that is no text. Used by the parts of a program.
"""

from __future__ import annotations

from typing import Any

_ESCAPES = {"%": "%25", "/": "%2F", ":": "%3A", "~": "%7E"}
_TABLE = str.maketrans(_ESCAPES)


def escaped(key: Any) -> str:
    """Encodes a key as part of a name.

    In text the separators are replaced; a key of another kind is `~` and its `repr`.
    """
    return key.translate(_TABLE) if type(key) is str else f"~{escaped(repr(key))}"


def unescaped(part: str) -> str:
    """The text that was a key."""
    for character, escape in reversed(_ESCAPES.items()):
        part = part.replace(escape, character)
    return part


def is_plain(part: str) -> bool:
    """Returns whether a part is one text key, not nested or wrapped."""
    return "~" not in part and ":" not in part


def joined(path: str, key: Any) -> str:
    """Names what is below `key` of the value named `path`."""
    part = escaped(key)
    return f"{path}{part}" if part.startswith("~") else f"{path}~{part}"
