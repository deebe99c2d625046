"""Encodes and decodes messages of frozen dataclasses as strictly typed JSON.

Pure; for both lines (agent–coordinator, trainer–agent). A message carries its version and its type; whatever is
unknown, missing, foreign or of another type is refused by name: a guessed field would let an old epoch's message be
believed.

How a version grows: a field that version N adds has `field(default=…, metadata={"since": N})` (`since(N, default)`), a
whole message type has `SINCE: ClassVar[int] = N`. Towards an older peer such fields are left out and such messages are
refused; from an older peer the fields take their defaults.

msgspec reads what our own peers write, in microseconds. What it cannot take (a loss of NaN, as Python writes it), or
what is foreign, is read again by Python's parser, which says what is wrong with it.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Sequence
from typing import Any, Union

import msgspec

from surefoot.errors import ProtocolError
from surefoot.protocol import bounds
from surefoot.protocol.strict import FLAT, JsonShape, Misfit, check, hints_of, mirror, restored, since_of
from surefoot.protocol.text import is_plain_json, plain, shown


def since(version: int, default: Any) -> Any:
    """A dataclass field that `version` added; older peers do without it."""
    return dataclasses.field(default=default, metadata={"since": version})


def flat(default: Any) -> Any:
    """A dataclass field whose own fields are written into the message."""
    return dataclasses.field(default=default, metadata={FLAT: True})


class Codec:
    """Encodes and decodes a closed set of messages in several versions."""

    def __init__(
        self, message_types: Sequence[type[Any]], version: int, oldest: int, plain_texts: bool = False
    ) -> None:
        """`plain_texts`: control characters of every text that is read are written out."""
        self._types = {cls.__name__: cls for cls in message_types}
        self._version = version
        self._oldest = oldest
        self._plain_texts = plain_texts
        self._decoders = {f'{{"v":{n},': (n, _decoder(message_types, n)) for n in range(oldest, version + 1)}

    def encode(self, message: Any, version: int | None = None) -> str:
        """Encodes a message as JSON of `version` (None: the newest).

        Raises ProtocolError for a message that this version does not have: the caller asks first, or does without.
        """
        version = self._version if version is None else version
        cls = type(message)
        self._check_version(version, cls.__name__)
        if _since(cls) > version:
            raise ProtocolError(f"{cls.__name__} came with version {_since(cls)}, this peer speaks {version}")
        body = msgspec.to_builtins(message)
        if version < self._version:
            _leave_out(cls, body, version)
        for field in dataclasses.fields(cls):
            if FLAT in field.metadata:
                body |= body.pop(field.name)
        return json.dumps({"v": version, "type": cls.__name__, **body}, separators=(",", ":"))

    def decode(self, text: str | bytes) -> Any:
        """Decodes a message; raises ProtocolError that names what is foreign."""
        return self.decode_versioned(text)[0]

    def decode_versioned(self, text: str | bytes) -> tuple[Any, int]:
        """Decodes a message and its version; raises ProtocolError as `decode` does."""
        try:
            text = text if isinstance(text, str) else text.decode()
            version, decoder = self._decoders[text[: text.find(",") + 1]]
            if not self._plain_texts or is_plain_json(text):
                made = decoder.decode(text)
                return restored(self._types[type(made).__name__], made), version
        except (KeyError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
            pass  # not as our peers write it: right all the same, or refused by name
        return self._read(text)

    def _read(self, text: str | bytes) -> tuple[Any, int]:
        try:
            bounds.check_json("a message", text, bounds.MAX_PAGE_CHARACTERS, bounds.MAX_MESSAGE_VALUES)
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a message is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise ProtocolError(f"a message is a JSON {type(body).__name__}, not an object")
        version, name = body.get("v"), body.get("type")
        if type(version) is not int:
            raise ProtocolError(f"message {shown(name)} has version {shown(version)}, which is not a whole number")
        self._check_version(version, name)
        cls = self._types.get(name) if isinstance(name, str) else None
        if cls is None or _since(cls) > version:
            raise ProtocolError(f"no message of version {version} is called {shown(name)}")
        wanted = mirror(cls, JsonShape(version), cls.__name__)
        try:
            made = check(wanted, body)
            if self._plain_texts:  # behind the check, which knows how deep a message can be
                made = check(wanted, _written_out(msgspec.to_builtins(made)))
        except Misfit as misfit:
            of_version = f" in version {version}" if misfit.foreign is not None else ""
            raise ProtocolError(f"{cls.__name__}{misfit.path} {misfit.why}{of_version}") from misfit
        return restored(cls, made), version

    def _check_version(self, version: int, name: object) -> None:
        if not self._oldest <= version <= self._version:
            spoken = f"{self._oldest} to {self._version}"
            raise ProtocolError(
                f"message {shown(name)} speaks version {shown(version)}, this side {spoken}: upgrade the older one"
            )


def _decoder(message_types: Sequence[type[Any]], version: int) -> msgspec.json.Decoder[Any]:
    spoken = tuple(mirror(cls, JsonShape(version), cls.__name__) for cls in message_types if _since(cls) <= version)
    return msgspec.json.Decoder(Union[spoken])  # noqa: UP007  made of a list


def _since(cls: type[Any]) -> int:
    return int(getattr(cls, "SINCE", 1))


def _leave_out(cls: type[Any], body: dict[str, Any], version: int) -> None:
    """Takes out of `body` what came after `version`."""
    for field in dataclasses.fields(cls):
        if since_of(field) > version:
            del body[field.name]
        else:
            for inner in _dataclasses_in(hints_of(cls)[field.name]):
                for one in _mappings_in(body[field.name]):
                    _leave_out(inner, one, version)


def _dataclasses_in(hint: Any) -> list[type[Any]]:
    if dataclasses.is_dataclass(hint):
        return [typing.cast(type[Any], hint)]
    return [cls for argument in typing.get_args(hint) for cls in _dataclasses_in(argument)]


def _mappings_in(body: Any) -> list[dict[str, Any]]:
    if isinstance(body, dict):
        return [body]
    return [one for item in body for one in _mappings_in(item)] if isinstance(body, (list, tuple)) else []


def _written_out(value: Any) -> Any:
    """`value` with each of its texts made harmless, names of fields included: ours stay as they are."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, (list, tuple)):
        return [_written_out(item) for item in value]
    return {plain(key): _written_out(item) for key, item in value.items()} if isinstance(value, dict) else value
