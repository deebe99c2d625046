"""Frozen dataclasses to JSON and back, strictly typed: what both lines (agent–coordinator, trainer–agent) are made of.

Pure. A message carries its version and its type; whatever is unknown, missing, foreign or of another type is refused
by name, because a guessed field is how an old world's word ends up believed.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal, Union, get_args, get_origin

from surefoot.errors import ProtocolError


class Codec:
    """Encodes and decodes a closed set of message types, speaking versions `oldest` to `version`."""

    def __init__(self, message_types: Sequence[type[Any]], version: int, oldest: int) -> None:
        self._types = {cls.__name__: cls for cls in message_types}
        self._version = version
        self._oldest = oldest

    def encode(self, message: Any) -> str:
        """JSON text of one message."""
        body = {"v": self._version, "type": type(message).__name__, **dataclasses.asdict(message)}
        return json.dumps(body, separators=(",", ":"))

    def decode(self, text: str | bytes) -> Any:
        """The message in `text`; raises ProtocolError that names what is foreign about it."""
        try:
            body = json.loads(text)
        except (ValueError, UnicodeDecodeError) as error:
            raise ProtocolError(f"a message is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise ProtocolError(f"a message is a JSON {type(body).__name__}, not an object")
        version, name = body.pop("v", None), body.pop("type", None)
        if not isinstance(version, int) or not self._oldest <= version <= self._version:
            spoken = f"{self._oldest} to {self._version}"
            raise ProtocolError(
                f"message {name!r} speaks version {version!r}, this side {spoken}: upgrade the older one"
            )
        cls = self._types.get(name) if isinstance(name, str) else None
        if cls is None:
            raise ProtocolError(f"no message is called {name!r}")
        return _build(cls, body, str(name))


_HINTS: dict[type[Any], dict[str, Any]] = {}


def _build(cls: type[Any], body: dict[str, Any], path: str) -> Any:
    hints = _HINTS.get(cls)
    if hints is None:
        hints = _HINTS[cls] = typing.get_type_hints(cls)
    foreign = sorted(set(body) - set(hints))
    if foreign:
        raise ProtocolError(f"{path} has no field {foreign[0]!r}")
    try:
        return cls(**{name: _value(hints[name], value, f"{path}.{name}") for name, value in body.items()})
    except TypeError as error:
        raise ProtocolError(f"{path} is incomplete: {error}") from error


def _value(hint: Any, value: Any, path: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _value(next(a for a in arguments if a is not type(None)), value, path)
    if origin is Literal:
        if value not in arguments:
            raise ProtocolError(f"{path} is {value!r}, not one of {', '.join(map(repr, arguments))}")
        return value
    if origin is tuple:
        return _tuple(arguments, value, path)
    if origin is dict and isinstance(value, dict):
        return {str(k): _value(arguments[1], v, f"{path}[{k!r}]") for k, v in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _build(typing.cast(type[Any], hint), value, path)
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    raise ProtocolError(f"{path} is {value!r}, which is not of type {getattr(hint, '__name__', hint)}")


def _tuple(arguments: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ProtocolError(f"{path} is {value!r}, not a list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_value(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if len(value) != len(arguments):
        raise ProtocolError(f"{path} has {len(value)} entries, not {len(arguments)}")
    return tuple(_value(a, item, f"{path}[{i}]") for i, (a, item) in enumerate(zip(arguments, value, strict=True)))
