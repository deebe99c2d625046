"""Checks that a plan keeps the invariants before it is applied.

Pure; a violation is a bug. The reconciler checks every plan, and so do the simulator and the property tests. The invariants:
counters and known damage never shrink, a generation is claimed before it is committed, members are connected and stopped,
the parent was read to be complete and is on the lineage, and the last uploaded checkpoint never moves backwards without a
reason.
"""

from __future__ import annotations

from surefoot.protocol.checkpoints.completeness import complete_checkpoints, is_on_lineage
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.status import JobStatus, Membership
from surefoot_operator.errors import InvariantViolation
from surefoot_operator.job_snapshot import JobSnapshot
from surefoot_operator.policy.core.actions import CreateWorker, Plan
from surefoot_operator.policy.core.facts import build_facts, tier_reading
from surefoot_operator.policy.failure.spare_workers import is_allowed_size
from surefoot_operator.policy.membership.restore_decisions import may_be_forgotten, restore_limit
from surefoot_operator.policy.membership.restore_point import initial_checkpoint_of, source_checkpoints
from surefoot_operator.policy.membership.workers import lacks_pod_group


def check_plan(plan: Plan, snapshot: JobSnapshot) -> None:
    """Raises InvariantViolation with the invariant that the plan violates."""
    old, new = snapshot.status, plan.status
    if not plan.reason:
        _violated("a plan has no reason")
    _check_growth(old, new)
    _check_membership(old.membership, new.membership, snapshot)
    if new.membership is not None and new.membership.state == "Committed" and new.membership != old.membership:
        _check_commit(new.membership, new, snapshot)
    _check_last_uploaded(old, new, snapshot)
    creates = [action for action in plan.actions if isinstance(action, CreateWorker)]
    if creates and lacks_pod_group(build_facts(snapshot)):
        _violated(
            f"{creates[0]} comes before its pod group; without the group, the scheduler would block the pod or place it alone"
        )
    for action in plan.actions:
        if isinstance(action, CreateWorker) and action.attempt >= new.next_attempt:
            _violated(f"{action} is not counted in status first (next attempt {new.next_attempt})")


def _check_growth(old: JobStatus, new: JobStatus) -> None:
    """Checks that counters grow, that no damage is forgotten, and that a job that has ended stays so."""
    rollback = old.rollback
    # a rollback to step 0 discards every checkpoint
    is_discarded = rollback is not None and not rollback.to_step and new.rollback_count > old.rollback_count
    for subject, old_value, new_value in (
        ("restarts", old.restarts, new.restarts),
        ("counted restarts", old.restarts_counted, new.restarts_counted),
        ("rollbacks", old.rollback_count, new.rollback_count),
        ("the next attempt", old.next_attempt, new.next_attempt),
        ("whether there was a checkpoint", old.had_checkpoint and not is_discarded, new.had_checkpoint),
    ):
        if new_value < old_value:
            _violated(f"{subject} would shrink from {old_value} to {new_value}")
    for checkpoint in set(old.unreadable_checkpoints) - set(new.unreadable_checkpoints):
        if not may_be_forgotten(checkpoint, old):
            _violated(f"the status would forget that {checkpoint} is unreadable")
    if len(new.incidents) > 10:
        _violated("more than ten incidents would be stored")
    if old.phase in ("Complete", "Failed") and new.phase != old.phase:
        _violated(f"a job that is {old.phase} would become {new.phase}")


def _check_membership(old: Membership | None, new: Membership | None, snapshot: JobSnapshot) -> None:
    """Checks that a newer generation is claimed, then committed, and stays after the job's end."""
    if old == new:
        return
    if new is None:
        _violated("the membership would be forgotten")
        return
    old_generation = old.generation if old is not None else 0
    if new.state == "Claimed" and new.generation <= old_generation:
        _violated(f"generation {new.generation} would be claimed after {old_generation}")
    if new.state == "Committed" and (old is None or old.state != "Claimed" or new.generation != old.generation):
        _violated(f"generation {new.generation} would be committed without having been claimed")
    if snapshot.status.phase in ("Complete", "Failed"):
        _violated("the membership of a job that has ended would change")


def _check_commit(membership: Membership, new: JobStatus, snapshot: JobSnapshot) -> None:
    """Checks members and parent of a generation that is committed."""
    spec, facts = snapshot.job.spec, build_facts(snapshot)
    generation = membership.generation

    # members: an allowed number, each once, each connected, warm and stopped
    count = len(membership.members)
    if count and not is_allowed_size(spec, count):
        _violated(f"{count} workers is a number that the spec does not allow")
    if membership.world_size != count * spec.nproc_per_node:
        _violated(f"{count} workers of {spec.nproc_per_node} ranks do not have {membership.world_size} ranks")
    if len({m.index for m in membership.members}) != count or len({m.incarnation for m in membership.members}) != count:
        _violated("a worker or an agent would be a member twice")
    sessions_by_incarnation = {s.incarnation: s for s in snapshot.sessions}
    for member in membership.members:
        session = sessions_by_incarnation.get(member.incarnation)
        if session is None or not session.connected or not session.warm or session.stopped < generation:
            _violated(f"worker {member.index} would be a member without being connected, warm and stopped")

    # parent: on the lineage, read to be complete, not after a rollback's target and not before the last upload
    parents = [entry for entry in new.lineage if entry.generation == generation]
    if len(parents) != 1 or parents[0].parent != membership.parent:
        _violated(f"generation {generation} would have two parents, or one that its lineage does not have")
    parent = membership.parent
    if parent is None:
        return
    if parent.is_imported:
        _check_initial_checkpoint(parent, new, snapshot)
        return
    old_lineage = snapshot.status.lineage
    old_generation = old_lineage[-1].generation if old_lineage else 0
    if not is_on_lineage(old_lineage, parent, old_generation):
        _violated(f"parent {parent} is not on the lineage of generation {old_generation}")
    readable = complete_checkpoints(
        tier_reading(facts, generation),
        old_lineage,
        old_generation,
        frozenset(snapshot.status.unreadable_checkpoints),
        snapshot.covers,
    )
    if parent not in readable:
        _violated(f"parent {parent} was not read to be complete")
    last_uploaded = snapshot.status.last_uploaded
    is_undecidable = (
        snapshot.persistent.read_generation == generation and last_uploaded in snapshot.persistent.undecidable
    )
    max_step = restore_limit(facts)
    if max_step is not None and parent.step > max_step:
        _violated(f"parent {parent} is after step {max_step}, to which a rollback returns")
    is_rolled_back = max_step is not None and last_uploaded is not None and last_uploaded.step > max_step
    is_unbound = (
        last_uploaded is None
        or last_uploaded in snapshot.status.unreadable_checkpoints
        or is_undecidable
        or is_rolled_back
    )
    if last_uploaded is not None and not is_unbound and parent.step < last_uploaded.step:
        _violated(f"parent {parent} is older than the last uploaded checkpoint, {last_uploaded}")


def _check_initial_checkpoint(parent: Checkpoint, new: JobStatus, snapshot: JobSnapshot) -> None:
    """Checks that a source job's checkpoint is complete, chosen once, and stored with the commit."""
    if new.initial_checkpoint != parent or new.source_job is None:
        _violated(f"parent {parent} would not be recorded as the checkpoint from which the job began")
    recorded = initial_checkpoint_of(snapshot.status)
    if recorded is not None and recorded != parent:
        _violated(f"the job began from {recorded}, and would begin from {parent} now")
    if recorded is None and parent not in source_checkpoints(build_facts(snapshot)):
        _violated(f"parent {parent} was not read to be complete in {new.source_job}")


def _check_last_uploaded(old: JobStatus, new: JobStatus, snapshot: JobSnapshot) -> None:
    """Checks that the last uploaded checkpoint only moves forwards on a committed lineage."""
    if new.last_uploaded == old.last_uploaded:
        return
    membership = new.membership
    if membership is None or membership.state != "Committed":
        _violated("the last uploaded checkpoint would change while a generation is claimed")
        return
    if new.last_uploaded is not None and not is_on_lineage(new.lineage, new.last_uploaded, membership.generation):
        _violated(
            f"the last uploaded checkpoint, {new.last_uploaded}, is not on the lineage of generation"
            f" {membership.generation}"
        )
    is_older = old.last_uploaded is not None and (
        new.last_uploaded is None or new.last_uploaded.step < old.last_uploaded.step
    )
    is_unreadable = (
        old.last_uploaded in snapshot.status.unreadable_checkpoints
        or old.last_uploaded in snapshot.persistent.undecidable
    )
    max_step = restore_limit(build_facts(snapshot))
    is_rolled_back = max_step is not None and old.last_uploaded is not None and old.last_uploaded.step > max_step
    is_excused = is_unreadable or is_rolled_back or membership.parent is None or membership.parent.is_imported
    if is_older and not is_excused:
        _violated(f"the last uploaded checkpoint would go back from {old.last_uploaded} to {new.last_uploaded}")


def _violated(sentence: str) -> None:
    raise InvariantViolation(sentence)
