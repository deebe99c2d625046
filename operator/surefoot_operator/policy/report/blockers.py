"""Finds what keeps workers from running or the operator from managing a job, and words it for the status.

Pure; called by `plan`, `status_conditions` and `reconcile`. Users read the job's status: that its pods are rejected, unscheduled
or cannot start would otherwise appear only on the pods or in the operator's log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from surefoot_operator import reasons
from surefoot_operator.api.status import Condition, JobStatus, condition_of
from surefoot_operator.policy.core.actions import Event
from surefoot_operator.policy.core.facts import (
    JobFacts,
    MembershipFacts,
    MembershipNodeFacts,
    cached_per_snapshot,
)
from surefoot_operator.policy.failure.spare_workers import indexes_to_train, newest_workers, required_indexes
from surefoot_operator.policy.membership.workers import (
    describe_failed_start,
    describe_start_blocker,
    has_failed_by_itself,
    pod_group_blocker,
)
from surefoot_operator.rejected_calls import ApiCall, RejectedCall

CREATION_REJECTED = "CreationRejected"
"""The platform rejects the creation of a worker."""
NO_GROUP = reasons.POD_GROUP_CREATION_FAILED
"""The pod group that workers must belong to cannot be created."""
UNSCHEDULABLE = "Unschedulable"
NOT_STARTED = "ContainersNotStarted"
EXITED_EARLY = "ExitedEarly"
OUT_OF_MEMORY = "OOMKilled"

SLOW_SECONDS = 60.0
"""Time after which a worker that has a node and neither runs nor reports why is a blocker: its pod's events name the cause."""

_SAME_CAUSE = {"ErrImagePull": "ImagePullBackOff"}
"""Reasons between which a kubelet alternates for one cause, while it fails and waits in turn."""


@dataclass(frozen=True, slots=True)
class Blocker:
    """The first cause that keeps a worker from running."""

    reason: str
    """Cause in one CamelCase word, a reason of the condition PodsScheduled."""
    text: str
    """Cause as a sentence that names the worker."""

    @property
    def has_node(self) -> bool:
        """Whether the blocked worker has a node already."""
        return self.reason not in (CREATION_REJECTED, NO_GROUP, UNSCHEDULABLE)


def find_blocker(facts: MembershipNodeFacts) -> Blocker | None:
    """Finds the first cause that keeps the workers of the membership from running."""
    return _find_blocker_among(facts, indexes_to_train(facts))


def find_spare_blocker(facts: MembershipNodeFacts) -> Blocker | None:
    """Finds the first cause that keeps spares from running."""
    return _find_blocker_among(facts, required_indexes(facts) - indexes_to_train(facts))


def _find_blocker_among(facts: MembershipNodeFacts, indices: frozenset[int]) -> Blocker | None:
    """Finds the first cause that keeps the workers with these indices from running."""
    newest = newest_workers(facts)
    live = {i for i, w in newest.items() if w.phase not in ("Succeeded", "Failed") and not w.deleting}

    # not created
    group_problem = pod_group_blocker(facts) if indices - live else ""
    if group_problem:
        return Blocker(NO_GROUP, group_problem)
    rejected = next((c for c in facts.pending_creates if c.rejection and c.index in indices), None)
    if rejected is not None:
        return Blocker(CREATION_REJECTED, f"worker {rejected.index} was rejected: {rejected.rejection}")

    # created, but not able to start, or ended before it could train
    workers = [w for index, w in newest.items() if index in indices]
    for worker in workers:
        if worker.start_blocker and not worker.deleting:
            return Blocker(_cause_of(worker.start_blocker), describe_start_blocker(worker))
    for worker in workers:
        if has_failed_by_itself(facts, worker):
            reason = OUT_OF_MEMORY if worker.message == OUT_OF_MEMORY else EXITED_EARLY
            return Blocker(reason, describe_failed_start(worker))

    # waiting for a node, or for the kubelet
    pending = [w for w in workers if w.phase == "Pending" and not w.deleting]
    for worker in pending:
        if worker.node is None and worker.message:
            return Blocker(UNSCHEDULABLE, f"worker {worker.index} has no node: {worker.message}")
    for worker in pending:
        if worker.node is not None and facts.now - worker.created_seconds > SLOW_SECONDS:
            text = f"worker {worker.index} was not started on node {worker.node} within {SLOW_SECONDS:g} s"
            hint = f"read the events of pod {worker.name} for the cause"
            return Blocker(NOT_STARTED, f"{text}; {worker.message or hint}")
    return None


def event_reason_of(blocker_reason: str) -> str:
    """Returns the reason of the event that reports a blocker."""
    if blocker_reason == CREATION_REJECTED:
        return reasons.WORKER_CREATION_FAILED
    if blocker_reason == NO_GROUP:
        return reasons.POD_GROUP_CREATION_FAILED
    return reasons.WORKER_UNSCHEDULABLE if blocker_reason == UNSCHEDULABLE else reasons.WORKER_START_FAILED


def _cause_of(start_blocker: str) -> str:
    """Returns the kubelet's own reason if the sentence begins with one, such as `ImagePullBackOff: …`."""
    word = start_blocker.partition(":")[0]
    return _SAME_CAUSE.get(word, word) if word.isalnum() and word[:1].isupper() else NOT_STARTED


# ---- members whose agents did not connect ----------------------------------------------------------------------------
# Reports members of a running generation whose agents never connected to this leader. A new leader knows only the stored
# status. An agent that cannot reach it (DNS, a NetworkPolicy, other keys after a reinstallation of the operator) may still
# train, or wait, and nothing reacts to a failure of its trainers.

UNCONNECTED_SECONDS = 20.0
"""Time after the start of a term, or of a generation, at which members without a connection are reported. Agents connect to
a new leader within a few seconds."""
_MAX_NAMED_MEMBERS = 8


@cached_per_snapshot
def unconnected_members(facts: MembershipFacts) -> tuple[int, ...]:
    """Returns the indices of members whose pod runs and whose agent has not connected in this term."""
    membership = facts.status.membership
    has_ended = facts.job.deleted or facts.status.phase in ("Complete", "Failed")
    if has_ended or membership is None or membership.state != "Committed":
        return ()
    without_session = (worker for worker in facts.members if worker not in facts.sessions)
    pods = ((worker, facts.workers.get(worker)) for worker in without_session)
    return tuple(sorted(w.index for w, pod in pods if pod is not None and pod.phase == "Running" and not pod.deleting))


def describe_unconnected(facts: MembershipFacts) -> str:
    """Returns the message of a job whose step is not known, because agents have not connected to this leader."""
    return f"{_unconnected_sentence(facts)}; the last known step is {facts.status.step}"


def _unconnected_sentence(facts: MembershipFacts) -> str:
    """Returns a sentence that names the unconnected members."""
    indices = unconnected_members(facts)
    unlisted = f" and {len(indices) - _MAX_NAMED_MEMBERS} more" if len(indices) > _MAX_NAMED_MEMBERS else ""
    listed_indices = f"{', '.join(map(str, indices[:_MAX_NAMED_MEMBERS]))}{unlisted}"
    subject = f"worker {listed_indices} has" if len(indices) == 1 else f"workers {listed_indices} have"
    return f"{subject} not connected to this operator since it began to lead"


def unconnected_deadline(facts: MembershipFacts) -> float | None:
    """Returns when unconnected members are to be reported; None: every member has connected."""
    return _connecting_since(facts) + UNCONNECTED_SECONDS if unconnected_members(facts) else None


def evaluate_agents_connected(
    facts: MembershipFacts, old: Condition | None
) -> tuple[Literal["True", "False", "Unknown"], str, str] | None:
    """Returns (truth, reason, message) of `AgentsConnected`; None: no agent was ever missing."""
    deadline = unconnected_deadline(facts)
    if deadline is not None and facts.now >= deadline:
        text = (
            f"{_unconnected_sentence(facts)}. They may still train, but the operator cannot react to their failures: check"
            " DNS and the network between them and the operator (surefoot doctor --network). If the operator was"
            " reinstalled with other keys, they cannot reconnect: delete their pods"
        )
        return "False", "NotConnected", text
    if old is None:
        return None
    if deadline is not None:  # a new leader gives agents time to connect before it repeats or withdraws the report
        return old.status, old.reason, old.message
    return "True", "AllConnected", "every worker that trains has connected"


def _connecting_since(facts: JobFacts) -> float:
    return max(facts.term_seconds, facts.membership.changed_seconds)


# ---- rejected calls --------------------------------------------------------------------------------------------------
# Reports on a job which calls the API server keeps rejecting. Called by `status_conditions`, and by `reconcile` where
# nothing can be planned or written.

REPEAT_SECONDS = 600.0
"""Time after which the event about a call that is still rejected is repeated: Kubernetes deletes events after an hour."""
_MAX_NAMED_CALLS = 3
_REASON = "Rejected"


def evaluate_api_accepted(
    rejected: tuple[RejectedCall, ...], old: Condition | None
) -> tuple[Literal["True", "False"], str, str] | None:
    """Returns (truth, reason, message) of `ApiAccepted`; None: no call was ever rejected for long."""
    if rejected:
        return "False", _REASON, _describe_rejected_calls(rejected)
    return None if old is None else ("True", "Accepted", "the API server accepts the calls for this job")


def status_without_plan(status: JobStatus, rejected: tuple[RejectedCall, ...], now: float) -> JobStatus:
    """Returns the status of a job that cannot be planned, because its operator may not read the cluster."""
    if not rejected or status.memory_cleared:
        return status
    text, old = _describe_rejected_calls(rejected), condition_of(status, reasons.API_ACCEPTED)
    transition_seconds = old.last_transition_seconds if old is not None and old.status == "False" else now
    others = tuple(c for c in status.conditions if c.type != reasons.API_ACCEPTED)
    condition = Condition(reasons.API_ACCEPTED, "False", _REASON, text, transition_seconds)
    return replace(
        status,
        message=f"{text}; until the API server accepts it, Surefoot plans nothing for this job",
        conditions=(*others, condition),
    )


@dataclass(frozen=True, slots=True)
class RejectionEvents:
    """The events to record now, and when each call that is still rejected was last reported."""

    events: tuple[Event, ...]
    """Warnings about calls that were not reported within `REPEAT_SECONDS`."""
    reported_seconds: Mapping[ApiCall, float]
    """Time of the last event of each call that is still rejected, by the caller's clock."""


def rejected_call_events(
    rejected: tuple[RejectedCall, ...], reported_seconds: Mapping[ApiCall, float], now: float
) -> RejectionEvents:
    """Returns an event for each call whose rejection was not reported recently.

    Args:
        rejected: the calls that are rejected now.
        reported_seconds: when each call was last reported, from the former result.
        now: the time by any clock that never goes back.
    """
    due = [r for r in rejected if now - reported_seconds.get(r.call, float("-inf")) >= REPEAT_SECONDS]
    still_rejected = {r.call: reported_seconds[r.call] for r in rejected if r.call in reported_seconds}
    events = tuple(Event("ApiCallRejected", f"{call}; the operator retries this call", warning=True) for call in due)
    return RejectionEvents(events, still_rejected | {r.call: now for r in due})


def _describe_rejected_calls(rejected: Iterable[RejectedCall]) -> str:
    sentences = sorted({str(call) for call in rejected})
    unlisted = f"; and {len(sentences) - _MAX_NAMED_CALLS} more" if len(sentences) > _MAX_NAMED_CALLS else ""
    return "; ".join(sentences[:_MAX_NAMED_CALLS]) + unlisted


# ---- rejected records ------------------------------------------------------------------------------------------------
# Reports records of a job that exceed a limit. Such a record is not read and no plan uses it: it counts as a damaged copy,
# and another copy is needed.

OUT_OF_BOUNDS = "OutOfBounds"


def describe_rejected_records(sentences: Sequence[str]) -> str:
    """Returns the first rejected record in full, and the number of others."""
    others = len(sentences) - 1
    return f"{sentences[0]} (and {others} more)" if others else sentences[0]


def with_rejected_records(status: JobStatus, sentences: Sequence[str], now: float) -> JobStatus:
    """Sets the condition `RecordsRejected` in a status from which no plan can be made."""
    old = condition_of(status, reasons.RECORDS_REJECTED)
    message = describe_rejected_records(sentences)
    if old is not None and old.message == message:
        return status
    transition_seconds = old.last_transition_seconds if old is not None else now
    others = tuple(c for c in status.conditions if c.type != reasons.RECORDS_REJECTED)
    condition = Condition(reasons.RECORDS_REJECTED, "True", OUT_OF_BOUNDS, message, transition_seconds)
    return replace(status, conditions=(*others, condition))
