"""Checks that a plan keeps the invariants before it is applied.

Pure; a breach is a bug. The reconciler checks every plan, and so do the simulator and the property tests.
"""

from __future__ import annotations

from surefoot.protocol.checkpoints.completeness import complete, on_lineage
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.status import JobStatus, World
from surefoot_operator.errors import InvariantBroken
from surefoot_operator.job_snapshot import Observed
from surefoot_operator.policy.core.actions import CreateWorker, Plan
from surefoot_operator.policy.core.facts import gather, reading_at
from surefoot_operator.policy.failure.spare_workers import is_allowed
from surefoot_operator.policy.membership.restore_decisions import ceiling, may_be_forgotten
from surefoot_operator.policy.membership.restore_point import older_job_checkpoints, origin_of
from surefoot_operator.policy.membership.workers import lacks_group


def check(plan: Plan, seen: Observed) -> None:
    """Raises InvariantBroken with the sentence that the plan breaks."""
    old, new = seen.status, plan.status
    if not plan.reason:
        _break("a plan has no reason")
    _check_growth(old, new)
    _check_world(old.world, new.world, seen)
    if new.world is not None and new.world.state == "Committed" and new.world != old.world:
        _check_commit(new.world, new, seen)
    _check_floor(old, new, seen)
    creates = [action for action in plan.actions if isinstance(action, CreateWorker)]
    if creates and lacks_group(gather(seen)):
        _break(f"{creates[0]} comes before its pod group, without which its scheduler holds it back or places it alone")
    for action in plan.actions:
        if isinstance(action, CreateWorker) and action.attempt >= new.next_attempt:
            _break(f"{action} is not counted in status first (next attempt {new.next_attempt})")


def _check_growth(old: JobStatus, new: JobStatus) -> None:
    back = old.rollback
    given_up = back is not None and not back.to_step and new.rollbacks > old.rollbacks
    for what, before, after in (
        ("restarts", old.restarts, new.restarts),
        ("counted restarts", old.restarts_counted, new.restarts_counted),
        ("rollbacks", old.rollbacks, new.rollbacks),
        ("the next attempt", old.next_attempt, new.next_attempt),
        ("what was recorded", old.recorded and not given_up, new.recorded),
    ):
        if after < before:
            _break(f"{what} would shrink from {before} to {after}")
    for checkpoint in set(old.bad) - set(new.bad):
        if not may_be_forgotten(checkpoint, old):
            _break(f"that {checkpoint} is bad would be forgotten")
    if len(new.incidents) > 10:
        _break("more than ten incidents would be kept")
    if old.phase in ("Complete", "Failed") and new.phase != old.phase:
        _break(f"a job that is {old.phase} would become {new.phase}")


def _check_world(old: World | None, new: World | None, seen: Observed) -> None:
    if old == new:
        return
    if new is None:
        _break("the world would be forgotten")
        return
    before = old.epoch if old is not None else 0
    if new.state == "Claimed" and new.epoch <= before:
        _break(f"epoch {new.epoch} would be claimed after {before}")
    if new.state == "Committed" and (old is None or old.state != "Claimed" or new.epoch != old.epoch):
        _break(f"epoch {new.epoch} would be committed without having been claimed")
    if seen.status.phase in ("Complete", "Failed"):
        _break("the world of a job that is over would change")


def _check_commit(world: World, new: JobStatus, seen: Observed) -> None:
    spec, facts = seen.job.spec, gather(seen)
    count = len(world.members)
    if count and not is_allowed(spec, count):
        _break(f"a world of {count} workers is none that the spec allows")
    if world.size != count * spec.nproc_per_node:
        _break(f"{count} workers of {spec.nproc_per_node} ranks are not a world of {world.size}")
    if len({m.index for m in world.members}) != count or len({m.incarnation for m in world.members}) != count:
        _break("a worker or an agent would be a member twice")
    speaking = {s.incarnation: s for s in seen.sessions}
    for member in world.members:
        session = speaking.get(member.incarnation)
        if session is None or not session.connected or not session.warm or session.stopped < world.epoch:
            _break(f"worker {member.index} would be a member without being connected, warm and stopped")
    parents = [entry for entry in new.lineage if entry.epoch == world.epoch]
    if len(parents) != 1 or parents[0].parent != world.parent:
        _break(f"epoch {world.epoch} would have two parents, or none that its lineage knows")
    parent = world.parent
    if parent is None:
        return
    if parent.imported:
        _check_origin(parent, new, seen)
        return
    before = seen.status.lineage
    epoch = before[-1].epoch if before else 0
    if not on_lineage(before, parent, epoch):
        _break(f"parent {parent} does not lie on the lineage of epoch {epoch}")
    readable = complete(reading_at(facts, world.epoch), before, epoch, frozenset(seen.status.bad), seen.covers)
    if parent not in readable:
        _break(f"parent {parent} was not read to be complete")
    floor = seen.status.floor
    unreadable = seen.persistent.read_epoch == world.epoch and floor in seen.persistent.unjudged
    most = ceiling(facts)
    if most is not None and parent.step > most:
        _break(f"parent {parent} lies beyond step {most}, to which a rollback goes back")
    left = most is not None and floor is not None and floor.step > most
    unbound = floor is None or floor in seen.status.bad or unreadable or left
    if floor is not None and not unbound and parent.step < floor.step:
        _break(f"parent {parent} lies below the floor, {floor}")


def _check_origin(parent: Checkpoint, new: JobStatus, seen: Observed) -> None:
    """An older job's checkpoint: decided once, after it was read to be complete, and durable with the commit."""
    if new.origin != parent or new.older_job is None:
        _break(f"parent {parent} would not be known as what the job began from")
    known = origin_of(seen.status)
    if known is not None and known != parent:
        _break(f"the job began from {known}, and would begin from {parent} now")
    if known is None and parent not in older_job_checkpoints(gather(seen)):
        _break(f"parent {parent} was not read to be complete in {new.older_job}")


def _check_floor(old: JobStatus, new: JobStatus, seen: Observed) -> None:
    if new.floor == old.floor:
        return
    world = new.world
    if world is None or world.state != "Committed":
        _break("the floor would move while the world is claimed")
        return
    if new.floor is not None and not on_lineage(new.lineage, new.floor, world.epoch):
        _break(f"floor {new.floor} does not lie on the lineage of epoch {world.epoch}")
    fell = old.floor is not None and (new.floor is None or new.floor.step < old.floor.step)
    gone = old.floor in seen.status.bad or old.floor in seen.persistent.unjudged
    most = ceiling(gather(seen))
    left = most is not None and old.floor is not None and old.floor.step > most
    excused = gone or left or world.parent is None or world.parent.imported
    if fell and not excused:
        _break(f"the floor would fall from {old.floor} to {new.floor}")


def _break(sentence: str) -> None:
    raise InvariantBroken(sentence)
