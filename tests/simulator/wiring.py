"""What goes over one modelled line goes through the project's own codec, in the version that both its ends have.

So an agent of the former version hears and says exactly what that version has: its fields, its messages, whole lists.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from surefoot.errors import ProtocolError
from surefoot.protocol.memory_server_list import HolderList, HoldersTold, changes, told_steps
from surefoot.protocol.messages import Assign, HolderChanges, Holders
from surefoot.protocol.wire import OLDEST, VERSION, decode_versioned, encode

VERSIONS = (OLDEST, VERSION)


class Wire:
    """Of one line. `version`: what it was opened for; `oldest_end`: what its older end understands."""

    def __init__(self, version: int, oldest_end: int) -> None:
        self._version, self._oldest_end = version, oldest_end
        self._told: HoldersTold = self.told_before()
        self._all_listed = False
        self._heard = HolderList()

    @staticmethod
    def told_before() -> HoldersTold:
        """Holders that the agent knows of as the line begins: none."""
        return ()

    @property
    def lists_holders(self) -> bool:
        return self._version >= HolderChanges.SINCE

    def packed(self, message: Any) -> list[str]:
        """What is sent for it; nothing if that version does not have it. As `AgentConnection.send`."""
        texts = []
        if isinstance(message, Assign | Holders) and self.lists_holders:
            for before, after in told_steps(self._told, self._all_listed, message):
                changed = changes(before, after)
                if changed is not None:
                    texts.append(encode(changed, self._version))
            self._told, self._all_listed = message.holders, not message.partial
            message = replace(message, holders=(), listed=True)
        try:
            texts.append(encode(message, self._version))
        except ProtocolError:
            return texts
        return texts

    def unpacked(self, text: str) -> Any:
        """The message, or None for one that only tells of holders.

        Raises:
            ProtocolError: the end that reads it does not know that version, or that list.
        """
        message, version = decode_versioned(text)
        if version > self._oldest_end:
            raise ProtocolError(f"version {version} came to an end that speaks {self._oldest_end}")
        return self._heard.heard(message)


def picked(agent: int, operator: int) -> int:
    """The version of a line of those two: the newest that both have."""
    return min(agent, operator)


def wire(agent: int | None, operator: int | None) -> Wire | None:
    """Between ends of these versions; None where nothing is modelled to go over a wire."""
    return None if agent is None or operator is None else Wire(picked(agent, operator), min(agent, operator))
