"""Tracks when each kubelet last renewed its node lease.

Owned by `cache`; time is an argument. A lease's own time is never read: clocks of other machines differ. Nor does
silence count while nobody could have been heard: after an API server was away, every lease is as old as the outage,
and every kubelet lives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]

LEASE_SECONDS = 25.0
"""A kubelet renews its lease every 10 s; after this without, it counts as silent."""


@dataclass(frozen=True, slots=True)
class Heard:
    """Nodes whose kubelet renewed its lease lately, and those whose kubelet should have. Of others nothing is known."""

    renewed: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()


class Leases:
    """Of one cluster. All times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._known: dict[str, float] = {}
        """Since when each lease stands as it does."""
        self._renewals: dict[str, float] = {}
        """When a renewal was seen to come: one that was there when we came may be of any age."""

    def changed(self, old: Object | None, new: Object | None, now: float) -> None:
        """A node's lease as it was and as it is; None: it is not there."""
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
        """As of `heard_at`, when the leases' watch was last heard of; it was not broken since `heard_since`."""
        return Heard(
            frozenset(node for node, at in self._renewals.items() if heard_at - at <= LEASE_SECONDS),
            frozenset(node for node, at in self._known.items() if heard_at - max(at, heard_since) > LEASE_SECONDS),
        )
