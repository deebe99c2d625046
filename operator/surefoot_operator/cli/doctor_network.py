"""Defines the doctor's findings and their rendering, and checks the network between workers.

A check that could not be made is `unknown`, with the reason: "ok" would be a guess, and "fault" would send users to
repair something that works.
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
    """The result of a check, with its remedy."""

    check: str
    """Name of the check."""
    state: State
    text: str
    """Sentence that describes the result."""
    remedy: str = ""
    """Advice to the user; empty if there is nothing to do."""


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Renders the findings with their remedies, and the number in each state."""
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
# Tries the network from inside one worker on each node: reads jobs and their pods, and runs `reach_program` in workers
# by exec. NetworkPolicies let workers connect to the operator and the memory servers, but not the user's machine or
# other pods, so only a test from inside a worker is meaningful.

Object = dict[str, Any]

MAX_PROBE_WORKERS = 32
MAX_TARGETS = 32
"""Limit of the memory servers, and of the workers, that each worker tries; `_nearest_targets` selects them."""
SECONDS = 30.0
BEGIN = 'import json, sys; text, targets = json.loads(sys.stdin.readline()); made = {}; exec(text, made); made["main"](targets)'
"""Command that reads the program from standard input, because some proxies reject a long command."""


@dataclass(frozen=True, slots=True)
class ProbeWorker:
    """A worker from which the network is tried."""

    namespace: str
    pod: str
    node: str
    targets: tuple[Object, ...]
    """Addresses to try, in the form that `reach_program` reads."""


@dataclass(frozen=True, slots=True)
class ReachabilityResult:
    """The result of one connection attempt, as `reach_program` prints it, with its source added."""

    kind: str
    """Kind of the target: coordinator, memory-server or worker."""
    node: str
    """Node of the target; empty for the operator."""
    host: str
    port: int
    seconds: float | None = None
    """Time until it was connected; None if it failed."""
    step: str = ""
    """Step that failed: resolve, connect or verify; empty if none did."""
    problem: str = ""
    """Error of the step that failed."""
    source: str = ""
    """Node from which it was tried."""

    @property
    def target(self) -> str:
        address = f"{self.host}:{self.port}"
        return f"{self.node} ({address})" if self.node else address


async def check_network(cluster: ClusterConnection) -> list[Finding]:
    """Tries the network from one worker on each node, for at most MAX_PROBE_WORKERS nodes."""
    # Choose one running worker per node over all jobs.
    worker_by_node: dict[str, ProbeWorker] = {}
    try:
        for job in await read_jobs(cluster):
            if job.status is not None and job.status.membership is not None:
                for worker in choose_probe_workers(job, await read_worker_pods(cluster, job)):
                    worker_by_node.setdefault(worker.node, worker)
    except ClusterRequestFailed as error:
        return network_findings((), (str(error),))
    # Run the program in all of them concurrently; a text in place of results is the reason for having none.
    probe_workers = [worker_by_node[node] for node in sorted(worker_by_node)][:MAX_PROBE_WORKERS]
    answers = await asyncio.gather(*(run_probe(cluster, worker) for worker in probe_workers))
    results = [result for answer in answers if not isinstance(answer, str) for result in answer]
    return network_findings(results, [answer for answer in answers if isinstance(answer, str)])


async def run_probe(cluster: ClusterConnection, worker: ProbeWorker) -> tuple[ReachabilityResult, ...] | str:
    """Runs `reach_program` in a worker; returns its results, or the reason why there are none."""
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


# ---- pure ------------------------------------------------------------------------------------------------------------


def choose_probe_workers(job: StoredJob, pods: Sequence[Object]) -> list[ProbeWorker]:
    """Chooses one running worker of the job on each node, and the addresses that it tries."""
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
    """Returns the first MAX_TARGETS targets in the order of node names, starting at `node` and wrapping around.

    Over all nodes, every target is then tried equally often.
    """
    targets_in_order = sorted(targets, key=lambda target: (target["node"] < node, target["node"]))
    return targets_in_order[:MAX_TARGETS]


def _worker_target(node: str, pod: Object) -> Object | None:
    """Returns the metrics port of a worker's pod as a target; None if it has none."""
    for container in pod["spec"]["containers"]:
        for port in container.get("ports", ()):
            if port.get("name") == METRICS_PORT:
                return {"kind": "worker", "node": node, "host": pod["status"]["podIP"], "port": port["containerPort"]}
    return None


# ---- judgement of the network ----------------------------------------------------------------------------------------
# Judges the results. A worker that cannot reach its operator or other workers cannot train. One that cannot reach some
# memory servers saves to fewer of them.

NOT_CHECKED = Finding(
    "network",
    "unknown",
    "who reaches whom was not tried",
    "give --network while a job runs: it runs a short program in one worker on each node",
)
_MAX_LISTED = 5
_KIND_NAMES = {"coordinator": "to the operator", "memory-server": "to memory servers", "worker": "between workers"}
_NODES_REMEDY = "check security groups, firewalls and the network plugin's pods between these nodes"
_REMEDIES = {
    "coordinator resolve": "see the cluster's DNS: kubectl -n kube-system get pods -l k8s-app=kube-dns",
    "coordinator connect": "see that an operator leads, and that NetworkPolicies let pods with surefoot.dev/part=worker out to its port 8443",
    "coordinator verify": "the operator's certificate is of another authority than the worker was given: see docs/security.md, then replace the worker",
    "memory-server connect": f"{_NODES_REMEDY}, and NetworkPolicies: pods with surefoot.dev/part=worker must reach the port redis of surefoot.dev/part=memory-tier",
    "worker connect": f"{_NODES_REMEDY}, and NetworkPolicies of the job's namespace: its workers must reach each other at any port",
}


def network_findings(results: Sequence[ReachabilityResult], unasked: Sequence[str]) -> list[Finding]:
    """Judges the results of each kind of target. `unasked`: for each worker without results, the reason."""
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
    """Judges all results of one kind of target in one finding."""
    name = f"network {_KIND_NAMES[kind]}"
    failed = [result for result in results if result.seconds is None]
    if not failed:
        slowest = max(result.seconds or 0.0 for result in results)
        source_count = len({result.source for result in results})
        text = f"{len(results)} ways from {source_count} nodes are open, the slowest in {1000 * slowest:.0f} ms"
        return Finding(name, "ok", text)
    text = f"{len(failed)} of {len(results)} ways fail: {join_names(describe_failures(failed), _MAX_LISTED)}"
    remedy = _REMEDIES.get(f"{kind} {failed[0].step}") or _REMEDIES[f"{kind} connect"]
    # If every worker reaches some memory server, saves still work with fewer copies: a warning, not a fault.
    reaching_nodes = {result.source for result in results if result.seconds is not None}
    is_partial = kind == "memory-server" and reaching_nodes == {result.source for result in results}
    return Finding(name, "warning" if is_partial else "fault", text, remedy)


def describe_failures(failed: Sequence[ReachabilityResult]) -> list[str]:
    """Groups failures by target and error, so that one unreachable node gives one sentence."""
    nodes_by_failure: dict[tuple[str, str], list[str]] = {}
    for result in failed:
        nodes_by_failure.setdefault((result.target, result.problem), []).append(result.source)
    return [
        f"from {join_names(sorted(nodes), _MAX_LISTED)} to {target}: {problem}"
        for (target, problem), nodes in sorted(nodes_by_failure.items())
    ]
