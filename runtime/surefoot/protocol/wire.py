"""Encodes messages of agents and coordinator as JSON.

Decoding is strict: an unknown type, a missing or foreign field, or another version is refused by name
(`ProtocolError`), never guessed. `encode` and `decode` are the only ways in and out.
"""

from __future__ import annotations

import typing
from typing import get_args

from surefoot.protocol.codec import Codec
from surefoot.protocol.messages import FromAgent, Message, ToAgent

VERSION = 1
"""Grows with each change after which one side could misunderstand the other."""

_CODEC = Codec((*get_args(FromAgent), *get_args(ToAgent)), VERSION, plain_texts=True)


def encode(message: Message) -> str:
    """Encodes a message as JSON."""
    return _CODEC.encode(message)


def decode(text: str | bytes) -> Message:
    """Decodes a message; raises ProtocolError if it is foreign or of another version."""
    return typing.cast(Message, _CODEC.decode(text))
