"""Reads the memory tier's pods and their newest revision."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot_operator.fabric.kubernetes import holders
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
    around = cache.nodes.items.values()
    pods = holders.pods(cache.holders.items.values(), newest.uid, around, cache.kubelets())
    return TierPods(pods, newest.wanted, newest.revision)
