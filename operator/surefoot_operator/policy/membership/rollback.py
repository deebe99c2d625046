"""Goes back to a checkpoint from before the loss was odd.

Pure; called by `plan`. Or to one that a person names. What came behind that checkpoint is of another history from then on: the claim says up to which step
anything may be restored, and the commit how many steps' batches loaders leave out. Both are durable, so that neither a new
operator nor another failure brings back what was spoiled. Rollbacks in a row are bounded.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain

from surefoot.protocol.checkpoints.completeness import complete, complete_persistent, first_step
from surefoot.protocol.checkpoints.retention import suspects
from surefoot.protocol.identities import Checkpoint
from surefoot_operator import reasons
from surefoot_operator.api.spec import ROLLBACK
from surefoot_operator.api.status import Rollback
from surefoot_operator.policy.core.actions import Event
from surefoot_operator.policy.core.facts import (
    JobFacts,
    TierFacts,
    WorldTierFacts,
    bad_of,
    last_step,
    memory_reading,
    saving_steps,
    step_of,
)
from surefoot_operator.policy.failure import incidents
from surefoot_operator.policy.failure.failure_detection import Loss
from surefoot_operator.policy.failure.loss_anomalies import UnsoundLoss, unsound_loss
from surefoot_operator.policy.failure.restart_budget import allowance, recorded
from surefoot_operator.policy.membership.claim import claimed
from surefoot_operator.policy.membership.lifecycle import Completion, PhaseDecision, end_job

_WORD = re.compile(r"(\d{1,18})/(\d{1,18})(/keep-data)?")


def heal(facts: WorldTierFacts) -> PhaseDecision | None:
    """Ends the epoch where a person or the policy says so."""
    asked = _asked(facts)
    if asked is not None:
        return _back(facts, asked)
    found = unsound_loss(facts)
    if found is None or found.action == "Warn":
        return None
    wanted = _wanted(facts, found)
    if found.action == "Stop":
        text = f"{found.reason}; healthPolicy.numerics says that this stops the job. {_way_out(facts)}"
        return _stopped(facts, text, wanted)
    policy = facts.spec.health_policy.numerics
    most = policy.max_rollbacks if policy is not None else 0
    if wanted.row > most:
        text = f"{found.reason}; {most} rollbacks in a row led to no good checkpoint beyond it (maxRollbacks). {_way_out(facts)}"
        return _stopped(facts, text, wanted)
    return _back(facts, wanted)


def _wanted(facts: WorldTierFacts, found: UnsoundLoss) -> Rollback:
    status, good = facts.status, facts.status.last_good
    before = status.rollback
    reached = max(last_step(facts), found.since_step)
    again = before is not None and before.row and (good is None or good.step < before.reached_step)
    return Rollback(
        epoch=facts.world.epoch,
        to_step=_unproven(facts, reached) if good is None else good.step,
        reached_step=reached,
        odd_step=found.since_step,
        reason=found.reason,
        row=before.row + 1 if before is not None and again else 1,
        proven=good is not None,
    )


def _unproven(facts: TierFacts, reached_step: int) -> int:
    """Where to go back to while no checkpoint is proven: to the begin of a run that has just begun, else as far as one can.

    A policy that was set in the middle of a long run has proven nothing yet, and nobody begins such a run again.
    """
    policy = facts.spec.health_policy.numerics
    later = policy.good_after_steps if policy is not None else 0
    listed = facts.persistent.entries or ()
    suspect = suspects(chain(listed, *(h.entries for h in facts.holder_list)))
    oldest = min((c.step for c in _complete(facts) if c not in suspect), default=0)
    young = reached_step - first_step(facts.status.lineage) < 2 * (later + saving_steps(facts))
    return 0 if young else oldest


def _asked(facts: WorldTierFacts) -> Rollback | None:
    """What a person's annotation asks for, where it names the present epoch and a checkpoint that is complete."""
    word = _WORD.fullmatch(facts.job.rollback)
    if word is None or int(word[1]) != facts.world.epoch:
        return None
    step = int(word[2])
    if step not in {c.step for c in _complete(facts)}:
        return None
    reached = step_of(facts, facts.world.epoch)
    reason = f"a person asked to go back to step {step}"
    return Rollback(facts.world.epoch, step, reached, 0, reason, row=0, keeps_data=word[3] is not None)


def refusal(facts: TierFacts) -> str:
    """Why a person's wish is not done; empty: it is, or none."""
    given, world = facts.job.rollback, facts.status.world
    if not given or world is None or world.state != "Committed":
        return ""
    word = _WORD.fullmatch(given)
    if word is None:
        return f"the annotation {ROLLBACK} is {given[:80]!r}; EPOCH/STEP or EPOCH/STEP/keep-data is understood"
    if int(word[1]) != world.epoch:
        return ""
    steps = sorted({c.step for c in _complete(facts)})
    if int(word[2]) in steps:
        return ""
    there = f"complete are those of steps {', '.join(map(str, steps[-8:]))}" if steps else "none is complete"
    return f"step {word[2]} cannot be gone back to, as no checkpoint of it is complete: {there}"


def _complete(facts: TierFacts) -> list[Checkpoint]:
    """What could be restored now, in either tier, as last read."""
    epoch, lineage, bad = facts.world.epoch, facts.status.lineage, bad_of(facts)
    found = complete(memory_reading(facts, epoch), lineage, epoch, bad, facts.covers)
    persistent = facts.persistent
    if persistent.read_epoch == epoch:
        found += complete_persistent(persistent.entries or (), lineage, epoch, bad, facts.covers)
    floor = facts.status.floor
    return [*found, floor] if floor is not None and floor not in bad else found


def _back(facts: WorldTierFacts, wanted: Rollback) -> PhaseDecision:
    """Claims the next epoch, unless too many restarts of any cause say that enough is enough."""
    reached = wanted.reached_step
    where = f"step {wanted.to_step}" if wanted.to_step else "the beginning"
    where += "" if wanted.proven else ", as no checkpoint is known to be good"
    reason = f"{wanted.reason}: going back to {where}"
    loss = Loss("numerics", reason, facts.now, announced=not wanted.row)
    allowed = allowance(facts, loss, reached)
    if allowed.refusal is not None:
        return _stopped(facts, allowed.refusal, wanted)
    status = replace(
        recorded(claimed(facts, reason), allowed, reached),
        incidents=incidents.opened(facts, loss, reached),
        rollback=wanted,
    )
    return PhaseDecision(reason, status, events=(Event(reasons.ROLLED_BACK, reason, True),))


def _stopped(facts: WorldTierFacts, text: str, wanted: Rollback) -> PhaseDecision:
    """Ends the job; what it uploads first is the newest checkpoint from before the loss was odd."""
    before = max(0, wanted.odd_step - 1)
    over = end_job(facts, Completion("Failed", text), up_to_step=before)
    if over.status.ending is not None:
        over = replace(over, status=replace(over.status, rollback=replace(wanted, to_step=before)))
    return replace(over, events=(Event(reasons.LOSS_UNSOUND, text, True), *over.events))


def _way_out(facts: JobFacts) -> str:
    good = facts.status.last_good
    known = (
        "no checkpoint is known to be good" if good is None else f"the last good checkpoint is that of step {good.step}"
    )
    return f"{known}; correct the program or its data, and begin a job from there with checkpoint.restoreFrom"
