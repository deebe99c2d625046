"""Encodes plain values as tagged JSON and decodes them exactly.

Param groups, schedules, positions, RNG states. What JSON says stays as it is; everything else is an object with the
key `~` that names its kind. What `values` does not know goes through the caller's hook (torch's own small types), so
that this room needs no torch. A value that cannot be said, or read back, is an error that names its key.
"""

from __future__ import annotations

import builtins
import json
import math
import sys
from argparse import Namespace
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from functools import lru_cache
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any
from uuid import UUID

from surefoot.errors import StateMismatch, StateNotRestorable

# ---- kinds of values -------------------------------------------------------------------------------------------------
# Encodes values beyond JSON by an explicit kind; nothing saved is executed. Containers keep their kind; enums,
# dataclasses and named tuples name their class, which the reading process must have loaded itself: nothing is imported
# because a checkpoint says so. Used below, and by who walks such values.


@dataclass(frozen=True, slots=True)
class NamedObject:
    """Names a class or function that the reader must have loaded itself."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


def _fraction(text: str) -> Fraction:
    """As `str` writes one: of an exponent Python would work out all digits, for days."""
    numerator, _, denominator = text.partition("/")
    return Fraction(int(numerator), int(denominator or "1"))


ENCODED_AS_TEXT: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
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

KIND_BY_TAG = {kind.__name__: kind for kind in ENCODED_AS_TEXT}

_NAMESPACES: dict[str, type] = {"Namespace": Namespace, "SimpleNamespace": SimpleNamespace}
_OWN: tuple[type, ...] = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, object, OrderedDict)
_PLAIN_TYPES: dict[str, type] = {kind.__name__: kind for kind in _OWN}


def timezone_is_plain(value: datetime | time) -> bool:
    """Whether a zone is a fixed UTC offset, or there is none.

    A text keeps nothing else of it.
    """
    return value.tzinfo is None or type(value.tzinfo) is timezone


def name_of(value: Any) -> NamedObject | None:
    """The name that finds a class or function again in its module.

    None if none does.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    return NamedObject(module, name) if resolve_name(NamedObject(module, name)) is value else None


def resolve_name(what: NamedObject) -> Any:
    """Looks a name up in the modules that this process loaded."""
    here: Any = sys.modules.get(what.module)
    for part in what.name.split("."):
        here = getattr(here, part, None)
    return here


def is_nameable(value: Any) -> bool:
    return isinstance(value, type | FunctionType | BuiltinFunctionType)


def plain_type(what: NamedObject) -> type | None:
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
    if kind is NamedObject:
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


def build_without_init(kind: type, held: dict[str, Any]) -> Any:
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


def namespace_class(tag: str) -> type | None:
    return _NAMESPACES.get(tag)


def map_container(value: Any, each: Callable[[Any, Any], Any]) -> Any:
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
    return build_without_init(kind, {name: each(name, held) for name, held in fields_of(value).items()})


def find_class(what: NamedObject, shape: str) -> type | None:
    """Finds a loaded enum, dataclass or named tuple; `shape` says which.

    None if the name is of something else.
    """
    kind = resolve_name(what)
    if not isinstance(kind, type) or kind.__module__ == builtins.__name__:
        return None
    if shape == "enum":
        return kind if issubclass(kind, Enum) else None
    return kind if shape_of(kind) == shape else None


# ---- values ----------------------------------------------------------------------------------------------------------

VALUES_FORMAT = 2
TAG = "~"
MAX_DEPTH = 200
"""Nesting beyond this is taken for a value that contains itself."""

Inner = Callable[[Any], Any]
"""Writes, or reads, a value that lies in another."""
Encoder = Callable[[Any, Inner], Mapping[str, Any] | None]
Decoder = Callable[[str, Mapping[str, Any], Inner], Any]
"""Gets the kind and all of the object; raises KeyError for a kind that it does not know."""

_WRONG = (TypeError, ValueError, AttributeError, KeyError, IndexError, ArithmeticError)
_ARRAY_KINDS = "biufcmMUS"
_WIDE_BITS = 1024
"""Whole numbers beyond this are written in hexadecimal, because Python limits decimal ones."""
_WAY_OUT = "leave it out of state_dict, or give it as numbers, text, tensors, enums or dataclasses"


def encode_values(values: Mapping[str, Any], other: Encoder | None = None) -> bytes:
    """Encodes a values blob; `other` encodes what has no kind here.

    It returns an object with `~`, or None.
    """
    body = {name: _encode(value, name, other, 0) for name, value in values.items()}
    return json.dumps({"format": VALUES_FORMAT, "values": body}, separators=(",", ":"), allow_nan=False).encode()


def decode_values(data: bytes, other: Decoder | None = None) -> dict[str, Any]:
    """The inverse. `other` gets the objects that the encoder's hook gave."""
    try:
        body = json.loads(data)
        if body["format"] != VALUES_FORMAT:
            raise StateMismatch(
                f"the values are of format {body['format']!r}, this version reads {VALUES_FORMAT}: restore with the"
                " surefoot that wrote them"
            )
        return {name: _decode(value, name, other) for name, value in body["values"].items()}
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError, MemoryError, *_WRONG) as error:
        raise StateMismatch(f"the values of a checkpoint are not what this version writes: {error!r}") from error


def _encode(value: Any, path: str, other: Encoder | None, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise StateNotRestorable(f"{path[:200]}… is nested more than {MAX_DEPTH} deep: does it contain itself?")
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if value.bit_length() <= _WIDE_BITS else {TAG: "int", "of": hex(value)}
    if kind is str:
        return _checked_text(value, path)
    if kind is float:
        return value if math.isfinite(value) else {TAG: "float", "of": repr(value)}
    if kind is list:
        return [_encode(item, f"{path}[{i}]", other, depth + 1) for i, item in enumerate(value)]
    if kind is dict and TAG not in value and all(type(key) is str for key in value):
        return {_checked_text(key, path): _encode(v, f"{path}.{key}", other, depth + 1) for key, v in value.items()}
    return _encode_tagged(value, kind, path, other, depth)


def _encode_tagged(value: Any, kind: type, path: str, other: Encoder | None, depth: int) -> dict[str, Any]:
    def each(item: Any, where: str) -> Any:
        return _encode(item, f"{path}{where}", other, depth + 1)

    if kind in (dict, OrderedDict, defaultdict, Counter):
        pairs = [
            [_encode(key, f"a key of {path}", other, depth + 1), each(v, f"[{key!r}]")] for key, v in value.items()
        ]
        body = {TAG: kind.__name__, "of": pairs}
        return body if kind is not defaultdict else body | {"factory": _factory(value, path)}
    if kind is complex:
        return {TAG: "complex", "of": [each(value.real, ".real"), each(value.imag, ".imag")]}
    if kind in (bytes, bytearray):
        return {TAG: kind.__name__, "of": b64encode(value).decode()}
    if kind in (tuple, deque):
        items = [each(item, f"[{i}]") for i, item in enumerate(value)]
        return {TAG: kind.__name__, "of": items} | ({"most": value.maxlen} if kind is deque else {})
    if kind in (set, frozenset):
        return {TAG: kind.__name__, "of": sorted((each(item, " (a member)") for item in value), key=json.dumps)}
    if kind is slice:
        return {TAG: "slice", "of": [each(part, "") for part in (value.start, value.stop, value.step)]}
    if kind in ENCODED_AS_TEXT and (not isinstance(value, datetime | time) or timezone_is_plain(value)):
        return {TAG: kind.__name__, "of": ENCODED_AS_TEXT[kind][0](value)}
    if _is_numpy(value, kind):
        shape = list(value.shape) if kind.__name__ == "ndarray" else None  # a scalar is not a 0-d array
        return {TAG: "numpy", "dtype": value.dtype.str, "shape": shape, "of": b64encode(value.tobytes()).decode()}
    said = None if other is None else other(value, lambda item: each(item, ""))
    found = _encode_classed(value, kind, path, each) if said is None else dict(said)
    if found is None:
        raise StateNotRestorable(f"{path} is {_article(kind)}, which cannot be saved as a plain value: {_WAY_OUT}")
    return found


def _encode_classed(value: Any, kind: type, path: str, each: Callable[[Any, str], Any]) -> dict[str, Any] | None:
    """Values of classes that are named, and named things themselves."""
    if kind is NamedObject:
        return {TAG: "name", "of": str(value)}
    if is_nameable(value):
        return {TAG: "name", "of": str(_name(value, path))}
    if isinstance(value, Enum):
        member = {"value": each(value.value, ".value")} if isinstance(value, Flag) else {"name": value.name}
        return {TAG: "enum", "of": str(_name(kind, path)), **member}
    match container_of(value):
        case "namedtuple":
            items = [each(item, f".{name}") for name, item in zip(value._fields, value, strict=True)]
            return {TAG: "namedtuple", "of": str(_name(kind, path)), "items": items}
        case "dataclass":
            if beyond := beyond_fields(value):
                raise StateNotRestorable(
                    f"{path} is {_article(kind)} with {beyond[0]!r}, which is no field: {_WAY_OUT}"
                )
            held = {name: each(v, f".{name}") for name, v in fields_of(value).items()}
            return {TAG: "dataclass", "of": str(_name(kind, path)), "fields": held}
        case "Namespace" | "SimpleNamespace" as tag:
            return {TAG: tag, "of": {name: each(v, f".{name}") for name, v in vars(value).items()}}
    return None


def _name(what: Any, path: str) -> NamedObject:
    found = name_of(what)
    if found is None:
        raise StateNotRestorable(
            f"{path} is of {getattr(what, '__qualname__', what)!r}, which no module has under that name (it was made"
            f" inside a function?): define it at the top of a module, or {_WAY_OUT}"
        )
    return found


def _factory(value: defaultdict[Any, Any], path: str) -> str | None:
    if value.default_factory is None:
        return None
    named = name_of(value.default_factory)
    if named is None or plain_type(named) is None:
        raise StateNotRestorable(
            f"{path} is a defaultdict of {value.default_factory!r}, which is none of Python's own types: {_WAY_OUT}"
        )
    return str(named)


def _is_numpy(value: Any, kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None or not (kind is numpy.ndarray or isinstance(value, numpy.generic)):
        return False
    return value.dtype.kind in _ARRAY_KINDS


def _article(kind: type) -> str:
    return f"a {kind.__module__}.{kind.__qualname__}"


def _checked_text(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise StateNotRestorable(f"{path} is text that has no UTF-8 form: {error}") from error
    return text


def _decode(value: Any, path: str, other: Decoder | None) -> Any:
    if isinstance(value, list):
        return [_decode(item, f"{path}[{i}]", other) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _decode(item, f"{path}.{key}", other) for key, item in value.items()}
    return _decode_tagged(value[TAG], value, path, other)


def _decode_tagged(tag: str, value: dict[str, Any], path: str, other: Decoder | None) -> Any:
    of = value.get("of")
    match tag:
        case "float":
            return float(str(of))
        case "int":
            return int(str(of), 16)
        case "complex":
            return complex(*_decode(of, path, other))
        case "bytes" | "bytearray":
            return b64decode(str(of)) if tag == "bytes" else bytearray(b64decode(str(of)))
        case "tuple" | "set" | "frozenset":
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](_decode(of, path, other))
        case "slice":
            return slice(*_decode(of, path, other))
        case "deque":
            return deque(_decode(of, path, other), value["most"])
        case "dict" | "OrderedDict" | "defaultdict" | "Counter":
            pairs = {_decode(k, path, other): _decode(v, f"{path}[{k!r}]", other) for k, v in of or ()}
            if tag == "defaultdict":
                return defaultdict(None if value["factory"] is None else _plain_type(value["factory"], path), pairs)
            return {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}[tag](pairs)
        case "numpy":
            return _numpy(value, path)
        case "name":
            named = NamedObject(*str(of).split(":", 1))
            return plain_type(named) or named
        case "enum" | "namedtuple" | "dataclass":
            return _decode_classed(tag, value, path, other)
    if tag in KIND_BY_TAG:
        return ENCODED_AS_TEXT[KIND_BY_TAG[tag]][1](of)
    if (namespace := namespace_class(tag)) is not None:
        return build_without_init(namespace, {str(k): _decode(v, f"{path}.{k}", other) for k, v in (of or {}).items()})
    if other is not None:
        try:
            return other(tag, value, lambda item: _decode(item, path, other))
        except KeyError:
            pass  # a kind that the hook does not know either
    raise StateMismatch(f"{path} is of kind {tag!r}, which this reader does not know: use the surefoot that wrote it")


def _decode_classed(tag: str, value: dict[str, Any], path: str, other: Decoder | None) -> Any:
    named = NamedObject(*str(value["of"]).split(":", 1))
    kind: Any = find_class(named, tag)
    if kind is None:
        raise StateMismatch(
            f"{path} is of the {tag} {named} in the checkpoint, and this program has loaded none of that name: import"
            f" {named.module} before restoring, or keep its name"
        )
    try:
        if tag == "enum":
            return kind[value["name"]] if "name" in value else kind(_decode(value["value"], path, other))
    except (KeyError, ValueError) as error:
        raise StateMismatch(f"{path} is {error} of {named} in the checkpoint, which that enum no longer has") from error
    if tag == "namedtuple":
        items = _decode(value["items"], path, other)
        if len(items) != len(kind._fields):
            raise StateMismatch(f"{path} has {len(items)} fields in the checkpoint and {named} has {len(kind._fields)}")
        return tuple.__new__(kind, items)
    held = {name: _decode(v, f"{path}.{name}", other) for name, v in value["fields"].items()}
    if odd := sorted(set(held) - field_names(kind)):
        raise StateMismatch(f"{path} has the field {odd[0]!r} in the checkpoint, which {named} no longer has")
    return build_without_init(kind, held)


def _plain_type(text: str, path: str) -> type:
    kind = plain_type(NamedObject(*text.split(":", 1)))
    if kind is None:
        raise StateMismatch(f"{path} is a defaultdict of {text}, which is never saved")
    return kind


def _numpy(value: dict[str, Any], path: str) -> Any:
    import numpy  # only where such a value was saved; the agent never needs it

    dtype = numpy.dtype(value["dtype"])
    if dtype.kind not in _ARRAY_KINDS:
        raise StateMismatch(f"{path} is an array of {dtype}, which is never saved as one")
    array: Any = numpy.ndarray(value["shape"] or (), dtype, b64decode(value["of"])).copy()
    return array[()] if value["shape"] is None else array
