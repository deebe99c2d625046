"""Sends the list of holders once per connection, then its changes.

Both ends, pure. At two thousand nodes the list is hundreds of kilobytes: an agent is told of what it needs of it, and
where it needs more of all, as a message that is the same for others; each once on a connection, and by its changes from
then on. Assignments leave it out.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.errors import ProtocolError
from surefoot.protocol.identities import ENDPOINT_ORDER, MemoryServerEndpoint, MemoryServerInstance
from surefoot.protocol.messages import Assign, MemoryServerChanges, MemoryServers, ToAgent

SentServers = tuple[MemoryServerEndpoint, ...]
"""In the order of their nodes and instances, as the coordinator names them."""


def list_changes(told: SentServers, wanted: SentServers) -> MemoryServerChanges | None:
    """The changes from the list that was sent to `wanted`, or None."""
    before, after = {e.instance: e for e in told}, {e.instance: e for e in wanted}
    added = tuple(_row(e) for e in wanted if before.get(e.instance) != e)
    gone = tuple(holder for holder in before if holder not in after)
    return MemoryServerChanges(added, gone) if added or gone else None


def known_transitions(
    told: SentServers, hears_all: bool, message: Assign | MemoryServers
) -> tuple[tuple[SentServers, SentServers], ...]:
    """Pairs lists whose differences tell a line of a message's holders.

    A line that hears of all for the first time is told them from nothing, by a text that is the same for every such line;
    what it was told before and is gone by now is taken back first.
    """
    if message.is_partial or hears_all:
        return ((told, message.servers),)
    present = frozenset(message.servers)
    return ((told, tuple(one for one in told if one in present)), ((), message.servers))


class MemoryServerList:
    """Tracks the holders that one connection was told of, initially none."""

    def __init__(self) -> None:
        self._sent: dict[MemoryServerInstance, MemoryServerEndpoint] = {}
        self._sorted: SentServers = ()

    def apply_message(self, message: ToAgent) -> ToAgent | None:
        """Puts its holders into a message; None for a mere list change.

        Raises:
            ProtocolError: holders go that were never told of: both sides mean different lists.
        """
        if isinstance(message, MemoryServerChanges):
            self._change(message)
            return None
        if isinstance(message, Assign | MemoryServers):
            return replace(message, servers=self._sorted)
        return message

    def _change(self, told: MemoryServerChanges) -> None:
        for holder in told.removed:
            if self._sent.pop(holder, None) is None:
                raise ProtocolError(f"{holder} went, of which this line was never told: it begins anew")
        for node, instance, host, port, domain, tls, server in told.added:
            holder = MemoryServerInstance(node, instance)
            self._sent[holder] = MemoryServerEndpoint(holder, host, port, domain or node, tls, server)
        self._sorted = tuple(sorted(self._sent.values(), key=ENDPOINT_ORDER))


def _row(endpoint: MemoryServerEndpoint) -> tuple[str, str, str, int, str, bool, int]:
    holder = endpoint.instance
    domain = "" if endpoint.domain == holder.node else endpoint.domain
    return holder.node, holder.run_id, endpoint.host, endpoint.port, domain, endpoint.tls, endpoint.server_index
