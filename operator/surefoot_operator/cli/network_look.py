"""Tries the network from inside one worker on each node.

Touches the network: reads jobs and their pods, and runs `reach_program` in workers by exec. Workers are who NetworkPolicies let through to
operator and holders; from a person's machine or another pod the answer would be another one.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from surefoot_operator.cli import reach_program
from surefoot_operator.cli.cluster_access import OpenCluster
from surefoot_operator.cli.cluster_refusals import ClusterRefused, Right, refused
from surefoot_operator.cli.jobs.cluster_reads import read_jobs, read_worker_pods
from surefoot_operator.cli.jobs.stored_job import StoredJob
from surefoot_operator.errors import FabricError
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.api_errors import ApiRefused
from surefoot_operator.platforms.kubernetes.pods import METRICS_PORT
from surefoot_operator.platforms.kubernetes.views.observations import node_of

Object = dict[str, Any]

MOST_ASKERS = 32
MOST_TARGETS = 32
"""Holders, and workers, that each worker tries; of more, those that follow its own node."""
SECONDS = 30.0
BEGIN = 'import json, sys; text, targets = json.loads(sys.stdin.readline()); made = {}; exec(text, made); made["main"](targets)'
"""The program itself goes by its input: not every proxy lets a long command through."""


@dataclass(frozen=True, slots=True)
class Asker:
    """A worker from which the network is tried."""

    namespace: str
    pod: str
    node: str
    targets: tuple[Object, ...]


@dataclass(frozen=True, slots=True)
class Way:
    """What came of one try from one node."""

    source: str
    kind: str
    target: str
    """The node it leads to; of the coordinator its address."""
    address: str
    seconds: float | None
    step: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class NetworkLook:
    """What workers could reach.

    `unasked` says of each worker without an answer why.
    """

    ways: tuple[Way, ...]
    unasked: tuple[str, ...]


async def look_at_network(cluster: OpenCluster) -> NetworkLook:
    """Asks one worker on each node."""
    found: dict[str, Asker] = {}
    try:
        for job in await read_jobs(cluster):
            if job.status is not None and job.status.world is not None:
                for asker in askers_of(job, await read_worker_pods(cluster, job)):
                    found.setdefault(asker.node, asker)
    except ClusterRefused as error:
        return NetworkLook((), (str(error),))
    chosen = [found[node] for node in sorted(found)][:MOST_ASKERS]
    answers = await asyncio.gather(*(_asked(cluster, one) for one in chosen))
    ways = tuple(way for one in answers if not isinstance(one, str) for way in one)
    return NetworkLook(ways, tuple(one for one in answers if isinstance(one, str)))


async def _asked(cluster: OpenCluster, asker: Asker) -> tuple[Way, ...] | str:
    path = api_objects.core_path(asker.namespace, "pods", asker.pod) + "/exec"
    told = json.dumps([inspect.getsource(reach_program), asker.targets])
    try:
        ran = await cluster.api.run_in(path, api_objects.TRAINER, ("python3", "-c", BEGIN), f"{told}\n", SECONDS)
    except FabricError as error:
        if isinstance(error, ApiRefused) and error.code == 403:
            return str(refused(error, Right("create", "pods/exec", asker.namespace), cluster.server))
        return f"worker {asker.pod} on {asker.node}: {error}"
    if ran.problem:
        return f"worker {asker.pod} on {asker.node}: {ran.problem} {ran.errors.strip()[-200:]}".strip()
    try:
        return tuple(_way(asker.node, one) for one in json.loads(ran.output))
    except (ValueError, KeyError, TypeError) as error:
        return f"worker {asker.pod} on {asker.node} answered what cannot be read: {error!r}"


# ---- pure -----------------------------------------------------------------------------------------------------------


def askers_of(job: StoredJob, pods: Sequence[Object]) -> list[Asker]:
    """Chooses a job's running worker on each node, and what it tries."""
    running: dict[str, Object] = {}
    for pod in pods:
        node, status = node_of(pod), pod.get("status", {})
        if node is not None and status.get("phase") == "Running" and status.get("podIP"):
            running.setdefault(node, pod)
    known = job.status.named_holders if job.status is not None else ()
    holders = [{"kind": "holder", "node": one.holder.node, "host": one.host, "port": one.port} for one in known]
    workers = [found for node, pod in running.items() if (found := _worker(node, pod)) is not None]
    return [
        Asker(
            job.namespace,
            pod["metadata"]["name"],
            node,
            (*_near(holders, node), *_near([one for one in workers if one["node"] != node], node)),
        )
        for node, pod in running.items()
    ]


def _near(targets: list[Object], node: str) -> list[Object]:
    """Those that follow a node in order of names, its own first: over all nodes each is tried as often."""
    ordered = sorted(targets, key=lambda one: (one["node"] < node, one["node"]))
    return ordered[:MOST_TARGETS]


def _worker(node: str, pod: Object) -> Object | None:
    for container in pod["spec"]["containers"]:
        for port in container.get("ports", ()):
            if port.get("name") == METRICS_PORT:
                return {"kind": "worker", "node": node, "host": pod["status"]["podIP"], "port": port["containerPort"]}
    return None


def _way(source: str, one: Object) -> Way:
    address = f"{one['host']}:{one['port']}"
    seconds = one.get("seconds")
    return Way(
        source,
        str(one["kind"]),
        str(one["node"]) or address,
        address,
        None if seconds is None else float(seconds),
        str(one.get("step", "")),
        str(one.get("problem", "")),
    )
