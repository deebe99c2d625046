"""Rolls a job back to a checkpoint from before a loss anomaly, or to one that a user names.

Pure; called by `plan`. Later checkpoints are on an abandoned branch from then on: the claim limits the step up to which
anything may be restored, and the commit records how many steps' batches the loaders skip. Both are durable, so that neither
a new operator nor another failure restores an abandoned state. The number of rollbacks in a row is limited.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain

from surefoot.protocol.checkpoints.completeness import complete_checkpoints, complete_in_persistent_tier, first_own_step
from surefoot.protocol.checkpoints.retention import anomalous_checkpoints
from surefoot.protocol.identities import Checkpoint
from surefoot_operator import reasons
from surefoot_operator.api.spec import ROLLBACK
from surefoot_operator.api.status import Rollback
from surefoot_operator.policy.core.actions import Event
from surefoot_operator.policy.core.facts import (
    JobFacts,
    MembershipTierFacts,
    TierFacts,
    last_step,
    memory_reading,
    saving_steps,
    step_of,
    unreadable_checkpoints,
)
from surefoot_operator.policy.failure import incidents
from surefoot_operator.policy.failure.failure_detection import Failure
from surefoot_operator.policy.failure.loss_anomalies import LossAnomaly, find_loss_anomaly
from surefoot_operator.policy.failure.restart_budget import decide_restart, record_restart
from surefoot_operator.policy.membership.claim import claim_generation
from surefoot_operator.policy.membership.lifecycle import Completion, PhaseDecision, end_job

_ANNOTATION = re.compile(r"(\d{1,18})/(\d{1,18})(/keep-data)?")


def decide_rollback(facts: MembershipTierFacts) -> PhaseDecision | None:
    """Rolls back or ends the job if a user or the loss policy requires it; None: neither does."""
    requested = _rollback_requested(facts)
    if requested is not None:
        return _claim_rollback(facts, requested)
    anomaly = find_loss_anomaly(facts)
    if anomaly is None or anomaly.action == "Warn":
        return None
    rollback = _rollback_for_anomaly(facts, anomaly)
    # Stop ends the job at once; Rollback does so after too many rollbacks without a good checkpoint beyond them.
    if anomaly.action == "Stop":
        text = f"{anomaly.reason}; healthPolicy.numerics stops the job for this. {_describe_way_out(facts)}"
        return _stop_job(facts, text, rollback)
    policy = facts.spec.health_policy.numerics
    max_rollbacks = policy.max_rollbacks if policy is not None else 0
    if rollback.consecutive > max_rollbacks:
        text = f"{anomaly.reason}; {max_rollbacks} rollbacks in a row led to no newer good checkpoint (maxRollbacks). {_describe_way_out(facts)}"
        return _stop_job(facts, text, rollback)
    return _claim_rollback(facts, rollback)


def _rollback_for_anomaly(facts: MembershipTierFacts, anomaly: LossAnomaly) -> Rollback:
    """Returns the rollback to the last good checkpoint, with its place in a row of rollbacks."""
    status, last_good = facts.status, facts.status.last_good
    previous = status.rollback
    reached_step = max(last_step(facts), anomaly.since_step)
    is_repeated = (
        previous is not None and previous.consecutive and (last_good is None or last_good.step < previous.reached_step)
    )
    return Rollback(
        generation=facts.membership.generation,
        to_step=_target_without_good_checkpoint(facts, reached_step) if last_good is None else last_good.step,
        reached_step=reached_step,
        anomaly_step=anomaly.since_step,
        reason=anomaly.reason,
        consecutive=previous.consecutive + 1 if previous is not None and is_repeated else 1,
        target_known_good=last_good is not None,
    )


def _target_without_good_checkpoint(facts: TierFacts, reached_step: int) -> int:
    """Returns the step to roll back to without a known good checkpoint: 0 early in a run, else the oldest.

    A policy that is set in the middle of a long run has no known good checkpoint yet, and the run must not restart at step 0.
    """
    policy = facts.spec.health_policy.numerics
    good_after_steps = policy.good_after_steps if policy is not None else 0
    persistent_entries = facts.persistent.entries or ()
    anomalous = anomalous_checkpoints(chain(persistent_entries, *(h.entries for h in facts.server_list)))
    oldest_step = min((c.step for c in _complete_checkpoints(facts) if c not in anomalous), default=0)
    is_young = reached_step - first_own_step(facts.status.lineage) < 2 * (good_after_steps + saving_steps(facts))
    return 0 if is_young else oldest_step


def _rollback_requested(facts: MembershipTierFacts) -> Rollback | None:
    """Returns the rollback that a user's annotation requests, if it names this generation and a complete checkpoint."""
    match = _ANNOTATION.fullmatch(facts.job.rollback)
    if match is None or int(match[1]) != facts.membership.generation:
        return None
    step = int(match[2])
    if step not in {c.step for c in _complete_checkpoints(facts)}:
        return None
    reached_step = step_of(facts, facts.membership.generation)
    reason = f"a user requested a rollback to step {step}"
    return Rollback(
        facts.membership.generation, step, reached_step, 0, reason, consecutive=0, keep_data=match[3] is not None
    )


def describe_rollback_rejection(facts: TierFacts) -> str:
    """Returns why a user's rollback request is rejected; empty: it is accepted, or there is none."""
    annotation, membership = facts.job.rollback, facts.status.membership
    if not annotation or membership is None or membership.state != "Committed":
        return ""
    match = _ANNOTATION.fullmatch(annotation)
    if match is None:
        return (
            f"the annotation {ROLLBACK} is {annotation[:80]!r}; it must be GENERATION/STEP or GENERATION/STEP/keep-data"
        )
    if int(match[1]) != membership.generation:
        return ""
    steps = sorted({c.step for c in _complete_checkpoints(facts)})
    if int(match[2]) in steps:
        return ""
    available = f"complete checkpoints are at steps {', '.join(map(str, steps[-8:]))}" if steps else "none is complete"
    return f"cannot roll back to step {match[2]}, because no checkpoint of it is complete: {available}"


def _complete_checkpoints(facts: TierFacts) -> list[Checkpoint]:
    """Lists the checkpoints that could be restored now from either tier, as last read."""
    generation, lineage, unreadable = facts.membership.generation, facts.status.lineage, unreadable_checkpoints(facts)
    complete = complete_checkpoints(
        memory_reading(facts, generation), lineage, generation, unreadable, facts.layout_covers
    )
    persistent = facts.persistent
    if persistent.read_generation == generation:
        complete += complete_in_persistent_tier(
            persistent.entries or (), lineage, generation, unreadable, facts.layout_covers
        )
    last_uploaded = facts.status.last_uploaded
    return [*complete, last_uploaded] if last_uploaded is not None and last_uploaded not in unreadable else complete


def _claim_rollback(facts: MembershipTierFacts, rollback: Rollback) -> PhaseDecision:
    """Claims the next generation for a rollback, or ends the job if the restart budget is used up."""
    reached_step = rollback.reached_step
    target = f"step {rollback.to_step}" if rollback.to_step else "the beginning"
    target += "" if rollback.target_known_good else ", as no checkpoint is known to be good"
    reason = f"{rollback.reason}: rolling back to {target}"
    failure = Failure("numerics", reason, facts.now, expected=not rollback.consecutive)
    # A rollback is a restart, and counts as one; a user's request is expected and counts for no budget.
    decision = decide_restart(facts, failure, reached_step)
    if decision.rejection is not None:
        return _stop_job(facts, decision.rejection, rollback)
    status = replace(
        record_restart(claim_generation(facts, reason), decision, reached_step),
        incidents=incidents.append_incident(facts, failure, reached_step),
        rollback=rollback,
    )
    return PhaseDecision(reason, status, events=(Event(reasons.ROLLED_BACK, reason, True),))


def _stop_job(facts: MembershipTierFacts, text: str, rollback: Rollback) -> PhaseDecision:
    """Ends the job; it first uploads the newest checkpoint from before the loss anomaly."""
    last_sound_step = max(0, rollback.anomaly_step - 1)
    decision = end_job(facts, Completion("Failed", text), up_to_step=last_sound_step)
    if decision.status.ending is not None:
        decision = replace(
            decision, status=replace(decision.status, rollback=replace(rollback, to_step=last_sound_step))
        )
    return replace(decision, events=(Event("LossPolicyStopped", text, True), *decision.events))


def _describe_way_out(facts: JobFacts) -> str:
    """Describes the last good checkpoint and how to continue from it."""
    last_good = facts.status.last_good
    good_clause = (
        "no checkpoint is known to be good"
        if last_good is None
        else f"the last good checkpoint is that of step {last_good.step}"
    )
    return f"{good_clause}; correct the program or its data, and create a new job from it with checkpoint.restoreFrom"
