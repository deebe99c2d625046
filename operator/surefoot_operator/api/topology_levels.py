"""Lists the node labels that describe a node's position in the network and the building: zone, rack, and vendors' names.

Pure. Levels are ordered from the highest to the lowest. Copies of a save are spread over the highest level at which the job's
nodes differ. At each level, the first of its labels that a node has counts. A job's `topologyKey` becomes the highest level.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

HOSTNAME = "kubernetes.io/hostname"


@dataclass(frozen=True, slots=True)
class TopologyLevel:
    """A level of the topology, such as racks."""

    noun: str
    """Singular word for one domain of this level, for messages."""
    labels: tuple[str, ...]
    """Label keys of this level. The first that a node has counts."""


LEVELS = (
    TopologyLevel("region", ("topology.kubernetes.io/region",)),
    TopologyLevel("zone", ("topology.kubernetes.io/zone",)),
    TopologyLevel("fault domain", ("oci.oraclecloud.com/fault-domain",)),
    TopologyLevel(
        "network block",
        (
            "topology.kubernetes.io/block",
            "cloud.google.com/gce-topology-block",
            "topology.k8s.aws/network-node-layer-1",
            "network.topology.nvidia.com/core",
            "fabric.topograph.run/tier-2",
            "oci.oraclecloud.com/rdma.hpc_island_id",
        ),
    ),
    TopologyLevel(
        "network spine",
        (
            "topology.k8s.aws/network-node-layer-2",
            "network.topology.nvidia.com/spine",
            "fabric.topograph.run/tier-1",
            "oci.oraclecloud.com/rdma.network_block_id",
        ),
    ),
    TopologyLevel(
        "rack",
        (
            "topology.kubernetes.io/rack",
            "topology.rook.io/rack",
            "cloud.google.com/gce-topology-subblock",
            "topology.k8s.aws/network-node-layer-3",
            "network.topology.nvidia.com/leaf",
            "fabric.topograph.run/tier-0",
            "oci.oraclecloud.com/rdma.local_block_id",
        ),
    ),
    TopologyLevel(
        "NVLink domain",
        (
            "accelerator.topograph.run/domain",
            "network.topology.nvidia.com/accelerator",
            "topology.k8s.aws/ultraserver-id",
            "nvidia.com/gpu.clique",
        ),
    ),
    TopologyLevel("machine", ("cloud.google.com/gce-topology-host",)),
)


def spread_levels(topology_key: str) -> tuple[TopologyLevel, ...]:
    """Returns the levels over which a job spreads its copies, from the level of its `topologyKey` on.

    The default key, the host name, means all levels. An unknown label becomes a level above all others.
    """
    if topology_key == HOSTNAME:
        return LEVELS
    index = next((i for i, level in enumerate(LEVELS) if topology_key in level.labels), None)
    if index is None:
        return TopologyLevel(topology_key.rpartition("/")[2], (topology_key,)), *LEVELS
    return TopologyLevel(LEVELS[index].noun, (topology_key,)), *LEVELS[index + 1 :]


def topology_path(labels: Mapping[str, str], topology_key: str = HOSTNAME) -> tuple[str, ...]:
    """Returns the node's label value at each of `spread_levels`, "" where it has none, down to its last label.

    Empty: the node has no topology label.
    """
    path = [next(_values(labels, level), "") for level in spread_levels(topology_key)]
    # a missing label between two others stays as "", so that paths of different nodes compare level by level
    while path and not path[-1]:
        path.pop()
    return tuple(path)


def _values(labels: Mapping[str, str], level: TopologyLevel) -> Iterator[str]:
    return (labels[name] for name in level.labels if labels.get(name))
