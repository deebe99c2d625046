"""What goes over one modelled line goes through the project's own codec, as `AgentConnection` sends it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from surefoot.protocol.memory_server_list import MemoryServerList, SentServers, list_changes, list_transitions
from surefoot.protocol.messages import Assign, MemoryServers
from surefoot.protocol.wire import decode, encode


class Wire:
    """Both ends of one line."""

    def __init__(self) -> None:
        self._told: SentServers = self.told_before()
        self._all_listed = False
        self._heard = MemoryServerList()

    @staticmethod
    def told_before() -> SentServers:
        """Holders that the agent knows of as the line begins: none."""
        return ()

    def packed(self, message: Any) -> list[str]:
        """What is sent for it."""
        texts = []
        if isinstance(message, Assign | MemoryServers):
            for before, after in list_transitions(self._told, self._all_listed, message):
                changed = list_changes(before, after)
                if changed is not None:
                    texts.append(encode(changed))
            self._told, self._all_listed = message.servers, not message.is_partial
            message = replace(message, servers=())
        return [*texts, encode(message)]

    def unpacked(self, text: str) -> Any:
        """The message, or None for one that only tells of holders.

        Raises:
            ProtocolError: the end that reads it does not know that list.
        """
        return self._heard.apply_message(decode(text))  # type: ignore[arg-type]
