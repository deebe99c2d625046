"""Reads the memory tier's pods and their newest revision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from surefoot_operator.fabric.kubernetes import holders, labels
from surefoot_operator.fabric.kubernetes.views.cache import ClusterCache
from surefoot_operator.policy.maintenance.rollout import HolderPod


@dataclass(frozen=True, slots=True)
class TierPods:
    """The memory tier's pods; `wanted` of them should be of `revision`."""

    pods: tuple[HolderPod, ...]
    wanted: int
    revision: str


async def tier_pods(cache: ClusterCache, namespace: str, daemon_set: str) -> TierPods | None:
    """Returns the tier's pods; None: there is no such DaemonSet. Raises FabricError."""
    cache.check_fresh()
    newest = await holders.newest(cache.api, namespace, daemon_set)
    if newest is None:
        return None
    key = agreed_topology_key(cache.jobs.items.values())
    around = cache.nodes.items.values()
    pods = holders.pods(cache.holders.items.values(), newest.uid, around, cache.kubelets(), key)
    return TierPods(pods, newest.wanted, newest.revision)


def agreed_topology_key(jobs: Iterable[Mapping[str, Any]]) -> str:
    """Returns the failure domain that all jobs agree on.

    Else a node, which is within every one. By the jobs as they are stored, of whatever shard: a domain that is one job's may be all that another's copies are in.
    """
    memory = [((job.get("spec") or {}).get("checkpoint") or {}).get("memory") or {} for job in jobs]
    keys = {str(one.get("topologyKey") or labels.HOSTNAME) for one in memory}
    return keys.pop() if len(keys) == 1 else labels.HOSTNAME
