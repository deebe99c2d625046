"""Describes what is said to a holder, without a connection.

A dialogue yields commands and is sent their replies. One text of each call so serves an agent's thread (`Wire.converse`)
and the operator's event loop, where a thread for each holder would let one that is frozen delay the others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

Command = tuple[Any, ...]
Asked = Command | list[Command]
"""One command, whose error is raised; or several that travel together, whose errors are among the replies. An empty list
asks nothing: whoever carries out the dialogue may do something else before it goes on."""
Dialogue = Generator[Asked, Any, T]


def driven(dialogue: Dialogue[T], exchange: Callable[[Asked], Any]) -> T:
    """Carries a dialogue to its end; `exchange` blocks until the reply.

    Raises what the dialogue makes of an error.
    """
    try:
        asked = next(dialogue)
        while True:
            try:
                reply = exchange(asked)
            except Exception as error:  # noqa: BLE001  what an error means the dialogue says
                asked = dialogue.throw(error)
            else:
                asked = dialogue.send(reply)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # a generator's value is untyped


def section_of(reply: bytes) -> dict[str, str]:
    """Reads one section of INFO as a mapping."""
    lines: Sequence[str] = reply.decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)
