"""Reads holder addresses and revisions from the memory tier's DaemonSet.

`places` and `pods` are pure; `newest` and `restart` touch the network. Called by each job's fabric and by the leader's
rollout of the tier.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.protocol.identities import MemoryServerId
from surefoot_operator.job_snapshot import ObservedNode
from surefoot_operator.memory.connection_pool import MemoryServerAddress, MemoryTierCredentials
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.api_objects import ApiError
from surefoot_operator.platforms.kubernetes.views import observations
from surefoot_operator.platforms.kubernetes.views.observations import KubeletLiveness
from surefoot_operator.policy.maintenance.memory_tier_rollout import MemoryServerPod

Object = dict[str, Any]

_REVISION = "controller-revision-hash"
_APPS = "/apis/apps/v1/namespaces"


@dataclass(frozen=True, slots=True)
class NewestRevision:
    """The DaemonSet's target: `wanted` pods, all of `revision`."""

    uid: str
    revision: str
    wanted: int


def server_addresses(
    found: Iterable[Object], gone: Iterable[Object], domains: Mapping[str, str], access: MemoryTierCredentials
) -> tuple[MemoryServerAddress, ...]:
    """Chooses one holder a server: a running one, else the newest.

    `gone`: pods that were deleted.
    """
    known = [(pod, True) for pod in gone] + [(pod, False) for pod in found]
    known.sort(key=lambda one: str(one[0]["metadata"].get("creationTimestamp")))
    chosen: dict[MemoryServerId, MemoryServerAddress] = {}
    for pod, is_gone in known:
        where = observations.node_of(pod) or ""
        for place in observations.observe_servers(pod, is_gone, domains.get(where, where), access):
            server = place.server_id
            if place.running or not (server in chosen and chosen[server].running):
                chosen[server] = place
    return tuple(chosen[server] for server in sorted(chosen))


def observe_server_pods(
    found: Iterable[Object], owner_uid: str, around: Collection[Object], heard: KubeletLiveness
) -> tuple[MemoryServerPod, ...]:
    """Reads one DaemonSet's pods for the rollout."""
    weighed = observations.without_mass_doubt(observations.observe_node(one, heard) for one in around)
    known = {one.name: one for one in weighed}
    return tuple(_pod(pod, known) for pod in found if _is_owned(pod, owner_uid))


def _pod(pod: Object, known: Mapping[str, ObservedNode]) -> MemoryServerPod:
    metadata = pod["metadata"]
    where = observations.node_of(pod) or ""
    node = known.get(where)
    return MemoryServerPod(
        name=metadata["name"],
        uid=metadata["uid"],
        node=where,
        domain=node.domain if node is not None else where,
        revision=str((metadata.get("labels") or {}).get(_REVISION, "")),
        ready=observations.is_ready(pod),
        deleting=metadata.get("deletionTimestamp") is not None,
        node_ready=node is None or node.ready,
        servers=observations.count_servers(pod),
    )


async def newest_revision(api: Api, namespace: str, name: str) -> NewestRevision | None:
    """Reads the newest revision; None while the DaemonSet's controller has none."""
    try:
        found = await api.get(f"{_APPS}/{namespace}/daemonsets/{name}")
    except ApiError as error:
        if error.code == 404:
            return None
        raise
    status = found.get("status", {})
    if status.get("observedGeneration") != found["metadata"]["generation"]:
        return None
    uid = found["metadata"]["uid"]
    wanted = ",".join(f"{key}={value}" for key, value in found["spec"]["selector"].get("matchLabels", {}).items())
    listed = await api.get(f"{_APPS}/{namespace}/controllerrevisions", {"labelSelector": wanted})
    revisions = [one for one in listed["items"] if _is_owned(one, uid)]
    if not revisions:
        return None
    last = max(revisions, key=lambda one: int(one["revision"]))
    return NewestRevision(uid, last["metadata"]["labels"][_REVISION], int(status.get("desiredNumberScheduled", 0)))


async def restart_pod(api: Api, namespace: str, pod: MemoryServerPod) -> None:
    """Deletes exactly this pod, so that its DaemonSet creates another."""
    options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": pod.uid}}
    try:
        await api.delete(api_objects.core_path(namespace, "pods", pod.name), options)
    except ApiError as error:
        if error.code not in (404, 409):
            raise


def _is_owned(found: Object, uid: str) -> bool:
    return any(owner.get("uid") == uid for owner in found["metadata"].get("ownerReferences", ()))
