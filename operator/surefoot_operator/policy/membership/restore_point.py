"""Chooses the restore point of a claimed generation.

Pure; called by `plan` until it returns a parent. The contents of a tier that does not answer are unknown, never empty: the
tier is waited for, but no longer than it would take to train again the steps that it may have.

The order is fixed, because each step needs the one before:

1. Trainers of the previous generation stop, and their agents finish flushes already under way.
2. Every reachable memory server is fenced and its index read, so that no older save can complete afterwards.
3. The persistent tier is listed, because data moves from memory to it.
4. Checkpoints with all ranks wait until their layouts are known to cover every tensor.
5. Unreachable servers are waited for, as long as their saves are worth it.
6. The newest complete checkpoint is the parent. Without any, the job's policy decides (`onTotalLoss`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime

from surefoot.protocol.checkpoints.completeness import (
    TierReading,
    UnreadRecord,
    complete_checkpoints,
    is_complete,
    is_on_lineage,
    layout_sets_to_check,
    newest_checkpoint,
)
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, MemoryServerInstance, SourceJob
from surefoot.protocol.text import join_names
from surefoot_operator.api.spec import ACCEPT_LOSS, CheckpointPolicy
from surefoot_operator.api.status import JobStatus, Membership
from surefoot_operator.job_snapshot import MAX_GENERATION, ObservedMemoryServer, PersistentListing
from surefoot_operator.policy.core.actions import FenceMemoryServer, ListPersistentTier
from surefoot_operator.policy.core.facts import (
    Facts,
    JobFacts,
    MembershipFacts,
    MembershipTierFacts,
    TierFacts,
    is_responsive,
    seconds_per_step,
    step_of,
    tier_reading,
    unreadable_checkpoints,
)
from surefoot_operator.policy.failure.incidents import open_incident
from surefoot_operator.policy.failure.memory_server_liveness import (
    awaited_servers,
    describe_why_alive,
    may_still_have_data,
    unreachable_servers,
)
from surefoot_operator.policy.membership.restore_decisions import (
    Choice,
    LastUploadedLost,
    RestoreChosen,
    RestorePending,
    SourceCheckpointMissing,
    TotalLoss,
    find_later_target,
    request_listing,
    restore_limit,
)

# ---- initial restore -------------------------------------------------------------------------------------------------
# Chooses the initial restore point: step 0 or a checkpoint of the source job. Pure; called for the first generation, and for
# a later one without any checkpoint on its lineage. A source job's checkpoint is chosen once and kept in the status; another
# one is chosen only if it is unreadable.

_MAX_NAMED = 8


def source_job(policy: CheckpointPolicy) -> SourceJob | None:
    """Returns the job that `checkpoint.restoreFrom` names; None: none."""
    restore_from = policy.restore_from
    if restore_from is None:
        return None
    if restore_from.uri is not None:
        uri, _, job = restore_from.uri.rstrip("/").rpartition("/")
        return SourceJob(f"{uri}/" if uri.endswith("//") else uri, job)
    return (
        SourceJob(policy.persistent.uri, restore_from.uid)
        if policy.persistent is not None and restore_from.uid
        else None
    )


def initial_checkpoint_of(status: JobStatus) -> Checkpoint | None:
    """Returns the source job's checkpoint that this job started from, if it is readable; None: it started at step 0."""
    return None if status.initial_checkpoint in status.unreadable_checkpoints else status.initial_checkpoint


def initial_restore_point(
    facts: MembershipTierFacts, unreachable: tuple[MemoryServerEndpoint, ...]
) -> RestorePending | RestoreChosen | SourceCheckpointMissing:
    """Chooses the parent of a generation without a checkpoint of its own job."""
    status = facts.status
    origin = initial_checkpoint_of(status)
    if origin is not None:
        return RestoreChosen(origin, unreachable, source_job=status.source_job)
    # a job that started without a source job must not take one up later
    source = status.source_job or (None if facts.running_generation else source_job(facts.spec.checkpoint))
    if source is None:
        return RestoreChosen(None, unreachable)
    listing_state = facts.source_listing
    if listing_state.source_job != source or listing_state.read_generation != facts.membership.generation:
        return request_listing(facts, listing_state, source)
    restore_from = facts.spec.checkpoint.restore_from
    step = restore_from.step if restore_from is not None else "latest"
    candidates = source_checkpoints(facts)
    # generations are negated here: of one step, the least checkpoint is that of the newest generation
    chosen = max(
        (c for c in candidates if step in ("latest", c.step)), key=lambda c: (c.step, -c.generation), default=None
    )
    if chosen is None:
        return SourceCheckpointMissing(_describe_missing_source(facts, source, step, candidates))
    return RestoreChosen(chosen, unreachable, source_job=source)


def source_checkpoints(facts: TierFacts) -> list[Checkpoint]:
    """Lists the source job's checkpoints that its listing shows to be complete, without unreadable ones.

    The source job's lineage is neither known nor needed: of two generations that completed one step, the job continued from
    the newer.
    """
    reading = TierReading({}, facts.source_listing.entries)
    manifests = reading.manifests_by_rank().items()
    return [
        c
        for c, ranks in manifests
        if c not in facts.status.unreadable_checkpoints and is_complete(ranks, facts.layout_covers)
    ]


def _describe_missing_source(
    facts: JobFacts, source: SourceJob, step: int | str, complete: Iterable[Checkpoint]
) -> str:
    """Builds the message about a source checkpoint that does not exist."""
    steps = sorted({c.step for c in complete}, reverse=True)
    steps_text = ", ".join(map(str, steps[:_MAX_NAMED])) + (", …" if len(steps) > _MAX_NAMED else "")
    available = f"complete checkpoints are at steps {steps_text}" if steps else "none is complete there"
    unreadable = [c for c in facts.status.unreadable_checkpoints if c.is_imported and step in ("latest", c.step)]
    exception = f", apart from unreadable ones ({', '.join(map(str, unreadable))})" if unreadable else ""
    checkpoint = "no checkpoint" if step == "latest" else f"no complete checkpoint of step {step}"
    return f"{source} has {checkpoint} to start from{exception}: {available}; correct spec.checkpoint.restoreFrom and create the job again"


# ---- total loss ------------------------------------------------------------------------------------------------------
# Reports that no checkpoint can be read, and how to continue. The data may not be lost: nodes with memory servers may be
# rebooting, or a bucket's key may have expired, and a job that failed could not use data that returned an hour later. So a
# total loss waits, with everything kept, until something becomes readable or a user accepts the loss.

LOSS_LISTING_INTERVAL_SECONDS = 60.0
"""Time between two listings of the persistent tier while everything else is lost."""

LATE_UPLOAD_WAIT_SECONDS = 30.0
"""Time after a failure in which a started upload may still complete: 15 s for one attempt, and as much again."""

LISTING_LAG_SECONDS = 45.0
"""Time after a failure in which a listing may lack the last uploaded checkpoint without proof that it is gone: a client of a
network file system may show an old state of a changed folder for half a minute."""

_MAX_SHOWN_CHARACTERS = 40


def is_loss_accepted(facts: JobFacts) -> bool:
    """Whether a user accepted the loss of this generation; an annotation for an earlier loss does not count."""
    annotation = facts.job.accepted_loss
    return annotation == str(facts.membership.generation)


def how_to_accept_loss(facts: JobFacts) -> str:
    """Returns the instruction for the annotation by which a user accepts the loss."""
    return f'annotate the job with {ACCEPT_LOSS}: "{facts.membership.generation}"'


def describe_loss(facts: TierFacts, unread_records: tuple[UnreadRecord, ...]) -> str:
    """Describes the lost checkpoints and their location."""
    if unread_records:
        return f"no checkpoint can be restored: {unread_records[0]} ({len(unread_records)} such records; restore the files from a backup)"
    status = facts.status
    last_known, max_step = status.last_complete or status.last_uploaded, restore_limit(facts)
    if max_step:
        return (
            f"every copy of every checkpoint up to step {max_step}, the target of a rollback, is lost{_describe_location(facts)};"
            " every later checkpoint that may be left has an anomalous loss"
        )
    return f"every copy of every checkpoint is lost (the last known was {last_known}){_describe_location(facts)}"


def describe_waiting_for_loss(facts: TierFacts, unread_records: tuple[UnreadRecord, ...]) -> str:
    """Returns the condition's message: the loss, since when the job waits, and the ways out."""
    waiting_since = datetime.fromtimestamp(facts.membership.changed_seconds, UTC).isoformat(timespec="seconds")
    start = initial_checkpoint_of(facts.status) or "step 0"
    sentences = [
        describe_loss(facts, unread_records),
        f"The job has waited since {waiting_since}, keeps its data in memory, and continues by itself when any checkpoint becomes readable",
        f"To start over at {start} instead, {how_to_accept_loss(facts)}",
        "To end the job, set spec.checkpoint.onTotalLoss to Fail, or delete it",
    ]
    annotation = facts.job.accepted_loss
    if annotation and not is_loss_accepted(facts):
        shortened = annotation if len(annotation) <= _MAX_SHOWN_CHARACTERS else annotation[:_MAX_SHOWN_CHARACTERS] + "…"
        sentences.append(
            f"Its annotation {ACCEPT_LOSS} is {shortened!r}, but must be the present generation, {facts.membership.generation}"
        )
    return ". ".join(sentences)


def _describe_location(facts: TierFacts) -> str:
    """Describes on which nodes the lost copies were, and which of these do not answer."""
    server_nodes = {e.instance.node for e in facts.status.assigned_servers}
    member_nodes = {m.node for m in facts.membership.members}
    if not server_nodes:  # the platform reports each of them gone
        return (
            f"; its workers saved from {join_names(sorted(member_nodes))}, whose memory servers are gone"
            if member_nodes
            else ""
        )
    unreachable_nodes = sorted({e.instance.node for e in may_still_have_data(facts)})
    # a server known to be gone a moment before the others is no longer assigned, but had its workers' saves too
    text = f"; it was on the memory servers of {join_names(sorted(server_nodes | member_nodes))}"
    return (
        f"{text}, of which {join_names(unreachable_nodes)} do not answer"
        if unreachable_nodes
        else f"{text}, and none has it now"
    )


# ---- restore point ---------------------------------------------------------------------------------------------------

MIN_LISTING_WAIT_SECONDS = 2.0
"""Shortest wait for a listing if memory has a complete checkpoint."""

MAX_LISTING_WAIT_SECONDS = 30.0
"""Longest wait for it then, however often a change of memory servers makes it void: a server may come and go for ever."""

UNANSWERED_RETRY_SECONDS = 5.0
"""Time until a listing that lacks a decisive record is requested again."""

MIN_FIRST_ANSWER_WAIT_SECONDS = 1.5
"""Shortest wait of a new operator for a first answer: one call takes up to a second."""


def choose_restore_point(facts: Facts) -> Choice:
    """Returns the next step of choosing a restore point, or the chosen parent; see the module's description."""
    # No server is read before the old trainers have stopped, and nothing is chosen before every ready server was read.
    pending_flushes = _wait_for_flushes(facts)
    if pending_flushes is not None:
        return pending_flushes
    unread = [h for h in facts.server_list if h.state == "Ready" and h.read_generation != facts.membership.generation]
    if unread:
        servers = sorted(h.endpoint.instance for h in unread)
        actions = tuple(FenceMemoryServer(server, facts.membership.generation) for server in servers)
        return RestorePending(f"fencing and reading {join_names(servers)}", actions)
    # Then each tier gets as much time as its checkpoints may be worth.
    best = _best_readable(facts)
    worth_seconds = _wait_budget_seconds(facts, best)
    patience_seconds = min(worth_seconds, facts.spec.checkpoint.memory_server_timeout_seconds)
    if patience_seconds and facts.term_seconds > facts.membership.changed_seconds:
        patience_seconds = max(patience_seconds, MIN_FIRST_ANSWER_WAIT_SECONDS)
    deadline = _wait_start(facts) + patience_seconds
    return (
        _wait_for_listing(facts, best, deadline)
        or _wait_for_layouts(facts, best)
        or _wait_for_unreachable_servers(facts, best, patience_seconds, worth_seconds)
        or _conclude(facts, best)
    )


def last_uploaded_bound(facts: TierFacts) -> Checkpoint | None:
    """Returns the last uploaded checkpoint, below which nothing is restored; None: it is damaged, or there is none.

    If its record was not returned by the tier, the checkpoint may be readable, so it still counts. A checkpoint beyond a
    rollback's target does not.
    """
    last_uploaded, persistent = facts.status.last_uploaded, facts.persistent
    if last_uploaded in facts.status.unreadable_checkpoints or (
        last_uploaded is not None and _is_beyond_rollback(facts, last_uploaded)
    ):
        return None
    is_undecided = persistent.read_generation == facts.membership.generation and last_uploaded in persistent.undecidable
    return None if is_undecided and not _is_only_unanswered(persistent, last_uploaded) else last_uploaded


def _is_beyond_rollback(facts: JobFacts, checkpoint: Checkpoint) -> bool:
    """Whether a rollback excludes this checkpoint."""
    max_step = restore_limit(facts)
    return max_step is not None and checkpoint.step > max_step


def _is_only_unanswered(persistent: PersistentListing, checkpoint: Checkpoint | None) -> bool:
    """Whether records of a checkpoint are missing only because the tier did not answer, and none is damaged."""
    layouts = {m.layout for m in persistent.entries or () if m.save.checkpoint == checkpoint}
    records = [
        record for record in persistent.unread_records if record.checkpoint == checkpoint or record.digest in layouts
    ]
    return bool(records) and all(record.is_silent for record in records)


def _wait_for_flushes(facts: MembershipFacts) -> RestorePending | None:
    """Waits until no newer step of the previous generation can complete, or `flushGraceSeconds` has passed."""
    generation, membership = facts.running_generation, facts.membership
    if not generation:
        return None
    responsive = [s for s in facts.sessions.values() if is_responsive(facts, s)]
    running = [s for s in responsive if s.stopped < membership.generation and s.generation == generation]
    flushing = [s for s in responsive if any(c.generation == generation for c in s.pending)]
    deadline = membership.changed_seconds + facts.spec.checkpoint.flush_grace_seconds
    if not (running or flushing) or facts.now >= deadline:
        return None
    if running:
        names = join_names(sorted(s.index for s in running))
        return RestorePending(
            f"workers {names} are stopping their trainers", until_seconds=deadline, are_trainers_stopped=False
        )
    return RestorePending(
        "saves of the previous generation are still being flushed to the memory servers", until_seconds=deadline
    )


def _wait_start(facts: JobFacts) -> float:
    """Returns from when on unanswered requests count: an operator that started during a claim made none before."""
    return max(facts.membership.changed_seconds, facts.term_seconds)


def _best_readable(facts: TierFacts) -> Checkpoint | None:
    """Returns the newest checkpoint read as complete on the lineage, and not below the last uploaded one."""
    last_uploaded = last_uploaded_bound(facts)
    return newest_checkpoint(
        c for c in _readable_checkpoints(facts) if last_uploaded is None or c.step >= last_uploaded.step
    )


def _readable_checkpoints(facts: TierFacts) -> list[Checkpoint]:
    """Lists the checkpoints read as complete on the lineage and not beyond a rollback's target."""
    generation = facts.running_generation
    if not generation:
        return []
    reading = tier_reading(facts, facts.membership.generation)
    complete = complete_checkpoints(
        reading, facts.status.lineage, generation, unreadable_checkpoints(facts), facts.layout_covers
    )
    return [checkpoint for checkpoint in complete if not _is_beyond_rollback(facts, checkpoint)]


def _wait_budget_seconds(facts: MembershipFacts, best: Checkpoint | None) -> float:
    """Returns the training time that a wait for an unknown tier may save; infinite if all may be lost."""
    incident = open_incident(facts.status.incidents)
    reached_step = max(
        facts.status.step, step_of(facts, facts.running_generation), incident.last_step if incident is not None else 0
    )
    max_step = restore_limit(facts)
    if max_step == 0:
        return 0.0  # a rollback to step 0 needs nothing that any tier has
    reached_step = reached_step if max_step is None else min(reached_step, max_step)
    base = best or initial_checkpoint_of(facts.status)
    lost_steps = max(0, reached_step - (base.step if base else 0))
    if best is not None and lost_steps <= 0:
        return 0.0
    if best is None and facts.status.had_checkpoint:
        return math.inf
    step_seconds = seconds_per_step(facts)
    return (
        max(facts.spec.checkpoint.memory_server_timeout_seconds, lost_steps * 1.0)
        if step_seconds is None
        else lost_steps * step_seconds
    )


def _wait_for_listing(facts: MembershipTierFacts, best: Checkpoint | None, deadline: float) -> RestorePending | None:
    """Requests a listing after the last index was read; None: it is there, or not worth waiting for."""
    persistent, generation = facts.persistent, facts.membership.generation
    if facts.spec.checkpoint.persistent is None or not facts.running_generation or restore_limit(facts) == 0:
        return None
    latest_deadline = max(deadline, _wait_start(facts) + MAX_LISTING_WAIT_SECONDS)
    if best is not None and facts.now >= latest_deadline:
        return None
    if persistent.read_generation == generation:
        # data moves from memory to the persistent tier: parts that a server lost since may be there by now
        changes = (h.since_seconds for h in facts.server_list if h.state != "Ready")
        last_change_seconds = max(changes, default=0.0)
        if persistent.requested_seconds is None or last_change_seconds <= persistent.requested_seconds:
            return None
        return request_listing(facts, replace(persistent, requested_seconds=None))
    if best is None or persistent.requested_seconds is None:
        return request_listing(facts, persistent)
    # memory has a good checkpoint: a listing that takes longer, or fails, is not waited for
    listing_deadline = (
        deadline
        if persistent.error is not None
        else max(deadline, persistent.requested_seconds + MIN_LISTING_WAIT_SECONDS)
    )
    if facts.now >= listing_deadline:
        return None
    pending = request_listing(facts, persistent)
    return replace(pending, until_seconds=min(listing_deadline, pending.until_seconds or listing_deadline))


def _wait_for_layouts(facts: TierFacts, best: Checkpoint | None) -> RestorePending | None:
    """Waits while a newer checkpoint has all its ranks but is not known to cover every tensor."""
    reading = tier_reading(facts, facts.membership.generation)
    lost_layouts = facts.persistent.lost_layouts  # no agent will bring these
    unchecked = {s for s in layout_sets_to_check(reading) - set(facts.layout_covers) if not s & lost_layouts}
    if not unchecked or not facts.running_generation:
        return None
    assumed = {**facts.layout_covers, **dict.fromkeys(unchecked, True)}
    newer = [
        c
        for c, ranks in reading.manifests_by_rank().items()
        if _is_preferable(facts, c, best) and is_complete(ranks, assumed)
    ]
    deadline = facts.membership.changed_seconds + facts.spec.checkpoint.memory_server_timeout_seconds
    if not newer or facts.now >= deadline:
        return None
    return RestorePending(f"checking that the layouts of {max(newer)} cover every tensor", until_seconds=deadline)


def _is_preferable(facts: JobFacts, checkpoint: Checkpoint, best: Checkpoint | None) -> bool:
    """Whether this checkpoint, if complete, would be restored rather than `best`."""
    return (
        checkpoint not in unreadable_checkpoints(facts)
        and is_on_lineage(facts.status.lineage, checkpoint, facts.running_generation)
        and (best is None or checkpoint.step > best.step)
        and not _is_beyond_rollback(facts, checkpoint)
    )


def has_nothing_newer(facts: JobFacts, server: ObservedMemoryServer | None, best: Checkpoint | None) -> bool:
    """Whether a memory server's index, read after its fence, has no part of a better checkpoint than `best`.

    The fence admits no new saves, however long the server is unreachable afterwards.
    """
    if server is None or server.read_generation != facts.membership.generation:
        return False
    return not any(_is_preferable(facts, m.save.checkpoint, best) for m in server.entries)


def _wait_for_unreachable_servers(
    facts: Facts, best: Checkpoint | None, patience_seconds: float, worth_seconds: float
) -> RestorePending | None:
    """Waits for unreachable servers that may have a better checkpoint, also for those that were read before.

    Each is waited for from the time it stopped answering. A server that is probably alive is waited for as long as its saves
    are worth, because an unreachable copy is not lost; any other only for the usual timeout.
    """
    if is_loss_accepted(facts):
        return None
    start_seconds = _wait_start(facts)
    deadlines, alive_reasons = dict[MemoryServerInstance, float](), dict[MemoryServerInstance, str]()
    for endpoint in awaited_servers(facts, worth_seconds):
        server, server_state = endpoint.instance, facts.servers.get(endpoint.instance)
        if has_nothing_newer(facts, server_state, best):
            continue
        silent_since = max(start_seconds, server_state.since_seconds) if server_state is not None else start_seconds
        alive_reason = describe_why_alive(facts, endpoint, worth_seconds)
        if alive_reason:
            alive_reasons[server] = alive_reason
        deadlines[server] = silent_since + (worth_seconds if alive_reason else patience_seconds)
    waiting = sorted(server for server, deadline in deadlines.items() if facts.now < deadline)
    if not waiting:
        return None
    deadline = max(deadlines[server] for server in waiting)
    wake_seconds = deadline if math.isfinite(deadline) else None
    names = join_names(waiting)
    alive_server = next((server for server in waiting if server in alive_reasons), None)
    if alive_server is None:
        return RestorePending(
            f"waiting up to {patience_seconds:.1f} s for {names}: they may have newer steps", (), wake_seconds
        )
    return RestorePending(
        f"waiting for {names}, which the operator cannot reach: {alive_reasons[alive_server]}. To continue without it, {how_to_accept_loss(facts)}",
        (),
        wake_seconds,
    )


def _conclude(facts: MembershipTierFacts, best: Checkpoint | None) -> Choice:
    """Decides once all tiers have been read or given their time."""
    status, membership = facts.status, facts.membership
    unknown_checkpoint = _newer_than_status(facts)
    if (
        unknown_checkpoint is not None
        and (best is None or unknown_checkpoint.step > best.step)
        and not is_loss_accepted(facts)
    ):
        return _offer_choice(facts, unknown_checkpoint, best)
    unreachable = tuple(unreachable_servers(facts))
    has_persistent = facts.spec.checkpoint.persistent is not None and bool(facts.running_generation)
    is_unlisted = has_persistent and facts.persistent.read_generation != membership.generation
    # A readable checkpoint ends the search.
    if best is not None:
        return RestoreChosen(best, unreachable, is_unlisted)
    # A rollback to step 0 needs no checkpoint.
    if restore_limit(facts) == 0:
        return initial_restore_point(facts, unreachable)
    if is_unlisted:
        return RestorePending(
            "no checkpoint is left in memory, and the persistent tier does not answer: waiting for it"
        )
    # From here on no checkpoint is readable. Unanswered records and later rollback targets are tried first.
    unread_records = facts.persistent.unread_records if has_persistent else ()
    if any(record.is_silent for record in unread_records):
        return _retry_unread_records(facts, unread_records)
    later_target = find_later_target(facts)
    if later_target is not None:
        return later_target
    nothing_to_lose = not facts.running_generation or (
        not status.had_checkpoint and status.last_uploaded is None and not unread_records
    )
    last_uploaded, older_checkpoint = (
        last_uploaded_bound(facts),
        _older_than_last_uploaded(facts) if has_persistent else None,
    )
    if last_uploaded is not None and older_checkpoint is not None:
        missing_clause = f"{last_uploaded}, the last uploaded checkpoint, is missing from the persistent tier"
        listing_reason = f"{missing_clause}: it is listed once more before {older_checkpoint} is restored"
        return _wait_for_listing_after(facts, LISTING_LAG_SECONDS, listing_reason) or LastUploadedLost(
            last_uploaded, f"{missing_clause} and from memory: the older {older_checkpoint} is restored"
        )
    # A total loss. Nothing is lost if there never was a checkpoint; else the user's policy decides.
    policy = facts.spec.checkpoint.on_total_loss
    if nothing_to_lose or is_loss_accepted(facts):
        return initial_restore_point(facts, unreachable)
    if policy == "Wait":
        return _wait_after_total_loss(facts, unread_records)
    late_uploads = _wait_for_late_uploads(facts) if has_persistent else None
    if late_uploads is not None:
        return late_uploads
    if policy == "Restart":
        return initial_restore_point(facts, unreachable)
    return TotalLoss(
        f"{describe_loss(facts, unread_records)}; "
        f"with spec.checkpoint.onTotalLoss: Restart it would start over at {initial_checkpoint_of(status) or 'step 0'}"
    )


def _newer_than_status(facts: TierFacts) -> Checkpoint | None:
    """Returns the newest complete checkpoint of a generation that the status does not know."""
    persistent = facts.persistent
    if persistent.read_generation != facts.membership.generation or restore_limit(facts) == 0:
        return None
    manifests = TierReading({}, persistent.entries).manifests_by_rank().items()
    newer = [c for c, ranks in manifests if facts.running_generation < c.generation <= MAX_GENERATION and c not in unreadable_checkpoints(facts)
             and is_complete(ranks, facts.layout_covers)]  # fmt: skip
    return max(newer, key=lambda c: (c.generation, c.step), default=None)


def _offer_choice(facts: JobFacts, unknown: Checkpoint, best: Checkpoint | None) -> RestorePending:
    """Asks the user to choose: stored steps are not trained again without confirmation."""
    text = (
        f"the persistent tier has {unknown}, of a generation that this job's status does not know (its newest is"
        f" {facts.running_generation}; was it restored from a backup?). The job trains and removes nothing until you choose."
        f" To continue from {unknown}, create a new job with spec.checkpoint.restoreFrom that names this job's folder and"
        f" step {unknown.step}. To continue from {best or 'step 0'} instead, {how_to_accept_loss(facts)}"
    )
    return RestorePending(text, loss_message=text)


def _wait_after_total_loss(facts: MembershipTierFacts, unread_records: tuple[UnreadRecord, ...]) -> RestorePending:
    """Waits after a total loss, and lists the persistent tier repeatedly."""
    text = describe_waiting_for_loss(facts, unread_records)
    if facts.spec.checkpoint.persistent is None:
        return RestorePending(text, loss_message=text)
    actions, retry_seconds = _retry_listing(facts, LOSS_LISTING_INTERVAL_SECONDS)
    return RestorePending(text, actions, retry_seconds, loss_message=text)


def _older_than_last_uploaded(facts: TierFacts) -> Checkpoint | None:
    """Returns the newest readable checkpoint below the last uploaded one, which is missing from a complete listing.

    It was deleted, by a bucket's lifecycle rule for example. Waiting for it or starting over would lose the older one as well.
    """
    last_uploaded = last_uploaded_bound(facts)
    return (
        newest_checkpoint(c for c in _readable_checkpoints(facts) if c.step < last_uploaded.step)
        if last_uploaded is not None
        else None
    )


def _wait_for_late_uploads(facts: MembershipTierFacts) -> RestorePending | None:
    """Waits for a listing so late after the failure that no upload of the previous generation can come after it."""
    reason = "no checkpoint is left, unless an upload that had started still arrives in the persistent tier"
    return _wait_for_listing_after(
        facts, LATE_UPLOAD_WAIT_SECONDS, f"{reason}: it is listed once more before the job fails or starts over"
    )


def _wait_for_listing_after(facts: MembershipTierFacts, delay_seconds: float, reason: str) -> RestorePending | None:
    """Waits for a listing requested `delay_seconds` or more after the failure; None: there is one."""
    persistent, listing_seconds = facts.persistent, facts.membership.changed_seconds + delay_seconds
    if persistent.requested_seconds is not None and persistent.requested_seconds >= listing_seconds:
        return None
    if facts.now >= listing_seconds:
        return request_listing(facts, replace(persistent, requested_seconds=None))
    return RestorePending(reason, until_seconds=listing_seconds)


def _retry_unread_records(facts: MembershipTierFacts, unread_records: tuple[UnreadRecord, ...]) -> RestorePending:
    """Lists again until the tier returns the records that decide."""
    record = next(item for item in unread_records if item.is_silent)
    actions, retry_seconds = _retry_listing(facts, UNANSWERED_RETRY_SECONDS)
    reason = f"no other checkpoint is left, and the persistent tier does not return a decisive record: {record}"
    return RestorePending(
        f"{reason}. It is listed again; make the tier answer, or remove that record", actions, retry_seconds
    )


def _retry_listing(facts: MembershipTierFacts, pause_seconds: float) -> tuple[tuple[ListPersistentTier, ...], float]:
    """Returns the request of another listing, if `pause_seconds` have passed since the last, and when they have."""
    retry_seconds = (facts.persistent.requested_seconds or facts.now) + pause_seconds
    worker = min((s.index for s in facts.sessions.values() if is_responsive(facts, s)), default=None)
    actions = (
        (ListPersistentTier(facts.membership.generation, worker),)
        if worker is not None and facts.now >= retry_seconds
        else ()
    )
    return actions, retry_seconds


def describe_restore(membership: Membership, parent: Checkpoint | None) -> str:
    """Describes a committed generation for its event."""
    start = f"restores {parent}" if parent else "starts at step 0"
    return f"generation {membership.generation} {start}"
