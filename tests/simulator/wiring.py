"""What goes over one modelled line goes through the project's own codec, as `AgentConnection` sends it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from surefoot.protocol.memory_server_list import HolderList, HoldersTold, changes, told_steps
from surefoot.protocol.messages import Assign, Holders
from surefoot.protocol.wire import decode, encode


class Wire:
    """Both ends of one line."""

    def __init__(self) -> None:
        self._told: HoldersTold = self.told_before()
        self._all_listed = False
        self._heard = HolderList()

    @staticmethod
    def told_before() -> HoldersTold:
        """Holders that the agent knows of as the line begins: none."""
        return ()

    def packed(self, message: Any) -> list[str]:
        """What is sent for it."""
        texts = []
        if isinstance(message, Assign | Holders):
            for before, after in told_steps(self._told, self._all_listed, message):
                changed = changes(before, after)
                if changed is not None:
                    texts.append(encode(changed))
            self._told, self._all_listed = message.holders, not message.partial
            message = replace(message, holders=())
        return [*texts, encode(message)]

    def unpacked(self, text: str) -> Any:
        """The message, or None for one that only tells of holders.

        Raises:
            ProtocolError: the end that reads it does not know that list.
        """
        return self._heard.heard(decode(text))  # type: ignore[arg-type]
