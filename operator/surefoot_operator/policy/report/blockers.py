"""Explains what keeps workers from running.

Pure; called by `claimed_plan` and `status_conditions`. People look at the job; that its pods are refused, unscheduled or cannot start
would otherwise appear only on the pods or in the operator's log.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot_operator import reasons
from surefoot_operator.policy.core.facts import Facts
from surefoot_operator.policy.failure.spare_workers import newest_workers, wanted_indexes, world_indexes
from surefoot_operator.policy.membership.gang import group_message, group_refusal
from surefoot_operator.policy.membership.workers import could_not_start, ended_by_itself, never_trained

REFUSED = "Refused"
"""The fabric will not make a worker."""
NO_GROUP = reasons.POD_GROUP_REFUSED
"""The fabric has no pod group for workers that are to be in one."""
UNSCHEDULABLE = "Unschedulable"
NOT_STARTED = "NotStarted"
ENDED = "Ended"
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
        return self.reason not in (REFUSED, NO_GROUP, UNSCHEDULABLE)


def hindrance(facts: Facts) -> Hindrance | None:
    """Finds the first cause that keeps the world's workers from running."""
    return _among(facts, world_indexes(facts))


def spare_hindrance(facts: Facts) -> Hindrance | None:
    """Finds the first cause that keeps spares from running."""
    return _among(facts, wanted_indexes(facts) - world_indexes(facts))


def _among(facts: Facts, indexes: frozenset[int]) -> Hindrance | None:
    newest = newest_workers(facts)
    there = {i for i, w in newest.items() if w.phase not in ("Succeeded", "Failed") and not w.deleting}
    without = group_refusal(facts) if indexes - there else ""
    if without:
        return Hindrance(NO_GROUP, without)
    refused = next((c for c in facts.seen.creates if c.refusal and c.index in indexes), None)
    if refused is not None:
        return Hindrance(REFUSED, f"worker {refused.index} was refused: {refused.refusal}")
    workers = [w for index, w in newest.items() if index in indexes]
    for worker in workers:
        if worker.unstarted and not worker.deleting:
            return Hindrance(_cause(worker.unstarted), could_not_start(worker))
    for worker in workers:
        if ended_by_itself(facts, worker):
            reason = OUT_OF_MEMORY if worker.message == OUT_OF_MEMORY else ENDED
            return Hindrance(reason, never_trained(worker))
    waiting = [w for w in workers if w.phase == "Pending" and not w.deleting]
    for worker in waiting:
        if worker.node is None and worker.message:
            return Hindrance(UNSCHEDULABLE, f"worker {worker.index} has no node: {worker.message}")
    said = group_message(facts)
    if said and any(worker.node is None for worker in waiting):
        return Hindrance(UNSCHEDULABLE, f"its scheduler says of the pod group: {said}")
    for worker in waiting:
        if worker.node is not None and facts.now - worker.created_seconds > SLOW_SECONDS:
            text = f"worker {worker.index} was not started on node {worker.node} within {SLOW_SECONDS:g} s"
            return Hindrance(NOT_STARTED, f"{text}; {worker.message or f'the events of pod {worker.name} say why'}")
    return None


def event_of(reason: str) -> str:
    """The event's reason for a hindrance's."""
    if reason == REFUSED:
        return reasons.WORKER_REFUSED
    if reason == NO_GROUP:
        return reasons.POD_GROUP_REFUSED
    return reasons.WORKER_UNSCHEDULABLE if reason == UNSCHEDULABLE else reasons.WORKER_NOT_STARTED


def _cause(unstarted: str) -> str:
    """The kubelet's own word, where the sentence begins with one."""
    word = unstarted.partition(":")[0]
    return _SAME.get(word, word) if word.isalnum() and word[:1].isupper() else NOT_STARTED
