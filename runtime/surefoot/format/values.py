"""Plain values (param groups, schedules, positions, RNG states) as tagged JSON and back, exactly.

What JSON says stays as it is; everything else is an object with the key `~` that names its kind. What is none of
these goes through the caller's hook (torch's own format), so that this room needs no torch. A value that cannot be
said, or read back, is an error that names its key.
"""

from __future__ import annotations

import json
import math
import pickle
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from surefoot.errors import StateMismatch

VALUES_FORMAT = 1
TAG = "~"
DEEPEST = 200
"""Nesting beyond this is taken for a value that contains itself."""

Encoder = Callable[[Any], bytes]
Decoder = Callable[[bytes], Any]

_HOOK_ERRORS = (pickle.PickleError, TypeError, ValueError, AttributeError, RuntimeError, EOFError)
_ARRAY_KINDS = "biufc"
_WIDE_BITS = 1024
"""Whole numbers beyond this are written in hexadecimal, because Python limits decimal ones."""


def encode_values(values: Mapping[str, Any], other: Encoder | None = None) -> bytes:
    """The values blob. `other` gets what has no tag of its own and returns bytes, or raises."""
    body = {name: _encode(value, name, other, 0) for name, value in values.items()}
    return json.dumps({"format": VALUES_FORMAT, "values": body}, separators=(",", ":"), allow_nan=False).encode()


def decode_values(data: bytes, other: Decoder | None = None) -> dict[str, Any]:
    """The inverse. `other` gets the bytes that the encoder's hook gave."""
    try:
        body = json.loads(data)
        if body["format"] != VALUES_FORMAT:
            raise StateMismatch(f"the values are of format {body['format']!r}, this version reads {VALUES_FORMAT}")
        return {name: _decode(value, name, other) for name, value in body["values"].items()}
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise StateMismatch(f"the values of a checkpoint are not what this version writes: {error!r}") from error


def _encode(value: Any, path: str, other: Encoder | None, depth: int) -> Any:
    if depth > DEEPEST:
        raise StateMismatch(f"{path[:200]}… is nested more than {DEEPEST} deep: does it contain itself?")
    kind = type(value)
    if kind is int and value.bit_length() > _WIDE_BITS:
        return {TAG: "int", "of": hex(value)}
    if value is None or kind in (bool, int, str):
        return _checked_text(value, path) if kind is str else value
    if kind is float:
        return value if math.isfinite(value) else {TAG: "float", "of": repr(value)}
    if kind is complex:
        return {TAG: "complex", "of": [_encode(part, path, other, depth) for part in (value.real, value.imag)]}
    if kind in (bytes, bytearray):
        return {TAG: kind.__name__, "of": b64encode(value).decode()}
    if kind in (list, tuple, set, frozenset):
        items = [_encode(item, f"{path}[{i}]", other, depth + 1) for i, item in enumerate(value)]
        if kind is list:
            return items
        return {TAG: kind.__name__, "of": items if kind is tuple else sorted(items, key=json.dumps)}
    if kind in (dict, OrderedDict):
        return _encode_mapping(value, path, other, depth)
    if kind.__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in _ARRAY_KINDS:
        raw = b64encode(value.tobytes()).decode()
        shape = list(value.shape) if kind.__name__ == "ndarray" else None  # a scalar is not a 0-d array
        return {TAG: "numpy", "dtype": value.dtype.str, "shape": shape, "of": raw}
    return {TAG: "other", "of": b64encode(_through(other, value, path)).decode()}


def _encode_mapping(value: Mapping[Any, Any], path: str, other: Encoder | None, depth: int) -> Any:
    if type(value) is dict and TAG not in value and all(type(key) is str for key in value):
        return {_checked_text(key, path): _encode(v, f"{path}.{key}", other, depth + 1) for key, v in value.items()}
    pairs = [
        [_encode(key, f"a key of {path}", other, depth + 1), _encode(v, f"{path}[{key!r}]", other, depth + 1)]
        for key, v in value.items()
    ]
    return {TAG: type(value).__name__, "of": pairs}


def _through(other: Encoder | None, value: Any, path: str) -> bytes:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if other is None:
        raise StateMismatch(
            f"{path} is a {name}, which cannot be saved as a plain value: give numbers, text or tensors"
        )
    try:
        return other(value)
    except _HOOK_ERRORS as error:
        raise StateMismatch(f"{path} is a {name}, which cannot be saved: {error}") from error


def _checked_text(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise StateMismatch(f"{path} is text that has no UTF-8 form: {error}") from error
    return text


def _decode(value: Any, path: str, other: Decoder | None) -> Any:
    if isinstance(value, list):
        return [_decode(item, f"{path}[{i}]", other) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _decode(item, f"{path}.{key}", other) for key, item in value.items()}
    tag, of = value[TAG], value["of"]
    match tag:
        case "float":
            return float(of)
        case "int":
            return int(of, 16)
        case "complex":
            return complex(*_decode(of, path, other))
        case "bytes" | "bytearray":
            return b64decode(of) if tag == "bytes" else bytearray(b64decode(of))
        case "tuple" | "set" | "frozenset":
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](_decode(of, path, other))
        case "dict" | "OrderedDict":
            pairs = ((_decode(k, path, other), _decode(v, f"{path}[{k!r}]", other)) for k, v in of)
            return dict(pairs) if tag == "dict" else OrderedDict(pairs)
        case "numpy":
            return _numpy(value, path)
        case "other" if other is not None:
            try:
                return other(b64decode(of))
            except _HOOK_ERRORS as error:
                raise StateMismatch(f"{path} cannot be read back: {error}") from error
    raise StateMismatch(f"{path} is of kind {tag!r}, which this reader does not know: use the surefoot that wrote it")


def _numpy(value: dict[str, Any], path: str) -> Any:
    import numpy  # only where such a value was saved; the agent never needs it

    dtype = numpy.dtype(value["dtype"])
    if dtype.kind not in _ARRAY_KINDS:
        raise StateMismatch(f"{path} is an array of {dtype}, which is never saved as one")
    array: Any = numpy.ndarray(value["shape"] or (), dtype, b64decode(value["of"])).copy()
    return array[()] if value["shape"] is None else array
