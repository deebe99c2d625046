"""Chooses the memory servers that each rank's saves are copied to.

Pure; the result is sent with the assignment. Failure domains are divided into disjoint groups of R rather than arranged
in a ring: with 16 nodes, R=2 and two losses, groups survive 93.3 % of the cases, a ring 86.7 % (GEMINI, SOSP'23).
Members of a group differ at the highest level of the topology at which nodes differ at all (zone, then rack). Where no
topology is known, groups follow a hash of the nodes' names: nodes with adjacent names are mostly in one rack, which
could take both copies with it. If the number of domains is not a multiple of R, some groups have one more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain

from surefoot.protocol.identities import ENDPOINT_ORDER, MemoryServerEndpoint

RankTargets = tuple[tuple[MemoryServerEndpoint, ...], ...]
"""By local rank, the servers that its saves are copied to; a single entry applies to all ranks."""

Path = tuple[str, ...]
"""Location of a node, the highest level first (zone, rack); an unknown level is empty."""

_HASH_BITS = 64
"""Bits of the hash of a node's name."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The locations of nodes, and a salt that gives each job its own groups."""

    salt: str = ""
    """Key of the hash that orders nodes; the job's own."""
    paths: Mapping[str, Path] = field(default_factory=dict, hash=False)
    """Locations by node; a missing node has no known zone or rack."""

    def differing_paths(self, nodes: Iterable[str]) -> dict[str, Path]:
        """Returns the paths of these nodes without the highest levels, as far as all of them share these."""
        padded = self._padded_paths(nodes)
        shared_levels = _highest_differing_level(padded)
        return {node: () if shared_levels is None else path[shared_levels:] for node, path in padded.items()}

    def highest_differing_level(self, nodes: Iterable[str]) -> int | None:
        """Returns the highest level at which these nodes differ, 0 for the zone; None if they do not differ."""
        return _highest_differing_level(self._padded_paths(nodes))

    def _padded_paths(self, nodes: Iterable[str]) -> dict[str, Path]:
        """Returns the paths of these nodes, all with the same number of levels."""
        paths = {node: self.paths.get(node, ()) for node in nodes}
        depth = max(map(len, paths.values()), default=0)
        return {node: (*path, *[""] * (depth - len(path))) for node, path in paths.items()}


UNKNOWN_TOPOLOGY = Topology()
"""Locations of nodes are unknown."""


def _highest_differing_level(paths: Mapping[str, Path]) -> int | None:
    """Returns the first index at which paths of equal length differ; None if they do not."""
    depth = len(next(iter(paths.values()), ()))
    return next((level for level in range(depth) if len({path[level] for path in paths.values()}) > 1), None)


def replica_groups(
    domains: Iterable[str], replicas: int, topology: Topology = UNKNOWN_TOPOLOGY
) -> list[tuple[str, ...]]:
    """Divides the domains into disjoint groups of `replicas` members, or one more.

    If no zone (or rack, whichever differs first) has more than 1/R of the domains, no group has two members in one. In
    a larger zone, only domains that have no partner elsewhere share a group. Adding or removing a domain changes few
    groups; see `_HashTree`.
    """
    paths = topology.differing_paths(domains)
    ordered = _order_by_hash(topology.salt, paths)
    size = max(1, min(replicas, len(ordered)))
    groups: list[list[str]] = []
    depth = max(map(len, paths.values()), default=0)
    # domains without a partner in another zone get one in another rack, and else any other domain
    for level in range(depth + 1):
        tree = _HashTree(
            {name: path[: level + 1] if level < depth else (*path, name) for name, path in paths.items()}, size
        )
        ungrouped = set(tree.group_names(ordered))
        groups += tree.groups
        ordered = [item for item in ordered if item[1] in ungrouped]
    # fewer names than a group's size are left: they become additional members
    for position, (_, name) in enumerate(ordered):
        groups[position % len(groups)].append(name)
    # then swap members of groups that are at one place, in zones before racks
    for level in range(depth):
        _swap_members_apart(groups, {name: path[: level + 1] for name, path in paths.items()})
    return [tuple(group) for group in groups]


def _order_by_hash(salt: str, names: Iterable[str]) -> list[tuple[int, str]]:
    """Sorts names by a keyed hash, so that the order is independent of the input's order and differs between jobs."""
    key, length = blake2b(salt.encode()).digest(), _HASH_BITS // 8
    return sorted(
        (int.from_bytes(blake2b(name.encode(), digest_size=length, key=key).digest()), name) for name in names
    )


class _HashTree:
    """Groups names that are at different places, along the binary tree of the names' hashes.

    Names that find no group in a branch move up to the next fork. So adding or removing a name changes its own branch
    and perhaps one group at each fork above. Cutting a sorted list would change all groups that follow.
    """

    def __init__(self, place: Mapping[str, Path], size: int) -> None:
        self._place_of, self._size = place, size
        self._places_per_group = min(size, len(set(place.values())))
        """Number of different places that each group must have."""
        self.groups: list[list[str]] = []
        """The groups so far."""

    def group_names(self, ordered: Sequence[tuple[int, str]], bit: int = _HASH_BITS - 1) -> list[str]:
        """Groups names, which are ordered by hash, as far as possible; returns the names without a group."""
        if len(ordered) < 2 or bit < 0:
            return self._add_groups([name for _, name in ordered])
        # split at the highest bit in which hashes of this branch can differ
        fork = (ordered[0][0] >> (bit + 1) << (bit + 1)) | (1 << bit)
        fork_position = bisect_left(ordered, (fork, ""))
        ungrouped = self.group_names(ordered[:fork_position], bit - 1) if fork_position else []
        return self._add_groups(
            [*ungrouped, *(self.group_names(ordered[fork_position:], bit - 1) if fork_position < len(ordered) else [])]
        )

    def _add_groups(self, names: list[str]) -> list[str]:
        """Groups these names, always from the places with most names left; returns the names without a group."""
        by_place: dict[Path, list[str]] = defaultdict(list)
        for name in reversed(names):
            by_place[self._place_of[name]].append(name)
        largest = [(-len(members), place) for place, members in by_place.items()]
        heapify(largest)
        ungrouped = len(names)
        while len(largest) >= self._places_per_group and ungrouped >= self._size:
            group: list[str] = []
            while len(group) < self._size:
                # taking from the places with most names keeps the rest as mixed as possible
                largest_places = [heappop(largest) for _ in range(min(len(largest), self._size - len(group)))]
                group += [by_place[place].pop() for _, place in largest_places]
                for count, place in largest_places:
                    if count < -1:
                        heappush(largest, (count + 1, place))
            self.groups.append(group)
            ungrouped -= self._size
        ungrouped_names = set(chain(*by_place.values()))
        return [name for name in names if name in ungrouped_names]


def _swap_members_apart(groups: list[list[str]], places: Mapping[str, Path]) -> None:
    """Swaps members between groups until no swap reduces the pairs of one group that are at one place.

    Swaps only members of the same place one level higher, so that they stay as far apart at that level. As long as a
    group lacks a place that another has twice, some swap reduces the number of such pairs.
    """
    changed = True
    while changed:
        changed, next_group = False, defaultdict[Path, int](int)
        for group in groups:
            for name in _members_sharing_place(group, places):
                # each place continues at the group where it last had no partner, or this would be quadratic
                while next_group[places[name]] < len(groups):
                    other = groups[next_group[places[name]]]
                    partner = _swap_partner(group, name, other, places)
                    if partner is not None:
                        group[group.index(name)], other[other.index(partner)] = partner, name
                        changed = True
                        break
                    next_group[places[name]] += 1


def _members_sharing_place(group: Sequence[str], places: Mapping[str, Path]) -> list[str]:
    """Returns the members whose place another member before them has."""
    return [
        name
        for position, name in enumerate(group)
        if any(places[name] == places[earlier] for earlier in group[:position])
    ]


def _swap_partner(group: Sequence[str], name: str, other: Sequence[str], places: Mapping[str, Path]) -> str | None:
    """Returns the member of the other group to swap `name` for; None if no swap helps."""
    other_places, own_places = [places[candidate] for candidate in other], {places[candidate] for candidate in group}
    if places[name] in other_places:
        return None
    candidates = [candidate for candidate in other if places[candidate][:-1] == places[name][:-1]]
    # best is a place that is new to this group, else one that the other group has twice
    new_places = (candidate for candidate in candidates if places[candidate] not in own_places)
    return next(
        new_places, next((candidate for candidate in candidates if other_places.count(places[candidate]) > 1), None)
    )


def assign_targets(
    worker_nodes: Mapping[int, str],
    endpoints: Sequence[MemoryServerEndpoint],
    replicas: int,
    local_ranks: int = 1,
    topology: Topology = UNKNOWN_TOPOLOGY,
) -> dict[int, RankTargets]:
    """Returns the servers that each worker's saves are copied to, by worker index.

    A worker uses its own node first and then other members of the node's group, one server per failure domain. A
    worker whose node has no server uses the group with the fewest workers. Where nodes run several servers, each rank
    gets one of each node: otherwise one server thread would have to receive all saves of a node.
    """
    servers: dict[str, dict[int, MemoryServerEndpoint]] = {}
    for endpoint in sorted(endpoints, key=ENDPOINT_ORDER):
        servers.setdefault(endpoint.instance.node, {}).setdefault(endpoint.server_index, endpoint)
    round_robin = _RoundRobin(servers)
    domains = {node: next(iter(by_index.values())).domain for node, by_index in servers.items()}
    nodes_by_worker = _choose_nodes(worker_nodes, domains, replicas, topology)
    return {index: round_robin.next_targets(nodes, local_ranks) for index, nodes in nodes_by_worker.items()}


def servers_per_node(endpoints: Iterable[MemoryServerEndpoint]) -> int:
    """Returns the number of servers that each node runs, from the highest server index of all nodes.

    A single node may lack its last server for a while, which must not reassign all its ranks.
    """
    return 1 + max((endpoint.server_index for endpoint in endpoints), default=0)


def _choose_nodes(
    worker_nodes: Mapping[int, str], domains: Mapping[str, str], replicas: int, topology: Topology
) -> dict[int, tuple[str, ...]]:
    """Chooses the nodes that take each worker's saves; `domains` are those of all nodes with servers, in order."""
    by_domain: dict[str, list[str]] = defaultdict(list)
    for node, domain in domains.items():
        by_domain[domain].append(node)
    domain_topology = Topology(
        topology.salt, {domain: topology.paths.get(nodes[0], ()) for domain, nodes in by_domain.items()}
    )
    groups = replica_groups(by_domain, replicas, domain_topology)
    if not groups:
        return dict.fromkeys(worker_nodes, ())
    group_of = {domain: position for position, group in enumerate(groups) for domain in group}
    group_loads = _LoadCounter(len(groups))
    node_loads = {domain: _LoadCounter(len(nodes)) for domain, nodes in by_domain.items()}
    position_of = {node: position for nodes in by_domain.values() for position, node in enumerate(nodes)}
    nodes_by_worker: dict[int, tuple[str, ...]] = {}
    for index, node in sorted(worker_nodes.items()):
        home_domain = domains.get(node)
        group_index = group_of[home_domain] if home_domain is not None else group_loads.least_loaded()
        group = groups[group_index]
        start = group.index(home_domain) if home_domain is not None else 0
        picks: list[tuple[int, str]] = []
        # of each domain in the group, one node: the worker's own at home, elsewhere the least loaded
        for domain in (*group[start:], *group[:start]):
            pick = node if domain == home_domain else by_domain[domain][node_loads[domain].least_loaded()]
            picks.append((node_loads[domain].of[position_of[pick]], pick))
        nodes_by_worker[index] = _choose_distant_nodes(picks, max(1, replicas), topology.paths)
        for chosen_node in nodes_by_worker[index]:
            node_loads[domains[chosen_node]].add(position_of[chosen_node])
            group_loads.add(group_index)
    return nodes_by_worker


def _choose_distant_nodes(
    picks: Sequence[tuple[int, str]], replicas: int, paths: Mapping[str, Path]
) -> tuple[str, ...]:
    """Chooses nodes of a group: the first, then those that share least with those chosen, then the least loaded."""
    (_, first), *others = picks
    chosen = [first]
    while others and len(chosen) < replicas:
        shared_levels = {
            node: max(_shared_levels(paths.get(node, ()), paths.get(chosen_node, ())) for chosen_node in chosen)
            for _, node in others
        }
        best = min(others, key=lambda pick: (shared_levels[pick[1]], pick[0]))
        others.remove(best)
        chosen.append(best[1])
    return tuple(chosen)


def _shared_levels(first: Path, second: Path) -> int:
    """Counts the levels, from the highest on, at which both paths are equal."""
    return next(
        (level for level, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


class _RoundRobin:
    """Assigns ranks to each node's servers in turn."""

    def __init__(self, servers: Mapping[str, Mapping[int, MemoryServerEndpoint]]) -> None:
        self._servers = servers
        self._present = {node: [by_index[number] for number in sorted(by_index)] for node, by_index in servers.items()}
        self._count = servers_per_node(chain(*(by_index.values() for by_index in servers.values())))
        self._turn: dict[str, int] = defaultdict(int)

    def next_targets(self, nodes: Sequence[str], local_ranks: int) -> RankTargets:
        """Returns the servers on these nodes for each of the next `local_ranks` ranks."""
        if self._count == 1:
            return (tuple(self._present[node][0] for node in nodes),)
        # the turns are fixed before any rank is assigned, so all ranks of a worker get adjacent ones
        first_turns = [self._turn[node] for node in nodes]
        for node in nodes:
            self._turn[node] += local_ranks
        return tuple(
            tuple(self._server_of_turn(node, turn + local) for node, turn in zip(nodes, first_turns, strict=True))
            for local in range(local_ranks)
        )

    def _server_of_turn(self, node: str, turn: int) -> MemoryServerEndpoint:
        """Returns the server of a turn; while it is away its ranks are spread over the others, and no other rank moves."""
        server = self._servers[node].get(turn % self._count)
        present_servers = self._present[node]
        return server if server is not None else present_servers[turn // self._count % len(present_servers)]


class _LoadCounter:
    """Counts the load of several places, and finds the first least loaded one without scanning all."""

    def __init__(self, places: int) -> None:
        self.of = [0] * places
        self._heap = [(0, place) for place in range(places)]

    def add(self, place: int) -> None:
        """Adds one to the load of a place."""
        self.of[place] += 1

    def least_loaded(self) -> int:
        """Returns the index of the first place with the lowest load."""
        while True:
            load, place = self._heap[0]
            if load == self.of[place]:
                return place
            heapreplace(self._heap, (self.of[place], place))  # loads only grow, so this entry was outdated
