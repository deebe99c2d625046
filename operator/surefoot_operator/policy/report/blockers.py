"""Explains what keeps workers from running.

Pure; called by `plan` and `status_conditions`. People look at the job; that its pods are refused, unscheduled or cannot start
would otherwise appear only on the pods or in the operator's log.
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
    WorldFacts,
    WorldNodeFacts,
    cached_per_snapshot,
)
from surefoot_operator.policy.failure.spare_workers import member_indices, newest_workers, required_indices
from surefoot_operator.policy.membership.workers import (
    could_not_start,
    ended_by_itself,
    group_rejection,
    never_trained,
)
from surefoot_operator.rejected_calls import ApiCall, RefusedCall

CREATION_REJECTED = "Refused"
"""The fabric will not make a worker."""
NO_GROUP = reasons.POD_GROUP_CREATION_FAILED
"""The fabric has no pod group for workers that are to be in one."""
UNSCHEDULABLE = "Unschedulable"
NOT_STARTED = "ContainersNotStarted"
EXITED_EARLY = "Ended"
OUT_OF_MEMORY = "OOMKilled"

SLOW_SECONDS = 60.0
"""A worker that has a node for so long and says nothing of why it does not run: what its kubelet waits for is on its pod."""

_SAME = {"ErrImagePull": "ImagePullBackOff"}
"""A kubelet tells one cause by turns: it fails, it waits."""


@dataclass(frozen=True, slots=True)
class Hindrance:
    """A cause: `reason` in one word, `text` as a sentence."""

    reason: str
    text: str

    @property
    def placed(self) -> bool:
        """Whether it concerns workers that have a node."""
        return self.reason not in (CREATION_REJECTED, NO_GROUP, UNSCHEDULABLE)


def find_blocker(facts: WorldNodeFacts) -> Hindrance | None:
    """Finds the first cause that keeps the world's workers from running."""
    return _among(facts, member_indices(facts))


def find_spare_blocker(facts: WorldNodeFacts) -> Hindrance | None:
    """Finds the first cause that keeps spares from running."""
    return _among(facts, required_indices(facts) - member_indices(facts))


def _among(facts: WorldNodeFacts, indexes: frozenset[int]) -> Hindrance | None:
    newest = newest_workers(facts)
    there = {i for i, w in newest.items() if w.phase not in ("Succeeded", "Failed") and not w.deleting}
    without = group_rejection(facts) if indexes - there else ""
    if without:
        return Hindrance(NO_GROUP, without)
    refused = next((c for c in facts.creates if c.rejection and c.index in indexes), None)
    if refused is not None:
        return Hindrance(CREATION_REJECTED, f"worker {refused.index} was refused: {refused.rejection}")
    workers = [w for index, w in newest.items() if index in indexes]
    for worker in workers:
        if worker.start_blocker and not worker.deleting:
            return Hindrance(_cause(worker.start_blocker), could_not_start(worker))
    for worker in workers:
        if ended_by_itself(facts, worker):
            reason = OUT_OF_MEMORY if worker.message == OUT_OF_MEMORY else EXITED_EARLY
            return Hindrance(reason, never_trained(worker))
    waiting = [w for w in workers if w.phase == "Pending" and not w.deleting]
    for worker in waiting:
        if worker.node is None and worker.message:
            return Hindrance(UNSCHEDULABLE, f"worker {worker.index} has no node: {worker.message}")
    for worker in waiting:
        if worker.node is not None and facts.now - worker.created_seconds > SLOW_SECONDS:
            text = f"worker {worker.index} was not started on node {worker.node} within {SLOW_SECONDS:g} s"
            return Hindrance(NOT_STARTED, f"{text}; {worker.message or f'the events of pod {worker.name} say why'}")
    return None


def event_reason(reason: str) -> str:
    """The event's reason for a hindrance's."""
    if reason == CREATION_REJECTED:
        return reasons.WORKER_CREATION_FAILED
    if reason == NO_GROUP:
        return reasons.POD_GROUP_CREATION_FAILED
    return reasons.WORKER_UNSCHEDULABLE if reason == UNSCHEDULABLE else reasons.WORKER_START_FAILED


def _cause(unstarted: str) -> str:
    """The kubelet's own word, where the sentence begins with one."""
    word = unstarted.partition(":")[0]
    return _SAME.get(word, word) if word.isalnum() and word[:1].isupper() else NOT_STARTED


# ---- members whose agents did not come -------------------------------------------------------------------------------
# Reports members of a running world whose agents never came to this leader. A new leader knows only what is stored: an
# agent that cannot reach it (DNS, a NetworkPolicy, other keys of an operator that was installed anew) trains on, or
# stands, and no failure of its trainers is answered.

UNHEARD_SECONDS = 20.0
"""Agents come to a new leader within a few seconds; who has not in so many is reported."""
_MAX_NAMED_MEMBERS = 8


@cached_per_snapshot
def unheard_members(facts: WorldFacts) -> tuple[int, ...]:
    """Returns members whose pod runs and whose agent was not heard of in this term, by index."""
    world = facts.status.membership
    over = facts.job.deleted or facts.status.phase in ("Complete", "Failed")
    if over or world is None or world.state != "Committed":
        return ()
    missing = (worker for worker in facts.members if worker not in facts.sessions)
    there = ((worker, facts.workers.get(worker)) for worker in missing)
    return tuple(sorted(w.index for w, pod in there if pod is not None and pod.phase == "Running" and not pod.deleting))


def unheard_message(facts: WorldFacts) -> str:
    """Says who was not heard of, instead of what is not known."""
    return f"{_who(facts)}; the last known step is {facts.status.step}"


def _who(facts: WorldFacts) -> str:
    missing = unheard_members(facts)
    more = f" and {len(missing) - _MAX_NAMED_MEMBERS} more" if len(missing) > _MAX_NAMED_MEMBERS else ""
    numbers = f"{', '.join(map(str, missing[:_MAX_NAMED_MEMBERS]))}{more}"
    subject = f"worker {numbers} has" if len(missing) == 1 else f"workers {numbers} have"
    return f"{subject} not connected to this operator since it began to lead"


def unheard_due(facts: WorldFacts) -> float | None:
    """When it is time to report them; None: nobody is missing."""
    return _since(facts) + UNHEARD_SECONDS if unheard_members(facts) else None


def agents_heard(
    facts: WorldFacts, known: Condition | None
) -> tuple[Literal["True", "False", "Unknown"], str, str] | None:
    """Returns (truth, reason, message) of the condition; None: all were always heard."""
    due = unheard_due(facts)
    if due is not None and facts.now >= due:
        text = (
            f"{_who(facts)}. They may still train, but the operator cannot react to their failures: check DNS and the"
            " network between them and the operator (surefoot doctor --network). If the operator was reinstalled with"
            " other keys, they cannot reconnect: delete their pods"
        )
        return "False", "NotHeard", text
    if known is None:
        return None
    if due is not None:  # a new leader waits a moment before it says the same
        return known.status, known.reason, known.message
    return "True", "Heard", "every worker of the world has connected"


def _since(facts: JobFacts) -> float:
    return max(facts.term_seconds, facts.membership.changed_seconds)


# ---- refused calls ---------------------------------------------------------------------------------------------------
# Reports on a job what the API server refuses again and again. Called by `status_conditions`, and by `reconcile` where
# nothing can be planned or written.

AGAIN_SECONDS = 600.0
"""An event about a call that is still refused is repeated after this: the first one is forgotten in an hour."""
_MAX_NAMED_CALLS = 3
_REASON = "Refused"


def acceptance(
    refused: tuple[RefusedCall, ...], known: Condition | None
) -> tuple[Literal["True", "False"], str, str] | None:
    """Returns (truth, reason, message) of the condition; None: nothing was ever refused for long."""
    if refused:
        return "False", _REASON, _named(refused)
    return None if known is None else ("True", "Accepted", "the API server accepts the calls for this job")


def unplanned(status: JobStatus, refused: tuple[RefusedCall, ...], now: float) -> JobStatus:
    """The status of a job that no plan is made for, as its operator may not see the cluster."""
    if not refused or status.memory_cleared:
        return status
    text, old = _named(refused), condition_of(status, reasons.API_ACCEPTED)
    since = old.last_transition_seconds if old is not None and old.status == "False" else now
    others = tuple(c for c in status.conditions if c.type != reasons.API_ACCEPTED)
    condition = Condition(reasons.API_ACCEPTED, "False", _REASON, text, since)
    return replace(
        status,
        message=f"{text}; until the server accepts it, Surefoot plans nothing for this job",
        conditions=(*others, condition),
    )


@dataclass(frozen=True, slots=True)
class RefusalEvents:
    """The events to record now, and when each refused call was last told of."""

    events: tuple[Event, ...]
    told: Mapping[ApiCall, float]


def refusal_events(refused: tuple[RefusedCall, ...], told: Mapping[ApiCall, float], now: float) -> RefusalEvents:
    """Derives an event for each call whose refusal is news; `now` is of any clock that never goes back."""
    due = [r for r in refused if now - told.get(r.call, float("-inf")) >= AGAIN_SECONDS]
    still = {r.call: told[r.call] for r in refused if r.call in told}
    events = tuple(Event(reasons.API_REFUSED, f"{one}; the operator retries this call", warning=True) for one in due)
    return RefusalEvents(events, still | {r.call: now for r in due})


def _named(refused: Iterable[RefusedCall]) -> str:
    sentences = sorted({str(one) for one in refused})
    more = f"; and {len(sentences) - _MAX_NAMED_CALLS} more" if len(sentences) > _MAX_NAMED_CALLS else ""
    return "; ".join(sentences[:_MAX_NAMED_CALLS]) + more


# ---- refused records -------------------------------------------------------------------------------------------------
# Reports records of a job that break a bound. Such a record is not read, and nothing is planned from it: as a damaged
# copy, of which another is needed.

REASON = "OutOfBounds"


def refused_message(sentences: Sequence[str]) -> str:
    """The first record in full, and how many others there are."""
    others = len(sentences) - 1
    return f"{sentences[0]} (and {others} more)" if others else sentences[0]


def with_refused_records(status: JobStatus, sentences: Sequence[str], now: float) -> JobStatus:
    """Sets the condition in a status that no plan can be made from."""
    old = condition_of(status, reasons.RECORDS_REFUSED)
    message = refused_message(sentences)
    if old is not None and old.message == message:
        return status
    since = old.last_transition_seconds if old is not None else now
    others = tuple(c for c in status.conditions if c.type != reasons.RECORDS_REFUSED)
    condition = Condition(reasons.RECORDS_REFUSED, "True", REASON, message, since)
    return replace(status, conditions=(*others, condition))
