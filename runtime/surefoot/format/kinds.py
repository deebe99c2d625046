"""Encodes values beyond JSON by an explicit kind; nothing saved is executed.

Containers keep their kind; enums, dataclasses and named tuples name their class, which the reading process must have
loaded itself: nothing is imported because a checkpoint says so. Used by `values`, and by who walks such values.
"""

from __future__ import annotations

import builtins
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, is_dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import lru_cache
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Named:
    """Names a class or function that the reader must have loaded itself."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


def _fraction(text: str) -> Fraction:
    """As `str` writes one: of an exponent Python would work out all digits, for days."""
    numerator, _, denominator = text.partition("/")
    return Fraction(int(numerator), int(denominator or "1"))


SPELT: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    Fraction: (str, _fraction),
    Decimal: (str, Decimal),
    UUID: (str, UUID),
    date: (date.isoformat, date.fromisoformat),
    timedelta: (lambda v: [v.days, v.seconds, v.microseconds], lambda of: timedelta(*of)),
    range: (lambda v: [hex(n) for n in (v.start, v.stop, v.step)], lambda of: range(*(int(n, 16) for n in of))),
    PosixPath: (str, PosixPath),
    WindowsPath: (str, WindowsPath),
    PurePosixPath: (str, PurePosixPath),
    PureWindowsPath: (str, PureWindowsPath),
    type(...): (lambda _: None, lambda _: ...),
    datetime: (lambda v: [v.isoformat(), v.fold], lambda of: datetime.fromisoformat(of[0]).replace(fold=of[1])),
    time: (lambda v: [v.isoformat(), v.fold], lambda of: time.fromisoformat(of[0]).replace(fold=of[1])),
}
"""What a JSON value says whole: how it is written, and read. The tag is the class' name."""

BY_TAG = {kind.__name__: kind for kind in SPELT}

_NAMESPACES: dict[str, type] = {"Namespace": Namespace, "SimpleNamespace": SimpleNamespace}
_OWN: tuple[type, ...] = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, object, OrderedDict)
_PLAIN_TYPES: dict[str, type] = {kind.__name__: kind for kind in _OWN}


def timezone_is_plain(value: datetime | time) -> bool:
    """Whether a zone is a fixed UTC offset, or there is none.

    A text keeps nothing else of it.
    """
    return value.tzinfo is None or type(value.tzinfo) is timezone


def name_of(value: Any) -> Named | None:
    """The name that finds a class or function again in its module.

    None if none does.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    return Named(module, name) if found(Named(module, name)) is value else None


def found(what: Named) -> Any:
    """Looks a name up in the modules that this process loaded."""
    here: Any = sys.modules.get(what.module)
    for part in what.name.split("."):
        here = getattr(here, part, None)
    return here


def is_nameable(value: Any) -> bool:
    return isinstance(value, type | FunctionType | BuiltinFunctionType)


def plain_type(what: Named) -> type | None:
    """One of Python's own types by name, else None."""
    kind = _PLAIN_TYPES.get(what.name)
    return kind if kind is not None and kind.__module__ == what.module else None


def container_of(value: Any) -> str | None:
    """The kind of a container beyond JSON's own, else None."""
    kind = type(value)
    if kind in (deque, defaultdict, Counter, Namespace, SimpleNamespace):
        return kind.__name__
    return shape_of(kind)  # type: ignore[arg-type]  # a class is hashable


@lru_cache(maxsize=1024)
def shape_of(kind: Hashable) -> str | None:
    """`namedtuple` or `dataclass`, if such a class is one."""
    assert isinstance(kind, type), "a class"
    if kind is Named:
        return None
    if kind.__bases__ == (tuple,) and hasattr(kind, "_fields"):
        return "namedtuple"
    plain = not issubclass(kind, dict | list | tuple | set | frozenset | str | bytes | int | float | Enum)
    return "dataclass" if is_dataclass(kind) and plain else None


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass or namespace that are set."""
    if isinstance(value, Namespace | SimpleNamespace):
        return dict(vars(value))
    return {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}


def field_names(kind: Any) -> set[str]:
    return {f.name for f in fields(kind)}


def beyond_fields(value: Any) -> list[str]:
    """Attributes of a dataclass that are no fields."""
    return sorted(set(getattr(value, "__dict__", ())) - field_names(value))


def made_of(kind: type, held: dict[str, Any]) -> Any:
    """Makes a dataclass or namespace without running its code."""
    if kind in _NAMESPACES.values():
        holder: Any = kind()
        # not by setattr: a namespace may hold a name such as `__dict__` that an object gives to nobody
        vars(holder).update(held)
        return holder
    value: Any = object.__new__(kind)
    for name, one in held.items():
        object.__setattr__(value, name, one)
    return value


def namespace(tag: str) -> type | None:
    return _NAMESPACES.get(tag)


def mapped(value: Any, each: Callable[[Any, Any], Any]) -> Any:
    """The same container around `each(key, held)`; the value itself if it is none."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        return kind((key, each(key, held)) for key, held in value.items())
    if kind in (list, tuple):
        return kind(each(index, held) for index, held in enumerate(value))
    match container_of(value):
        case None:
            return value
        case "deque":
            return deque((each(index, held) for index, held in enumerate(value)), value.maxlen)
        case "defaultdict":
            return defaultdict(value.default_factory, {key: each(key, held) for key, held in value.items()})
        case "Counter":
            return Counter({key: each(key, held) for key, held in value.items()})
        case "namedtuple":
            return tuple.__new__(kind, (each(name, held) for name, held in zip(kind._fields, value, strict=True)))
    return made_of(kind, {name: each(name, held) for name, held in fields_of(value).items()})


def class_named(what: Named, shape: str) -> type | None:
    """Finds a loaded enum, dataclass or named tuple; `shape` says which.

    None if the name is of something else.
    """
    kind = found(what)
    if not isinstance(kind, type) or kind.__module__ == builtins.__name__:
        return None
    if shape == "enum":
        return kind if issubclass(kind, Enum) else None
    return kind if shape_of(kind) == shape else None
