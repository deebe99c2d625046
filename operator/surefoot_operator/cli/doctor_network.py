"""Defines what the doctor finds, and renders it.

Pure. A check that could not be made is `unknown` and says why: "ok" would be a guess, and a fault would send people to mend what works.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from surefoot.protocol.text import join_names
from surefoot_operator.cli import reach_program
from surefoot_operator.cli.cluster_access import ClusterConnection, ClusterRequestFailed, Permission, describe_api_error
from surefoot_operator.cli.jobs.read_jobs import StoredJob, read_jobs, read_worker_pods
from surefoot_operator.errors import PlatformError
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.api_objects import ApiError
from surefoot_operator.platforms.kubernetes.pods import METRICS_PORT
from surefoot_operator.platforms.kubernetes.views.observations import node_of

State = Literal["ok", "warning", "fault", "unknown"]
STATES: tuple[State, ...] = ("ok", "warning", "fault", "unknown")


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was found, and what to do about it."""

    check: str
    state: State
    text: str
    remedy: str = ""


def finding_lines(found: Sequence[Finding]) -> list[str]:
    """Renders findings with their remedies, and counts them."""
    width = max((len(one.check) for one in found), default=0)
    lines = []
    for one in found:
        lines.append(f"{one.state:<8} {one.check:<{width}}   {one.text}")
        if one.remedy:
            lines.append(f"{'':<8} {'':<{width}}   -> {one.remedy}")
    counts = {state: sum(one.state == state for one in found) for state in STATES}
    return [*lines, "", ", ".join(f"{count} {state}" for state, count in counts.items() if count)]


def has_fault(found: Sequence[Finding]) -> bool:
    return any(one.state == "fault" for one in found)


# ---- what workers reach ----------------------------------------------------------------------------------------------
# Tries the network from inside one worker on each node. Touches the network: reads jobs and their pods, and runs
# `reach_program` in workers by exec. Workers are who NetworkPolicies let through to operator and holders; from a
# person's machine or another pod the answer would be another one.

Object = dict[str, Any]

MAX_PROBE_WORKERS = 32
MAX_TARGETS = 32
"""Holders, and workers, that each worker tries; of more, those that follow its own node."""
SECONDS = 30.0
BEGIN = 'import json, sys; text, targets = json.loads(sys.stdin.readline()); made = {}; exec(text, made); made["main"](targets)'
"""The program itself goes by its input: not every proxy lets a long command through."""


@dataclass(frozen=True, slots=True)
class ProbeWorker:
    """A worker from which the network is tried."""

    namespace: str
    pod: str
    node: str
    targets: tuple[Object, ...]


@dataclass(frozen=True, slots=True)
class ReachabilityResult:
    """What came of one try; but for `source` as `reach_program` prints it."""

    kind: str
    node: str
    """The node it leads to; empty: it leads to the operator."""
    host: str
    port: int
    seconds: float | None = None
    step: str = ""
    problem: str = ""
    source: str = ""
    """The node that it was tried from."""

    @property
    def target(self) -> str:
        address = f"{self.host}:{self.port}"
        return f"{self.node} ({address})" if self.node else address


async def check_network(cluster: ClusterConnection) -> list[Finding]:
    """Asks one worker on each node."""
    found: dict[str, ProbeWorker] = {}
    try:
        for job in await read_jobs(cluster):
            if job.status is not None and job.status.membership is not None:
                for asker in choose_probe_workers(job, await read_worker_pods(cluster, job)):
                    found.setdefault(asker.node, asker)
    except ClusterRequestFailed as error:
        return network_findings((), (str(error),))
    chosen = [found[node] for node in sorted(found)][:MAX_PROBE_WORKERS]
    answers = await asyncio.gather(*(run_probe(cluster, one) for one in chosen))
    ways = [way for one in answers if not isinstance(one, str) for way in one]
    return network_findings(ways, [one for one in answers if isinstance(one, str)])


async def run_probe(cluster: ClusterConnection, asker: ProbeWorker) -> tuple[ReachabilityResult, ...] | str:
    path = api_objects.core_path(asker.namespace, "pods", asker.pod) + "/exec"
    told = json.dumps([inspect.getsource(reach_program), asker.targets])
    try:
        ran = await cluster.api.exec_in_pod(
            path, api_objects.TRAINER_CONTAINER, ("python3", "-c", BEGIN), f"{told}\n", SECONDS
        )
    except PlatformError as error:
        if isinstance(error, ApiError) and error.code == 403:
            return str(describe_api_error(error, Permission("create", "pods/exec", asker.namespace), cluster.server))
        return f"worker {asker.pod} on {asker.node}: {error}"
    if ran.failure:
        return f"worker {asker.pod} on {asker.node}: {ran.failure} {ran.stderr.strip()[-200:]}".strip()
    try:
        return tuple(
            replace(way, source=asker.node) for way in msgspec.json.decode(ran.stdout, type=list[ReachabilityResult])
        )
    except msgspec.DecodeError as error:
        return f"worker {asker.pod} on {asker.node} answered what cannot be read: {error!r}"


# ---- pure -----------------------------------------------------------------------------------------------------------


def choose_probe_workers(job: StoredJob, pods: Sequence[Object]) -> list[ProbeWorker]:
    """Chooses a job's running worker on each node, and what it tries."""
    running: dict[str, Object] = {}
    for pod in pods:
        node, status = node_of(pod), pod.get("status", {})
        if node is not None and status.get("phase") == "Running" and status.get("podIP"):
            running.setdefault(node, pod)
    known = job.status.assigned_servers if job.status is not None else ()
    holders = [
        {"kind": "memory-server", "node": one.instance.node, "host": one.host, "port": one.port} for one in known
    ]
    workers = [found for node, pod in running.items() if (found := _worker(node, pod)) is not None]
    return [
        ProbeWorker(
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
    return ordered[:MAX_TARGETS]


def _worker(node: str, pod: Object) -> Object | None:
    for container in pod["spec"]["containers"]:
        for port in container.get("ports", ()):
            if port.get("name") == METRICS_PORT:
                return {"kind": "worker", "node": node, "host": pod["status"]["podIP"], "port": port["containerPort"]}
    return None


# ---- judgement of the network ----------------------------------------------------------------------------------------
# Judges who reaches whom. A worker that does not reach its operator, or other workers, trains nothing; one that misses
# some holders saves to fewer.

NOT_CHECKED = Finding(
    "network",
    "unknown",
    "who reaches whom was not tried",
    "give --network while a job runs: it runs a short program in one worker on each node",
)
_SHOWN = 5
_NAMES = {"coordinator": "to the operator", "memory-server": "to memory servers", "worker": "between workers"}
_NODES = "see what stands between these nodes (security groups, firewalls, the network plugin's pods there)"
_REMEDIES = {
    "coordinator resolve": "see the cluster's DNS: kubectl -n kube-system get pods -l k8s-app=kube-dns",
    "coordinator connect": "see that an operator leads, and that NetworkPolicies let pods with surefoot.dev/part=worker out to its port 8443",
    "coordinator verify": "the operator's certificate is of another authority than the worker was given: see docs/security.md, then replace the worker",
    "memory-server connect": f"{_NODES}, and NetworkPolicies: pods with surefoot.dev/part=worker must reach the port redis of surefoot.dev/part=memory-tier",
    "worker connect": f"{_NODES}, and NetworkPolicies of the job's namespace: its workers must reach each other at any port",
}


def network_findings(ways: Sequence[ReachabilityResult], unasked: Sequence[str]) -> list[Finding]:
    """Judges each kind of way; `unasked` says of each worker without an answer why."""
    found = [_of_kind(kind, those) for kind in _NAMES if (those := [way for way in ways if way.kind == kind])]
    if unasked:
        remedy = "the worker's image needs python3 on its PATH, and you the right to create pods/exec there"
        found.append(Finding("network", "unknown", join_names(unasked, _SHOWN), remedy))
    elif not ways:
        remedy = "kubectl apply -f examples/cluster/minimal.yaml, and ask again while it runs; -n names its namespace"
        found.append(Finding("network", "unknown", "no worker runs here from which it could be tried", remedy))
    return found


def _of_kind(kind: str, ways: Sequence[ReachabilityResult]) -> Finding:
    name = f"network {_NAMES[kind]}"
    failed = [way for way in ways if way.seconds is None]
    if not failed:
        slowest = max(way.seconds or 0.0 for way in ways)
        sources = len({way.source for way in ways})
        said = f"{len(ways)} ways from {sources} nodes are open, the slowest in {1000 * slowest:.0f} ms"
        return Finding(name, "ok", said)
    said = f"{len(failed)} of {len(ways)} ways fail: {join_names(describe_failures(failed), _SHOWN)}"
    remedy = _REMEDIES.get(f"{kind} {failed[0].step}") or _REMEDIES[f"{kind} connect"]
    # who reaches some holders saves to fewer
    reached = {way.source for way in ways if way.seconds is not None}
    partly = kind == "memory-server" and reached == {way.source for way in ways}
    return Finding(name, "warning" if partly else "fault", said, remedy)


def describe_failures(failed: Sequence[ReachabilityResult]) -> list[str]:
    """Ways by where they lead and why they fail: one node behind a wall is one sentence."""
    sources: dict[tuple[str, str], list[str]] = {}
    for way in failed:
        sources.setdefault((way.target, way.problem), []).append(way.source)
    return [
        f"from {join_names(sorted(names), _SHOWN)} to {target}: {problem}"
        for (target, problem), names in sorted(sources.items())
    ]
