"""Encodes and decodes messages of frozen dataclasses as strictly typed JSON.

Pure; used on both connections (agent to coordinator, trainer to agent). A message carries its version and its type.
Unknown, missing or mistyped fields and other versions are rejected by name: if a field were guessed, a message of an
old generation could be believed.

msgspec decodes the messages of our own peers in microseconds. A message that it rejects (such as one with a loss of
NaN, as Python writes it) is parsed again by Python, which accepts it or names the fault.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from surefoot.errors import ProtocolError
from surefoot.protocol import bounds
from surefoot.protocol.text import escape_control_characters, is_plain_json, short_repr

# ---- strict types ----------------------------------------------------------------------------------------------------
# Builds frozen dataclasses from JSON, strictly typed by msgspec. A mismatch is reported by path and value. A dataclass
# can neither reject unknown fields nor rename its own, so each gets a *mirror*: a msgspec struct, made once from its
# type hints. Messages, statuses and records all use this one engine, so that they share one definition of a number.

T = TypeVar("T")

INLINE_KEY = "flat"
"""Metadata key of a dataclass field whose own fields are written into the enclosing object."""

_LOCATION = re.compile(r"(.*) - at `\$([^`]*)`", re.DOTALL)
_PATH_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_JSON_TYPE_NAMES = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    list: "array",
    dict: "object",
    type(None): "null",
}


@dataclass(frozen=True, slots=True)
class JsonShape:
    """How a dataclass is represented in JSON."""

    ignores_unknown_fields: bool = False
    """Whether unknown fields are ignored; else they are rejected."""
    rename: Callable[[str], str] | None = None
    """Makes a field's JSON name from its Python name; None: the names are equal."""


class TypeMismatch(Exception):
    """A JSON value does not have the type that it should have.

    Attributes:
        path: Where the value is, as in `.saved.step`; empty for the outermost object.
        reason: What is wrong there, to be read after the path.
        foreign: Name of the unknown field; None for any other mismatch.
    """

    def __init__(self, path: str, why: str, foreign: str | None = None) -> None:
        super().__init__(f"{path} {why}")
        self.path = path
        self.reason = why
        self.unknown_field = foreign


def type_hints_of(cls: type[Any]) -> Mapping[str, Any]:
    """Returns the type hints of a dataclass, resolved once."""
    return _resolve_hints(typing.cast(Hashable, cls))


def build_struct(cls: type[Any], shape: JsonShape = JsonShape(), tag: str | None = None) -> type[msgspec.Struct]:
    """Makes the msgspec struct (mirror) that decodes a `cls`.

    Args:
        cls: The dataclass.
        shape: How it is represented.
        tag: Makes it a message, with this text in its field `type` and the version in `v`; None: no message.
    """
    return _build_mirror(typing.cast(Hashable, cls), shape, tag)


@functools.cache
def _resolve_hints(cls: Hashable) -> Mapping[str, Any]:
    return typing.get_type_hints(cls)


@functools.cache
def _build_mirror(dataclass_type: Hashable, shape: JsonShape, tag: str | None) -> type[msgspec.Struct]:
    """Makes the msgspec struct of a dataclass; cached, because it is needed for each message."""
    cls = typing.cast(type[Any], dataclass_type)
    flat = [field.name for field in dataclasses.fields(cls) if INLINE_KEY in field.metadata]
    fields = [*([] if tag is None else [("v", int)]), *_mirror_fields(cls, shape)]
    fields.sort(key=lambda field: len(field) > 2)  # a struct's fields with a default must follow those without
    return msgspec.defstruct(
        cls.__name__,
        fields,
        namespace={name: property(lambda self: self) for name in flat},  # the struct itself has the inlined fields
        frozen=True,
        forbid_unknown_fields=not shape.ignores_unknown_fields,
        rename=shape.rename,
        tag=tag,
        tag_field=None if tag is None else "type",
    )


def build_from_json(cls: type[T], body: object, shape: JsonShape = JsonShape()) -> T:
    """Builds a `cls` from decoded JSON; raises TypeMismatch if it does not fit."""
    return to_dataclass(cls, convert_to_mirror(build_struct(cls, shape), body))


def convert_to_mirror(mirror: Any, body: object) -> Any:
    """Converts decoded JSON to the mirror `wanted`; raises TypeMismatch if it does not fit."""
    try:
        return msgspec.convert(body, mirror)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        raise _to_type_mismatch(str(error), mirror, body) from error


def to_dataclass(cls: type[T], struct: msgspec.Struct) -> T:
    """Builds the dataclass of a mirror; missing fields take their defaults."""
    return msgspec.convert(struct, cls, from_attributes=True)


def _mirror_fields(cls: type[Any], shape: JsonShape) -> Iterator[Any]:
    """Yields the struct's fields: name, type and perhaps default; inlined dataclasses yield their own."""
    for field in dataclasses.fields(cls):
        hint = type_hints_of(cls)[field.name]
        if INLINE_KEY in field.metadata:
            yield from _mirror_fields(hint, shape)
        else:
            mirrored = _mirror_type(hint, shape)
            yield field.name, mirrored, *_field_default(field, mirrored)


def _mirror_type(hint: Any, shape: JsonShape) -> Any:
    """Replaces dataclasses within a type hint by their structs."""
    if dataclasses.is_dataclass(hint):
        return build_struct(typing.cast(type[Any], hint), shape)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is None or origin is Literal:
        return hint
    inner = tuple(argument if argument is Ellipsis else _mirror_type(argument, shape) for argument in arguments)
    return Union[inner] if origin in (Union, types.UnionType) else origin[inner]  # noqa: UP007  made of a list


def _field_default(field: dataclasses.Field[Any], hint: Any) -> tuple[Any, ...]:
    """Returns the default of a field as a tuple of one; empty if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return (msgspec.field(default_factory=field.default_factory),)
    if field.default is dataclasses.MISSING:
        return ()
    if dataclasses.is_dataclass(field.default):
        return (msgspec.convert(field.default, hint, from_attributes=True),)
    return (field.default,)


def _to_type_mismatch(error_text: str, mirror: Any, body: object) -> TypeMismatch:
    """Converts msgspec's error, which names no value and writes `...` for a mapping's key."""
    location = _LOCATION.fullmatch(error_text)
    sentence, steps = (location[1], _PATH_STEP.findall(location[2])) if location is not None else (error_text, [])
    actual_kind = re.search(r"got `(\w+)`", sentence)
    path, value, hint = "", body, mirror
    for name, index in steps:
        value, key = _value_at(value, name or index, actual_kind[1] if actual_kind is not None else "")
        path += f".{key}" if name else f"[{key}]"
        hint = _hint_at(hint, name)
    names = _known_field_names(hint)
    if "unknown field" in sentence and isinstance(value, dict):
        foreign = min((key for key in value if key not in names), key=str, default="?")
        return TypeMismatch(path, f"has no field {short_repr(foreign)}", str(foreign))
    if "missing required field" in sentence:
        return TypeMismatch(path, f"is incomplete: {sentence.partition('field ')[2].strip('`')} is missing")
    return TypeMismatch(path, _describe_mismatch(sentence, value, hint))


def _value_at(value: object, key: str, kind: str) -> tuple[object, str]:
    """Returns the value under `key` and the key; for the key `...` of a mapping, the first value of type `kind`."""
    if key == "..." and isinstance(value, dict):
        for name, item in value.items():
            if _JSON_TYPE_NAMES.get(type(item)) == kind:
                return item, short_repr(name)
        return None, "…"
    if isinstance(value, dict):
        return value.get(key), key
    if isinstance(value, list) and key.isdigit() and int(key) < len(value):
        return value[int(key)], key
    return None, key


def _hint_at(hint: Any, name: str) -> Any:
    """Returns the type of a field of `hint`, or of the items of `hint` if `name` is empty; None if unknown."""
    for option in (hint, *get_args(hint)):
        if not name and get_origin(option) in (tuple, dict):
            return get_args(option)[-1 if get_origin(option) is dict else 0]
        if name and isinstance(option, type) and issubclass(option, msgspec.Struct):
            for field in msgspec.structs.fields(option):
                if field.encode_name == name:
                    return field.type
    return None


def _known_field_names(hint: Any) -> set[str]:
    """Returns the JSON names of all fields that a type has, and those of a message's header."""
    names = {"v", "type"}
    for option in (hint, *get_args(hint)):
        if isinstance(option, type) and issubclass(option, msgspec.Struct):
            names.update(field.encode_name for field in msgspec.structs.fields(option))
    return names


def _describe_mismatch(sentence: str, value: object, hint: Any) -> str:
    """Describes a value of the wrong type, to be read after its path."""
    options = [
        literal for option in (hint, *get_args(hint)) if get_origin(option) is Literal for literal in get_args(option)
    ]
    length = re.search(r"`array` of length (\d+), got (\d+)", sentence)
    if length is not None:
        return f"has {length[2]} entries, not {length[1]}"
    if options:
        return f"is {short_repr(value)}, not one of {', '.join(map(repr, options))}"
    if "Expected `array" in sentence:
        return f"is {short_repr(value)}, not a list"
    expected = re.search(r"Expected `([^`]+)`", sentence)
    if expected is None:
        return f"is {short_repr(value)}, which is no value for it"
    kind = expected[1].removesuffix(" | null").replace("object", "mapping")
    return f"is {short_repr(value)}, which is not of type {kind}"


# ---- codec -----------------------------------------------------------------------------------------------------------


def inlined_field(default: Any) -> Any:
    """Declares a dataclass field whose own fields are written into the enclosing message."""
    return dataclasses.field(default=default, metadata={INLINE_KEY: True})


class Codec:
    """Encodes and decodes a closed set of messages in one version."""

    def __init__(self, message_types: Sequence[type[Any]], version: int, plain_texts: bool = False) -> None:
        """Makes a codec; with `plain_texts`, control characters in decoded texts are replaced by escapes."""
        self._types = {cls.__name__: cls for cls in message_types}
        self._version = version
        self._plain_texts = plain_texts
        self._expected_start = f'{{"v":{version},'
        mirrors = tuple(build_struct(cls, tag=cls.__name__) for cls in message_types)
        self._decoder = msgspec.json.Decoder(Union[mirrors])  # noqa: UP007  made of a list

    def encode(self, message: Any) -> str:
        """Encodes a message as JSON."""
        cls = type(message)
        body = msgspec.to_builtins(message)
        # msgspec writes inlined fields as an object of their own: lift them
        for field in dataclasses.fields(cls):
            if INLINE_KEY in field.metadata:
                body |= body.pop(field.name)
        return json.dumps({"v": self._version, "type": cls.__name__, **body}, separators=(",", ":"))

    def decode(self, text: str | bytes) -> Any:
        """Decodes a message; raises ProtocolError that names what does not fit."""
        try:
            text = text if isinstance(text, str) else text.decode()
            # the quick path: our own peers write the version first, and mostly no escapes
            if text.startswith(self._expected_start) and (not self._plain_texts or is_plain_json(text)):
                struct = self._decoder.decode(text)
                return to_dataclass(self._types[type(struct).__name__], struct)
        except (ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
            pass  # not as our own peers write it: the slower path below accepts it or names the fault
        return self._decode_slowly(text)

    def _decode_slowly(self, text: str | bytes) -> Any:
        """Decodes a message with Python's JSON parser; raises ProtocolError that names what does not fit."""
        try:
            bounds.require_json_in_bounds("a message", text, bounds.MAX_PAGE_CHARACTERS, bounds.MAX_MESSAGE_VALUES)
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"cannot decode a message, it is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise ProtocolError(f"cannot decode a message: it is a JSON {type(body).__name__}, not an object")
        # the version before the type: another version may have renamed the type
        version, name = body.get("v"), body.get("type")
        if type(version) is not int:
            raise ProtocolError(
                f"message {short_repr(name)} has version {short_repr(version)}, which is not a whole number"
            )
        if version != self._version:
            raise ProtocolError(
                f"message {short_repr(name)} has protocol version {short_repr(version)}, this process has {self._version}: upgrade the older one"
            )
        cls = self._types.get(name) if isinstance(name, str) else None
        if cls is None:
            raise ProtocolError(f"protocol version {version} has no message type {short_repr(name)}")
        mirror = build_struct(cls, tag=cls.__name__)
        try:
            struct = convert_to_mirror(mirror, body)
            if self._plain_texts:  # after the type check, which limits how deep this recursion can go
                struct = convert_to_mirror(mirror, _escape_texts(msgspec.to_builtins(struct)))
        except TypeMismatch as mismatch:
            of_version = f" in version {version}" if mismatch.unknown_field is not None else ""
            raise ProtocolError(f"{cls.__name__}{mismatch.path} {mismatch.reason}{of_version}") from mismatch
        return to_dataclass(cls, struct)


def _escape_texts(value: Any) -> Any:
    """Returns `value` with control characters escaped in all its texts, field names included."""
    if isinstance(value, str):
        return escape_control_characters(value)
    if isinstance(value, (list, tuple)):
        return [_escape_texts(item) for item in value]
    return (
        {escape_control_characters(key): _escape_texts(item) for key, item in value.items()}
        if isinstance(value, dict)
        else value
    )
