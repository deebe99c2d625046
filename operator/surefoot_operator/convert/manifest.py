"""Tracks which fields of another system's object were taken over.

Pure. A field that nobody asks for is reported as left out: whoever moves a job learns what it loses before it runs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from surefoot_operator.errors import OperatorError

Key = str | int
NO_COUNTERPART = "a TrainingJob has no counterpart"


@dataclass(frozen=True, slots=True)
class FieldNote:
    """One field, and what became of it.

    Never its value, which may be a secret.
    """

    path: str
    text: str


class Manifest:
    """One object of another system."""

    def __init__(self, tree: Mapping[str, Any], root: str = "") -> None:
        self._tree, self._root = tree, root
        self._open = dict.fromkeys(_leaves(tree))
        self.used_fields: list[FieldNote] = []
        self.skipped_fields: list[FieldNote] = []

    def take(self, *path: Key, to: str = "") -> Any:
        """Returns the value of a field, None where it is not there.

        Args:
            to: the TrainingJob's field that it becomes; empty: it has told something, and is not reported.
        """
        value = self._at(path)
        if value is not None:
            self._close(path)
            if to:
                self.used_fields.append(FieldNote(dotted(path, self._root), to))
        return copy.deepcopy(value)

    def skip(self, *path: Key, why: str) -> None:
        """Reports a field, where it is there, as left out."""
        if self._at(path) is not None:
            self._close(path)
            self.skipped_fields.append(FieldNote(dotted(path, self._root), why))

    def peek(self, *path: Key) -> Any:
        """Returns a field's value, and leaves it to be taken."""
        return self._at(path)

    def length(self, *path: Key) -> int:
        """How many items a list has; 0 where there is none."""
        found = self._at(path)
        return len(found) if isinstance(found, list) else 0

    def unused_fields(self) -> list[FieldNote]:
        """Lists what was neither taken nor left."""
        return [FieldNote(dotted(path, self._root), NO_COUNTERPART) for path in self._open]

    def _at(self, path: tuple[Key, ...]) -> Any:
        found: Any = self._tree
        for key in path:
            fits = isinstance(found, Mapping) if isinstance(key, str) else isinstance(found, list) and key < len(found)
            found = (found.get(key) if isinstance(found, Mapping) else found[key]) if fits else None
        return found

    def _close(self, path: tuple[Key, ...]) -> None:
        self._open = {leaf: None for leaf in self._open if leaf[: len(path)] != path}


def dotted(path: tuple[Key, ...], root: str = "") -> str:
    """`spec.replicaSpecs[0].name`."""
    text = root
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}"
    return text.removeprefix(".")


def _leaves(tree: Any, path: tuple[Key, ...] = ()) -> Iterator[tuple[Key, ...]]:
    """Paths of values that hold no mapping; a list of plain values is one."""
    children: list[tuple[Key, Any]] = []
    if isinstance(tree, Mapping):
        children = list(tree.items())
    elif isinstance(tree, list) and any(isinstance(item, Mapping | list) for item in tree):
        children = list(enumerate(tree))
    if not children:
        if path and tree is not None:
            yield path
        return
    for key, value in children:
        yield from _leaves(value, (*path, key))


# ---- conversion errors -----------------------------------------------------------------------------------------------
# The error of this room.


class NotConvertible(OperatorError):
    """What a TrainingJob cannot be made of, and what to write instead."""
