"""One value of any of our frozen dataclasses, every field filled from its type: the same in every run."""

from __future__ import annotations

import dataclasses
import itertools
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin


def sample(cls: type[Any]) -> Any:
    """A `cls` whose fields differ from each other."""
    return _made(cls, itertools.count(1))


def _made(cls: type[Any], numbers: Iterator[int]) -> Any:
    hints = typing.get_type_hints(cls)
    return cls(**{f.name: _value(hints[f.name], numbers) for f in dataclasses.fields(cls) if f.init})


def _value(hint: Any, numbers: Iterator[int]) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _value(next(a for a in arguments if a is not type(None)), numbers)
    if origin is Literal:
        return arguments[-1]
    if origin is tuple:
        inner = arguments[:1] * 2 if arguments[1:] == (Ellipsis,) else arguments
        return tuple(_value(a, numbers) for a in inner)
    if origin in (dict, Mapping):
        return {f"key{next(numbers)}": _value(arguments[1], numbers) for _ in range(2)}
    if dataclasses.is_dataclass(hint):
        return _made(typing.cast(type[Any], hint), numbers)
    if issubclass(hint, tuple):
        return hint(*(_value(a, numbers) for a in typing.get_type_hints(hint).values()))
    number = next(numbers)
    return {int: number, float: number + 0.25, bool: True, str: f'täxt {number} \U0001f600 "/'}[hint]
