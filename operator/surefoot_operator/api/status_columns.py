"""Packs members and holders of a status into columns.

Pure: numbers as runs, texts without what they share. A mapping for each of two thousand workers makes a status of 636
kB, which each write stores whole and each watch carries. A column is one string, so that a schema can describe it and
`kubectl get -o yaml` shows it in a few lines: `0..1999`, `1x2000`, `node-{a,b,c}.example`. Random identities of many
entries are base64, the only part that people cannot read.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

MOST_ENTRIES = 100_000
"""Of one column: ten times what the API server lets a list have."""
FEWEST_PACKED = 64
"""Fewer identities are listed as they are: people compare them with a log."""

_TOKEN = re.compile(r"(-?\d{1,40})(?:\.\.(-?\d{1,40})|x(\d{1,6}))?")
_PLAIN = re.compile(r"[A-Za-z0-9._:-]+")
_HEX = re.compile(r"(?:[0-9a-f]{2})+")
_BRACES = re.compile(r"([^{}]*)\{([^{}]*)\}([^{}]*)")
_PACKED = re.compile(r"#(\d{1,3}):([A-Za-z0-9+/]*={0,2})")


def packed_numbers(values: Sequence[int]) -> str:
    """Packs numbers: successive ones as `0..1999`, repeated `1x2000`, others `3,5`."""
    return ",".join(_tokens(values))


def numbers(column: str) -> list[int]:
    """The inverse of `packed_numbers`. Raises ValueError that says what is wrong."""
    found: list[int] = []
    for token in column.split(",") if column else ():
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise ValueError(f"{token[:40]!r} is neither a number nor a run of numbers")
        first, last = int(match[1]), int(match[2] or match[1])
        count = int(match[3] or 1) if match[2] is None else last - first + 1
        if not 1 <= count <= MOST_ENTRIES - len(found):
            raise ValueError(f"{token[:40]!r} is no run, or makes more than {MOST_ENTRIES} entries")
        found += range(first, last + 1) if match[2] is not None else [first] * count
    return found


def packed_texts(values: Sequence[str]) -> str:
    """Packs texts in the shortest form that `texts` reads and that fits.

    Braces, a few texts with who has which, base64 of hex, or JSON.
    """
    if not values:
        return ""
    if not all(map(_PLAIN.fullmatch, values)):
        return json.dumps(list(values), separators=(",", ":"))
    distinct = list(dict.fromkeys(values))
    if 2 * len(distinct) <= len(values):
        places = {text: place for place, text in enumerate(distinct)}
        return f"{_braced(distinct)}|{packed_numbers([places[text] for text in values])}"
    size = len(values[0])
    if len(values) >= FEWEST_PACKED and all(len(text) == size and _HEX.fullmatch(text) for text in values):
        return f"#{size // 2}:{base64.b64encode(bytes.fromhex(''.join(values))).decode()}"
    return _braced(values)


def texts(column: str) -> list[str]:
    """The inverse of `packed_texts`. Raises ValueError that says what is wrong."""
    if column.startswith("["):
        found = json.loads(column)
        if not all(isinstance(text, str) for text in found):
            raise ValueError("a list has something that is no text")
        return list(found)
    if column.startswith("#"):
        return _unpacked(column)
    named, bar, places = column.partition("|")
    distinct = _unbraced(named)
    if not bar:
        return distinct
    chosen = numbers(places)
    if any(not 0 <= place < len(distinct) for place in chosen):
        raise ValueError(f"it names more than the {len(distinct)} texts that it has")
    return [distinct[place] for place in chosen]


def _tokens(values: Sequence[int]) -> Iterator[str]:
    place = 0
    while place < len(values):
        first, step = values[place], values[place + 1] - values[place] if place + 1 < len(values) else None
        end = place + 1
        while step in (0, 1) and end < len(values) and values[end] - values[end - 1] == step:
            end += 1
        count = end - place
        if count == 1:
            yield str(first)
        else:
            yield f"{first}..{values[end - 1]}" if step == 1 else f"{first}x{count}"
        place = end


def _braced(values: Sequence[str]) -> str:
    """`prefix{a,b}suffix`, the suffix none where it would overlap the prefix in any text."""
    if len(values) == 1:
        return values[0]
    prefix = values[0][: _shared_length(values)]
    rest = [text[len(prefix) :] for text in values]
    suffix = rest[0][len(rest[0]) - _shared_length([text[::-1] for text in rest]) :]
    return f"{prefix}{{{','.join(text[: len(text) - len(suffix)] for text in rest)}}}{suffix}"


def _shared_length(values: Sequence[str]) -> int:
    """Characters that all texts begin with: the first and the last in order differ at the earliest place."""
    first, last = min(values), max(values)
    return next((place for place, pair in enumerate(zip(first, last, strict=False)) if len(set(pair)) > 1), len(first))


def _unbraced(column: str) -> list[str]:
    if not column:
        return []
    match = _BRACES.fullmatch(column)
    if match is None:
        if "{" in column or "}" in column:
            raise ValueError(f"{column[:40]!r} has braces that are not one pair")
        return [column]
    return [f"{match[1]}{text}{match[3]}" for text in match[2].split(",")]


def _unpacked(column: str) -> list[str]:
    match = _PACKED.fullmatch(column)
    size = int(match[1]) if match is not None else 0
    if match is None or not size:
        raise ValueError(f"{column[:40]!r} is no packed column")
    held = base64.b64decode(match[2], validate=True)
    if len(held) % size:
        raise ValueError(f"{len(held)} bytes are not a multiple of {size}")
    bounds = range(0, len(held) + 1, size)
    return [held[begin:end].hex() for begin, end in pairwise(bounds)]
