"""Encodes messages that many agents receive alike once.

Called by `surefoot_operator.coordinator.agent_connection`. Two thousand copies of a list of two thousand holders would take seconds of
the event loop, and more memory than the operator has.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from surefoot.protocol.holder_list import HoldersTold, changes
from surefoot.protocol.wire import encode

MOST_TEXTS = 64
"""Of the newest changes; agents that were told the same long ago are few."""

LARGE_CHARACTERS = 16 * 1024
LARGE_AT_A_TIME = 32
"""Large texts that are being written at a time: each stands in its connection's buffer once more."""


def between(told: HoldersTold, wanted: HoldersTold, version: int | None) -> str | None:
    """Encodes the difference of two holder lists; None: they are equal."""
    message = None if told is wanted else changes(told, wanted)
    return None if message is None else encode(message, version)


class SharedTexts:
    """Caches one server's encoded holder lists by the lists' identity.

    Equal lists are made one object where the desired state is taken.
    """

    def __init__(self) -> None:
        self._texts: OrderedDict[tuple[int, int, int | None], tuple[HoldersTold, HoldersTold, str | None]] = (
            OrderedDict()
        )
        self.large = asyncio.Semaphore(LARGE_AT_A_TIME)

    def between(self, told: HoldersTold, wanted: HoldersTold, version: int | None) -> str | None:
        """Encodes the difference once for all lines; None: they are equal."""
        if told is wanted:
            return None
        key = (id(told), id(wanted), version)
        if key not in self._texts:
            text = between(told, wanted, version)
            self._texts[key] = (told, wanted, text)  # which keeps both, so that no other list gets their identity
            if len(self._texts) > MOST_TEXTS:
                self._texts.popitem(last=False)
        return self._texts[key][2]
