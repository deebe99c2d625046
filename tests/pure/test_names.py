"""One name, one thing: a class name is defined once in both packages together.

A reader who greps `Report` should find what a call means by it, not one of three classes. `ALLOWED_CLASSES` names
what is still defined twice; it only ever loses entries.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("runtime/surefoot", "operator/surefoot_operator")

# within the runtime
_RUNTIME_CLASSES: set[str] = set()
# within the operator
_OPERATOR_CLASSES: set[str] = set()
# once in each
_SHARED_CLASSES: set[str] = set()
ALLOWED_CLASSES = _RUNTIME_CLASSES | _OPERATOR_CLASSES | _SHARED_CLASSES


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def more_than_once(names: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: places for name, places in names.items() if len(places) > 1}


def test_class_name_is_defined_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    twice = more_than_once(places)
    assert {name: where for name, where in twice.items() if name not in ALLOWED_CLASSES} == {}, "name it for what it is"
    assert ALLOWED_CLASSES - set(twice) == set(), "defined once now: take them from the list"
