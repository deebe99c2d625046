"""Keeps what all jobs see of nodes and holders.

Owned by `cluster_cache`, asked by each job's fabric. It is made once: jobs that ask alike get
the same tuple until something in it changes. Made by each for itself, the nodes of a thousand jobs were a million values, and as many comparisons at each change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from surefoot_operator.api.spec import NodeSignals
from surefoot_operator.job_snapshot import NodeSeen
from surefoot_operator.memory.holder_place import HolderPlace, TierAccess
from surefoot_operator.platforms.kubernetes.views import memory_tier_pods, nodes
from surefoot_operator.platforms.kubernetes.views.derived_cache import DerivedCache
from surefoot_operator.platforms.kubernetes.views.leases import Heard

Object = dict[str, Any]
Items = Mapping[tuple[str, str], Object]

MOST_VIEWS = 64
"""Ways of looking at nodes that are kept: jobs with the same topology key and node signals share one."""


class _View:
    """Nodes and holders, as jobs with one topology key and one set of signals see them."""

    def __init__(self, topology_key: str, signals: NodeSignals) -> None:
        self._topology_key, self._signals = topology_key, signals
        self._each = DerivedCache[NodeSeen]()
        self._nodes_of: tuple[object, ...] = ()
        self._places_of: tuple[object, ...] = ()
        self.nodes: tuple[NodeSeen, ...] = ()
        self.places: tuple[HolderPlace, ...] = ()

    def look(self, items: Iterable[Object], changes: int, heard: Heard) -> None:
        """Looks at the nodes again if one changed, or a kubelet fell silent."""
        if self._nodes_of and self._nodes_of[0] == changes and self._nodes_of[1] is heard:
            return
        self._nodes_of = (changes, heard)
        found = self._each.all(
            items,
            lambda one: nodes.node(one, heard, self._topology_key, self._signals),
            lambda one: (one["metadata"]["name"] in heard.silent, one["metadata"]["name"] in heard.renewed),
        )
        seen = nodes.without_mass_doubt(sorted(found, key=lambda one: one.name))
        self.nodes = self.nodes if seen == self.nodes else seen

    def find(self, there: Iterable[Object], gone: Iterable[Object], changes: int, access: TierAccess) -> None:
        """Looks for the holders again if one changed, a node did, or there is another password."""
        of = (changes, id(self.nodes), access.user, access.password, access.authority)
        if of == self._places_of:
            return
        self._places_of = of
        found = memory_tier_pods.places(there, gone, {node.name: node.domain for node in self.nodes}, access)
        self.places = self.places if found == self.places else found


class ClusterViews:
    """Nodes and holders as jobs see them, of what is mapped.

    `gone`: pods of holders that were deleted. Whoever owns the mappings tells of each change.
    """

    def __init__(self, nodes_there: Items, holders_there: Items, gone: Mapping[str, Object]) -> None:
        self._nodes, self._holders, self._gone = nodes_there, holders_there, gone
        self._views: dict[tuple[str, NodeSignals], _View] = {}
        self._node_changes = self._holder_changes = 0

    def node_changed(self, old: Object | None, new: Object | None) -> None:
        """Takes note of a node whose kept fields changed."""
        if old is None or new is None or _told(old) != _told(new):
            self._node_changes += 1

    def holder_changed(self) -> None:
        """Takes note that some holder's pod is another."""
        self._holder_changes += 1

    def seen(
        self, heard: Heard, topology_key: str, signals: NodeSignals, access: TierAccess
    ) -> tuple[tuple[NodeSeen, ...], tuple[HolderPlace, ...]]:
        """Returns nodes by name, and the holders on them.

        The same tuples as before while they are the same.
        """
        view = self._views.get((topology_key, signals))
        if view is None:
            if len(self._views) >= MOST_VIEWS:
                del self._views[next(iter(self._views))]
            view = self._views[topology_key, signals] = _View(topology_key, signals)
        view.look(self._nodes.values(), self._node_changes, heard)
        view.find(self._holders.values(), self._gone.values(), self._holder_changes, access)
        return view.nodes, view.places


def _told(node: Object) -> tuple[Any, ...]:
    return node["metadata"].get("labels"), node.get("spec"), node.get("status")
