"""Limits the size of each agent message by its kind.

Pure; called by `agent_server` before it parses one. An agent runs beside a user's program, and one operator serves all
jobs: one job's messages must not exhaust the others' memory. Only what was read of a tier has a reason to be large.
"""

from __future__ import annotations

import re

from surefoot.errors import ProtocolError
from surefoot.protocol import bounds
from surefoot.protocol.messages import Exited, Heartbeat, Hello, Listing, UnreadableSave
from surefoot.protocol.plain import shown
from surefoot.protocol.sighting_messages import HolderReading

USUAL_CHARACTERS = 64 * 1024
_LARGER = {
    Listing.__name__: bounds.MAX_PAGE_CHARACTERS,
    HolderReading.__name__: 8 * 1024 * 1024,
    Heartbeat.__name__: 1024 * 1024,
    Exited.__name__: 1024 * 1024,
    UnreadableSave.__name__: 1024 * 1024,
}
_TYPE = re.compile(r'\{"v":\d{1,9},"type":"(\w{1,40})"')
"""How every agent of ours begins. What begins otherwise may be right, and is small."""

_HELLO_CHARACTERS = {"job": 128, "incarnation": 128, "node": 253, "token": 32 * 1024, "store": 512}
_LARGEST_NUMBER = 2**53


_ANSWERS = (Listing.__name__, HolderReading.__name__)


def check_size(text: str, is_asked: bool = True) -> None:
    """Raises ProtocolError if a message is too large for its kind, before it is read.

    `is_asked`: whether its agent was asked what a tier has; else no answer of it is large.
    """
    if len(text) <= USUAL_CHARACTERS:
        return
    found = _TYPE.match(text)
    name = found[1] if found is not None else "unknown"
    limit = _LARGER.get(name, USUAL_CHARACTERS)
    if len(text) > limit:
        raise ProtocolError(f"a message ({name}) of {len(text)} characters, more than any valid one has")
    if name in _ANSWERS and not is_asked:
        raise ProtocolError(f"a message ({name}) of {len(text)} characters without a request")
    # short texts take many times their length in memory; a quote that begins one has no backslash before it
    texts = (text.count('"') - text.count('\\"')) // 2
    if texts > bounds.MAX_PAGE_TEXTS:
        raise ProtocolError(f"a message ({name}) of {texts} texts, more than any valid one has")


def check_hello(hello: Hello) -> None:
    """Raises ProtocolError if a hello's field is out of bounds.

    Its fields are used as keys, stored, and quoted in messages.
    """
    for name, most in _HELLO_CHARACTERS.items():
        text = getattr(hello, name)
        if text is not None and len(text) > most:
            raise ProtocolError(f"Hello.{name} has {len(text)} characters, more than {most}")
    for name in ("index", "attempt", "epoch", "stopped"):
        number = getattr(hello, name)
        if not 0 <= number <= _LARGEST_NUMBER:
            raise ProtocolError(f"Hello.{name} is {shown(number)}, which is out of range")
