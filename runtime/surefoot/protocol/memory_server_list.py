"""Sends the list of memory servers once per connection, and then only its changes.

Pure; used on both ends. At two thousand nodes the list has hundreds of kilobytes. So an agent gets the part that it
needs, or the whole list as a message whose text is the same for all agents that need it; each is sent once per
connection and updated by `MemoryServerChanges`. Assignments leave the list out, and the receiver puts it back in.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.errors import ProtocolError
from surefoot.protocol.identities import ENDPOINT_ORDER, MemoryServerEndpoint, MemoryServerInstance
from surefoot.protocol.messages import Assign, MemoryServerChanges, MemoryServers, ToAgent

SentServers = tuple[MemoryServerEndpoint, ...]
"""Endpoints that were sent on a connection, ordered by node and instance."""


def list_changes(sent: SentServers, current: SentServers) -> MemoryServerChanges | None:
    """Returns the changes that turn the list `sent` into `current`; None if there are none."""
    old_by_instance, new_by_instance = {e.instance: e for e in sent}, {e.instance: e for e in current}
    added = tuple(_endpoint_row(e) for e in current if old_by_instance.get(e.instance) != e)
    removed = tuple(instance for instance in old_by_instance if instance not in new_by_instance)
    return MemoryServerChanges(added, removed) if added or removed else None


def list_transitions(
    sent: SentServers, has_all: bool, message: Assign | MemoryServers
) -> tuple[tuple[SentServers, SentServers], ...]:
    """Returns pairs of lists, old and new, whose changes bring a connection up to date with a message.

    The first complete list on a connection is sent as a change from the empty list, so that its text can be shared by
    all connections; servers of the earlier partial list that no longer exist are removed first.
    """
    if message.is_partial or has_all:
        return ((sent, message.servers),)
    # servers that no longer exist are removed first; the complete list then follows as a change from nothing
    present = frozenset(message.servers)
    return ((sent, tuple(endpoint for endpoint in sent if endpoint in present)), ((), message.servers))


class MemoryServerList:
    """The memory servers that were sent on one connection; initially none."""

    def __init__(self) -> None:
        self._sent: dict[MemoryServerInstance, MemoryServerEndpoint] = {}
        self._sorted: SentServers = ()

    def apply_message(self, message: ToAgent) -> ToAgent | None:
        """Fills the list of memory servers into a message; returns None for a mere change of the list.

        Raises:
            ProtocolError: A server is removed that is not in the list, so both ends have different lists.
        """
        if isinstance(message, MemoryServerChanges):
            self._apply_changes(message)
            return None
        if isinstance(message, Assign | MemoryServers):
            return replace(message, servers=self._sorted)
        return message

    def _apply_changes(self, changes: MemoryServerChanges) -> None:
        """Removes and adds servers; a changed endpoint replaces its predecessor."""
        for instance in changes.removed:
            # a lost or repeated change would otherwise go unnoticed until a restore misses a server
            if self._sent.pop(instance, None) is None:
                raise ProtocolError(
                    f"{instance} was removed from the list of memory servers, but was never sent on this connection: the agent connects again to get the whole list"
                )
        for node, run_id, host, port, domain, tls, server_index in changes.added:
            instance = MemoryServerInstance(node, run_id)
            self._sent[instance] = MemoryServerEndpoint(instance, host, port, domain or node, tls, server_index)
        self._sorted = tuple(sorted(self._sent.values(), key=ENDPOINT_ORDER))


def _endpoint_row(endpoint: MemoryServerEndpoint) -> tuple[str, str, str, int, str, bool, int]:
    """Converts an endpoint to its short form in `MemoryServerChanges.added`."""
    instance = endpoint.instance
    domain = "" if endpoint.domain == instance.node else endpoint.domain
    return instance.node, instance.run_id, endpoint.host, endpoint.port, domain, endpoint.tls, endpoint.server_index
