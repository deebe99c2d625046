"""Names the node labels that say where a node stands: its zone, its rack, and what vendors call them.

Pure. From the highest level to the lowest: copies differ at the highest one at which a job's nodes do. At each level the
first label that a node bears counts. A job's `topologyKey` puts its own label on top.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

HOSTNAME = "kubernetes.io/hostname"


@dataclass(frozen=True, slots=True)
class TopologyLevel:
    """One level; `noun` is what people call a place of it."""

    noun: str
    labels: tuple[str, ...]


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


def levels(topology_key: str) -> tuple[TopologyLevel, ...]:
    """The levels that a job spreads its copies over, by its `topologyKey`: from that label on, or all."""
    if topology_key == HOSTNAME:
        return LEVELS
    named = next((at for at, level in enumerate(LEVELS) if topology_key in level.labels), None)
    if named is None:
        return TopologyLevel(topology_key.rpartition("/")[2], (topology_key,)), *LEVELS
    return TopologyLevel(LEVELS[named].noun, (topology_key,)), *LEVELS[named + 1 :]


def topology_path(labels: Mapping[str, str], topology_key: str = HOSTNAME) -> tuple[str, ...]:
    """Where a node with these labels stands, by `levels`, down to its last label; empty: nobody says."""
    path = [next(_values(labels, level), "") for level in levels(topology_key)]
    while path and not path[-1]:
        path.pop()
    return tuple(path)


def _values(labels: Mapping[str, str], level: TopologyLevel) -> Iterator[str]:
    return (labels[name] for name in level.labels if labels.get(name))
