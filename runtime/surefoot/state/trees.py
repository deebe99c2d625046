"""Flattens nested state into tensors and plain values, and unflattens it.

Tensors are replaced by marks that name them, so that the structure can travel as plain values and the tensors as
tensors. Used by the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from surefoot.errors import StateMismatch
from surefoot.format import kinds
from surefoot.format.kinds import Named
from surefoot.state.tensor_names import escaped

Facts = Mapping[str, Any]
"""What building a tensor needs beside its name, type and shape (`tensor_building`)."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Stands where a tensor belongs."""

    name: str
    facts: Facts | None = None


_NOTHING = object()


def taken_apart(
    tree: Any,
    path: str,
    tensors: dict[str, torch.Tensor],
    facts_of: Callable[[torch.Tensor], Facts | None] = lambda _: None,
    join: Callable[[str, Any], str] = lambda path, key: f"{path}/{escaped(key)}",
) -> Any:
    """Replaces a tree's tensors by marks and collects them by path.

    `join` makes a path from the one above and a key.
    """
    if isinstance(tree, torch.Tensor):
        tensors[path] = tree
        return Mark(path, facts_of(tree))
    return kinds.mapped(tree, lambda key, value: taken_apart(value, join(path, key), tensors, facts_of, join))


def put_together(tree: Any, tensor_of: Callable[[str], torch.Tensor], live: Any = _NOTHING, path: str = "") -> Any:
    """Replaces marks by tensors, and objects saved by name by `live`'s."""
    if isinstance(tree, Mark):
        return tensor_of(tree.name)
    if isinstance(tree, Named):
        return _same_object(tree, live, path)
    return kinds.mapped(tree, lambda key, v: put_together(v, tensor_of, _held(live, key), f"{path}/{key}"))


def _held(live: Any, key: Any) -> Any:
    try:
        return live[key] if isinstance(live, Mapping | list | tuple) else getattr(live, str(key), _NOTHING)
    except (KeyError, IndexError, TypeError):
        return _NOTHING


def _same_object(saved: Named, live: Any, path: str) -> Any:
    here = "nothing" if live is _NOTHING else repr(live)
    if live is not _NOTHING and kinds.is_nameable(live) and kinds.name_of(live) == saved:
        return live
    raise StateMismatch(
        f"{path} is {saved} in the checkpoint and {here} here: classes and functions are never taken from a checkpoint,"
        " so build the program with the same one in its place"
    )


def marks(tree: Any) -> list[Mark]:
    """The marks in a tree, in its order."""
    found: list[Mark] = []

    def note(_: Any, value: Any) -> Any:
        if isinstance(value, Mark):
            found.append(value)
        else:
            kinds.mapped(value, note)
        return None

    note(None, tree)
    return found


def marked(tree: Any) -> list[str]:
    """Names of the tensors that belong into a tree."""
    return [mark.name for mark in marks(tree)]


def named(tree: Any) -> bool:
    """Whether something in it was saved by its name alone."""
    found: list[Any] = []

    def note(_: Any, value: Any) -> Any:
        if isinstance(value, Named):
            found.append(value)
        elif not isinstance(value, Mark):
            kinds.mapped(value, note)
        return None

    note(None, tree)
    return bool(found)


def first_difference(saved: Any, live: Any, path: str = "") -> str | None:
    """Describes the first difference in keys or kinds; None without one.

    A sentence's subject and verb. Values may differ.
    """
    if isinstance(saved, torch.Tensor) and isinstance(live, torch.Tensor):
        a, b = (torch.Tensor if isinstance(t, torch.nn.Parameter) else type(t) for t in (saved, live))
        if a is not b:
            return f"{path} would come back as {a.__name__} where {b.__name__} was"
        if (saved.dtype, saved.shape) != (live.dtype, live.shape):
            return f"{path} would come back as {saved.dtype} {tuple(saved.shape)}, not {live.dtype} {tuple(live.shape)}"
        return None
    if type(saved) is not type(live):
        return f"{path} would come back as {type(saved).__name__}, not {type(live).__name__}"
    ours, theirs = _children(saved), _children(live)
    for key in [*theirs, *ours]:
        if key not in ours or key not in theirs:
            return f"{path}/{key} would {'not come back' if key not in ours else 'come back, and is not there'}"
        if found := first_difference(ours[key], theirs[key], f"{path}/{key}"):
            return found
    return None


def _children(tree: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = {}

    def note(key: Any, value: Any) -> Any:
        found[key] = value
        return value

    kinds.mapped(tree, note)
    return found
