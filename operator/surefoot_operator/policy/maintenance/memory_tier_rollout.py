"""Rolls out a new holder revision, one failure domain at a time.

Pure. `safety` says for one job whether it can lose a holder now; `rollout` combines all jobs with the pods. Called by
each job's reconciler and by the leader's `memory_tier_maintenance`.
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
    fenced_servers,
    gather,
)
from surefoot_operator.policy.failure.incidents import open_incident
from surefoot_operator.policy.failure.memory_server_liveness import may_still_have_data
from surefoot_operator.policy.maintenance.maintenance_plan import MaintenancePlan
from surefoot_operator.reasons import CHECKPOINT_LOST

STALE_SECONDS = 15.0
"""What a job said so long ago says nothing about now."""


@dataclass(frozen=True, slots=True)
class MemoryServerPod:
    """A pod of the memory tier; `domain` is empty without a node."""

    name: str
    uid: str
    node: str
    domain: str
    revision: str
    ready: bool
    deleting: bool = False
    node_ready: bool = True
    servers: int = 1
    """That it runs."""


@dataclass(frozen=True, slots=True)
class JobSafety:
    """Whether one job can lose a holder now.

    `nodes`: how many holders of each it has sealed and read; None: it needs none.
    """

    job: str
    """Its name, for the sentence."""
    safe: bool
    reason: str
    at_seconds: float
    nodes: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Rollout:
    """Pods to delete now, all of one domain, with the reason."""

    delete: tuple[MemoryServerPod, ...]
    reason: str
    outdated: int


def judge_job_safety(seen: JobSnapshot, status: JobStatus, kept: MaintenancePlan | None) -> JobSafety:
    """Decides whether this job survives the restart of one more holder domain.

    `status` and `kept` were decided from `seen`.
    """
    name = f"{seen.job.namespace}/{seen.job.name}"

    def says(safe: bool, reason: str, nodes: Mapping[str, int] | None = None) -> JobSafety:
        return JobSafety(name, safe, reason, seen.now_seconds, nodes)

    membership = status.membership
    nothing = not status.had_checkpoint and status.last_complete is None
    if status.phase in ("Complete", "Failed") or seen.job.deleted:
        return says(True, "it is over")
    if membership is None or (membership.state == "Committed" and not membership.members):
        kept_elsewhere = status.last_uploaded is not None and status.last_uploaded == status.last_complete
        if nothing or kept_elsewhere:
            return says(True, "none of its workers run, and memory has nothing that is stored nowhere else")
        return says(False, "no worker of it runs that could copy its newest checkpoint, which is in memory only")
    lost = condition_of(status, CHECKPOINT_LOST)
    if lost is not None and lost.status == "True" and not may_still_have_data(facts := gather(seen)):
        # it may wait so until a person comes, and would hold up every upgrade of the tier
        return says(
            True, "every checkpoint of it is lost, and no holder is away that may have one", _read(facts, membership)
        )
    if membership.state != "Committed" or kept is None:
        return says(False, "its world is changing")
    if open_incident(status.incidents) is not None:
        return says(False, "it is recovering")
    if kept.watermark is None:
        return says(False, "none of its complete checkpoints has all its copies")
    if kept.replicas < 2 and (status.last_uploaded is None or status.last_uploaded in status.unreadable_checkpoints):
        return says(False, "its checkpoints have one copy, and none is in the persistent tier")
    return says(True, f"{kept.watermark} has {kept.replicas} copies", _read(gather(seen), membership))


def _read(facts: TierFacts, membership: Membership) -> Mapping[str, int]:
    """How many holders of each node the job has sealed and read in that world's epoch."""
    return Counter(h.endpoint.instance.node for h in fenced_servers(facts, membership.generation))


def rejected_safety(status: JobStatus | None, now: float) -> JobSafety:
    """The safety of a job that cannot be read.

    `status` None: its status cannot be read either.
    """
    if status is not None and status.membership is None:
        return JobSafety("", True, "it never began", now)
    return JobSafety("", False, "its spec or status cannot be read", now)


def plan_rollout(
    pods: Sequence[MemoryServerPod], wanted: int, revision: str, jobs: Sequence[JobSafety], now: float
) -> Rollout:
    """Chooses the outdated pods to delete now.

    `wanted`: how many pods there should be; `revision`: the newest one's name. A pod on a node that is away waits for
    the node's return. One that is not ready may go while others are not, so that a revision that never becomes ready
    can be replaced.
    """
    outdated = sorted(
        (pod for pod in pods if pod.revision != revision and not pod.deleting), key=lambda pod: (pod.domain, pod.name)
    )

    def says(reason: str, delete: Sequence[MemoryServerPod] = ()) -> Rollout:
        return Rollout(tuple(delete), reason, len(outdated))

    reachable = [pod for pod in outdated if pod.node_ready]
    if not outdated:
        return says(f"every holder is of revision {revision}")
    if not reachable:
        return says(f"{len(outdated)} holders of an older revision are on nodes that are away")
    if len(pods) < wanted:
        return says(f"{wanted - len(pods)} holders are still missing")
    leaving = [pod for pod in pods if pod.deleting and pod.node_ready]
    if leaving:
        return says(f"{leaving[0].name} is ending")
    waiting = [pod for pod in pods if not pod.ready and pod.node_ready]
    candidates = [pod for pod in reachable if not pod.ready] if waiting else reachable
    if not candidates:
        return says(f"{waiting[0].name} on {waiting[0].node or 'no node yet'} is not ready")
    problem = why_unsafe(pods, jobs, now)
    if problem:
        return says(problem)
    first = candidates[0]
    chosen = [pod for pod in candidates if pod.domain == first.domain]
    where = first.domain or "no node"
    return says(f"{len(chosen)} of {len(outdated)} holders of an older revision, in {where}", chosen)


def ready_servers(pods: Sequence[MemoryServerPod]) -> str:
    """Digests which holders are ready.

    So two replicas can tell whether they judge the same ones.
    """
    ready = sorted(f"{pod.node}/{pod.uid}" for pod in pods if pod.ready and pod.node_ready)
    return hashlib.sha256("\n".join(ready).encode()).hexdigest()[:16]


def why_unsafe(pods: Sequence[MemoryServerPod], jobs: Sequence[JobSafety], now: float) -> str:
    """Says why no holder may be restarted; empty: one may."""
    ready = {pod.node: pod.servers for pod in pods if pod.ready and pod.node_ready}
    for one in jobs:
        if not one.safe:
            return f"job {one.job} cannot spare a holder: {one.reason}"
        if one.nodes is not None and now - one.at_seconds > STALE_SECONDS:
            return f"job {one.job} was not reconciled for {now - one.at_seconds:.0f} s"
        read = one.nodes
        missing = sorted(n for n, servers in ready.items() if read.get(n, 0) < servers) if read is not None else []
        if missing:
            which = "the holder" if ready[missing[0]] == 1 else "every holder"
            return f"job {one.job} has not read {which} on {missing[0]} yet"
    return ""
