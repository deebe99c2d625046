"""Reads the addresses and revisions of memory servers from the pods of the memory tier's DaemonSet.

`choose_server_addresses` and `observe_server_pods` are pure; `read_newest_revision` and `restart_pod` call the API
server. Used by each job's platform and by the leader's rollout of the tier.
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
"""Label with a DaemonSet's revision, on its pods and on its ControllerRevisions."""
_APPS = "/apis/apps/v1/namespaces"


@dataclass(frozen=True, slots=True)
class NewestRevision:
    """The newest revision of the memory tier's DaemonSet."""

    uid: str
    """UID of the DaemonSet."""
    revision: str
    """The revision that all its pods should have."""
    desired_count: int
    """Number of nodes that should have a pod."""


def choose_server_addresses(
    pods: Iterable[Object], deleted_pods: Iterable[Object], domains: Mapping[str, str], access: MemoryTierCredentials
) -> tuple[MemoryServerAddress, ...]:
    """Chooses one address for each memory server: that of a running pod, else that of the newest pod.

    Args:
        pods: Pods of memory servers that exist.
        deleted_pods: Such pods that were deleted lately.
        domains: Node → failure domain; a node that is missing is a domain of its own.
        access: Credentials of the memory servers.
    """
    pods_and_deletion = [(pod, True) for pod in deleted_pods] + [(pod, False) for pod in pods]
    pods_and_deletion.sort(key=lambda entry: str(entry[0]["metadata"].get("creationTimestamp")))
    chosen: dict[MemoryServerId, MemoryServerAddress] = {}
    for pod, is_deleted in pods_and_deletion:
        node = observations.node_of(pod) or ""
        for address in observations.observe_servers(pod, is_deleted, domains.get(node, node), access):
            server = address.server_id
            if address.running or not (server in chosen and chosen[server].running):
                chosen[server] = address
    return tuple(chosen[server] for server in sorted(chosen))


def observe_server_pods(
    pods: Iterable[Object], owner_uid: str, nodes: Collection[Object], kubelets: KubeletLiveness
) -> tuple[MemoryServerPod, ...]:
    """Reads the pods of one DaemonSet for the rollout.

    Args:
        pods: Pods of memory servers.
        owner_uid: UID of the DaemonSet; other pods are left out.
        nodes: All nodes.
        kubelets: Which kubelets have renewed their lease.
    """
    confirmed_nodes = observations.confirm_node_failures(observations.observe_node(node, kubelets) for node in nodes)
    node_by_name = {node.name: node for node in confirmed_nodes}
    return tuple(_observe_server_pod(pod, node_by_name) for pod in pods if _is_owned(pod, owner_uid))


def _observe_server_pod(pod: Object, node_by_name: Mapping[str, ObservedNode]) -> MemoryServerPod:
    metadata = pod["metadata"]
    node_name = observations.node_of(pod) or ""
    node = node_by_name.get(node_name)
    return MemoryServerPod(
        name=metadata["name"],
        uid=metadata["uid"],
        node=node_name,
        domain=node.domain if node is not None else node_name,
        revision=str((metadata.get("labels") or {}).get(_REVISION, "")),
        ready=observations.is_ready(pod),
        deleting=metadata.get("deletionTimestamp") is not None,
        node_ready=node is None or node.ready,
        servers=observations.count_servers(pod),
    )


async def read_newest_revision(api: Api, namespace: str, name: str) -> NewestRevision | None:
    """Reads a DaemonSet's newest revision.

    Returns None if the DaemonSet does not exist or its controller has not yet processed its newest version.
    """
    try:
        daemon_set = await api.get(f"{_APPS}/{namespace}/daemonsets/{name}")
    except ApiError as error:
        if error.code == 404:
            return None
        raise
    status = daemon_set.get("status", {})
    if status.get("observedGeneration") != daemon_set["metadata"]["generation"]:
        return None
    uid = daemon_set["metadata"]["uid"]
    label_selector = ",".join(
        f"{key}={value}" for key, value in daemon_set["spec"]["selector"].get("matchLabels", {}).items()
    )
    response = await api.get(f"{_APPS}/{namespace}/controllerrevisions", {"labelSelector": label_selector})
    revisions = [revision for revision in response["items"] if _is_owned(revision, uid)]
    if not revisions:
        return None
    newest = max(revisions, key=lambda revision: int(revision["revision"]))
    return NewestRevision(uid, newest["metadata"]["labels"][_REVISION], int(status.get("desiredNumberScheduled", 0)))


async def restart_pod(api: Api, namespace: str, pod: MemoryServerPod) -> None:
    """Deletes this pod, if it still has its UID, so that the DaemonSet creates a new one."""
    options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": pod.uid}}
    try:
        await api.delete(api_objects.core_path(namespace, "pods", pod.name), options)
    except ApiError as error:
        if error.code not in (404, 409):
            raise


def _is_owned(item: Object, uid: str) -> bool:
    return any(owner.get("uid") == uid for owner in item["metadata"].get("ownerReferences", ()))
