"""Ensures that a finished job's last checkpoint is in the persistent tier.

Pure; called by `plan`. Users want the final state of a training, and the memory tier is deleted with the job: so a job does
not end before its last checkpoint is complete in the persistent tier, however often anything restarted after the last step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from surefoot.protocol.checkpoints.completeness import (
    TierReading,
    complete_checkpoints,
    layout_sets_to_check,
    newest_checkpoint,
)
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.text import join_names
from surefoot_operator.job_snapshot import ObservedSession
from surefoot_operator.policy.core.actions import Action
from surefoot_operator.policy.core.facts import (
    JobFacts,
    MembershipFacts,
    MembershipTierFacts,
    TierFacts,
    final_checkpoint,
    is_responsive,
    last_step_seconds,
    member_sessions,
    memory_reading,
    tier_reading,
    unreadable_checkpoints,
)
from surefoot_operator.policy.failure.failure_detection import Failure
from surefoot_operator.policy.failure.memory_server_liveness import unreachable_servers
from surefoot_operator.policy.membership.restore_decisions import request_listing, restore_limit

UPLOAD_SECONDS = 3600.0
"""How long a finished job waits for its last checkpoint to be complete in the persistent tier."""

RESCUE_SECONDS = 600.0
"""How long a job that fails waits for its newest checkpoint to be complete in the persistent tier."""

SAVING_SECONDS = 30.0
"""How long after the last step the memory servers are read for the saves that agents reported."""


@dataclass(frozen=True, slots=True)
class FinalCheckpointPending:
    """The last checkpoint is still being saved or uploaded."""

    reason: str
    until_seconds: float
    """Unix time at which the wait ends."""
    actions: tuple[Action, ...] = ()
    """Requests that bring the missing information, such as a listing."""


@dataclass(frozen=True, slots=True)
class FinalCheckpointUnsaved:
    """The last checkpoint was not saved and will not be."""

    reason: str
    fails_job: bool
    """Whether the job counts as failed, because no checkpoint remains of its training."""


def check_final_checkpoint(
    facts: MembershipTierFacts,
) -> FinalCheckpointPending | Failure | FinalCheckpointUnsaved | None:
    """Checks the last checkpoint of a finished generation; None: it lacks nothing.

    A Failure: it was lost from memory with its workers or servers, or no copy of it is readable, so the job trains it again.
    """
    # Nothing is required without a persistent tier, or if the checkpoint is there already.
    final = final_checkpoint(facts)
    if facts.spec.checkpoint.persistent is None or final is None or final.is_imported or _is_uploaded(facts, final):
        return None
    if final in unreadable_checkpoints(facts):
        reason = (
            f"every trainer finished after step {final.step}, and no copy of {final} can be read: it is trained again"
        )
        return Failure("unreadable", reason, facts.now, unexplained=True)
    # Find the newest checkpoint that can be uploaded: the final one if it was saved, else the newest that was.
    members = [s for _, s in member_sessions(facts) if s is not None]
    responsive = [s for s in members if is_responsive(facts, s)]
    is_saved = final == facts.membership.parent or all(_newest_save_of(s) == final for s in members)
    available = uploadable_checkpoints(facts)
    target = final if is_saved or final in available else newest_checkpoint(available)
    finished_clause = f"every trainer finished after step {final.step}"
    if target is None or _is_uploaded(facts, target):
        deadline = last_step_time(facts) + SAVING_SECONDS
        if facts.now < deadline and not _all_saves_reported(facts, members):
            return FinalCheckpointPending(
                f"{finished_clause}; waiting for memory servers and workers to report whether it was saved", deadline
            )
        return (
            _list_if_unknown(facts, finished_clause, target)
            or _find_lost_save(facts, final, target)
            or _build_unsaved(facts, final, target)
        )
    # The target exists by report. Wait while an agent can upload it and its parts can be read.
    if not responsive:
        deadline = max(s.last_message_seconds for s in members) + 2 * facts.spec.health_policy.heartbeat_timeout_seconds
        reason = f"{finished_clause}, and no worker is left that could upload {target} to the persistent tier"
        return (
            FinalCheckpointPending(reason, deadline)
            if facts.now < deadline
            else Failure("agent-lost", reason, deadline)
        )
    if target not in available:
        uploaded = _list_if_partly_uploaded(facts, finished_clause, target)
        if uploaded is not None:
            return uploaded
        reading = _reread_servers(facts, target, last_step_time(facts), len(responsive) == len(members))
        if facts.now < reading.until_seconds:
            return replace(reading, reason=f"{finished_clause}; {reading.reason}")
        reason_lost = f"{finished_clause}, and {target} was lost from memory before it was in the persistent tier"
        return Failure("checkpoint-lost", reason_lost, last_step_time(facts) + SAVING_SECONDS, unexplained=True)
    deadline = last_step_time(facts) + UPLOAD_SECONDS
    if facts.now < deadline:
        return FinalCheckpointPending(
            "every trainer finished; the last checkpoint is being uploaded to the persistent tier", deadline
        )
    return FinalCheckpointUnsaved(
        f"{finished_clause}, and {target} did not reach the persistent tier in {UPLOAD_SECONDS:g} s", fails_job=True
    )


def upload_before_failing(
    facts: MembershipTierFacts, since_seconds: float, up_to_step: int | None = None
) -> FinalCheckpointPending | None:
    """Uploads the newest checkpoint of a job that is about to end; None: there is nothing left to do.

    `up_to_step`: last step whose checkpoint is still useful; None: any.
    """
    agents = uploading_agents(facts)
    if not agents:
        return None
    began_seconds = min(since_seconds, facts.now) if since_seconds < facts.now else last_step_time(facts)
    newest = newest_checkpoint(c for c in uploadable_checkpoints(facts) if up_to_step is None or c.step <= up_to_step)
    if (
        facts.membership.state == "Committed" and up_to_step is None
    ):  # in a claimed generation, memory servers were fenced before they were read: no further save can follow
        saved = [
            c for s in agents if (c := _newest_save_of(s)) is not None and c.generation == facts.membership.generation
        ]
        reported = min(saved) if len(saved) == len(facts.membership.members) else None
        if reported is not None and (newest is None or reported > newest) and not _is_uploaded(facts, reported):
            reading = _reread_servers(facts, reported, began_seconds, all_reported=True)
            if facts.now < reading.until_seconds:
                return reading
    deadline = began_seconds + RESCUE_SECONDS
    if newest is None or newest.is_imported or _is_uploaded(facts, newest) or facts.now >= deadline:
        return None
    return FinalCheckpointPending(f"{newest} is uploaded to the persistent tier first", deadline)


def uploading_agents(facts: MembershipFacts) -> list[ObservedSession]:
    """Lists agents that can upload checkpoints from memory: only members were sent the memory servers' addresses."""
    if facts.spec.checkpoint.persistent is None or facts.status.membership is None:
        return []
    return [s for _, s in member_sessions(facts) if s is not None and is_responsive(facts, s)]


def complete_in_memory(facts: TierFacts) -> list[Checkpoint]:
    """Lists lineage checkpoints that are complete on the memory servers as last read."""
    return _complete_on_lineage(facts, memory_reading(facts, facts.membership.generation))


def uploadable_checkpoints(facts: TierFacts) -> list[Checkpoint]:
    """Lists lineage checkpoints that can be uploaded, oldest first.

    Parts that memory lacks may be in the persistent tier: a worker's node can die after its upload, while the parts that others
    had yet to upload are in memory. A job that required all parts in memory restored its last step from both tiers, found it
    lost again, and restarted for ever.
    """
    reading = tier_reading(facts, facts.membership.generation)
    in_persistent = _complete_on_lineage(facts, TierReading({}, reading.persistent))
    split_over_tiers = {*_complete_on_lineage(facts, reading)} - {*in_persistent}
    max_step = restore_limit(facts) if facts.membership.state == "Claimed" else None
    candidates = {*complete_in_memory(facts), *split_over_tiers}
    return sorted((c for c in candidates if max_step is None or c.step <= max_step), key=lambda c: c.step)


def _complete_on_lineage(facts: TierFacts, reading: TierReading) -> list[Checkpoint]:
    return complete_checkpoints(
        reading, facts.status.lineage, facts.running_generation, unreadable_checkpoints(facts), facts.layout_covers
    )


def _all_saves_reported(facts: TierFacts, members: list[ObservedSession]) -> bool:
    """Whether every member has reported its saves, and every assigned memory server that remains was read.

    A leader learns that a member finished before it learns of its last save, and a new leader before it learns of any save:
    unknown is not unsaved.
    """
    generation = facts.membership.generation
    assigned = {endpoint.instance for endpoint in facts.status.assigned_servers}
    remaining = [h for h in facts.server_list if h.endpoint.instance in assigned and h.state != "Gone"]
    all_read = all(h.state == "Ready" and h.read_generation == generation for h in remaining)
    return all_read and all(s.final_saves_reported and _newest_save_of(s) is not None for s in members)


def _list_if_unknown(
    facts: MembershipTierFacts, finished_clause: str, newest: Checkpoint | None
) -> FinalCheckpointPending | None:
    """Lists the persistent tier if no checkpoint is known elsewhere.

    No agent reports uploads made under an earlier leader; without a listing, the job would fail despite a complete checkpoint.
    """
    persistent, deadline = facts.persistent, last_step_time(facts) + RESCUE_SECONDS
    if newest is not None or facts.status.last_uploaded is not None or facts.now >= deadline:
        return None
    if _is_listed(facts):
        unchecked = layout_sets_to_check(tier_reading(facts, facts.membership.generation)) - set(facts.layout_covers)
        if all(layouts & persistent.lost_layouts for layouts in unchecked):
            return _wait_for_unreachable(facts, finished_clause, deadline)
        return FinalCheckpointPending(
            f"{finished_clause}; checking that the layouts of the saves cover every tensor", deadline
        )
    return _request_listing(facts, finished_clause, deadline)


def _is_listed(facts: MembershipTierFacts) -> bool:
    """Whether the persistent tier was listed since the last step."""
    persistent = facts.persistent
    return persistent.read_generation == facts.membership.generation and (
        persistent.requested_seconds or 0.0
    ) >= last_step_time(facts)


def _request_listing(facts: MembershipTierFacts, finished_clause: str, deadline: float) -> FinalCheckpointPending:
    """Requests a listing; an earlier one of this generation does not count."""
    persistent = facts.persistent
    if persistent.read_generation == facts.membership.generation:
        persistent = replace(persistent, requested_seconds=None)
    pending = request_listing(facts, persistent)
    return FinalCheckpointPending(
        f"{finished_clause}; {pending.reason}", min(deadline, pending.until_seconds or deadline), pending.actions
    )


def _list_if_partly_uploaded(
    facts: MembershipTierFacts, finished_clause: str, target: Checkpoint
) -> FinalCheckpointPending | None:
    """Lists the persistent tier if it may have parts of the checkpoint that memory lacks."""
    deadline = last_step_time(facts) + RESCUE_SECONDS
    if not facts.uploaded.get(target) or _is_listed(facts) or facts.now >= deadline:
        return None
    return _request_listing(facts, finished_clause, deadline)


def _wait_for_unreachable(
    facts: TierFacts, finished_clause: str, until_seconds: float
) -> FinalCheckpointPending | None:
    """Waits for memory servers that the operator cannot reach and that may have a checkpoint of the finished job."""
    unreachable = _describe_unreachable(facts)
    return (
        FinalCheckpointPending(
            f"{finished_clause}; waiting for {unreachable}, which may have a checkpoint of it", until_seconds
        )
        if unreachable
        else None
    )


def _reread_servers(
    facts: TierFacts, target: Checkpoint, since_seconds: float, all_reported: bool
) -> FinalCheckpointPending:
    """Reads the memory servers for the saves that agents reported."""
    unreachable = _describe_unreachable_parts(facts, target) if all_reported else ""
    if unreachable:
        return FinalCheckpointPending(unreachable, since_seconds + RESCUE_SECONDS)
    return FinalCheckpointPending(
        "reading the memory servers again for the last checkpoint", since_seconds + SAVING_SECONDS
    )


def _describe_unreachable_parts(facts: TierFacts, target: Checkpoint) -> str:
    """Returns a message that names the memory servers the operator cannot reach; empty: there is none.

    Unreachable data is not lost. Without this wait, a finished generation would be restarted each half minute, until the restart
    budget is used up, for steps that are already made; and a failing job would lose its newest checkpoint with the memory tier.
    """
    unreachable = _describe_unreachable(facts)
    return (
        f"waiting for {unreachable}, which the operator cannot reach and which may have a part of {target}: allow connections from the operator to the memory tier's port"
        if unreachable
        else ""
    )


def _describe_unreachable(facts: TierFacts) -> str:
    return join_names(sorted(e.instance for e in unreachable_servers(facts)))


def _find_lost_save(facts: MembershipTierFacts, final: Checkpoint, newest: Checkpoint | None) -> Failure | None:
    """Returns a failure if every rank saved the last step and the saves are lost: it is trained again.

    None if this generation saved nothing at all, because the next would not either. If every copy was lost while no operator
    led, the agents' reports are the only trace of the saves.
    """
    members = [s for _, s in member_sessions(facts) if s is not None]
    best, parent = _newest_anywhere(facts, newest), facts.membership.parent
    if len(members) < len(facts.membership.members) or any(s.progress.final_save_step < final.step for s in members):
        return None
    start_step = parent.step if parent is not None else 0
    has_new_saves = all(
        s.saved is not None and s.saved.generation == facts.membership.generation and s.saved.step > start_step
        for s in members
    )
    if (best is None or best.step <= start_step) and not has_new_saves:
        return None
    restart_step = best.step if best is not None else start_step
    reason = f"every trainer finished after step {final.step}, whose save was lost: it is trained again from step {restart_step}"
    return Failure("checkpoint-lost", reason, facts.now, unexplained=True)


def _newest_anywhere(facts: TierFacts, newest: Checkpoint | None) -> Checkpoint | None:
    """Returns the newest checkpoint in any tier."""
    complete = _complete_on_lineage(facts, tier_reading(facts, facts.membership.generation))
    return newest_checkpoint(c for c in (newest, facts.status.last_uploaded, *complete) if c is not None)


def _build_unsaved(facts: TierFacts, final: Checkpoint, newest: Checkpoint | None) -> FinalCheckpointUnsaved:
    """Builds the result for a last step that was never saved; it fails the job if there is no checkpoint at all."""
    best = _newest_anywhere(facts, newest)
    finished_clause = f"every trainer finished after step {final.step}"
    if best is None:
        return FinalCheckpointUnsaved(
            f"{finished_clause}, and not one checkpoint of it was saved; the events give the reason", fails_job=True
        )
    return FinalCheckpointUnsaved(
        f"{finished_clause}, which was not saved: the newest checkpoint is of step {best.step} (call close() right after the"
        " last step, before another batch is taken)",
        fails_job=False,
    )


def _is_uploaded(facts: JobFacts, checkpoint: Checkpoint) -> bool:
    """Whether this checkpoint, or a newer one, is in the persistent tier."""
    last_uploaded = facts.status.last_uploaded
    return last_uploaded is not None and last_uploaded.step >= checkpoint.step


def _newest_save_of(session: ObservedSession) -> Checkpoint | None:
    """Returns the newest checkpoint that this agent has committed or is about to commit."""
    return newest_checkpoint(c for c in (*session.pending, session.saved) if c is not None)


def last_step_time(facts: MembershipFacts) -> float:
    """Returns when the last step was made, at the latest (Unix time); a new operator counts from its own start."""
    last_step_at = last_step_seconds(facts, facts.membership.generation)
    return max(facts.membership.changed_seconds, facts.term_seconds, last_step_at if last_step_at is not None else 0.0)
