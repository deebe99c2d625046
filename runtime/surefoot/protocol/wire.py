"""Encodes the messages of agents and coordinator as JSON.

Decoding is strict: an unknown type, a missing or unknown field, or another version is rejected by name
(`ProtocolError`), never guessed. All messages go through `encode` and `decode`.
"""

from __future__ import annotations

import typing
from typing import get_args

from surefoot.protocol.codec import Codec
from surefoot.protocol.messages import FromAgent, Message, ToAgent

VERSION = 1
"""Protocol version. Increase it with each change that one side could misunderstand."""

_CODEC = Codec((*get_args(FromAgent), *get_args(ToAgent)), VERSION, plain_texts=True)


def encode(message: Message) -> str:
    """Encodes a message as JSON."""
    return _CODEC.encode(message)


def decode(text: str | bytes) -> Message:
    """Decodes a message; raises ProtocolError if it does not fit or has another version."""
    return typing.cast(Message, _CODEC.decode(text))
