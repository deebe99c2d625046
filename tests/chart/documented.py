"""values.yaml as a table: each value, its default and the comment above it. Pure; called by `generated` and by tests."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import yaml

_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z][A-Za-z0-9]*):(?: |$)")
_COMMENT = re.compile(r"^ *# ?(?P<text>.*)$")


@dataclass(frozen=True)
class Value:
    """One documented value."""

    path: str
    default: Any
    meaning: str


def values(text: str) -> list[Value]:
    """Every value with a comment right above it, in the order of the file."""
    parsed = yaml.safe_load(text)
    found: list[Value] = []
    above: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in text.splitlines():
        said = _COMMENT.match(line)
        key = _KEY.match(line)
        if said is not None:
            comment.append(said["text"].strip())
        elif key is not None:
            indent = len(key["indent"])
            above = [entry for entry in above if entry[0] < indent] + [(indent, key["key"])]
            path = [name for _, name in above]
            if comment:
                found.append(Value(".".join(path), _at(parsed, path), " ".join(comment)))
            comment = []
        else:
            comment = []
    return found


def undocumented(text: str) -> list[str]:
    """Paths of values that neither have a comment nor lie below one that has."""
    known = {value.path for value in values(text)}

    def missing(node: Any, path: str) -> list[str]:
        if path in known:
            return []
        if not isinstance(node, dict) or not node:
            return [path]
        return [gap for name, child in node.items() for gap in missing(child, f"{path}.{name}")]

    return [gap for name, child in yaml.safe_load(text).items() for gap in missing(child, name)]


def table(text: str) -> str:
    """As Markdown."""
    lines = ["| value | default | meaning |", "|---|---|---|"]
    for value in values(text):
        default = json.dumps(value.default, ensure_ascii=False).replace("|", "\\|")
        meaning = value.meaning.replace("|", "\\|")
        lines.append(f"| `{value.path}` | `{default}` | {meaning} |")
    return "\n".join(lines) + "\n"


def _at(node: Any, path: list[str]) -> Any:
    for name in path:
        node = node[name]
    return node
