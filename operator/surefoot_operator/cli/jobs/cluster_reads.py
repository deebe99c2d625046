"""Reads jobs and what surrounds them from a cluster.

Touches the network. The job itself must be readable; of pods, nodes, holders and events each that may not be read is a sentence in the
look, since many people may see their jobs and no node.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot_operator.api.known_node_signals import KNOWN_SIGNALS
from surefoot_operator.api.moments import moment_seconds
from surefoot_operator.cli.cluster_access import OpenCluster
from surefoot_operator.cli.cluster_refusals import ClusterRefused, Right, jobs_right, refused, without_crd
from surefoot_operator.cli.jobs.job_view import HolderLook, JobView
from surefoot_operator.cli.jobs.stored_job import StoredJob, stored_job
from surefoot_operator.cli.local.progress import Happened
from surefoot_operator.errors import FabricError
from surefoot_operator.job_snapshot import NodeSeen, WorkerSeen
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.views import nodes, observations
from surefoot_operator.platforms.kubernetes.views.leases import Heard

Object = dict[str, Any]

_PAGE = 500
_MOST_PAGES = 200
"""A server that hands out pages for ever is not followed; 100,000 objects are more than any cluster's nodes or a job's pods."""


async def read_jobs(cluster: OpenCluster) -> list[StoredJob]:
    """Lists the TrainingJobs of the namespace meant, or of all. Raises ClusterRefused."""
    path = (
        f"{api_objects.JOBS}/namespaces/{cluster.namespace}/trainingjobs"
        if cluster.namespace
        else f"{api_objects.JOBS}/trainingjobs"
    )
    needed = jobs_right("list", cluster.namespace)
    return [stored_job(one) for one in await listed_objects(cluster, path, needed, missing=without_crd(cluster.server))]


async def read_job(cluster: OpenCluster, name: str) -> StoredJob:
    """Reads one TrainingJob. Raises ClusterRefused."""
    try:
        found = await cluster.api.get(api_objects.jobs_path(cluster.namespace, name))
    except FabricError as error:
        missing = (
            f"there is no TrainingJob {name} in namespace {cluster.namespace} of {cluster.server};"
            " surefoot list -A shows all that you may see"
        )
        raise refused(error, jobs_right("get", cluster.namespace), cluster.server, missing) from error
    return stored_job(found)


async def read_view(cluster: OpenCluster, name: str) -> JobView:
    """Reads a job, its pods, events, nodes and holders. Raises ClusterRefused."""
    stored = await read_job(cluster, name)
    unread: list[str] = []
    pods, around, holders, told = await asyncio.gather(
        _optional(unread, read_worker_pods(cluster, stored)),
        _optional(unread, _nodes(cluster)),
        _optional(unread, _holders(cluster)),
        _optional(unread, _events(cluster, stored)),
    )
    return JobView(
        now=time.time(),
        stored=stored,
        workers=workers_of(pods or (), unread),
        nodes=None if around is None else nodes_of(around, stored),
        holders=None if holders is None else holders_of(holders),
        events=events_of(told or ()),
        unread=tuple(unread),
    )


async def listed_objects(
    cluster: OpenCluster, path: str, needed: Right, query: Mapping[str, str] | None = None, missing: str = ""
) -> list[Object]:
    """Lists objects, page by page. Raises ClusterRefused, also without an end."""
    found: list[Object] = []
    further = ""
    for _ in range(_MOST_PAGES):
        asked: dict[str, str | int] = {**(query or {}), "limit": _PAGE, **({"continue": further} if further else {})}
        try:
            page = await cluster.api.get(path, asked)
        except FabricError as error:
            raise refused(error, needed, cluster.server, missing) from error
        found += page.get("items", ())
        further = str(page.get("metadata", {}).get("continue") or "")
        if not further:
            return found
    raise _endless(path, len(found), cluster)


async def read_worker_pods(cluster: OpenCluster, stored: StoredJob) -> list[Object]:
    """Lists a job's own worker pods. Raises ClusterRefused."""
    path = api_objects.core_path(stored.namespace, "pods")
    needed = Right("list", "pods", stored.namespace, why="workers")
    found = await listed_objects(cluster, path, needed, {"labelSelector": api_objects.selector(stored.uid)})
    me = api_objects.JobIdentity(stored.namespace, stored.name, stored.uid)
    return [pod for pod in found if api_objects.is_of(pod, me) and api_objects.part_of(pod) == api_objects.WORKER]


async def _nodes(cluster: OpenCluster) -> list[Object]:
    return await listed_objects(cluster, "/api/v1/nodes", Right("list", "nodes", why="nodes and their state"))


async def _holders(cluster: OpenCluster) -> list[Object]:
    needed = Right("list", "pods", why="holders of the memory tier")
    return await listed_objects(cluster, "/api/v1/pods", needed, {"labelSelector": api_objects.HOLDER_SELECTOR})


async def _events(cluster: OpenCluster, stored: StoredJob) -> list[Object]:
    path = api_objects.core_path(stored.namespace, "events")
    query = {"fieldSelector": f"involvedObject.uid={stored.uid}"}
    return await listed_objects(cluster, path, Right("list", "events", stored.namespace, why="events"), query)


async def _optional(unread: list[str], call: Any) -> list[Object] | None:
    try:
        found: list[Object] = await call
    except ClusterRefused as error:
        unread.append(str(error))
        return None
    return found


def _endless(path: str, count: int, cluster: OpenCluster) -> ClusterRefused:
    """Part of a list would be taken for the whole: a job that is not in it for one that is not there."""
    return ClusterRefused(
        f"{cluster.server} handed out {_MOST_PAGES} pages of {path}, {count} objects, and named a further one; nothing"
        " of them is shown, as what was not read would be missing: give -n NAMESPACE, and see what fills the list"
    )


# ---- pure -----------------------------------------------------------------------------------------------------------


def workers_of(pods: Sequence[Object], unread: list[str]) -> tuple[WorkerSeen, ...]:
    """Translates worker pods; one that is none of the operator's is named."""
    found = []
    for pod in pods:
        try:
            found.append(observations.worker(pod))
        except FabricError as error:
            unread.append(str(error))
    return tuple(sorted(found, key=lambda one: (one.index, one.attempt)))


def nodes_of(found: Sequence[Object], stored: StoredJob) -> tuple[NodeSeen, ...]:
    """Translates nodes as the operator does, but without leases."""
    spec = stored.job.spec if stored.job is not None else None
    key = spec.checkpoint.memory.topology_key if spec is not None else api_objects.HOSTNAME
    signals = (spec.health_policy.node_signals if spec is not None else None) or KNOWN_SIGNALS
    seen = [nodes.node(one, Heard(), key, signals) for one in found]
    return nodes.without_mass_doubt(sorted(seen, key=lambda one: one.name))


def holders_of(pods: Sequence[Object]) -> tuple[HolderLook, ...]:
    """Translates holders' pods: those that have a node."""
    looks = [(observations.node_of(pod), observations.is_ready(pod)) for pod in pods]
    return tuple(sorted((HolderLook(node, ready) for node, ready in looks if node), key=lambda one: one.node))


def events_of(found: Sequence[Object]) -> tuple[Happened, ...]:
    """Translates core/v1 events, oldest first."""
    told = []
    for event in found:
        at = moment_seconds(event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp"))
        reason, message = str(event.get("reason", "")), str(event.get("message", ""))
        told.append(Happened(at or 0.0, reason, message, event.get("type") == "Warning"))
    return tuple(sorted(told, key=lambda one: one.at_seconds))
