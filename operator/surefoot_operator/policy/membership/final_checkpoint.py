"""Ensures that a finished job's last checkpoint is in the persistent tier.

Pure; called by `plan`. People want the final state of a training, and the memory tier is deleted with the job: so a job
is not over before its last checkpoint is complete in the persistent tier, however often anything restarted after the
last step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from surefoot.protocol.checkpoints.completeness import (
    TierReading,
    complete_checkpoints,
    layouts_to_check,
    newest_checkpoint,
)
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.text import join_names
from surefoot_operator.job_snapshot import ObservedSession
from surefoot_operator.policy.core.actions import Action
from surefoot_operator.policy.core.facts import (
    JobFacts,
    TierFacts,
    WorldFacts,
    WorldTierFacts,
    final_checkpoint,
    is_responsive,
    last_step_seconds,
    member_sessions,
    memory_reading,
    reading_at,
    unreadable_checkpoints,
)
from surefoot_operator.policy.failure.failure_detection import Failure
from surefoot_operator.policy.failure.memory_server_liveness import unreachable_servers
from surefoot_operator.policy.membership.restore_decisions import listing, restore_limit

UPLOAD_SECONDS = 3600.0
"""How long a finished job waits for its last checkpoint to be complete in the persistent tier."""

RESCUE_SECONDS = 600.0
"""How long a job that fails waits for the same of its newest."""

SAVING_SECONDS = 30.0
"""How long after the last step the holders are read for what agents say they saved there."""


@dataclass(frozen=True, slots=True)
class FinalCheckpointPending:
    """The checkpoint is still being saved or promoted."""

    reason: str
    until_seconds: float
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True, slots=True)
class FinalCheckpointUnsaved:
    """The last checkpoint was not saved and will not be.

    `fails`: the job has nothing to show for its training, so it counts as failed.
    """

    reason: str
    fails: bool


def missing_from_final(facts: WorldTierFacts) -> FinalCheckpointPending | Failure | FinalCheckpointUnsaved | None:
    """What a finished world's last checkpoint still lacks; None: nothing.

    A Loss: it was in memory and lost with its workers or holders, or no copy of it is good, so it must be trained again.
    """
    final = final_checkpoint(facts)
    if facts.spec.checkpoint.persistent is None or final is None or final.imported or _is_uploaded(facts, final):
        return None
    if final in unreadable_checkpoints(facts):
        reason = (
            f"every trainer finished after step {final.step}, and no copy of {final} can be read: it is trained again"
        )
        return Failure("unreadable", reason, facts.now, unexplained=True)
    members = [s for _, s in member_sessions(facts) if s is not None]
    heard = [s for s in members if is_responsive(facts, s)]
    saved = final == facts.membership.parent or all(_saved(s) == final for s in members)
    there = at_hand(facts)
    wanted = final if saved or final in there else newest_checkpoint(there)
    step = f"every trainer finished after step {final.step}"
    if wanted is None or _is_uploaded(facts, wanted):
        until = since(facts) + SAVING_SECONDS
        if facts.now < until and not _all_saves_reported(facts, members):
            return FinalCheckpointPending(
                f"{step}; waiting for holders and workers to report whether it was saved", until
            )
        return _listed(facts, step, wanted) or _lost(facts, final, wanted) or _unsaved(facts, final, wanted)
    if not heard:
        until = max(s.last_message_seconds for s in members) + 2 * facts.spec.health_policy.heartbeat_timeout_seconds
        reason = f"{step}, and no worker is left that could upload {wanted} to the persistent tier"
        return FinalCheckpointPending(reason, until) if facts.now < until else Failure("agent-lost", reason, until)
    if wanted not in there:
        uploaded = _uploaded_in_part(facts, step, wanted)
        if uploaded is not None:
            return uploaded
        reading = _read_again(facts, wanted, since(facts), len(heard) == len(members))
        if facts.now < reading.until_seconds:
            return replace(reading, reason=f"{step}; {reading.reason}")
        lost = f"{step}, and {wanted} was lost from memory before it was in the persistent tier"
        return Failure("checkpoint-lost", lost, since(facts) + SAVING_SECONDS, unexplained=True)
    until = since(facts) + UPLOAD_SECONDS
    if facts.now < until:
        return FinalCheckpointPending(
            "every trainer finished; the last checkpoint is on its way to the persistent tier", until
        )
    return FinalCheckpointUnsaved(
        f"{step}, and {wanted} did not reach the persistent tier in {UPLOAD_SECONDS:g} s", fails=True
    )


def upload_before_failing(
    facts: WorldTierFacts, since_seconds: float, up_to_step: int | None = None
) -> FinalCheckpointPending | None:
    """Promotes the newest checkpoint of a job that is about to end.

    None once there is nothing to promote, or no agent left to do it. `up_to_step`: the last step that is of use.
    """
    agents = uploading_agents(facts)
    if not agents:
        return None
    began = min(since_seconds, facts.now) if since_seconds < facts.now else since(facts)
    there = newest_checkpoint(c for c in at_hand(facts) if up_to_step is None or c.step <= up_to_step)
    if (
        facts.membership.state == "Committed" and up_to_step is None
    ):  # a claimed one's holders were sealed before they were read: nothing follows
        said = [c for s in agents if (c := _saved(s)) is not None and c.generation == facts.membership.generation]
        coming = min(said) if len(said) == len(facts.membership.members) else None
        if coming is not None and (there is None or coming > there) and not _is_uploaded(facts, coming):
            reading = _read_again(facts, coming, began, all_say_so=True)
            if facts.now < reading.until_seconds:
                return reading
    until = began + RESCUE_SECONDS
    if there is None or there.imported or _is_uploaded(facts, there) or facts.now >= until:
        return None
    return FinalCheckpointPending(f"{there} goes to the persistent tier first", until)


def uploading_agents(facts: WorldFacts) -> list[ObservedSession]:
    """Agents that can upload what the job has in memory: members alone were told where the holders are."""
    if facts.spec.checkpoint.persistent is None or facts.status.membership is None:
        return []
    return [s for _, s in member_sessions(facts) if s is not None and is_responsive(facts, s)]


def in_memory(facts: TierFacts) -> list[Checkpoint]:
    """Lineage checkpoints that are complete on the holders as last read."""
    return _complete(facts, memory_reading(facts, facts.membership.generation))


def at_hand(facts: TierFacts) -> list[Checkpoint]:
    """Lineage checkpoints that can be uploaded, oldest first.

    What memory lacks of one the persistent tier may have: a worker's node can die behind its upload, and what others had
    yet to upload lies in memory. A job that asked for all of it there restored its last step from both tiers, found it
    lost again, and began anew for ever.
    """
    reading = reading_at(facts, facts.membership.generation)
    parted = {*_complete(facts, reading)} - {*_complete(facts, TierReading({}, reading.persistent))}
    most = restore_limit(facts) if facts.membership.state == "Claimed" else None
    found = {*in_memory(facts), *parted}
    return sorted((c for c in found if most is None or c.step <= most), key=lambda checkpoint: checkpoint.step)


def _complete(facts: TierFacts, reading: TierReading) -> list[Checkpoint]:
    return complete_checkpoints(
        reading, facts.status.lineage, facts.running_generation, unreadable_checkpoints(facts), facts.covers
    )


def _all_saves_reported(facts: TierFacts, members: list[ObservedSession]) -> bool:
    """Whether every member has said what it saved, and every named holder that is left was read.

    That a member finished is heard before what it saved last, by any leader; and by one that has just begun before what
    it saved at all: unknown is not unsaved.
    """
    generation = facts.membership.generation
    named = {endpoint.instance for endpoint in facts.status.assigned_servers}
    left = [h for h in facts.holder_list if h.endpoint.instance in named and h.state != "Gone"]
    read = all(h.state == "Ready" and h.read_generation == generation for h in left)
    return read and all(s.final_saves_reported and _saved(s) is not None for s in members)


def _listed(facts: WorldTierFacts, step: str, found: Checkpoint | None) -> FinalCheckpointPending | None:
    """Lists the persistent tier where nothing else is known of.

    What a leader that is gone had uploaded is told by no agent, and the job would fail beside a whole checkpoint.
    """
    persistent, until = facts.persistent, since(facts) + RESCUE_SECONDS
    if found is not None or facts.status.last_uploaded is not None or facts.now >= until:
        return None
    if _is_listed(facts):
        unknown = layouts_to_check(reading_at(facts, facts.membership.generation)) - set(facts.covers)
        if all(layouts & persistent.lost_layouts for layouts in unknown):
            return _wait_for_unreachable(facts, step, until)
        return FinalCheckpointPending(f"{step}; checking that the layouts of what is saved cover every tensor", until)
    return _listing(facts, step, until)


def _is_listed(facts: WorldTierFacts) -> bool:
    """Whether the persistent tier was listed since the world stopped to make steps."""
    persistent = facts.persistent
    return persistent.read_generation == facts.membership.generation and (persistent.requested_seconds or 0.0) >= since(
        facts
    )


def _listing(facts: WorldTierFacts, step: str, until: float) -> FinalCheckpointPending:
    """Asks for a listing; an earlier one of this epoch does not count."""
    persistent = facts.persistent
    if persistent.read_generation == facts.membership.generation:
        persistent = replace(persistent, requested_seconds=None)
    asked = listing(facts, persistent)
    return FinalCheckpointPending(f"{step}; {asked.reason}", min(until, asked.until_seconds or until), asked.actions)


def _uploaded_in_part(facts: WorldTierFacts, step: str, wanted: Checkpoint) -> FinalCheckpointPending | None:
    """Lists the persistent tier where some of the checkpoint was uploaded in this world: it may have what memory lacks."""
    until = since(facts) + RESCUE_SECONDS
    if not facts.promoted.get(wanted) or _is_listed(facts) or facts.now >= until:
        return None
    return _listing(facts, step, until)


def _wait_for_unreachable(facts: TierFacts, step: str, until_seconds: float) -> FinalCheckpointPending | None:
    """Holders that are out of the operator's sight may have what the job is to show for itself."""
    silent = _describe_unreachable(facts)
    return (
        FinalCheckpointPending(f"{step}; waiting for {silent}, which may have a checkpoint of it", until_seconds)
        if silent
        else None
    )


def _read_again(facts: TierFacts, wanted: Checkpoint, since_seconds: float, all_say_so: bool) -> FinalCheckpointPending:
    """Reads the holders for what is said to be saved there."""
    hidden = _unreachable_servers(facts, wanted) if all_say_so else ""
    if hidden:
        return FinalCheckpointPending(hidden, since_seconds + RESCUE_SECONDS)
    return FinalCheckpointPending("reading the holders again for the last checkpoint", since_seconds + SAVING_SECONDS)


def _unreachable_servers(facts: TierFacts, wanted: Checkpoint) -> str:
    """Names the holders that the operator does not reach; empty: none.

    Lost sight is no lost data. A finished world would be begun anew each half minute, until its budget is used up, for
    steps that are all made; and a job that fails would leave its newest checkpoint to the memory that goes with it.
    """
    silent = _describe_unreachable(facts)
    return (
        f"waiting for {silent}, which the operator cannot reach and which may have a part of {wanted}: let the operator connect to the memory tier's port"
        if silent
        else ""
    )


def _describe_unreachable(facts: TierFacts) -> str:
    return join_names(sorted(e.instance for e in unreachable_servers(facts)))


def _lost(facts: WorldTierFacts, final: Checkpoint, found: Checkpoint | None) -> Failure | None:
    """A last step that every program had saved, and that is nowhere, is trained again.

    Not where this epoch saved nothing at all: the next would not either. What an agent has saved may be all that is known
    of it, where every copy was lost while nobody led.
    """
    members = [s for _, s in member_sessions(facts) if s is not None]
    best, parent = _best(facts, found), facts.membership.parent
    if len(members) < len(facts.membership.members) or any(s.progress.final_save_step < final.step for s in members):
        return None
    begun = parent.step if parent is not None else 0
    told = all(
        s.saved is not None and s.saved.generation == facts.membership.generation and s.saved.step > begun
        for s in members
    )
    if (best is None or best.step <= begun) and not told:
        return None
    since = best.step if best is not None else begun
    reason = (
        f"every trainer finished after step {final.step}, whose save was lost: it is trained again from step {since}"
    )
    return Failure("checkpoint-lost", reason, facts.now, unexplained=True)


def _best(facts: TierFacts, found: Checkpoint | None) -> Checkpoint | None:
    """The newest checkpoint that is anywhere."""
    there = _complete(facts, reading_at(facts, facts.membership.generation))
    return newest_checkpoint(c for c in (found, facts.status.last_uploaded, *there) if c is not None)


def _unsaved(facts: TierFacts, final: Checkpoint, found: Checkpoint | None) -> FinalCheckpointUnsaved:
    best = _best(facts, found)
    step = f"every trainer finished after step {final.step}"
    if best is None:
        return FinalCheckpointUnsaved(f"{step}, and not one checkpoint of it was saved; the events say why", fails=True)
    return FinalCheckpointUnsaved(
        f"{step}, which was not saved: the newest checkpoint is of step {best.step} (call close() right behind the last"
        " step, before another batch is taken)",
        fails=False,
    )


def _is_uploaded(facts: JobFacts, checkpoint: Checkpoint) -> bool:
    floor = facts.status.last_uploaded
    return floor is not None and floor.step >= checkpoint.step


def _saved(session: ObservedSession) -> Checkpoint | None:
    """The newest that this agent has committed, or is about to."""
    return newest_checkpoint(c for c in (*session.pending, session.saved) if c is not None)


def since(facts: WorldFacts) -> float:
    """When the world stopped to make steps, at the latest; an operator that came later waits anew."""
    last = last_step_seconds(facts, facts.membership.generation)
    return max(facts.membership.changed_seconds, facts.term_seconds, last if last is not None else 0.0)
