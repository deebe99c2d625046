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
    LeftOut,
    TierReading,
    complete,
    is_complete,
    layouts_to_check,
    newest,
    on_lineage,
)
from surefoot.protocol.identities import Checkpoint, HolderEndpoint, HolderId, OlderJob
from surefoot.protocol.text import listed
from surefoot_operator.api.spec import ACCEPT_LOSS, CheckpointPolicy
from surefoot_operator.api.status import JobStatus, World
from surefoot_operator.job_snapshot import HIGHEST_EPOCH, HolderSeen, PersistentSeen
from surefoot_operator.policy.core.actions import ListPersistentTier, SealHolder
from surefoot_operator.policy.core.facts import (
    Facts,
    JobFacts,
    TierFacts,
    WorldFacts,
    WorldTierFacts,
    bad_of,
    is_responsive,
    reading_at,
    seconds_per_step,
    step_of,
)
from surefoot_operator.policy.failure.incidents import open_incident
from surefoot_operator.policy.failure.memory_server_liveness import (
    awaited,
    may_return,
    silent_holders,
    why_alive,
)
from surefoot_operator.policy.membership.restore_decisions import (
    Choice,
    Chosen,
    FloorGone,
    NothingToTakeUp,
    TotalLoss,
    Waiting,
    ceiling,
    further_on,
    listing,
)

# ---- initial restore -------------------------------------------------------------------------------------------------
# Chooses the initial restore point: step 0 or an older job's checkpoint. Pure; called below for the first epoch, and
# for a later one without any checkpoint on its lineage. An older job's checkpoint is chosen once and kept in status;
# again only if it is unreadable.

_MOST_NAMED = 8


def older_job(policy: CheckpointPolicy) -> OlderJob | None:
    """The job that `checkpoint.restoreFrom` names."""
    given = policy.restore_from
    if given is None:
        return None
    if given.uri is not None:
        uri, _, job = given.uri.rstrip("/").rpartition("/")
        return OlderJob(f"{uri}/" if uri.endswith("//") else uri, job)
    return OlderJob(policy.persistent.uri, given.uid) if policy.persistent is not None and given.uid else None


def origin_of(status: JobStatus) -> Checkpoint | None:
    """The older job's checkpoint that this job began from, if any."""
    return None if status.origin in status.bad else status.origin


def initial_restore_point(
    facts: WorldTierFacts, silent: tuple[HolderEndpoint, ...]
) -> Waiting | Chosen | NothingToTakeUp:
    """Chooses the parent of an epoch without a checkpoint of its own."""
    status = facts.status
    origin = origin_of(status)
    if origin is not None:
        return Chosen(origin, silent, older_job=status.older_job)
    # a job that has begun without one does not turn to an older job later
    older = status.older_job or (None if facts.running_epoch else older_job(facts.spec.checkpoint))
    if older is None:
        return Chosen(None, silent)
    seen = facts.older
    if seen.older_job != older or seen.read_epoch != facts.world.epoch:
        return listing(facts, seen, older)
    given = facts.spec.checkpoint.restore_from
    step = given.step if given is not None else "latest"
    found = older_job_checkpoints(facts)
    # epochs are negated here: of one step, the least is the newest epoch's
    chosen = max((c for c in found if step in ("latest", c.step)), key=lambda c: (c.step, -c.epoch), default=None)
    if chosen is None:
        return NothingToTakeUp(_missing(facts, older, step, found))
    return Chosen(chosen, silent, older_job=older)


def older_job_checkpoints(facts: TierFacts) -> list[Checkpoint]:
    """The older job's checkpoints that its listing shows to be complete.

    Unreadable ones are left out. Its lineage is neither known nor needed: of two epochs that completed one step, the
    job went on from the newer.
    """
    reading = TierReading({}, facts.older.entries)
    found = reading.manifests().items()
    return [c for c, ranks in found if c not in facts.status.bad and is_complete(ranks, facts.covers)]


def _missing(facts: JobFacts, older: OlderJob, step: int | str, found: Iterable[Checkpoint]) -> str:
    steps = sorted({c.step for c in found}, reverse=True)
    named = ", ".join(map(str, steps[:_MOST_NAMED])) + (", …" if len(steps) > _MOST_NAMED else "")
    there = f"complete are those of steps {named}" if steps else "none is complete there"
    unreadable = [c for c in facts.status.bad if c.imported and step in ("latest", c.step)]
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

_LONGEST_SHOWN = 40


def is_loss_accepted(facts: JobFacts) -> bool:
    """Whether a person accepted the loss of this very epoch.

    An annotation for an older loss accepts no later one.
    """
    said = facts.job.accepted_loss
    return said == str(facts.world.epoch)


def how_to_accept_loss(facts: JobFacts) -> str:
    """The annotation by which a person accepts the loss."""
    return f'annotate the job with {ACCEPT_LOSS}: "{facts.world.epoch}"'


def describe_loss(facts: TierFacts, left_out: tuple[LeftOut, ...]) -> str:
    """Says what is lost, and where it was."""
    if left_out:
        return f"no checkpoint can be restored: {left_out[0]} ({len(left_out)} such records; put the files back from a copy)"
    status = facts.status
    last, most = status.last_complete or status.floor, ceiling(facts)
    if most:
        return (
            f"every copy of every checkpoint up to step {most}, to which a rollback goes back, is lost{_where(facts)};"
            " of what may be left behind it the loss was odd"
        )
    return f"every copy of every checkpoint is lost (the last known was {last}){_where(facts)}"


def waiting_message(facts: TierFacts, left_out: tuple[LeftOut, ...]) -> str:
    """The condition's message: what is lost, since when, the ways out."""
    since = datetime.fromtimestamp(facts.world.changed_seconds, UTC).isoformat(timespec="seconds")
    begin = origin_of(facts.status) or "step 0"
    sentences = [
        describe_loss(facts, left_out),
        f"The job has waited since {since}, keeps what is in memory, and continues by itself when any of it comes back",
        f"To begin again at {begin} instead, {how_to_accept_loss(facts)}",
        "To end the job, set spec.checkpoint.onTotalLoss to Fail, or delete it",
    ]
    said = facts.job.accepted_loss
    if said and not is_loss_accepted(facts):
        shown = said if len(said) <= _LONGEST_SHOWN else said[:_LONGEST_SHOWN] + "…"
        sentences.append(f"Its annotation {ACCEPT_LOSS} says {shown!r}, which is not this epoch, {facts.world.epoch}")
    return ". ".join(sentences)


def _where(facts: TierFacts) -> str:
    named = {e.holder.node for e in facts.status.named_holders}
    members = {m.node for m in facts.world.members}
    if not named:  # the fabric knows of each that it is gone
        return f"; its workers saved from {listed(sorted(members))}, and those holders are gone" if members else ""
    silent = sorted({e.holder.node for e in may_return(facts)})
    # a holder that was known to be gone a moment before the others is named no more, and had its workers' saves too
    text = f"; it was on the holders of {listed(sorted(named | members))}"
    return f"{text}, of which {listed(silent)} do not answer" if silent else f"{text}, and none has it any more"


# ---- restore point ---------------------------------------------------------------------------------------------------

LISTING_PATIENCE_SECONDS = 2.0
"""How long a listing is waited for at least where memory has a complete checkpoint."""

LONGEST_LISTING_SECONDS = 30.0
"""How long it is waited for at most there, however often another reading made it void: a holder may come and go for ever."""

UNANSWERED_AGAIN_SECONDS = 5.0
"""How soon a listing that lacks a decisive record is asked for again."""

FIRST_ANSWER_SECONDS = 1.5
"""How long an operator that has just come waits at least for a first answer: one call takes up to a second."""


def choose(facts: Facts) -> Choice:
    """Returns what the claimed epoch needs next, or its parent."""
    draining = _draining(facts)
    if draining is not None:
        return draining
    unread = [h for h in facts.holder_list if h.state == "Ready" and h.read_epoch != facts.world.epoch]
    if unread:
        holders = sorted(h.endpoint.holder for h in unread)
        actions = tuple(SealHolder(holder, facts.world.epoch) for holder in holders)
        return Waiting(f"sealing and reading {listed(holders)}", actions)
    best = _best(facts)
    worth = _worth_waiting(facts, best)
    patience = min(worth, facts.spec.checkpoint.holder_return_seconds)
    if patience and facts.term_seconds > facts.world.changed_seconds:
        patience = max(patience, FIRST_ANSWER_SECONDS)
    limit = _began(facts) + patience
    return (
        _listing(facts, best, limit)
        or _unchecked(facts, best)
        or _silence(facts, best, patience, worth)
        or _conclusion(facts, best)
    )


def floor_of(facts: TierFacts) -> Checkpoint | None:
    """The floor below which nothing is restored; None: a damaged one.

    A floor whose record was withheld may be good, so it still counts. One beyond what a rollback goes back to does not.
    """
    floor, persistent = facts.status.floor, facts.persistent
    if floor in facts.status.bad or (floor is not None and _beyond(facts, floor)):
        return None
    unjudged = persistent.read_epoch == facts.world.epoch and floor in persistent.unjudged
    return None if unjudged and not _withheld(persistent, floor) else floor


def _beyond(facts: JobFacts, checkpoint: Checkpoint) -> bool:
    """Whether a rollback leaves this checkpoint behind."""
    most = ceiling(facts)
    return most is not None and checkpoint.step > most


def _withheld(persistent: PersistentSeen, floor: Checkpoint | None) -> bool:
    """Whether the tier did not give a record of it, and gave none that is damaged."""
    layouts = {m.layout for m in persistent.entries or () if m.save.checkpoint == floor}
    its = [one for one in persistent.left_out if one.checkpoint == floor or one.digest in layouts]
    return bool(its) and all(one.silent for one in its)


def _draining(facts: WorldFacts) -> Waiting | None:
    """Until no newer step of the old epoch can complete any more, or the grace ends."""
    epoch, world = facts.running_epoch, facts.world
    if not epoch:
        return None
    live = [s for s in facts.sessions.values() if is_responsive(facts, s)]
    running = [s for s in live if s.stopped < world.epoch and s.epoch == epoch]
    busy = [s for s in live if any(c.epoch == epoch for c in s.pending)]
    until = world.changed_seconds + facts.spec.checkpoint.drain_grace_seconds
    if not (running or busy) or facts.now >= until:
        return None
    if running:
        names = listed(sorted(s.index for s in running))
        return Waiting(f"workers {names} are stopping their trainers", until_seconds=until, stopped=False)
    return Waiting("saves of the old epoch are still on their way to the holders", until_seconds=until)


def _began(facts: JobFacts) -> float:
    """When silence began to count: an operator that came during a claim has not asked anybody before."""
    return max(facts.world.changed_seconds, facts.term_seconds)


def _best(facts: TierFacts) -> Checkpoint | None:
    """The newest checkpoint that was read to be complete, on the lineage, and not below the floor."""
    floor = floor_of(facts)
    return newest(c for c in _readable(facts) if floor is None or c.step >= floor.step)


def _readable(facts: TierFacts) -> list[Checkpoint]:
    """Lists what was read to be complete on the lineage, and is not beyond what a rollback goes back to."""
    epoch = facts.running_epoch
    if not epoch:
        return []
    reading = reading_at(facts, facts.world.epoch)
    found = complete(reading, facts.status.lineage, epoch, bad_of(facts), facts.covers)
    return [checkpoint for checkpoint in found if not _beyond(facts, checkpoint)]


def _worth_waiting(facts: WorldFacts, best: Checkpoint | None) -> float:
    """Seconds that an unknown tier is worth: what running the lost steps again would cost; endless if nothing is left."""
    incident = open_incident(facts.status.incidents)
    reached = max(
        facts.status.step, step_of(facts, facts.running_epoch), incident.last_step if incident is not None else 0
    )
    most = ceiling(facts)
    if most == 0:
        return 0.0  # whoever begins again wants nothing that any tier has
    reached = reached if most is None else min(reached, most)
    base = best or origin_of(facts.status)
    lost = max(0, reached - (base.step if base else 0))
    if best is not None and lost <= 0:
        return 0.0
    if best is None and facts.status.recorded:
        return math.inf
    pace = seconds_per_step(facts)
    return max(facts.spec.checkpoint.holder_return_seconds, lost * 1.0) if pace is None else lost * pace


def _listing(facts: WorldTierFacts, best: Checkpoint | None, limit: float) -> Waiting | None:
    """The persistent tier, listed after the last index was read."""
    persistent, epoch = facts.persistent, facts.world.epoch
    if facts.spec.checkpoint.persistent is None or not facts.running_epoch or ceiling(facts) == 0:
        return None
    latest = max(limit, _began(facts) + LONGEST_LISTING_SECONDS)
    if best is not None and facts.now >= latest:
        return None
    if persistent.read_epoch == epoch:
        # data moves from memory to the persistent tier: what a holder lost since may be there by now
        unread = (h.since_seconds for h in facts.holder_list if h.state != "Ready")
        lost = max(unread, default=0.0)
        if persistent.asked_seconds is None or lost <= persistent.asked_seconds:
            return None
        return listing(facts, replace(persistent, asked_seconds=None))
    if best is None or persistent.asked_seconds is None:
        return listing(facts, persistent)
    # what memory has is good: however long the listing takes, or whatever it fails of, it is not waited for any longer
    until = limit if persistent.error is not None else max(limit, persistent.asked_seconds + LISTING_PATIENCE_SECONDS)
    if facts.now >= until:
        return None
    waiting = listing(facts, persistent)
    return replace(waiting, until_seconds=min(until, waiting.until_seconds or until))


def _unchecked(facts: TierFacts, best: Checkpoint | None) -> Waiting | None:
    """A newer checkpoint has all its ranks, and whether they cover every tensor is not known yet."""
    reading = reading_at(facts, facts.world.epoch)
    lost = facts.persistent.lost_layouts  # nobody will bring these
    unknown = {s for s in layouts_to_check(reading) - set(facts.covers) if not s & lost}
    if not unknown or not facts.running_epoch:
        return None
    assumed = {**facts.covers, **dict.fromkeys(unknown, True)}
    newer = [
        c for c, ranks in reading.manifests().items() if _is_wanted(facts, c, best) and is_complete(ranks, assumed)
    ]
    until = facts.world.changed_seconds + facts.spec.checkpoint.holder_return_seconds
    if not newer or facts.now >= until:
        return None
    return Waiting(f"checking that the layouts of {max(newer)} cover every tensor", until_seconds=until)


def _is_wanted(facts: JobFacts, checkpoint: Checkpoint, best: Checkpoint | None) -> bool:
    """Whether it would be restored rather than `best`, were it whole."""
    return (
        checkpoint not in bad_of(facts)
        and on_lineage(facts.status.lineage, checkpoint, facts.running_epoch)
        and (best is None or checkpoint.step > best.step)
        and not _beyond(facts, checkpoint)
    )


def has_nothing_newer(facts: JobFacts, holder: HolderSeen | None, best: Checkpoint | None) -> bool:
    """Whether a holder's sealed index has no part of what is wanted.

    None comes behind the seal, however long the holder is silent afterwards.
    """
    if holder is None or holder.read_epoch != facts.world.epoch:
        return False
    return not any(_is_wanted(facts, m.save.checkpoint, best) for m in holder.entries)


def _silence(facts: Facts, best: Checkpoint | None, patience: float, worth: float) -> Waiting | None:
    """Each that may have what is wanted is waited for since it fell silent, also one that was read before.

    One that lives, as far as anybody can tell, is waited for as long as what it may hold is worth, for an unreachable
    copy is no lost copy; so is nobody else.
    """
    if is_loss_accepted(facts):
        return None
    began = _began(facts)
    until, alive = dict[HolderId, float](), dict[HolderId, str]()
    for endpoint in awaited(facts, worth):
        holder, known = endpoint.holder, facts.holders.get(endpoint.holder)
        if has_nothing_newer(facts, known, best):
            continue
        start = max(began, known.since_seconds) if known is not None else began
        why = why_alive(facts, endpoint, worth)
        if why:
            alive[holder] = why
        until[holder] = start + (worth if why else patience)
    waiting = sorted(holder for holder, limit in until.items() if facts.now < limit)
    if not waiting:
        return None
    limit = max(until[holder] for holder in waiting)
    again = limit if math.isfinite(limit) else None
    names = listed(waiting)
    seen = next((holder for holder in waiting if holder in alive), None)
    if seen is None:
        return Waiting(f"waiting up to {patience:.1f} s for {names}: they may have newer steps", (), again)
    return Waiting(
        f"waiting for {names}, which the operator cannot reach: {alive[seen]}. To continue without it, {how_to_accept_loss(facts)}",
        (),
        again,
    )


def _conclusion(facts: WorldTierFacts, best: Checkpoint | None) -> Choice:
    status, world = facts.status, facts.world
    unknown = _beyond_status(facts)
    if unknown is not None and (best is None or unknown.step > best.step) and not is_loss_accepted(facts):
        return _offered(facts, unknown, best)
    silent = tuple(silent_holders(facts))
    persistent = facts.spec.checkpoint.persistent is not None and bool(facts.running_epoch)
    unlisted = persistent and facts.persistent.read_epoch != world.epoch
    if best is not None:
        return Chosen(best, silent, unlisted)
    if ceiling(facts) == 0:
        return initial_restore_point(facts, silent)
    if unlisted:
        return Waiting("no checkpoint is left in memory and the persistent tier does not answer: waiting for it")
    left_out = facts.persistent.left_out if persistent else ()
    if any(one.silent for one in left_out):
        return _once_more(facts, left_out)
    further = further_on(facts)
    if further is not None:
        return further
    nothing_to_lose = not facts.running_epoch or (not status.recorded and status.floor is None and not left_out)
    floor, older = floor_of(facts), _older_than_floor(facts) if persistent else None
    if floor is not None and older is not None:
        gone = f"{floor}, which was stored last, is in the persistent tier no more"
        again = f"{gone}: it is listed once more before {older} is restored"
        return _listed_after(facts, LIST_AGAIN_AFTER_SECONDS, again) or FloorGone(
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
    if persistent.read_epoch != facts.world.epoch or ceiling(facts) == 0:
        return None
    found = TierReading({}, persistent.entries).manifests().items()
    later = [c for c, ranks in found if facts.running_epoch < c.epoch <= HIGHEST_EPOCH and c not in bad_of(facts)
             and is_complete(ranks, facts.covers)]  # fmt: skip
    return max(later, key=lambda c: (c.epoch, c.step), default=None)


def _offered(facts: JobFacts, unknown: Checkpoint, best: Checkpoint | None) -> Waiting:
    """Steps that are stored are not trained again without a word: a person chooses."""
    text = (
        f"the persistent tier has {unknown}, of an epoch that this job's status does not know (the newest it knows is"
        f" {facts.running_epoch}; was it restored from a backup?). The job trains and removes nothing until you choose."
        f" To continue from {unknown}, create a new job with spec.checkpoint.restoreFrom that names this job's folder and"
        f" step {unknown.step}. To continue from {best or 'step 0'} instead, {how_to_accept_loss(facts)}"
    )
    return Waiting(text, lost=text)


def _lost(facts: WorldTierFacts, left_out: tuple[LeftOut, ...]) -> Waiting:
    """Holders that come back are read as ever; of the persistent tier nobody tells, so it is listed now and then."""
    text = waiting_message(facts, left_out)
    if facts.spec.checkpoint.persistent is None:
        return Waiting(text, lost=text)
    actions, again = _list_again(facts, LIST_RETRY_SECONDS)
    return Waiting(text, actions, again, lost=text)


def _older_than_floor(facts: TierFacts) -> Checkpoint | None:
    """The newest that can be read below a floor that cannot, in a listing that withheld nothing.

    Somebody deleted what was stored last, a bucket's lifecycle rule for example. To wait for it, or to begin anew, would lose what is
    there as well.
    """
    floor = floor_of(facts)
    return newest(c for c in _readable(facts) if c.step < floor.step) if floor is not None else None


def _late_uploads(facts: WorldTierFacts) -> Waiting | None:
    """What ends a job, or begins it again, is decided by a listing that no upload of the old epoch can come after."""
    reason = "no checkpoint is left, unless an upload that had begun still arrives in the persistent tier"
    return _listed_after(facts, LATE_UPLOAD_SECONDS, f"{reason}: it is listed once more before the job is given up")


def _listed_after(facts: WorldTierFacts, seconds: float, reason: str) -> Waiting | None:
    """None: the tier was listed so long after the failure."""
    persistent, settled = facts.persistent, facts.world.changed_seconds + seconds
    if persistent.asked_seconds is not None and persistent.asked_seconds >= settled:
        return None
    if facts.now >= settled:
        return listing(facts, replace(persistent, asked_seconds=None))
    return Waiting(reason, until_seconds=settled)


def _once_more(facts: WorldTierFacts, left_out: tuple[LeftOut, ...]) -> Waiting:
    """Some record was not given: what it says decides, so the tier is listed again until it is."""
    named = next(one for one in left_out if one.silent)
    actions, again = _list_again(facts, UNANSWERED_AGAIN_SECONDS)
    reason = f"no other checkpoint is left, and the persistent tier does not return a record that decides: {named}"
    return Waiting(f"{reason}. It is listed again; make the tier answer, or remove that record", actions, again)


def _list_again(facts: WorldTierFacts, pause_seconds: float) -> tuple[tuple[ListPersistentTier, ...], float]:
    """Another listing once the pause behind the last is over, and when that is."""
    again = (facts.persistent.asked_seconds or facts.now) + pause_seconds
    there = min((s.index for s in facts.sessions.values() if is_responsive(facts, s)), default=None)
    actions = (ListPersistentTier(facts.world.epoch, there),) if there is not None and facts.now >= again else ()
    return actions, again


def describe(world: World, parent: Checkpoint | None) -> str:
    return f"epoch {world.epoch} restores {parent}" if parent else f"epoch {world.epoch} begins at step 0"
