"""Reads the memory tier's pods and their newest revision."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot_operator.platforms.kubernetes.views import memory_tier_pods
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache
from surefoot_operator.policy.maintenance.memory_tier_rollout import HolderPod


@dataclass(frozen=True, slots=True)
class TierPods:
    """The memory tier's pods; `wanted` of them should be of `revision`."""

    pods: tuple[HolderPod, ...]
    wanted: int
    revision: str


async def tier_pods(cache: ClusterCache, namespace: str, daemon_set: str) -> TierPods | None:
    """Returns the tier's pods; None: there is no such DaemonSet. Raises FabricError."""
    cache.check_fresh()
    newest = await memory_tier_pods.newest(cache.api, namespace, daemon_set)
    if newest is None:
        return None
    around = cache.nodes.items.values()
    pods = memory_tier_pods.pods(cache.holders.items.values(), newest.uid, around, cache.kubelets())
    return TierPods(pods, newest.wanted, newest.revision)
