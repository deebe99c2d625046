"""How messages of agents and coordinator go over the line: JSON, in two versions.

Both sides speak versions N and N−1 (`VERSION`, `OLDEST`). Decoding is strict: an unknown type, a missing or foreign
field, or an older version is refused by name (`ProtocolError`), never guessed. `encode` and `decode` are the only
ways in and out.

Which version a line speaks is settled before its first message, as the WebSocket's subprotocol, of which the agent offers
`SUBPROTOCOLS` and the coordinator picks the newest that it has. A line without one speaks the version of its Hello.
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
    """The protocol version that a picked subprotocol means; None if none of ours was picked."""
    return int(subprotocol.removeprefix("surefoot.v")) if subprotocol in SUBPROTOCOLS else None


def encode(message: Message, version: int | None = None) -> str:
    """One message as JSON text of `version` (None: ours). Raises ProtocolError if that version does not have it."""
    return _CODEC.encode(message, version)


def decode(text: str | bytes) -> Message:
    """As `decode_versioned`, without the version."""
    return decode_versioned(text)[0]


def decode_versioned(text: str | bytes) -> tuple[Message, int]:
    """The message in `text` and the version it speaks; raises ProtocolError that names what is foreign about it."""
    return typing.cast(tuple[Message, int], _CODEC.decode_versioned(text))
