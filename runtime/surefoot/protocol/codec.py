"""Encodes and decodes messages of frozen dataclasses as strictly typed JSON.

Pure; for both lines (agent–coordinator, trainer–agent). A message carries its version and its type; whatever is
unknown, missing, foreign, of another version or of another type is refused by name: a guessed field would let an old
epoch's message be believed.

msgspec reads what our own peers write, in microseconds. What it cannot take (a loss of NaN, as Python writes it), or
what is foreign, is read again by Python's parser, which says what is wrong with it.
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
# Reads frozen dataclasses from JSON, strictly typed by msgspec. What does not fit is named by path and value. A
# dataclass cannot refuse foreign fields or be renamed: its *mirror* can, a msgspec struct made from its type hints
# once. Without one engine for messages, statuses and records each would have its own idea of what a number is.

T = TypeVar("T")

FLAT = "flat"
"""In a field's metadata: the fields of its value stand beside the others."""

_AT = re.compile(r"(.*) - at `\$([^`]*)`", re.DOTALL)
_PART = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_KINDS = {bool: "bool", int: "int", float: "float", str: "str", list: "array", dict: "object", type(None): "null"}


@dataclass(frozen=True, slots=True)
class JsonShape:
    """How a dataclass is written."""

    foreign: bool = False
    """Whether fields that it does not have are passed over; else they are refused."""
    rename: Callable[[str], str] | None = None


class TypeMismatch(Exception):
    """A body is not of its type: `path` and `why`.

    `path` begins with a dot or is empty. `foreign` is the name of a field that the type does not have, if that is
    wrong.
    """

    def __init__(self, path: str, why: str, foreign: str | None = None) -> None:
        super().__init__(f"{path} {why}")
        self.path = path
        self.reason = why
        self.foreign = foreign


def hints_of(cls: type[Any]) -> Mapping[str, Any]:
    """Type hints of a dataclass, compiled once."""
    return _hints(typing.cast(Hashable, cls))


def build_struct(cls: type[Any], shape: JsonShape = JsonShape(), tag: str | None = None) -> type[msgspec.Struct]:
    """Makes the struct that reads a `cls`; `tag` makes it a message.

    A message has its version in `v` and the tag in `type`.
    """
    return _mirror(typing.cast(Hashable, cls), shape, tag)


@functools.cache
def _hints(cls: Hashable) -> Mapping[str, Any]:
    return typing.get_type_hints(cls)


@functools.cache
def _mirror(known: Hashable, shape: JsonShape, tag: str | None) -> type[msgspec.Struct]:
    cls = typing.cast(type[Any], known)
    flat = [field.name for field in dataclasses.fields(cls) if FLAT in field.metadata]
    fields = [*([] if tag is None else [("v", int)]), *_fields(cls, shape)]
    fields.sort(key=lambda one: len(one) > 2)  # those with a default may not stand before others
    return msgspec.defstruct(
        cls.__name__,
        fields,
        namespace={name: property(lambda self: self) for name in flat},  # it has the fields of each itself
        frozen=True,
        forbid_unknown_fields=not shape.foreign,
        rename=shape.rename,
        tag=tag,
        tag_field=None if tag is None else "type",
    )


def read(cls: type[T], body: object, shape: JsonShape = JsonShape()) -> T:
    """A `cls` from what JSON decodes to. Raises Misfit."""
    return to_dataclass(cls, require_type(build_struct(cls, shape), body))


def require_type(wanted: Any, body: object) -> Any:
    """`body` as `wanted`, a mirror. Raises Misfit."""
    try:
        return msgspec.convert(body, wanted)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        raise _misfit(str(error), wanted, body) from error


def to_dataclass(cls: type[T], made: msgspec.Struct) -> T:
    """Makes the dataclass of a mirror; missing fields take their defaults."""
    return msgspec.convert(made, cls, from_attributes=True)


def _fields(cls: type[Any], shape: JsonShape) -> Iterator[Any]:
    for field in dataclasses.fields(cls):
        hint = hints_of(cls)[field.name]
        if FLAT in field.metadata:
            yield from _fields(hint, shape)
        else:
            mirrored = _mirrored(hint, shape)
            yield field.name, mirrored, *_default(field, mirrored)


def _mirrored(hint: Any, shape: JsonShape) -> Any:
    if dataclasses.is_dataclass(hint):
        return build_struct(typing.cast(type[Any], hint), shape)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is None or origin is Literal:
        return hint
    inner = tuple(a if a is Ellipsis else _mirrored(a, shape) for a in arguments)
    return Union[inner] if origin in (Union, types.UnionType) else origin[inner]  # noqa: UP007  made of a list


def _default(field: dataclasses.Field[Any], hint: Any) -> tuple[Any, ...]:
    if field.default_factory is not dataclasses.MISSING:
        return (msgspec.field(default_factory=field.default_factory),)
    if field.default is dataclasses.MISSING:
        return ()
    if dataclasses.is_dataclass(field.default):
        return (msgspec.convert(field.default, hint, from_attributes=True),)
    return (field.default,)


def _misfit(text: str, wanted: Any, body: object) -> TypeMismatch:
    """Converts msgspec's message: it names no value, and a mapping's key by three dots."""
    found = _AT.fullmatch(text)
    sentence, steps = (found[1], _PART.findall(found[2])) if found is not None else (text, [])
    got = re.search(r"got `(\w+)`", sentence)
    path, value, hint = "", body, wanted
    for name, place in steps:
        value, key = _inner(value, name or place, got[1] if got is not None else "")
        path += f".{key}" if name else f"[{key}]"
        hint = _hint_at(hint, name)
    names = _names(hint)
    if "unknown field" in sentence and isinstance(value, dict):
        foreign = min((key for key in value if key not in names), key=str, default="?")
        return TypeMismatch(path, f"has no field {short_repr(foreign)}", str(foreign))
    if "missing required field" in sentence:
        return TypeMismatch(path, f"is incomplete: {sentence.partition('field ')[2].strip('`')} is missing")
    return TypeMismatch(path, _describe_mismatch(sentence, value, hint))


def _inner(value: object, key: str, kind: str) -> tuple[object, str]:
    """What lies under `key`; of a mapping whose key is not told, the first value of the `kind` that was found."""
    if key == "..." and isinstance(value, dict):
        for name, item in value.items():
            if _KINDS.get(type(item)) == kind:
                return item, short_repr(name)
        return None, "…"
    if isinstance(value, dict):
        return value.get(key), key
    if isinstance(value, list) and key.isdigit() and int(key) < len(value):
        return value[int(key)], key
    return None, key


def _hint_at(hint: Any, name: str) -> Any:
    """The type of a field of `hint`, or of a member of it."""
    for option in (hint, *get_args(hint)):
        if not name and get_origin(option) in (tuple, dict):
            return get_args(option)[-1 if get_origin(option) is dict else 0]
        if name and isinstance(option, type) and issubclass(option, msgspec.Struct):
            for field in msgspec.structs.fields(option):
                if field.encode_name == name:
                    return field.type
    return None


def _names(hint: Any) -> set[str]:
    found = {"v", "type"}
    for option in (hint, *get_args(hint)):
        if isinstance(option, type) and issubclass(option, msgspec.Struct):
            found.update(field.encode_name for field in msgspec.structs.fields(option))
    return found


def _describe_mismatch(sentence: str, value: object, hint: Any) -> str:
    options = [a for option in (hint, *get_args(hint)) if get_origin(option) is Literal for a in get_args(option)]
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


def inlined(default: Any) -> Any:
    """A dataclass field whose own fields are written into the message."""
    return dataclasses.field(default=default, metadata={FLAT: True})


class Codec:
    """Encodes and decodes a closed set of messages in one version."""

    def __init__(self, message_types: Sequence[type[Any]], version: int, plain_texts: bool = False) -> None:
        """`plain_texts`: control characters of every text that is read are written out."""
        self._types = {cls.__name__: cls for cls in message_types}
        self._version = version
        self._plain_texts = plain_texts
        self._beginning = f'{{"v":{version},'
        mirrors = tuple(build_struct(cls, tag=cls.__name__) for cls in message_types)
        self._decoder = msgspec.json.Decoder(Union[mirrors])  # noqa: UP007  made of a list

    def encode(self, message: Any) -> str:
        """Encodes a message as JSON."""
        cls = type(message)
        body = msgspec.to_builtins(message)
        for field in dataclasses.fields(cls):
            if FLAT in field.metadata:
                body |= body.pop(field.name)
        return json.dumps({"v": self._version, "type": cls.__name__, **body}, separators=(",", ":"))

    def decode(self, text: str | bytes) -> Any:
        """Decodes a message; raises ProtocolError that names what is foreign."""
        try:
            text = text if isinstance(text, str) else text.decode()
            if text.startswith(self._beginning) and (not self._plain_texts or is_plain_json(text)):
                made = self._decoder.decode(text)
                return to_dataclass(self._types[type(made).__name__], made)
        except (ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
            pass  # not as our peers write it: right all the same, or refused by name
        return self._read(text)

    def _read(self, text: str | bytes) -> Any:
        try:
            bounds.check_json("a message", text, bounds.MAX_PAGE_CHARACTERS, bounds.MAX_MESSAGE_VALUES)
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a message is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise ProtocolError(f"a message is a JSON {type(body).__name__}, not an object")
        version, name = body.get("v"), body.get("type")
        if type(version) is not int:
            raise ProtocolError(
                f"message {short_repr(name)} has version {short_repr(version)}, which is not a whole number"
            )
        if version != self._version:
            raise ProtocolError(
                f"message {short_repr(name)} speaks version {short_repr(version)}, this side {self._version}: upgrade the older one"
            )
        cls = self._types.get(name) if isinstance(name, str) else None
        if cls is None:
            raise ProtocolError(f"no message of version {version} is called {short_repr(name)}")
        wanted = build_struct(cls, tag=cls.__name__)
        try:
            made = require_type(wanted, body)
            if self._plain_texts:  # behind the check, which knows how deep a message can be
                made = require_type(wanted, _written_out(msgspec.to_builtins(made)))
        except TypeMismatch as misfit:
            of_version = f" in version {version}" if misfit.foreign is not None else ""
            raise ProtocolError(f"{cls.__name__}{misfit.path} {misfit.reason}{of_version}") from misfit
        return to_dataclass(cls, made)


def _written_out(value: Any) -> Any:
    """`value` with each of its texts made harmless, names of fields included: ours stay as they are."""
    if isinstance(value, str):
        return escape_control_characters(value)
    if isinstance(value, (list, tuple)):
        return [_written_out(item) for item in value]
    return (
        {escape_control_characters(key): _written_out(item) for key, item in value.items()}
        if isinstance(value, dict)
        else value
    )
