"""Writes copies line by line: the fields of dataclasses, and of every dataclass that their fields reach."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Union, get_args, get_origin


def text(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def schema(classes: Iterable[type[Any]]) -> str:
    """Returns a line for each class, with its version, and one for each field: name, type, default, metadata."""
    reached: set[type[Any]] = set()
    for cls in classes:
        _reach(cls, reached)
    return text(line for cls in sorted(reached, key=lambda cls: cls.__name__) for line in _class_lines(cls))


def _reach(hint: Any, reached: set[type[Any]]) -> None:
    if _has_fields(hint) and hint not in reached:
        reached.add(hint)
        for inner in typing.get_type_hints(hint).values():
            _reach(inner, reached)
    for argument in get_args(hint):
        _reach(argument, reached)


def _has_fields(hint: Any) -> bool:
    return isinstance(hint, type) and (dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"))


def _class_lines(cls: type[Any]) -> Iterator[str]:
    yield f"class {cls.__name__}"
    hints = typing.get_type_hints(cls)
    if not dataclasses.is_dataclass(cls):
        yield from (f"  {cls.__name__}.{name}: {type_text(hint)}" for name, hint in hints.items())
        return
    for field in dataclasses.fields(cls):
        metadata = "".join(f" [{key} {value}]" for key, value in sorted(field.metadata.items()))
        yield f"  {cls.__name__}.{field.name}: {type_text(hints[field.name])}{_default_text(field)}{metadata}"


def _default_text(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f" = {field.default_factory()!r}"
    return "" if field.default is dataclasses.MISSING else f" = {field.default!r}"


def type_text(hint: Any) -> str:
    """Returns a type as source code would have it, without module paths."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin in (Union, types.UnionType):
        return " | ".join(map(type_text, arguments))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(type_text, arguments))}]"
    if hint in (None, type(None), Ellipsis):
        return "..." if hint is Ellipsis else "None"
    return str(getattr(hint, "__name__", hint))
