"""Goes back to a checkpoint from before the loss was odd.

Pure; called by `plan`. Or to one that a person names. What came behind that checkpoint is of another history from then on: the claim says up to which step
anything may be restored, and the commit how many steps' batches loaders leave out. Both are durable, so that neither a new
operator nor another failure brings back what was spoiled. Rollbacks in a row are bounded.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain

from surefoot.protocol.checkpoints.completeness import complete_checkpoints, complete_persistent, first_step
from surefoot.protocol.checkpoints.retention import anomalous_checkpoints
from surefoot.protocol.identities import Checkpoint
from surefoot_operator import reasons
from surefoot_operator.api.spec import ROLLBACK
from surefoot_operator.api.status import Rollback
from surefoot_operator.policy.core.actions import Event
from surefoot_operator.policy.core.facts import (
    JobFacts,
    TierFacts,
    WorldTierFacts,
    last_step,
    memory_reading,
    saving_steps,
    step_of,
    unreadable_checkpoints,
)
from surefoot_operator.policy.failure import incidents
from surefoot_operator.policy.failure.failure_detection import Failure
from surefoot_operator.policy.failure.loss_anomalies import LossAnomaly, unsound_loss
from surefoot_operator.policy.failure.restart_budget import decide_restart, record_restart
from surefoot_operator.policy.membership.claim import claim_generation
from surefoot_operator.policy.membership.lifecycle import Completion, PhaseDecision, end_job

_ANNOTATION = re.compile(r"(\d{1,18})/(\d{1,18})(/keep-data)?")


def heal(facts: WorldTierFacts) -> PhaseDecision | None:
    """Ends the epoch where a person or the policy says so."""
    asked = _rollback_requested(facts)
    if asked is not None:
        return _back(facts, asked)
    found = unsound_loss(facts)
    if found is None or found.action == "Warn":
        return None
    wanted = _rollback_for(facts, found)
    if found.action == "Stop":
        text = f"{found.reason}; healthPolicy.numerics says that this stops the job. {_way_out(facts)}"
        return _stopped(facts, text, wanted)
    policy = facts.spec.health_policy.numerics
    most = policy.max_rollbacks if policy is not None else 0
    if wanted.consecutive > most:
        text = f"{found.reason}; {most} rollbacks in a row led to no good checkpoint beyond it (maxRollbacks). {_way_out(facts)}"
        return _stopped(facts, text, wanted)
    return _back(facts, wanted)


def _rollback_for(facts: WorldTierFacts, found: LossAnomaly) -> Rollback:
    status, good = facts.status, facts.status.last_good
    before = status.rollback
    reached = max(last_step(facts), found.since_step)
    again = before is not None and before.consecutive and (good is None or good.step < before.reached_step)
    return Rollback(
        generation=facts.membership.generation,
        to_step=_unproven(facts, reached) if good is None else good.step,
        reached_step=reached,
        anomaly_step=found.since_step,
        reason=found.reason,
        consecutive=before.consecutive + 1 if before is not None and again else 1,
        target_known_good=good is not None,
    )


def _unproven(facts: TierFacts, reached_step: int) -> int:
    """Where to go back to while no checkpoint is proven: to the begin of a run that has just begun, else as far as one can.

    A policy that was set in the middle of a long run has proven nothing yet, and nobody begins such a run again.
    """
    policy = facts.spec.health_policy.numerics
    later = policy.good_after_steps if policy is not None else 0
    listed = facts.persistent.entries or ()
    suspect = anomalous_checkpoints(chain(listed, *(h.entries for h in facts.holder_list)))
    oldest = min((c.step for c in _complete(facts) if c not in suspect), default=0)
    young = reached_step - first_step(facts.status.lineage) < 2 * (later + saving_steps(facts))
    return 0 if young else oldest


def _rollback_requested(facts: WorldTierFacts) -> Rollback | None:
    """What a person's annotation asks for, where it names the present epoch and a checkpoint that is complete."""
    word = _ANNOTATION.fullmatch(facts.job.rollback)
    if word is None or int(word[1]) != facts.membership.generation:
        return None
    step = int(word[2])
    if step not in {c.step for c in _complete(facts)}:
        return None
    reached = step_of(facts, facts.membership.generation)
    reason = f"a person asked to go back to step {step}"
    return Rollback(facts.membership.generation, step, reached, 0, reason, consecutive=0, keep_data=word[3] is not None)


def rejection(facts: TierFacts) -> str:
    """Why a person's wish is not done; empty: it is, or none."""
    given, membership = facts.job.rollback, facts.status.membership
    if not given or membership is None or membership.state != "Committed":
        return ""
    word = _ANNOTATION.fullmatch(given)
    if word is None:
        return f"the annotation {ROLLBACK} is {given[:80]!r}; EPOCH/STEP or EPOCH/STEP/keep-data is understood"
    if int(word[1]) != membership.generation:
        return ""
    steps = sorted({c.step for c in _complete(facts)})
    if int(word[2]) in steps:
        return ""
    there = f"complete are those of steps {', '.join(map(str, steps[-8:]))}" if steps else "none is complete"
    return f"step {word[2]} cannot be gone back to, as no checkpoint of it is complete: {there}"


def _complete(facts: TierFacts) -> list[Checkpoint]:
    """What could be restored now, in either tier, as last read."""
    generation, lineage, bad = facts.membership.generation, facts.status.lineage, unreadable_checkpoints(facts)
    found = complete_checkpoints(memory_reading(facts, generation), lineage, generation, bad, facts.covers)
    persistent = facts.persistent
    if persistent.read_generation == generation:
        found += complete_persistent(persistent.entries or (), lineage, generation, bad, facts.covers)
    floor = facts.status.last_uploaded
    return [*found, floor] if floor is not None and floor not in bad else found


def _back(facts: WorldTierFacts, wanted: Rollback) -> PhaseDecision:
    """Claims the next epoch, unless too many restarts of any cause say that enough is enough."""
    reached = wanted.reached_step
    where = f"step {wanted.to_step}" if wanted.to_step else "the beginning"
    where += "" if wanted.target_known_good else ", as no checkpoint is known to be good"
    reason = f"{wanted.reason}: going back to {where}"
    failure = Failure("numerics", reason, facts.now, expected=not wanted.consecutive)
    allowed = decide_restart(facts, failure, reached)
    if allowed.rejection is not None:
        return _stopped(facts, allowed.rejection, wanted)
    status = replace(
        record_restart(claim_generation(facts, reason), allowed, reached),
        incidents=incidents.append_incident(facts, failure, reached),
        rollback=wanted,
    )
    return PhaseDecision(reason, status, events=(Event(reasons.ROLLED_BACK, reason, True),))


def _stopped(facts: WorldTierFacts, text: str, wanted: Rollback) -> PhaseDecision:
    """Ends the job; what it uploads first is the newest checkpoint from before the loss was odd."""
    before = max(0, wanted.anomaly_step - 1)
    over = end_job(facts, Completion("Failed", text), up_to_step=before)
    if over.status.ending is not None:
        over = replace(over, status=replace(over.status, rollback=replace(wanted, to_step=before)))
    return replace(over, events=(Event(reasons.LOSS_POLICY_STOPPED, text, True), *over.events))


def _way_out(facts: JobFacts) -> str:
    good = facts.status.last_good
    known = (
        "no checkpoint is known to be good" if good is None else f"the last good checkpoint is that of step {good.step}"
    )
    return f"{known}; correct the program or its data, and begin a job from there with checkpoint.restoreFrom"
