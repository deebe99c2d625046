"""Chooses the restore point of a claimed epoch.

Pure; called by `plan` until it answers with a parent. A silent tier is unknown, never empty: it is waited for, but no
longer than it takes to run again the steps that it may hold.
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
    layouts_to_check,
    newest_checkpoint,
    on_lineage,
)
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, MemoryServerInstance, SourceJob
from surefoot.protocol.text import join_names
from surefoot_operator.api.spec import ACCEPT_LOSS, CheckpointPolicy
from surefoot_operator.api.status import JobStatus, Membership
from surefoot_operator.job_snapshot import HIGHEST_EPOCH, ObservedMemoryServer, PersistentListing
from surefoot_operator.policy.core.actions import FenceMemoryServer, ListPersistentTier
from surefoot_operator.policy.core.facts import (
    Facts,
    JobFacts,
    TierFacts,
    WorldFacts,
    WorldTierFacts,
    is_responsive,
    reading_at,
    seconds_per_step,
    step_of,
    unreadable_checkpoints,
)
from surefoot_operator.policy.failure.incidents import open_incident
from surefoot_operator.policy.failure.memory_server_liveness import (
    awaited_servers,
    may_still_have_data,
    unreachable_servers,
    why_alive,
)
from surefoot_operator.policy.membership.restore_decisions import (
    Choice,
    LastUploadedLost,
    RestoreChosen,
    RestorePending,
    SourceCheckpointMissing,
    TotalLoss,
    listing,
    older_target,
    restore_limit,
)

# ---- initial restore -------------------------------------------------------------------------------------------------
# Chooses the initial restore point: step 0 or an older job's checkpoint. Pure; called below for the first epoch, and
# for a later one without any checkpoint on its lineage. An older job's checkpoint is chosen once and kept in status;
# again only if it is unreadable.

_MAX_NAMED = 8


def source_job(policy: CheckpointPolicy) -> SourceJob | None:
    """The job that `checkpoint.restoreFrom` names."""
    given = policy.restore_from
    if given is None:
        return None
    if given.uri is not None:
        uri, _, job = given.uri.rstrip("/").rpartition("/")
        return SourceJob(f"{uri}/" if uri.endswith("//") else uri, job)
    return SourceJob(policy.persistent.uri, given.uid) if policy.persistent is not None and given.uid else None


def origin_of(status: JobStatus) -> Checkpoint | None:
    """The older job's checkpoint that this job began from, if any."""
    return None if status.initial_checkpoint in status.unreadable_checkpoints else status.initial_checkpoint


def initial_restore_point(
    facts: WorldTierFacts, silent: tuple[MemoryServerEndpoint, ...]
) -> RestorePending | RestoreChosen | SourceCheckpointMissing:
    """Chooses the parent of an epoch without a checkpoint of its own."""
    status = facts.status
    origin = origin_of(status)
    if origin is not None:
        return RestoreChosen(origin, silent, source_job=status.source_job)
    # a job that has begun without one does not turn to an older job later
    older = status.source_job or (None if facts.running_generation else source_job(facts.spec.checkpoint))
    if older is None:
        return RestoreChosen(None, silent)
    seen = facts.older
    if seen.source_job != older or seen.read_generation != facts.membership.generation:
        return listing(facts, seen, older)
    given = facts.spec.checkpoint.restore_from
    step = given.step if given is not None else "latest"
    found = source_checkpoints(facts)
    # epochs are negated here: of one step, the least is the newest epoch's
    chosen = max((c for c in found if step in ("latest", c.step)), key=lambda c: (c.step, -c.generation), default=None)
    if chosen is None:
        return SourceCheckpointMissing(_missing(facts, older, step, found))
    return RestoreChosen(chosen, silent, source_job=older)


def source_checkpoints(facts: TierFacts) -> list[Checkpoint]:
    """The older job's checkpoints that its listing shows to be complete.

    Unreadable ones are left out. Its lineage is neither known nor needed: of two epochs that completed one step, the
    job went on from the newer.
    """
    reading = TierReading({}, facts.older.entries)
    found = reading.manifests().items()
    return [
        c for c, ranks in found if c not in facts.status.unreadable_checkpoints and is_complete(ranks, facts.covers)
    ]


def _missing(facts: JobFacts, older: SourceJob, step: int | str, found: Iterable[Checkpoint]) -> str:
    steps = sorted({c.step for c in found}, reverse=True)
    named = ", ".join(map(str, steps[:_MAX_NAMED])) + (", …" if len(steps) > _MAX_NAMED else "")
    there = f"complete are those of steps {named}" if steps else "none is complete there"
    unreadable = [c for c in facts.status.unreadable_checkpoints if c.imported and step in ("latest", c.step)]
    why = f", apart from what could not be read ({', '.join(map(str, unreadable))})" if unreadable else ""
    what = "no checkpoint" if step == "latest" else f"no complete checkpoint of step {step}"
    return (
        f"{older} has {what} to begin from{why}: {there}; correct spec.checkpoint.restoreFrom and create the job anew"
    )


# ---- total loss ------------------------------------------------------------------------------------------------------
# Reports that no checkpoint can be read, and how to continue. What looks lost may be a tier whose nodes are being
# rebooted, or a bucket whose key expired: a job that failed for that could not use what came back an hour later. So a
# total loss waits, with everything kept, until something comes back or a person gives it up.

LIST_RETRY_SECONDS = 60.0
"""How often the persistent tier is listed anew while everything else is lost."""

LATE_UPLOAD_SECONDS = 30.0
"""How long after a loss an object may still appear that a worker had begun to upload: one try's 15 s, and as much again."""

LIST_AGAIN_AFTER_SECONDS = 45.0
"""How long after a failure what was stored last may lack in a listing before it counts as gone: a client of a network file system
shows a folder that changes as it was for half a minute."""

_MAX_SHOWN_CHARACTERS = 40


def is_loss_accepted(facts: JobFacts) -> bool:
    """Whether a person accepted the loss of this very epoch.

    An annotation for an older loss accepts no later one.
    """
    said = facts.job.accepted_loss
    return said == str(facts.membership.generation)


def how_to_accept_loss(facts: JobFacts) -> str:
    """The annotation by which a person accepts the loss."""
    return f'annotate the job with {ACCEPT_LOSS}: "{facts.membership.generation}"'


def describe_loss(facts: TierFacts, left_out: tuple[UnreadRecord, ...]) -> str:
    """Says what is lost, and where it was."""
    if left_out:
        return f"no checkpoint can be restored: {left_out[0]} ({len(left_out)} such records; put the files back from a copy)"
    status = facts.status
    last, most = status.last_complete or status.last_uploaded, restore_limit(facts)
    if most:
        return (
            f"every copy of every checkpoint up to step {most}, to which a rollback goes back, is lost{_where(facts)};"
            " of what may be left behind it the loss was odd"
        )
    return f"every copy of every checkpoint is lost (the last known was {last}){_where(facts)}"


def waiting_message(facts: TierFacts, left_out: tuple[UnreadRecord, ...]) -> str:
    """The condition's message: what is lost, since when, the ways out."""
    since = datetime.fromtimestamp(facts.membership.changed_seconds, UTC).isoformat(timespec="seconds")
    begin = origin_of(facts.status) or "step 0"
    sentences = [
        describe_loss(facts, left_out),
        f"The job has waited since {since}, keeps what is in memory, and continues by itself when any of it comes back",
        f"To begin again at {begin} instead, {how_to_accept_loss(facts)}",
        "To end the job, set spec.checkpoint.onTotalLoss to Fail, or delete it",
    ]
    said = facts.job.accepted_loss
    if said and not is_loss_accepted(facts):
        shown = said if len(said) <= _MAX_SHOWN_CHARACTERS else said[:_MAX_SHOWN_CHARACTERS] + "…"
        sentences.append(
            f"Its annotation {ACCEPT_LOSS} says {shown!r}, which is not this epoch, {facts.membership.generation}"
        )
    return ". ".join(sentences)


def _where(facts: TierFacts) -> str:
    named = {e.instance.node for e in facts.status.assigned_servers}
    members = {m.node for m in facts.membership.members}
    if not named:  # the fabric knows of each that it is gone
        return f"; its workers saved from {join_names(sorted(members))}, and those holders are gone" if members else ""
    silent = sorted({e.instance.node for e in may_still_have_data(facts)})
    # a holder that was known to be gone a moment before the others is named no more, and had its workers' saves too
    text = f"; it was on the holders of {join_names(sorted(named | members))}"
    return f"{text}, of which {join_names(silent)} do not answer" if silent else f"{text}, and none has it any more"


# ---- restore point ---------------------------------------------------------------------------------------------------

LISTING_PATIENCE_SECONDS = 2.0
"""How long a listing is waited for at least where memory has a complete checkpoint."""

MAX_LISTING_SECONDS = 30.0
"""How long it is waited for at most there, however often another reading made it void: a holder may come and go for ever."""

UNANSWERED_RETRY_SECONDS = 5.0
"""How soon a listing that lacks a decisive record is asked for again."""

FIRST_ANSWER_SECONDS = 1.5
"""How long an operator that has just come waits at least for a first answer: one call takes up to a second."""


def choose_restore_point(facts: Facts) -> Choice:
    """Returns what the claimed epoch needs next, or its parent."""
    draining = _wait_for_flushes(facts)
    if draining is not None:
        return draining
    unread = [h for h in facts.holder_list if h.state == "Ready" and h.read_generation != facts.membership.generation]
    if unread:
        servers = sorted(h.endpoint.instance for h in unread)
        actions = tuple(FenceMemoryServer(server, facts.membership.generation) for server in servers)
        return RestorePending(f"sealing and reading {join_names(servers)}", actions)
    best = _best(facts)
    worth = _wait_budget_seconds(facts, best)
    patience = min(worth, facts.spec.checkpoint.memory_server_timeout_seconds)
    if patience and facts.term_seconds > facts.membership.changed_seconds:
        patience = max(patience, FIRST_ANSWER_SECONDS)
    limit = _began(facts) + patience
    return (
        _listing(facts, best, limit)
        or _unchecked(facts, best)
        or _wait_for_silent_servers(facts, best, patience, worth)
        or _conclusion(facts, best)
    )


def last_uploaded_bound(facts: TierFacts) -> Checkpoint | None:
    """The floor below which nothing is restored; None: a damaged one.

    A floor whose record was withheld may be good, so it still counts. One beyond what a rollback goes back to does not.
    """
    floor, persistent = facts.status.last_uploaded, facts.persistent
    if floor in facts.status.unreadable_checkpoints or (floor is not None and _beyond(facts, floor)):
        return None
    unjudged = persistent.read_generation == facts.membership.generation and floor in persistent.undecidable
    return None if unjudged and not _withheld(persistent, floor) else floor


def _beyond(facts: JobFacts, checkpoint: Checkpoint) -> bool:
    """Whether a rollback leaves this checkpoint behind."""
    most = restore_limit(facts)
    return most is not None and checkpoint.step > most


def _withheld(persistent: PersistentListing, floor: Checkpoint | None) -> bool:
    """Whether the tier did not give a record of it, and gave none that is damaged."""
    layouts = {m.layout for m in persistent.entries or () if m.save.checkpoint == floor}
    its = [one for one in persistent.unread_records if one.checkpoint == floor or one.digest in layouts]
    return bool(its) and all(one.silent for one in its)


def _wait_for_flushes(facts: WorldFacts) -> RestorePending | None:
    """Until no newer step of the old epoch can complete any more, or the grace ends."""
    generation, membership = facts.running_generation, facts.membership
    if not generation:
        return None
    live = [s for s in facts.sessions.values() if is_responsive(facts, s)]
    running = [s for s in live if s.stopped < membership.generation and s.generation == generation]
    busy = [s for s in live if any(c.generation == generation for c in s.pending)]
    until = membership.changed_seconds + facts.spec.checkpoint.flush_grace_seconds
    if not (running or busy) or facts.now >= until:
        return None
    if running:
        names = join_names(sorted(s.index for s in running))
        return RestorePending(f"workers {names} are stopping their trainers", until_seconds=until, stopped=False)
    return RestorePending("saves of the old epoch are still on their way to the holders", until_seconds=until)


def _began(facts: JobFacts) -> float:
    """When silence began to count: an operator that came during a claim has not asked anybody before."""
    return max(facts.membership.changed_seconds, facts.term_seconds)


def _best(facts: TierFacts) -> Checkpoint | None:
    """The newest checkpoint that was read to be complete, on the lineage, and not below the floor."""
    floor = last_uploaded_bound(facts)
    return newest_checkpoint(c for c in _readable(facts) if floor is None or c.step >= floor.step)


def _readable(facts: TierFacts) -> list[Checkpoint]:
    """Lists what was read to be complete on the lineage, and is not beyond what a rollback goes back to."""
    generation = facts.running_generation
    if not generation:
        return []
    reading = reading_at(facts, facts.membership.generation)
    found = complete_checkpoints(reading, facts.status.lineage, generation, unreadable_checkpoints(facts), facts.covers)
    return [checkpoint for checkpoint in found if not _beyond(facts, checkpoint)]


def _wait_budget_seconds(facts: WorldFacts, best: Checkpoint | None) -> float:
    """Seconds that an unknown tier is worth: what running the lost steps again would cost; endless if nothing is left."""
    incident = open_incident(facts.status.incidents)
    reached = max(
        facts.status.step, step_of(facts, facts.running_generation), incident.last_step if incident is not None else 0
    )
    most = restore_limit(facts)
    if most == 0:
        return 0.0  # whoever begins again wants nothing that any tier has
    reached = reached if most is None else min(reached, most)
    base = best or origin_of(facts.status)
    lost = max(0, reached - (base.step if base else 0))
    if best is not None and lost <= 0:
        return 0.0
    if best is None and facts.status.had_checkpoint:
        return math.inf
    pace = seconds_per_step(facts)
    return max(facts.spec.checkpoint.memory_server_timeout_seconds, lost * 1.0) if pace is None else lost * pace


def _listing(facts: WorldTierFacts, best: Checkpoint | None, limit: float) -> RestorePending | None:
    """The persistent tier, listed after the last index was read."""
    persistent, generation = facts.persistent, facts.membership.generation
    if facts.spec.checkpoint.persistent is None or not facts.running_generation or restore_limit(facts) == 0:
        return None
    latest = max(limit, _began(facts) + MAX_LISTING_SECONDS)
    if best is not None and facts.now >= latest:
        return None
    if persistent.read_generation == generation:
        # data moves from memory to the persistent tier: what a holder lost since may be there by now
        unread = (h.since_seconds for h in facts.holder_list if h.state != "Ready")
        lost = max(unread, default=0.0)
        if persistent.requested_seconds is None or lost <= persistent.requested_seconds:
            return None
        return listing(facts, replace(persistent, requested_seconds=None))
    if best is None or persistent.requested_seconds is None:
        return listing(facts, persistent)
    # what memory has is good: however long the listing takes, or whatever it fails of, it is not waited for any longer
    until = (
        limit if persistent.error is not None else max(limit, persistent.requested_seconds + LISTING_PATIENCE_SECONDS)
    )
    if facts.now >= until:
        return None
    waiting = listing(facts, persistent)
    return replace(waiting, until_seconds=min(until, waiting.until_seconds or until))


def _unchecked(facts: TierFacts, best: Checkpoint | None) -> RestorePending | None:
    """A newer checkpoint has all its ranks, and whether they cover every tensor is not known yet."""
    reading = reading_at(facts, facts.membership.generation)
    lost = facts.persistent.lost_layouts  # nobody will bring these
    unknown = {s for s in layouts_to_check(reading) - set(facts.covers) if not s & lost}
    if not unknown or not facts.running_generation:
        return None
    assumed = {**facts.covers, **dict.fromkeys(unknown, True)}
    newer = [
        c for c, ranks in reading.manifests().items() if _is_preferable(facts, c, best) and is_complete(ranks, assumed)
    ]
    until = facts.membership.changed_seconds + facts.spec.checkpoint.memory_server_timeout_seconds
    if not newer or facts.now >= until:
        return None
    return RestorePending(f"checking that the layouts of {max(newer)} cover every tensor", until_seconds=until)


def _is_preferable(facts: JobFacts, checkpoint: Checkpoint, best: Checkpoint | None) -> bool:
    """Whether it would be restored rather than `best`, were it whole."""
    return (
        checkpoint not in unreadable_checkpoints(facts)
        and on_lineage(facts.status.lineage, checkpoint, facts.running_generation)
        and (best is None or checkpoint.step > best.step)
        and not _beyond(facts, checkpoint)
    )


def has_nothing_newer(facts: JobFacts, server: ObservedMemoryServer | None, best: Checkpoint | None) -> bool:
    """Whether a holder's sealed index has no part of what is wanted.

    None comes behind the seal, however long the holder is silent afterwards.
    """
    if server is None or server.read_generation != facts.membership.generation:
        return False
    return not any(_is_preferable(facts, m.save.checkpoint, best) for m in server.entries)


def _wait_for_silent_servers(
    facts: Facts, best: Checkpoint | None, patience: float, worth: float
) -> RestorePending | None:
    """Each that may have what is wanted is waited for since it fell silent, also one that was read before.

    One that lives, as far as anybody can tell, is waited for as long as what it may hold is worth, for an unreachable
    copy is no lost copy; so is nobody else.
    """
    if is_loss_accepted(facts):
        return None
    began = _began(facts)
    until, alive = dict[MemoryServerInstance, float](), dict[MemoryServerInstance, str]()
    for endpoint in awaited_servers(facts, worth):
        server, known = endpoint.instance, facts.servers.get(endpoint.instance)
        if has_nothing_newer(facts, known, best):
            continue
        start = max(began, known.since_seconds) if known is not None else began
        why = why_alive(facts, endpoint, worth)
        if why:
            alive[server] = why
        until[server] = start + (worth if why else patience)
    waiting = sorted(server for server, limit in until.items() if facts.now < limit)
    if not waiting:
        return None
    limit = max(until[server] for server in waiting)
    again = limit if math.isfinite(limit) else None
    names = join_names(waiting)
    seen = next((server for server in waiting if server in alive), None)
    if seen is None:
        return RestorePending(f"waiting up to {patience:.1f} s for {names}: they may have newer steps", (), again)
    return RestorePending(
        f"waiting for {names}, which the operator cannot reach: {alive[seen]}. To continue without it, {how_to_accept_loss(facts)}",
        (),
        again,
    )


def _conclusion(facts: WorldTierFacts, best: Checkpoint | None) -> Choice:
    status, membership = facts.status, facts.membership
    unknown = _beyond_status(facts)
    if unknown is not None and (best is None or unknown.step > best.step) and not is_loss_accepted(facts):
        return _offered(facts, unknown, best)
    silent = tuple(unreachable_servers(facts))
    persistent = facts.spec.checkpoint.persistent is not None and bool(facts.running_generation)
    unlisted = persistent and facts.persistent.read_generation != membership.generation
    if best is not None:
        return RestoreChosen(best, silent, unlisted)
    if restore_limit(facts) == 0:
        return initial_restore_point(facts, silent)
    if unlisted:
        return RestorePending("no checkpoint is left in memory and the persistent tier does not answer: waiting for it")
    left_out = facts.persistent.unread_records if persistent else ()
    if any(one.silent for one in left_out):
        return _list_again_if_unread(facts, left_out)
    further = older_target(facts)
    if further is not None:
        return further
    nothing_to_lose = not facts.running_generation or (
        not status.had_checkpoint and status.last_uploaded is None and not left_out
    )
    floor, older = last_uploaded_bound(facts), _older_than_last_uploaded(facts) if persistent else None
    if floor is not None and older is not None:
        gone = f"{floor}, which was stored last, is in the persistent tier no more"
        again = f"{gone}: it is listed once more before {older} is restored"
        return _listed_after(facts, LIST_AGAIN_AFTER_SECONDS, again) or LastUploadedLost(
            floor, f"{gone}, nor in memory: {older}, which is there, is restored"
        )
    policy = facts.spec.checkpoint.on_total_loss
    if nothing_to_lose or is_loss_accepted(facts):
        return initial_restore_point(facts, silent)
    if policy == "Wait":
        return _lost(facts, left_out)
    late = _late_uploads(facts) if persistent else None
    if late is not None:
        return late
    if policy == "Restart":
        return initial_restore_point(facts, silent)
    return TotalLoss(
        f"{describe_loss(facts, left_out)}; "
        f"spec.checkpoint.onTotalLoss: Restart would begin again at {origin_of(status) or 'step 0'}"
    )


def _beyond_status(facts: TierFacts) -> Checkpoint | None:
    """The newest complete checkpoint of an epoch after all that status knows: status was restored from a backup."""
    persistent = facts.persistent
    if persistent.read_generation != facts.membership.generation or restore_limit(facts) == 0:
        return None
    found = TierReading({}, persistent.entries).manifests().items()
    later = [c for c, ranks in found if facts.running_generation < c.generation <= HIGHEST_EPOCH and c not in unreadable_checkpoints(facts)
             and is_complete(ranks, facts.covers)]  # fmt: skip
    return max(later, key=lambda c: (c.generation, c.step), default=None)


def _offered(facts: JobFacts, unknown: Checkpoint, best: Checkpoint | None) -> RestorePending:
    """Steps that are stored are not trained again without a word: a person chooses."""
    text = (
        f"the persistent tier has {unknown}, of an epoch that this job's status does not know (the newest it knows is"
        f" {facts.running_generation}; was it restored from a backup?). The job trains and removes nothing until you choose."
        f" To continue from {unknown}, create a new job with spec.checkpoint.restoreFrom that names this job's folder and"
        f" step {unknown.step}. To continue from {best or 'step 0'} instead, {how_to_accept_loss(facts)}"
    )
    return RestorePending(text, lost=text)


def _lost(facts: WorldTierFacts, left_out: tuple[UnreadRecord, ...]) -> RestorePending:
    """Holders that come back are read as ever; of the persistent tier nobody tells, so it is listed now and then."""
    text = waiting_message(facts, left_out)
    if facts.spec.checkpoint.persistent is None:
        return RestorePending(text, lost=text)
    actions, again = _list_again(facts, LIST_RETRY_SECONDS)
    return RestorePending(text, actions, again, lost=text)


def _older_than_last_uploaded(facts: TierFacts) -> Checkpoint | None:
    """The newest that can be read below a floor that cannot, in a listing that withheld nothing.

    Somebody deleted what was stored last, a bucket's lifecycle rule for example. To wait for it, or to begin anew, would lose what is
    there as well.
    """
    floor = last_uploaded_bound(facts)
    return newest_checkpoint(c for c in _readable(facts) if c.step < floor.step) if floor is not None else None


def _late_uploads(facts: WorldTierFacts) -> RestorePending | None:
    """What ends a job, or begins it again, is decided by a listing that no upload of the old epoch can come after."""
    reason = "no checkpoint is left, unless an upload that had begun still arrives in the persistent tier"
    return _listed_after(facts, LATE_UPLOAD_SECONDS, f"{reason}: it is listed once more before the job is given up")


def _listed_after(facts: WorldTierFacts, seconds: float, reason: str) -> RestorePending | None:
    """None: the tier was listed so long after the failure."""
    persistent, settled = facts.persistent, facts.membership.changed_seconds + seconds
    if persistent.requested_seconds is not None and persistent.requested_seconds >= settled:
        return None
    if facts.now >= settled:
        return listing(facts, replace(persistent, requested_seconds=None))
    return RestorePending(reason, until_seconds=settled)


def _list_again_if_unread(facts: WorldTierFacts, left_out: tuple[UnreadRecord, ...]) -> RestorePending:
    """Some record was not given: what it says decides, so the tier is listed again until it is."""
    named = next(one for one in left_out if one.silent)
    actions, again = _list_again(facts, UNANSWERED_RETRY_SECONDS)
    reason = f"no other checkpoint is left, and the persistent tier does not return a record that decides: {named}"
    return RestorePending(f"{reason}. It is listed again; make the tier answer, or remove that record", actions, again)


def _list_again(facts: WorldTierFacts, pause_seconds: float) -> tuple[tuple[ListPersistentTier, ...], float]:
    """Another listing once the pause behind the last is over, and when that is."""
    again = (facts.persistent.requested_seconds or facts.now) + pause_seconds
    there = min((s.index for s in facts.sessions.values() if is_responsive(facts, s)), default=None)
    actions = (
        (ListPersistentTier(facts.membership.generation, there),) if there is not None and facts.now >= again else ()
    )
    return actions, again


def describe(membership: Membership, parent: Checkpoint | None) -> str:
    return (
        f"epoch {membership.generation} restores {parent}"
        if parent
        else f"epoch {membership.generation} begins at step 0"
    )
