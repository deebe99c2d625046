"""Nested state (what `state_dict()` returns) taken apart into tensors and plain values, and put together again.

Tensors are replaced by a marker that names them, so that the structure can travel as plain values and the tensors as
tensors. Used by the parts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from surefoot.errors import ProtocolError

MARK = "\x00tensor"
"""Key of a marker; no program's own dictionary has it."""


def taken_apart(tree: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The tree with markers for tensors; fills `tensors` by path."""
    if isinstance(tree, torch.Tensor):
        tensors[path] = tree
        return {MARK: path}
    if isinstance(tree, dict):
        kind = OrderedDict if isinstance(tree, OrderedDict) else dict
        return kind((key, taken_apart(value, f"{path}/{key}", tensors)) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(taken_apart(value, f"{path}/{index}", tensors) for index, value in enumerate(tree))
    return tree


def put_together(tree: Any, tensor_of: Callable[[str], torch.Tensor]) -> Any:
    """The tree with its markers replaced."""
    if isinstance(tree, dict):
        if set(tree) == {MARK}:
            return tensor_of(str(tree[MARK]))
        return type(tree)((key, put_together(value, tensor_of)) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(put_together(value, tensor_of) for value in tree)
    return tree


def marked(tree: Any) -> list[str]:
    """Names of the tensors that belong into a tree."""
    found: list[str] = []

    def note(name: str) -> torch.Tensor:
        if not isinstance(name, str):
            raise ProtocolError(f"a tensor's marker is {name!r}: the values were not written by surefoot")
        found.append(name)
        return torch.empty(0)

    put_together(tree, note)
    return found
