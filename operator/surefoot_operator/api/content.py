"""Limits the size, depth, numbers and text of any job document.

Pure; called by `loading` before YAML's nodes become values, and by `parse` for what an API server gives. A thousand
bytes of aliases can expand to more values than a machine holds, so aliases are counted, never expanded.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from surefoot.protocol.plain import shown
from surefoot_operator.errors import Hidden, SpecError

MOST_CHARACTERS = 1 << 18
"""Of a file: a template with all that Kubernetes knows takes a tenth of it."""
MOST_VALUES = 50_000
DEEPEST = 64
LARGEST = 2**63 - 1
"""A whole number in JSON, as an API server keeps it."""

_HALF = re.compile("[\ud800-\udfff]")
_SIZE = f"at most {MOST_VALUES} values, no deeper than {DEEPEST}, are allowed (each use of an alias counts)"


def check_nodes(root: yaml.Node) -> None:
    """Refuses a YAML document that is too large or deep. Raises SpecError.

    An alias counts at each of its uses.
    """
    counts: dict[int, tuple[int, int]] = {}
    stack = [(root, False)]
    open_nodes: set[int] = set()
    while stack:
        node, done = stack.pop()
        children = _children(node)
        if done:
            open_nodes.discard(id(node))
            found = [counts[id(child)] for child in children]
            counts[id(node)] = (1 + sum(c for c, _ in found), 1 + max((d for _, d in found), default=0))
            if counts[id(node)][0] > MOST_VALUES or counts[id(node)][1] > DEEPEST:
                raise SpecError("the document", Hidden("its size"), _SIZE)
        elif id(node) not in counts:
            if id(node) in open_nodes:
                raise SpecError("the document", Hidden("an alias that contains itself"), "JSON cannot hold it")
            open_nodes.add(id(node))
            stack.append((node, True))
            stack += [(child, False) for child in children if id(child) not in counts]


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def check_content(body: object, path: str) -> None:
    """Refuses the first value that JSON or programs cannot take. Raises SpecError."""
    left: list[tuple[object, str, int]] = [(body, path, 1)]
    seen = 0
    while left:
        value, where, depth = left.pop()
        seen += 1
        if seen > MOST_VALUES or depth > DEEPEST:
            raise SpecError(path, Hidden("its size"), _SIZE)
        if isinstance(value, dict):
            for key, below in reversed(value.items()):
                if not isinstance(key, str):
                    raise SpecError(where, key, "only text is allowed as the name of a field")
                if not key.isprintable():
                    raise SpecError(where, key, "the name of a field is allowed to hold printable characters alone")
                left.append((below, f"{where}.{_short(key)}", depth + 1))
        elif isinstance(value, list):
            left += [(item, f"{where}[{place}]", depth + 1) for place, item in reversed(list(enumerate(value)))]
        else:
            _check_scalar(value, where)


def _check_scalar(value: Any, path: str) -> None:
    if isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, int):
        if abs(value) > LARGEST:
            raise SpecError(path, value, f"whole numbers up to {LARGEST} are allowed")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise SpecError(path, value, "a finite number is allowed")
    elif value is not None:
        kind = type(value).__name__
        raise SpecError(path, Hidden(f"a {kind}"), "only JSON's types are allowed; put text into quotes")


def _check_text(value: str, path: str) -> None:
    if "\0" in value:
        raise SpecError(path, Hidden("text with a NUL"), "programs cannot take it as an argument; remove the NUL")
    if not value.isascii() and _HALF.search(value):
        raise SpecError(path, Hidden("text with half a character"), "text that UTF-8 can encode is allowed")


def _short(key: str) -> str:
    return key if len(key) <= 40 and key.isprintable() else shown(key, 40)
