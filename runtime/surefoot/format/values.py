"""Encodes plain values as tagged JSON and decodes them exactly.

Used for param groups, schedules, positions and RNG states. JSON's own values are written unchanged; every other value
is an object whose key `~` names its kind. Kinds that this module does not support go through the caller's hook (torch's
small types), so that this package does not need torch. A value that cannot be encoded or decoded raises an error that
names its key.
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
# Encodes values beyond JSON by an explicit kind; decoding never executes saved code. Containers keep their kind. Enums,
# dataclasses and named tuples name their class, which the reading process must have loaded already: a checkpoint never
# causes an import. Used below, and by code that walks such values.


@dataclass(frozen=True, slots=True)
class NamedObject:
    """Names a class or function that the reader must have loaded itself."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


def _parse_fraction(text: str) -> Fraction:
    """Parses `numerator/denominator` only: Fraction("1e999999999") would compute for days."""
    numerator, _, denominator = text.partition("/")
    return Fraction(int(numerator), int(denominator or "1"))


ENCODED_AS_TEXT: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    Fraction: (str, _parse_fraction),
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
"""Classes that one JSON value represents completely, with encoder and decoder. The tag is the class name."""

KIND_BY_TAG = {kind.__name__: kind for kind in ENCODED_AS_TEXT}

_NAMESPACES: dict[str, type] = {"Namespace": Namespace, "SimpleNamespace": SimpleNamespace}
_BUILTIN_TYPES: tuple[type, ...] = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    list,
    tuple,
    dict,
    set,
    frozenset,
    object,
    OrderedDict,
)
_PLAIN_TYPES: dict[str, type] = {kind.__name__: kind for kind in _BUILTIN_TYPES}


def timezone_is_plain(value: datetime | time) -> bool:
    """Returns whether a value has no time zone or a fixed UTC offset.

    ISO text cannot represent any other zone.
    """
    return value.tzinfo is None or type(value.tzinfo) is timezone


def name_of(value: Any) -> NamedObject | None:
    """Returns the name by which a class or function can be found in its module.

    None if the name does not lead back to it.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    return NamedObject(module, name) if resolve_name(NamedObject(module, name)) is value else None


def resolve_name(named_object: NamedObject) -> Any:
    """Resolves a name among the modules that this process has loaded; None if it is not there."""
    value: Any = sys.modules.get(named_object.module)
    for part in named_object.name.split("."):
        value = getattr(value, part, None)
    return value


def is_nameable(value: Any) -> bool:
    return isinstance(value, type | FunctionType | BuiltinFunctionType)


def plain_type(named_object: NamedObject) -> type | None:
    """Returns a Python built-in type by name, else None."""
    kind = _PLAIN_TYPES.get(named_object.name)
    return kind if kind is not None and kind.__module__ == named_object.module else None


def container_of(value: Any) -> str | None:
    """Returns the kind of a container that JSON does not have, else None."""
    kind = type(value)
    if kind in (deque, defaultdict, Counter, Namespace, SimpleNamespace):
        return kind.__name__
    return shape_of(kind)  # type: ignore[arg-type]  # a class is hashable


@lru_cache(maxsize=1024)
def shape_of(kind: Hashable) -> str | None:
    """Returns `namedtuple` or `dataclass` if a class is one, else None."""
    assert isinstance(kind, type), "a class"
    if kind is NamedObject:
        return None
    if kind.__bases__ == (tuple,) and hasattr(kind, "_fields"):
        return "namedtuple"
    plain = not issubclass(kind, dict | list | tuple | set | frozenset | str | bytes | int | float | Enum)
    return "dataclass" if is_dataclass(kind) and plain else None


def fields_of(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass or namespace that are set."""
    if isinstance(value, Namespace | SimpleNamespace):
        return dict(vars(value))
    return {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}


def field_names(kind: Any) -> set[str]:
    return {f.name for f in fields(kind)}


def beyond_fields(value: Any) -> list[str]:
    """Lists the attributes of a dataclass object that are not fields."""
    return sorted(set(getattr(value, "__dict__", ())) - field_names(value))


def build_without_init(kind: type, values_by_field: dict[str, Any]) -> Any:
    """Builds a dataclass or namespace without running its code."""
    if kind in _NAMESPACES.values():
        namespace: Any = kind()
        # not by setattr: a namespace may contain a name such as `__dict__`, which setattr would interpret
        vars(namespace).update(values_by_field)
        return namespace
    value: Any = object.__new__(kind)
    for name, field_value in values_by_field.items():
        object.__setattr__(value, name, field_value)
    return value


def namespace_class(tag: str) -> type | None:
    return _NAMESPACES.get(tag)


_SCALARS = frozenset((bool, int, float, str, type(None)))


def has_only_scalars(value: Any) -> bool:
    """Returns whether a value is a list or tuple of numbers and texts, in which nothing needs to be replaced.

    A history of 100,000 losses is so passed at once; visiting each of them took seconds of every save.
    """
    return type(value) in (list, tuple) and _SCALARS.issuperset(map(type, value))


def map_container(value: Any, each: Callable[[Any, Any], Any]) -> Any:
    """Rebuilds a container from `each(key, item)`; returns other values unchanged."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        return kind((key, each(key, item)) for key, item in value.items())
    if kind in (list, tuple):
        return kind(each(index, item) for index, item in enumerate(value))
    match container_of(value):
        case None:
            return value
        case "deque":
            return deque((each(index, item) for index, item in enumerate(value)), value.maxlen)
        case "defaultdict":
            return defaultdict(value.default_factory, {key: each(key, item) for key, item in value.items()})
        case "Counter":
            return Counter({key: each(key, item) for key, item in value.items()})
        case "namedtuple":
            return tuple.__new__(kind, (each(name, item) for name, item in zip(kind._fields, value, strict=True)))
    return build_without_init(kind, {name: each(name, item) for name, item in fields_of(value).items()})


def find_class(named_object: NamedObject, shape: str) -> type | None:
    """Finds a loaded enum, dataclass or named tuple; `shape` is `enum`, `dataclass` or `namedtuple`.

    None if the name belongs to something else.
    """
    found_class = resolve_name(named_object)
    if not isinstance(found_class, type) or found_class.__module__ == builtins.__name__:
        return None
    if shape == "enum":
        return found_class if issubclass(found_class, Enum) else None
    return found_class if shape_of(found_class) == shape else None


# ---- values ----------------------------------------------------------------------------------------------------------

VALUES_FORMAT = 2
TAG = "~"
MAX_DEPTH = 200
"""Deeper nesting is treated as a value that contains itself."""

Inner = Callable[[Any], Any]
"""Encodes or decodes a nested value."""
Encoder = Callable[[Any, Inner], Mapping[str, Any] | None]
Decoder = Callable[[str, Mapping[str, Any], Inner], Any]
"""Decodes (kind, whole object, decoder of nested values); raises KeyError for an unknown kind."""

_DECODE_ERRORS = (TypeError, ValueError, AttributeError, KeyError, IndexError, ArithmeticError)
_ARRAY_KINDS = "biufcmMUS"
_WIDE_BITS = 1024
"""Longer integers are written in hexadecimal, because Python limits the digits of decimal ones."""
_WIDE = 1 << _WIDE_BITS
_REMEDY = "leave it out of state_dict, or give it as numbers, text, tensors, enums or dataclasses"


def encode_values(values: Mapping[str, Any], other: Encoder | None = None) -> bytes:
    """Encodes a values blob; `other` encodes values of kinds that this module does not support.

    `other` returns an object with the key `~`, or None for a value that it does not support either.
    """
    encoded = {name: _encode(value, name, other, 0) for name, value in values.items()}
    return json.dumps({"format": VALUES_FORMAT, "values": encoded}, separators=(",", ":"), allow_nan=False).encode()


def decode_values(data: bytes, other: Decoder | None = None) -> dict[str, Any]:
    """Decodes a values blob; `other` decodes the objects that the encoder's hook returned.

    Raises StateMismatch for another format, or for values that this version does not write.
    """
    try:
        record = json.loads(data)
        if record["format"] != VALUES_FORMAT:
            raise StateMismatch(
                f"the values are of format {record['format']!r}, this version reads {VALUES_FORMAT}: restore with the"
                " surefoot that wrote them"
            )
        return {name: _decode(value, name, other) for name, value in record["values"].items()}
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError, MemoryError, *_DECODE_ERRORS) as error:
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
        if _is_json(value):
            return value
        return [_encode(item, f"{path}[{i}]", other, depth + 1) for i, item in enumerate(value)]
    if kind is dict and TAG not in value and all(type(key) is str for key in value):
        return {_checked_text(key, path): _encode(v, f"{path}.{key}", other, depth + 1) for key, v in value.items()}
    return _encode_tagged(value, kind, path, other, depth)


def _is_json(value: list[Any]) -> bool:
    """Returns whether a list has only finite floats, or only integers that JSON takes as they are."""
    kinds = set(map(type, value))
    if kinds == {float}:
        return all(map(math.isfinite, value))
    return kinds == {int} and min(value) > -_WIDE and max(value) < _WIDE


def _encode_tagged(value: Any, kind: type, path: str, other: Encoder | None, depth: int) -> dict[str, Any]:
    def each(item: Any, suffix: str) -> Any:
        return _encode(item, f"{path}{suffix}", other, depth + 1)

    if kind in (dict, OrderedDict, defaultdict, Counter):
        pairs = [
            [_encode(key, f"a key of {path}", other, depth + 1), each(v, f"[{key!r}]")] for key, v in value.items()
        ]
        encoded = {TAG: kind.__name__, "of": pairs}
        return encoded if kind is not defaultdict else encoded | {"factory": _factory_name(value, path)}
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
    other_encoding = None if other is None else other(value, lambda item: each(item, ""))
    encoded_value = _encode_classed(value, kind, path, each) if other_encoding is None else dict(other_encoding)
    if encoded_value is None:
        raise StateNotRestorable(f"{path} is {_type_phrase(kind)}, which cannot be saved as a plain value: {_REMEDY}")
    return encoded_value


def _encode_classed(value: Any, kind: type, path: str, each: Callable[[Any, str], Any]) -> dict[str, Any] | None:
    """Encodes classes, functions, and objects of enums, dataclasses, named tuples and namespaces; None for others."""
    if kind is NamedObject:
        return {TAG: "name", "of": str(value)}
    if is_nameable(value):
        return {TAG: "name", "of": str(_require_name(value, path))}
    if isinstance(value, Enum):
        member = {"value": each(value.value, ".value")} if isinstance(value, Flag) else {"name": value.name}
        return {TAG: "enum", "of": str(_require_name(kind, path)), **member}
    match container_of(value):
        case "namedtuple":
            items = [each(item, f".{name}") for name, item in zip(value._fields, value, strict=True)]
            return {TAG: "namedtuple", "of": str(_require_name(kind, path)), "items": items}
        case "dataclass":
            if extra_attributes := beyond_fields(value):
                raise StateNotRestorable(
                    f"{path} is {_type_phrase(kind)} with {extra_attributes[0]!r}, which is no field: {_REMEDY}"
                )
            encoded_fields = {name: each(v, f".{name}") for name, v in fields_of(value).items()}
            return {TAG: "dataclass", "of": str(_require_name(kind, path)), "fields": encoded_fields}
        case "Namespace" | "SimpleNamespace" as tag:
            return {TAG: tag, "of": {name: each(v, f".{name}") for name, v in vars(value).items()}}
    return None


def _require_name(value: Any, path: str) -> NamedObject:
    name = name_of(value)
    if name is None:
        raise StateNotRestorable(
            f"{path} is of {getattr(value, '__qualname__', value)!r}, which no module has under that name (it was made"
            f" inside a function?): define it at the top of a module, or {_REMEDY}"
        )
    return name


def _factory_name(value: defaultdict[Any, Any], path: str) -> str | None:
    if value.default_factory is None:
        return None
    factory = name_of(value.default_factory)
    if factory is None or plain_type(factory) is None:
        raise StateNotRestorable(
            f"{path} is a defaultdict of {value.default_factory!r}, which is none of Python's own types: {_REMEDY}"
        )
    return str(factory)


def _is_numpy(value: Any, kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None or not (kind is numpy.ndarray or isinstance(value, numpy.generic)):
        return False
    return value.dtype.kind in _ARRAY_KINDS


def _type_phrase(kind: type) -> str:
    return f"a {kind.__module__}.{kind.__qualname__}"


def _checked_text(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise StateNotRestorable(f"{path} is text that has no UTF-8 form: {error}") from error
    return text


def _decode(value: Any, path: str, other: Decoder | None) -> Any:
    if isinstance(value, list):
        if {list, dict}.isdisjoint(map(type, value)):
            return value
        return [_decode(item, f"{path}[{i}]", other) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _decode(item, f"{path}.{key}", other) for key, item in value.items()}
    return _decode_tagged(value[TAG], value, path, other)


def _decode_tagged(tag: str, value: dict[str, Any], path: str, other: Decoder | None) -> Any:
    content = value.get("of")
    match tag:
        case "float":
            return float(str(content))
        case "int":
            return int(str(content), 16)
        case "complex":
            return complex(*_decode(content, path, other))
        case "bytes" | "bytearray":
            return b64decode(str(content)) if tag == "bytes" else bytearray(b64decode(str(content)))
        case "tuple" | "set" | "frozenset":
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](_decode(content, path, other))
        case "slice":
            return slice(*_decode(content, path, other))
        case "deque":
            return deque(_decode(content, path, other), value["most"])
        case "dict" | "OrderedDict" | "defaultdict" | "Counter":
            pairs = {_decode(k, path, other): _decode(v, f"{path}[{k!r}]", other) for k, v in content or ()}
            if tag == "defaultdict":
                return defaultdict(
                    None if value["factory"] is None else _require_plain_type(value["factory"], path), pairs
                )
            return {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}[tag](pairs)
        case "numpy":
            return _decode_numpy(value, path)
        case "name":
            named_object = NamedObject(*str(content).split(":", 1))
            return plain_type(named_object) or named_object
        case "enum" | "namedtuple" | "dataclass":
            return _decode_classed(tag, value, path, other)
    if tag in KIND_BY_TAG:
        return ENCODED_AS_TEXT[KIND_BY_TAG[tag]][1](content)
    if (namespace := namespace_class(tag)) is not None:
        return build_without_init(
            namespace, {str(k): _decode(v, f"{path}.{k}", other) for k, v in (content or {}).items()}
        )
    if other is not None:
        try:
            return other(tag, value, lambda item: _decode(item, path, other))
        except KeyError:
            pass  # the hook does not support this kind either
    raise StateMismatch(f"{path} is of kind {tag!r}, which this reader does not know: use the surefoot that wrote it")


def _decode_classed(tag: str, value: dict[str, Any], path: str, other: Decoder | None) -> Any:
    named_object = NamedObject(*str(value["of"]).split(":", 1))
    found_class: Any = find_class(named_object, tag)
    if found_class is None:
        raise StateMismatch(
            f"{path} is of the {tag} {named_object} in the checkpoint, and this program has loaded none of that name:"
            f" import {named_object.module} before restoring, or keep its name"
        )
    try:
        if tag == "enum":
            return found_class[value["name"]] if "name" in value else found_class(_decode(value["value"], path, other))
    except (KeyError, ValueError) as error:
        raise StateMismatch(
            f"{path} is {error} of {named_object} in the checkpoint, which that enum no longer has"
        ) from error
    if tag == "namedtuple":
        items = _decode(value["items"], path, other)
        if len(items) != len(found_class._fields):
            raise StateMismatch(
                f"{path} has {len(items)} fields in the checkpoint and {named_object} has {len(found_class._fields)}"
            )
        return tuple.__new__(found_class, items)
    decoded_fields = {name: _decode(v, f"{path}.{name}", other) for name, v in value["fields"].items()}
    if unknown_fields := sorted(set(decoded_fields) - field_names(found_class)):
        raise StateMismatch(
            f"{path} has the field {unknown_fields[0]!r} in the checkpoint, which {named_object} no longer has"
        )
    return build_without_init(found_class, decoded_fields)


def _require_plain_type(class_path: str, path: str) -> type:
    kind = plain_type(NamedObject(*class_path.split(":", 1)))
    if kind is None:
        raise StateMismatch(f"{path} is a defaultdict of {class_path}, which is never saved")
    return kind


def _decode_numpy(value: dict[str, Any], path: str) -> Any:
    import numpy  # only where such a value was saved; the agent never needs it

    dtype = numpy.dtype(value["dtype"])
    if dtype.kind not in _ARRAY_KINDS:
        raise StateMismatch(f"{path} is an array of {dtype}, which is never saved as one")
    array: Any = numpy.ndarray(value["shape"] or (), dtype, b64decode(value["of"])).copy()
    return array[()] if value["shape"] is None else array
