"""Encodes messages of agents and coordinator as JSON, in two versions.

Both sides speak versions `OLDEST` to `VERSION`. Decoding is strict: an unknown type, a missing or foreign field, or an
older version is refused by name (`ProtocolError`), never guessed. `encode` and `decode` are the only ways in and out.

Which version a connection speaks is settled before its first message, as the WebSocket's subprotocol, of which the
agent offers `SUBPROTOCOLS` and the coordinator picks the newest that it has. One without it speaks the version of its
Hello.
"""

from __future__ import annotations

import typing
from typing import get_args

from surefoot.protocol.codec import Codec
from surefoot.protocol.messages import FromAgent, Message, ToAgent

VERSION = 3
OLDEST = max(1, VERSION - 1)
"""Oldest version still understood, so that an upgraded operator does not lose running agents."""

_CODEC = Codec((*get_args(FromAgent), *get_args(ToAgent)), VERSION, OLDEST, plain_texts=True)

SUBPROTOCOLS = tuple(f"surefoot.v{n}" for n in range(VERSION, OLDEST - 1, -1))
"""What is offered and picked when the WebSocket opens, the newest first."""


def version_of(subprotocol: str | None) -> int | None:
    """The protocol version of a picked subprotocol; None: not ours."""
    return int(subprotocol.removeprefix("surefoot.v")) if subprotocol in SUBPROTOCOLS else None


def encode(message: Message, version: int | None = None) -> str:
    """Encodes a message as JSON of `version` (None: ours).

    Raises ProtocolError if that version does not have it.
    """
    return _CODEC.encode(message, version)


def decode(text: str | bytes) -> Message:
    """Decodes a message without its version."""
    return decode_versioned(text)[0]


def decode_versioned(text: str | bytes) -> tuple[Message, int]:
    """Decodes a message and its version; raises ProtocolError if foreign."""
    return typing.cast(tuple[Message, int], _CODEC.decode_versioned(text))
