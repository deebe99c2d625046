"""Tracks when each kubelet last renewed its node lease.

Owned by `cache`; time is an argument. A lease's own time is never read: clocks of other machines differ. Silence does
not count while the API server was away: every lease is then as old as the outage, though every kubelet lives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]

LEASE_SECONDS = 25.0
"""A kubelet renews its lease every 10 s; after this without, it counts as silent."""


@dataclass(frozen=True, slots=True)
class Heard:
    """Nodes whose kubelet renewed its lease, and nodes that are silent.

    A node in neither set is not known yet.
    """

    renewed: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()


class Leases:
    """The node leases of one cluster; times are monotonic seconds."""

    def __init__(self) -> None:
        self._known: dict[str, float] = {}
        """Since when each lease stands as it does."""
        self._renewals: dict[str, float] = {}
        """When a renewal was seen to come: one that was there when we came may be of any age."""

    def changed(self, old: Object | None, new: Object | None, now: float) -> None:
        """Records a lease's change; None: it does not exist."""
        found = new or old
        assert found is not None
        name = found["metadata"]["name"]
        if new is None:
            self._known.pop(name, None)
            self._renewals.pop(name, None)
        elif old is None:
            self._known[name] = now
        elif old["spec"].get("renewTime") != new["spec"].get("renewTime"):
            self._known[name] = self._renewals[name] = now

    def heard(self, heard_since: float, heard_at: float) -> Heard:
        """Classifies nodes as of `heard_at`, the watch's last event.

        `heard_since`: since when the watch was not interrupted.
        """
        return Heard(
            frozenset(node for node, at in self._renewals.items() if heard_at - at <= LEASE_SECONDS),
            frozenset(node for node, at in self._known.items() if heard_at - max(at, heard_since) > LEASE_SECONDS),
        )
