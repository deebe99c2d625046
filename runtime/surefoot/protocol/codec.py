"""Frozen dataclasses to JSON and back, strictly typed: what both lines (agent–coordinator, trainer–agent) are made of.

Pure. A message carries its version and its type; whatever is unknown, missing, foreign or of another type is refused
by name, because a guessed field is how an old world's word ends up believed.

How a version grows: a field that version N adds has `field(default=…, metadata={"since": N})` (`since(N, default)`),
a whole message type has `SINCE: ClassVar[int] = N`. Towards an older peer such fields are left out and such messages
are refused; from an older peer the fields take their defaults.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from surefoot.errors import ProtocolError
from surefoot.protocol.plain import shown


def since(version: int, default: Any) -> Any:
    """A dataclass field that `version` added; peers of older versions neither send nor get it."""
    return dataclasses.field(default=default, metadata={"since": version})


class Codec:
    """Encodes and decodes a closed set of message types, speaking versions `oldest` to `version`."""

    def __init__(
        self, message_types: Sequence[type[Any]], version: int, oldest: int, text: Callable[[str], str] = str
    ) -> None:
        """`text`: what becomes of each text that is read."""
        self._text = text
        self._types = {cls.__name__: cls for cls in message_types}
        self._version = version
        self._oldest = oldest

    def encode(self, message: Any, version: int | None = None) -> str:
        """JSON text of one message as `version` of the protocol writes it (None: the newest).

        Raises ProtocolError for a message that this version does not have: the caller asks first, or does without.
        """
        version = self._version if version is None else version
        cls = type(message)
        self._check_version(version, cls.__name__)
        if _since(cls) > version:
            raise ProtocolError(f"{cls.__name__} came with version {_since(cls)}, this peer speaks {version}")
        return json.dumps({"v": version, "type": cls.__name__, **_fields(message, version)}, separators=(",", ":"))

    def decode(self, text: str | bytes) -> Any:
        """The message in `text`; raises ProtocolError that names what is foreign about it."""
        return self.decode_versioned(text)[0]

    def decode_versioned(self, text: str | bytes) -> tuple[Any, int]:
        """The message in `text` and the version it speaks; raises ProtocolError as `decode` does."""
        try:
            body = json.loads(text)
        except (ValueError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"a message is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise ProtocolError(f"a message is a JSON {type(body).__name__}, not an object")
        version, name = body.pop("v", None), body.pop("type", None)
        if type(version) is not int:
            raise ProtocolError(f"message {shown(name)} has version {shown(version)}, which is not a whole number")
        self._check_version(version, name)
        cls = self._types.get(name) if isinstance(name, str) else None
        if cls is None or _since(cls) > version:
            raise ProtocolError(f"no message of version {version} is called {shown(name)}")
        return _build(cls, body, str(name), _Reading(version, self._text)), version

    def _check_version(self, version: int, name: object) -> None:
        if not self._oldest <= version <= self._version:
            spoken = f"{self._oldest} to {self._version}"
            raise ProtocolError(
                f"message {shown(name)} speaks version {shown(version)}, this side {spoken}: upgrade the older one"
            )


def _since(cls: type[Any]) -> int:
    return int(getattr(cls, "SINCE", 1))


def _fields(value: Any, version: int) -> dict[str, Any]:
    return {
        f.name: _plain(getattr(value, f.name), version)
        for f in dataclasses.fields(value)
        if f.metadata.get("since", 1) <= version
    }


def _plain(value: Any, version: int) -> Any:
    if dataclasses.is_dataclass(value):
        return _fields(value, version)
    if isinstance(value, (tuple, list)):
        return [_plain(item, version) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, version) for key, item in value.items()}
    return value


@dataclass(frozen=True, slots=True)
class _Reading:
    """How a message is read."""

    version: int
    text: Callable[[str], str]


_HINTS: dict[type[Any], dict[str, Any]] = {}


def _build(cls: type[Any], body: dict[str, Any], path: str, how: _Reading) -> Any:
    hints = _HINTS.get(cls)
    if hints is None:
        hints = _HINTS[cls] = typing.get_type_hints(cls)
    spoken = {f.name for f in dataclasses.fields(cls) if f.metadata.get("since", 1) <= how.version}
    foreign = sorted(set(body) - spoken)
    if foreign:
        raise ProtocolError(f"{path} has no field {shown(foreign[0])} in version {how.version}")
    try:
        return cls(**{name: _value(hints[name], value, f"{path}.{name}", how) for name, value in body.items()})
    except TypeError as error:
        raise ProtocolError(f"{path} is incomplete: {error}") from error


def _value(hint: Any, value: Any, path: str, how: _Reading) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _value(next(a for a in arguments if a is not type(None)), value, path, how)
    if origin is Literal:
        if value not in arguments:
            raise ProtocolError(f"{path} is {shown(value)}, not one of {', '.join(map(repr, arguments))}")
        return value
    if origin is tuple:
        return _tuple(arguments, value, path, how)
    if origin is dict and isinstance(value, dict):
        return {how.text(str(k)): _value(arguments[1], v, f"{path}[{shown(k)}]", how) for k, v in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _build(typing.cast(type[Any], hint), value, path, how)
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint is str and type(value) is str:
        return how.text(value)
    if hint in (int, bool) and type(value) is hint:
        return value
    raise ProtocolError(f"{path} is {shown(value)}, which is not of type {getattr(hint, '__name__', hint)}")


def _tuple(arguments: tuple[Any, ...], value: Any, path: str, how: _Reading) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ProtocolError(f"{path} is {shown(value)}, not a list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_value(arguments[0], item, f"{path}[{i}]", how) for i, item in enumerate(value))
    if len(value) != len(arguments):
        raise ProtocolError(f"{path} has {len(value)} entries, not {len(arguments)}")
    pairs = enumerate(zip(arguments, value, strict=True))
    return tuple(_value(a, item, f"{path}[{i}]", how) for i, (a, item) in pairs)
