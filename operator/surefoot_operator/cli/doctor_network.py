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


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Renders findings with their remedies, and counts them."""
    width = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<8} {finding.check:<{width}}   {finding.text}")
        if finding.remedy:
            lines.append(f"{'':<8} {'':<{width}}   -> {finding.remedy}")
    counts = {state: sum(finding.state == state for finding in findings) for state in STATES}
    return [*lines, "", ", ".join(f"{count} {state}" for state, count in counts.items() if count)]


def has_fault(findings: Sequence[Finding]) -> bool:
    return any(finding.state == "fault" for finding in findings)


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
    worker_by_node: dict[str, ProbeWorker] = {}
    try:
        for job in await read_jobs(cluster):
            if job.status is not None and job.status.membership is not None:
                for worker in choose_probe_workers(job, await read_worker_pods(cluster, job)):
                    worker_by_node.setdefault(worker.node, worker)
    except ClusterRequestFailed as error:
        return network_findings((), (str(error),))
    probe_workers = [worker_by_node[node] for node in sorted(worker_by_node)][:MAX_PROBE_WORKERS]
    answers = await asyncio.gather(*(run_probe(cluster, worker) for worker in probe_workers))
    results = [result for answer in answers if not isinstance(answer, str) for result in answer]
    return network_findings(results, [answer for answer in answers if isinstance(answer, str)])


async def run_probe(cluster: ClusterConnection, worker: ProbeWorker) -> tuple[ReachabilityResult, ...] | str:
    path = api_objects.core_path(worker.namespace, "pods", worker.pod) + "/exec"
    program_input = json.dumps([inspect.getsource(reach_program), worker.targets])
    try:
        execution = await cluster.api.exec_in_pod(
            path, api_objects.TRAINER_CONTAINER, ("python3", "-c", BEGIN), f"{program_input}\n", SECONDS
        )
    except PlatformError as error:
        if isinstance(error, ApiError) and error.code == 403:
            return str(describe_api_error(error, Permission("create", "pods/exec", worker.namespace), cluster.server))
        return f"worker {worker.pod} on {worker.node}: {error}"
    if execution.failure:
        return f"worker {worker.pod} on {worker.node}: {execution.failure} {execution.stderr.strip()[-200:]}".strip()
    try:
        return tuple(
            replace(result, source=worker.node)
            for result in msgspec.json.decode(execution.stdout, type=list[ReachabilityResult])
        )
    except msgspec.DecodeError as error:
        return f"worker {worker.pod} on {worker.node} answered what cannot be read: {error!r}"


# ---- pure -----------------------------------------------------------------------------------------------------------


def choose_probe_workers(job: StoredJob, pods: Sequence[Object]) -> list[ProbeWorker]:
    """Chooses a job's running worker on each node, and what it tries."""
    pod_by_node: dict[str, Object] = {}
    for pod in pods:
        node, status = node_of(pod), pod.get("status", {})
        if node is not None and status.get("phase") == "Running" and status.get("podIP"):
            pod_by_node.setdefault(node, pod)
    servers = job.status.assigned_servers if job.status is not None else ()
    server_targets = [
        {"kind": "memory-server", "node": server.instance.node, "host": server.host, "port": server.port}
        for server in servers
    ]
    worker_targets = [target for node, pod in pod_by_node.items() if (target := _worker_target(node, pod)) is not None]
    return [
        ProbeWorker(
            job.namespace,
            pod["metadata"]["name"],
            node,
            (
                *_nearest_targets(server_targets, node),
                *_nearest_targets([target for target in worker_targets if target["node"] != node], node),
            ),
        )
        for node, pod in pod_by_node.items()
    ]


def _nearest_targets(targets: list[Object], node: str) -> list[Object]:
    """Those that follow a node in order of names, its own first: over all nodes each is tried as often."""
    targets_in_order = sorted(targets, key=lambda target: (target["node"] < node, target["node"]))
    return targets_in_order[:MAX_TARGETS]


def _worker_target(node: str, pod: Object) -> Object | None:
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
_MAX_LISTED = 5
_KIND_NAMES = {"coordinator": "to the operator", "memory-server": "to memory servers", "worker": "between workers"}
_NODES_REMEDY = "see what stands between these nodes (security groups, firewalls, the network plugin's pods there)"
_REMEDIES = {
    "coordinator resolve": "see the cluster's DNS: kubectl -n kube-system get pods -l k8s-app=kube-dns",
    "coordinator connect": "see that an operator leads, and that NetworkPolicies let pods with surefoot.dev/part=worker out to its port 8443",
    "coordinator verify": "the operator's certificate is of another authority than the worker was given: see docs/security.md, then replace the worker",
    "memory-server connect": f"{_NODES_REMEDY}, and NetworkPolicies: pods with surefoot.dev/part=worker must reach the port redis of surefoot.dev/part=memory-tier",
    "worker connect": f"{_NODES_REMEDY}, and NetworkPolicies of the job's namespace: its workers must reach each other at any port",
}


def network_findings(results: Sequence[ReachabilityResult], unasked: Sequence[str]) -> list[Finding]:
    """Judges each kind of way; `unasked` says of each worker without an answer why."""
    findings = [
        _judge_kind(kind, results_of_kind)
        for kind in _KIND_NAMES
        if (results_of_kind := [result for result in results if result.kind == kind])
    ]
    if unasked:
        remedy = "the worker's image needs python3 on its PATH, and you the right to create pods/exec there"
        findings.append(Finding("network", "unknown", join_names(unasked, _MAX_LISTED), remedy))
    elif not results:
        remedy = "kubectl apply -f examples/cluster/minimal.yaml, and ask again while it runs; -n names its namespace"
        findings.append(Finding("network", "unknown", "no worker runs here from which it could be tried", remedy))
    return findings


def _judge_kind(kind: str, results: Sequence[ReachabilityResult]) -> Finding:
    name = f"network {_KIND_NAMES[kind]}"
    failed = [result for result in results if result.seconds is None]
    if not failed:
        slowest = max(result.seconds or 0.0 for result in results)
        source_count = len({result.source for result in results})
        text = f"{len(results)} ways from {source_count} nodes are open, the slowest in {1000 * slowest:.0f} ms"
        return Finding(name, "ok", text)
    text = f"{len(failed)} of {len(results)} ways fail: {join_names(describe_failures(failed), _MAX_LISTED)}"
    remedy = _REMEDIES.get(f"{kind} {failed[0].step}") or _REMEDIES[f"{kind} connect"]
    # who reaches some holders saves to fewer
    reaching_nodes = {result.source for result in results if result.seconds is not None}
    is_partial = kind == "memory-server" and reaching_nodes == {result.source for result in results}
    return Finding(name, "warning" if is_partial else "fault", text, remedy)


def describe_failures(failed: Sequence[ReachabilityResult]) -> list[str]:
    """Ways by where they lead and why they fail: one node behind a wall is one sentence."""
    nodes_by_failure: dict[tuple[str, str], list[str]] = {}
    for result in failed:
        nodes_by_failure.setdefault((result.target, result.problem), []).append(result.source)
    return [
        f"from {join_names(sorted(nodes), _MAX_LISTED)} to {target}: {problem}"
        for (target, problem), nodes in sorted(nodes_by_failure.items())
    ]
