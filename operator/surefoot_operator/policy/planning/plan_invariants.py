"""Checks that a plan keeps the invariants before it is applied.

Pure; a breach is a bug. The reconciler checks every plan, and so do the simulator and the property tests.
"""

from __future__ import annotations

from surefoot.protocol.checkpoints.completeness import complete_checkpoints, on_lineage
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.status import JobStatus, Membership
from surefoot_operator.errors import InvariantViolation
from surefoot_operator.job_snapshot import JobSnapshot
from surefoot_operator.policy.core.actions import CreateWorker, Plan
from surefoot_operator.policy.core.facts import gather, reading_at
from surefoot_operator.policy.failure.spare_workers import is_allowed
from surefoot_operator.policy.membership.restore_decisions import may_be_forgotten, restore_limit
from surefoot_operator.policy.membership.restore_point import origin_of, source_checkpoints
from surefoot_operator.policy.membership.workers import lacks_group


def check_plan(plan: Plan, seen: JobSnapshot) -> None:
    """Raises InvariantBroken with the sentence that the plan breaks."""
    old, new = seen.status, plan.status
    if not plan.reason:
        _break("a plan has no reason")
    _check_growth(old, new)
    _check_membership(old.membership, new.membership, seen)
    if new.membership is not None and new.membership.state == "Committed" and new.membership != old.membership:
        _check_commit(new.membership, new, seen)
    _check_last_uploaded(old, new, seen)
    creates = [action for action in plan.actions if isinstance(action, CreateWorker)]
    if creates and lacks_group(gather(seen)):
        _break(f"{creates[0]} comes before its pod group, without which its scheduler holds it back or places it alone")
    for action in plan.actions:
        if isinstance(action, CreateWorker) and action.attempt >= new.next_attempt:
            _break(f"{action} is not counted in status first (next attempt {new.next_attempt})")


def _check_growth(old: JobStatus, new: JobStatus) -> None:
    back = old.rollback
    given_up = back is not None and not back.to_step and new.rollback_count > old.rollback_count
    for what, before, after in (
        ("restarts", old.restarts, new.restarts),
        ("counted restarts", old.restarts_counted, new.restarts_counted),
        ("rollbacks", old.rollback_count, new.rollback_count),
        ("the next attempt", old.next_attempt, new.next_attempt),
        ("what was recorded", old.had_checkpoint and not given_up, new.had_checkpoint),
    ):
        if after < before:
            _break(f"{what} would shrink from {before} to {after}")
    for checkpoint in set(old.unreadable_checkpoints) - set(new.unreadable_checkpoints):
        if not may_be_forgotten(checkpoint, old):
            _break(f"that {checkpoint} is bad would be forgotten")
    if len(new.incidents) > 10:
        _break("more than ten incidents would be kept")
    if old.phase in ("Complete", "Failed") and new.phase != old.phase:
        _break(f"a job that is {old.phase} would become {new.phase}")


def _check_membership(old: Membership | None, new: Membership | None, seen: JobSnapshot) -> None:
    if old == new:
        return
    if new is None:
        _break("the world would be forgotten")
        return
    before = old.generation if old is not None else 0
    if new.state == "Claimed" and new.generation <= before:
        _break(f"epoch {new.generation} would be claimed after {before}")
    if new.state == "Committed" and (old is None or old.state != "Claimed" or new.generation != old.generation):
        _break(f"epoch {new.generation} would be committed without having been claimed")
    if seen.status.phase in ("Complete", "Failed"):
        _break("the world of a job that is over would change")


def _check_commit(world: Membership, new: JobStatus, seen: JobSnapshot) -> None:
    spec, facts = seen.job.spec, gather(seen)
    count = len(world.members)
    if count and not is_allowed(spec, count):
        _break(f"a world of {count} workers is none that the spec allows")
    if world.world_size != count * spec.nproc_per_node:
        _break(f"{count} workers of {spec.nproc_per_node} ranks are not a world of {world.world_size}")
    if len({m.index for m in world.members}) != count or len({m.incarnation for m in world.members}) != count:
        _break("a worker or an agent would be a member twice")
    speaking = {s.incarnation: s for s in seen.sessions}
    for member in world.members:
        session = speaking.get(member.incarnation)
        if session is None or not session.connected or not session.warm or session.stopped < world.generation:
            _break(f"worker {member.index} would be a member without being connected, warm and stopped")
    parents = [entry for entry in new.lineage if entry.generation == world.generation]
    if len(parents) != 1 or parents[0].parent != world.parent:
        _break(f"epoch {world.generation} would have two parents, or none that its lineage knows")
    parent = world.parent
    if parent is None:
        return
    if parent.imported:
        _check_origin(parent, new, seen)
        return
    before = seen.status.lineage
    epoch = before[-1].generation if before else 0
    if not on_lineage(before, parent, epoch):
        _break(f"parent {parent} does not lie on the lineage of epoch {epoch}")
    readable = complete_checkpoints(
        reading_at(facts, world.generation), before, epoch, frozenset(seen.status.unreadable_checkpoints), seen.covers
    )
    if parent not in readable:
        _break(f"parent {parent} was not read to be complete")
    floor = seen.status.last_uploaded
    unreadable = seen.persistent.read_generation == world.generation and floor in seen.persistent.undecidable
    most = restore_limit(facts)
    if most is not None and parent.step > most:
        _break(f"parent {parent} lies beyond step {most}, to which a rollback goes back")
    left = most is not None and floor is not None and floor.step > most
    unbound = floor is None or floor in seen.status.unreadable_checkpoints or unreadable or left
    if floor is not None and not unbound and parent.step < floor.step:
        _break(f"parent {parent} lies below the floor, {floor}")


def _check_origin(parent: Checkpoint, new: JobStatus, seen: JobSnapshot) -> None:
    """An older job's checkpoint: decided once, after it was read to be complete, and durable with the commit."""
    if new.initial_checkpoint != parent or new.source_job is None:
        _break(f"parent {parent} would not be known as what the job began from")
    known = origin_of(seen.status)
    if known is not None and known != parent:
        _break(f"the job began from {known}, and would begin from {parent} now")
    if known is None and parent not in source_checkpoints(gather(seen)):
        _break(f"parent {parent} was not read to be complete in {new.source_job}")


def _check_last_uploaded(old: JobStatus, new: JobStatus, seen: JobSnapshot) -> None:
    if new.last_uploaded == old.last_uploaded:
        return
    world = new.membership
    if world is None or world.state != "Committed":
        _break("the floor would move while the world is claimed")
        return
    if new.last_uploaded is not None and not on_lineage(new.lineage, new.last_uploaded, world.generation):
        _break(f"floor {new.last_uploaded} does not lie on the lineage of epoch {world.generation}")
    fell = old.last_uploaded is not None and (
        new.last_uploaded is None or new.last_uploaded.step < old.last_uploaded.step
    )
    gone = old.last_uploaded in seen.status.unreadable_checkpoints or old.last_uploaded in seen.persistent.undecidable
    most = restore_limit(gather(seen))
    left = most is not None and old.last_uploaded is not None and old.last_uploaded.step > most
    excused = gone or left or world.parent is None or world.parent.imported
    if fell and not excused:
        _break(f"the floor would fall from {old.last_uploaded} to {new.last_uploaded}")


def _break(sentence: str) -> None:
    raise InvariantViolation(sentence)
