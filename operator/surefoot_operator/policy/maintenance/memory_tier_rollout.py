"""Rolls out a new revision of the memory servers, one failure domain at a time.

Pure. `judge_job_safety` decides for one job whether it can lose a memory server now; `plan_rollout` combines all jobs with
the pods. Called by each job's reconciler and by the leader's `memory_tier_maintenance`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surefoot_operator.api.status import JobStatus, Membership, condition_of
from surefoot_operator.job_snapshot import JobSnapshot
from surefoot_operator.policy.core.facts import (
    TierFacts,
    build_facts,
    fenced_servers,
)
from surefoot_operator.policy.failure.incidents import open_incident
from surefoot_operator.policy.failure.memory_server_liveness import may_still_have_data
from surefoot_operator.policy.maintenance.maintenance_plan import MaintenancePlan
from surefoot_operator.reasons import CHECKPOINT_LOST

MAX_REPORT_AGE_SECONDS = 15.0
"""Age from which on a job's report about its safety does not count."""


@dataclass(frozen=True, slots=True)
class MemoryServerPod:
    """A pod of the memory tier."""

    name: str
    uid: str
    node: str
    domain: str
    """Failure domain; empty if the pod has no node."""
    revision: str
    ready: bool
    deleting: bool = False
    node_ready: bool = True
    servers: int = 1
    """Number of memory servers that the pod runs."""


@dataclass(frozen=True, slots=True)
class JobSafety:
    """Whether one job can lose a memory server now."""

    job: str
    """Namespace and name."""
    is_safe: bool
    reason: str
    at_seconds: float
    """Unix time of the judgement."""
    servers_read_by_node: Mapping[str, int] | None = None
    """By node, the number of memory servers that the job has fenced and read; None: it needs none."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """Pods to delete now, all of one failure domain, with the reason."""

    to_delete: tuple[MemoryServerPod, ...]
    reason: str
    outdated_count: int
    """Number of pods of an older revision."""


def judge_job_safety(snapshot: JobSnapshot, status: JobStatus, maintenance: MaintenancePlan | None) -> JobSafety:
    """Decides whether this job survives the restart of one more failure domain of memory servers.

    `status` and `maintenance` were decided from `snapshot`; `maintenance` None: no maintenance was planned.
    """
    name = f"{snapshot.job.namespace}/{snapshot.job.name}"

    def decide(is_safe: bool, reason: str, nodes: Mapping[str, int] | None = None) -> JobSafety:
        return JobSafety(name, is_safe, reason, snapshot.now_seconds, nodes)

    membership = status.membership
    has_nothing = not status.had_checkpoint and status.last_complete is None
    if status.phase in ("Complete", "Failed") or snapshot.job.deleted:
        return decide(True, "it has ended")
    # Without workers, nothing could copy a checkpoint from one server to another.
    if membership is None or (membership.state == "Committed" and not membership.members):
        is_uploaded = status.last_uploaded is not None and status.last_uploaded == status.last_complete
        if has_nothing or is_uploaded:
            return decide(True, "none of its workers run, and memory has nothing that is not in the persistent tier")
        return decide(False, "none of its workers runs that could copy its newest checkpoint, which is in memory only")
    loss_condition = condition_of(status, CHECKPOINT_LOST)
    if (
        loss_condition is not None
        and loss_condition.status == "True"
        and not may_still_have_data(facts := build_facts(snapshot))
    ):
        # it may wait for a user like this for long, and must not block every upgrade of the memory tier
        return decide(
            True,
            "every checkpoint of it is lost, and no unreachable memory server may have one",
            _count_servers_read(facts, membership),
        )
    if membership.state != "Committed" or maintenance is None:
        return decide(False, "its membership is changing")
    if open_incident(status.incidents) is not None:
        return decide(False, "it is recovering")
    if maintenance.watermark is None:
        return decide(False, "none of its complete checkpoints has all its copies")
    if maintenance.replicas < 2 and (
        status.last_uploaded is None or status.last_uploaded in status.unreadable_checkpoints
    ):
        return decide(False, "its checkpoints have one copy, and none is in the persistent tier")
    return decide(
        True,
        f"{maintenance.watermark} has {maintenance.replicas} copies",
        _count_servers_read(build_facts(snapshot), membership),
    )


def _count_servers_read(facts: TierFacts, membership: Membership) -> Mapping[str, int]:
    """Counts, by node, the memory servers that the job has fenced and read in its present generation."""
    return Counter(h.endpoint.instance.node for h in fenced_servers(facts, membership.generation))


def rejected_safety(status: JobStatus | None, now_seconds: float) -> JobSafety:
    """Returns the safety of a job that cannot be parsed; `status` None: its status cannot be parsed either."""
    if status is not None and status.membership is None:
        return JobSafety("", True, "it never started", now_seconds)
    return JobSafety("", False, "its spec or status cannot be parsed", now_seconds)


def plan_rollout(
    pods: Sequence[MemoryServerPod], desired_pods: int, revision: str, jobs: Sequence[JobSafety], now_seconds: float
) -> Rollout:
    """Chooses the outdated pods to delete now.

    A pod on a node that is not ready waits for the node's return. An outdated pod that is itself not ready may be deleted
    while others are not ready, so that a revision that never becomes ready can be replaced.

    Args:
        pods: All pods of the memory tier.
        desired_pods: Number of pods that should exist.
        revision: Name of the newest revision.
        jobs: Safety of every job.
        now_seconds: Unix time.
    """
    outdated = sorted(
        (pod for pod in pods if pod.revision != revision and not pod.deleting), key=lambda pod: (pod.domain, pod.name)
    )

    def decide(reason: str, delete: Sequence[MemoryServerPod] = ()) -> Rollout:
        return Rollout(tuple(delete), reason, len(outdated))

    reachable = [pod for pod in outdated if pod.node_ready]
    # The first reason to wait is reported.
    if not outdated:
        return decide(f"every memory server is of revision {revision}")
    if not reachable:
        return decide(f"{len(outdated)} memory servers of an older revision are on nodes that are not ready")
    if len(pods) < desired_pods:
        return decide(f"{desired_pods - len(pods)} memory server pods are still missing")
    terminating = [pod for pod in pods if pod.deleting and pod.node_ready]
    if terminating:
        return decide(f"{terminating[0].name} is terminating")
    unready = [pod for pod in pods if not pod.ready and pod.node_ready]
    candidates = [pod for pod in reachable if not pod.ready] if unready else reachable
    if not candidates:
        return decide(f"{unready[0].name} on {unready[0].node or 'no node yet'} is not ready")
    problem = describe_unsafe_job(pods, jobs, now_seconds)
    if problem:
        return decide(problem)
    # All pods of one failure domain restart together: no save has two copies there.
    first_pod = candidates[0]
    chosen = [pod for pod in candidates if pod.domain == first_pod.domain]
    location = first_pod.domain or "no node"
    return decide(
        f"replacing {len(chosen)} of {len(outdated)} memory servers of an older revision, in {location}", chosen
    )


def digest_ready_servers(pods: Sequence[MemoryServerPod]) -> str:
    """Returns a digest of the ready memory servers, for comparison between two operator replicas."""
    ready = sorted(f"{pod.node}/{pod.uid}" for pod in pods if pod.ready and pod.node_ready)
    return hashlib.sha256("\n".join(ready).encode()).hexdigest()[:16]


def describe_unsafe_job(pods: Sequence[MemoryServerPod], jobs: Sequence[JobSafety], now_seconds: float) -> str:
    """Returns why no memory server may be restarted; empty: one may."""
    ready = {pod.node: pod.servers for pod in pods if pod.ready and pod.node_ready}
    for safety in jobs:
        if not safety.is_safe:
            return f"job {safety.job} cannot lose a memory server: {safety.reason}"
        if safety.servers_read_by_node is not None and now_seconds - safety.at_seconds > MAX_REPORT_AGE_SECONDS:
            return f"job {safety.job} was not reconciled for {now_seconds - safety.at_seconds:.0f} s"
        servers_read = safety.servers_read_by_node
        missing = (
            sorted(n for n, servers in ready.items() if servers_read.get(n, 0) < servers)
            if servers_read is not None
            else []
        )
        if missing:
            missing_servers = "the memory server" if ready[missing[0]] == 1 else "every memory server"
            return f"job {safety.job} has not read {missing_servers} on {missing[0]} yet"
    return ""
