"""Tracks when each kubelet last renewed its node lease.

Owned by `cluster_cache`; time is an argument. A lease's own time is never read: clocks of other machines differ. Silence does
not count while the API server was away: every lease is then as old as the outage, though every kubelet lives.
"""

from __future__ import annotations

import math
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
        self._heard: tuple[float, float, Heard] | None = None
        """Since when nothing was interrupted, until when nobody else can have fallen silent, and what was said."""
        self._last = Heard()

    def changed(self, old: Object | None, new: Object | None, now: float) -> None:
        """Records a lease's change; None: it does not exist."""
        found = new or old
        assert found is not None
        name = found["metadata"]["name"]
        if new is None:
            self._known.pop(name, None)
            self._renewals.pop(name, None)
            self._heard = None
        elif old is None:
            self._known[name] = now
            self._heard = None
        elif old["spec"].get("renewTime") != new["spec"].get("renewTime"):
            self._known[name] = self._renewals[name] = now
            if self._heard is not None and name not in self._heard[2].renewed:
                self._heard = None

    def heard(self, heard_since: float, heard_at: float) -> Heard:
        """Classifies nodes as of `heard_at`, the watch's last event.

        `heard_since`: since when the watch was not interrupted. The same value as before, unless it changed: a renewal of
        one more second is no news, and a thousand jobs ask twice a second.
        """
        if self._heard is None or self._heard[0] != heard_since or heard_at > self._heard[1]:
            self._heard = (heard_since, *self._looked(heard_since, heard_at))
        return self._heard[2]

    def _looked(self, heard_since: float, heard_at: float) -> tuple[float, Heard]:
        since = {node: max(at, heard_since) for node, at in self._known.items()}
        found = Heard(
            frozenset(node for node, at in self._renewals.items() if heard_at - at <= LEASE_SECONDS),
            frozenset(node for node, at in since.items() if heard_at - at > LEASE_SECONDS),
        )
        standing = [
            *(at for node, at in self._renewals.items() if node in found.renewed),
            *(at for node, at in since.items() if node not in found.silent),
        ]
        if found != self._last:
            self._last = found
        return min(standing, default=math.inf) + LEASE_SECONDS, self._last
