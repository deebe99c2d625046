"""Tracks which fields of another system's object were used in a conversion.

Pure. A field that no converter reads is reported as left out, so that users know before the job runs which settings it loses.
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
    """A field and how the conversion used it. It never has the value, which may be a secret."""

    path: str
    """Dotted path of the field."""
    text: str
    """The TrainingJob's field that it became, or why it was left out."""


class ForeignManifest:
    """An object of another system that records which of its fields were read.

    Args:
        tree: the object.
        root: prefix of every path in notes.
    """

    def __init__(self, tree: Mapping[str, Any], root: str = "") -> None:
        self._tree, self._root = tree, root
        self._unread = dict.fromkeys(_leaf_paths(tree))
        self.used_fields: list[FieldNote] = []
        self.skipped_fields: list[FieldNote] = []

    def take_field(self, *path: Key, to: str = "") -> Any:
        """Returns a copy of a field's value and marks the field as used; None if it is missing.

        Args:
            to: the TrainingJob's field that it becomes; empty: the field is used without being reported.
        """
        value = self._value_at(path)
        if value is not None:
            self._mark_read(path)
            if to:
                self.used_fields.append(FieldNote(dotted_path(path, self._root), to))
        return copy.deepcopy(value)

    def skip_field(self, *path: Key, why: str) -> None:
        """Reports a field as left out, if it exists.

        Args:
            why: why a TrainingJob does not need it.
        """
        if self._value_at(path) is not None:
            self._mark_read(path)
            self.skipped_fields.append(FieldNote(dotted_path(path, self._root), why))

    def peek_field(self, *path: Key) -> Any:
        """Returns a field's value without marking the field as used; None if it is missing."""
        return self._value_at(path)

    def length(self, *path: Key) -> int:
        """Returns the number of items of a list; 0 if there is no list."""
        value = self._value_at(path)
        return len(value) if isinstance(value, list) else 0

    def unused_fields(self) -> list[FieldNote]:
        """Returns a note for each field that was neither used nor left out."""
        return [FieldNote(dotted_path(path, self._root), NO_COUNTERPART) for path in self._unread]

    def _value_at(self, path: tuple[Key, ...]) -> Any:
        """Returns the value at a path; None if a part of the path is missing."""
        value: Any = self._tree
        for key in path:
            has_key = (
                isinstance(value, Mapping) if isinstance(key, str) else isinstance(value, list) and key < len(value)
            )
            value = (value.get(key) if isinstance(value, Mapping) else value[key]) if has_key else None
        return value

    def _mark_read(self, path: tuple[Key, ...]) -> None:
        # everything below a field is read with it
        self._unread = {leaf: None for leaf in self._unread if leaf[: len(path)] != path}


def dotted_path(path: tuple[Key, ...], root: str = "") -> str:
    """Returns a path as text, such as `spec.replicaSpecs[0].name`."""
    text = root
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}"
    return text.removeprefix(".")


def _leaf_paths(tree: Any, path: tuple[Key, ...] = ()) -> Iterator[tuple[Key, ...]]:
    """Yields the paths of scalar values; a list of scalars counts as one value."""
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
        yield from _leaf_paths(value, (*path, key))


# ---- conversion errors -----------------------------------------------------------------------------------------------


class NotConvertible(OperatorError):
    """The object cannot be converted to a TrainingJob. The message names the field and what to write instead."""
