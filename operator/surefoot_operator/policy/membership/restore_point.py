"""Chooses the restore point of a claimed epoch.

Pure; called by `claimed_plan` until it answers with a parent. A silent tier is unknown, never empty: it is waited for, but no
longer than it takes to run again the steps that it may hold.
"""

from __future__ import annotations

import math
from dataclasses import replace

from surefoot.protocol.checkpoints.completeness import LeftOut, TierReading, complete, is_complete, layouts_to_check
from surefoot.protocol.checkpoints.lineage import newest, on_lineage
from surefoot.protocol.identities import Checkpoint, HolderId
from surefoot.protocol.plain import listed
from surefoot_operator.api.status import World
from surefoot_operator.observed_tiers import HIGHEST_EPOCH, HolderSeen, PersistentSeen
from surefoot_operator.policy.core.actions import ListPersistentTier, SealHolder
from surefoot_operator.policy.core.facts import Facts, bad_of, is_responsive, reading_at, seconds_per_step, step_of
from surefoot_operator.policy.failure.incidents import open_incident
from surefoot_operator.policy.failure.memory_server_liveness import (
    UNSEEN_SECONDS,
    answers_awaited,
    awaited,
    living,
    looks,
    most_unseen,
    silent_holders,
)
from surefoot_operator.policy.membership import total_loss
from surefoot_operator.policy.membership.initial_restore import initial_restore_point, origin_of
from surefoot_operator.policy.membership.restore_decisions import Choice, Chosen, FloorGone, TotalLoss, Waiting, listing
from surefoot_operator.policy.membership.rollback_record import ceiling, further_on

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
    unread = [h for h in facts.seen.holders if h.state == "Ready" and h.read_epoch != facts.world.epoch]
    if unread:
        holders = sorted(h.endpoint.holder for h in unread)
        actions = tuple(SealHolder(holder, facts.world.epoch) for holder in holders)
        return Waiting(f"sealing and reading {listed(holders)}", actions)
    best = _best(facts)
    worth = _worth_waiting(facts, best)
    patience = min(worth, facts.spec.checkpoint.holder_return_seconds)
    if patience and facts.seen.term_seconds > facts.world.changed_seconds:
        patience = max(patience, FIRST_ANSWER_SECONDS)
    limit = _began(facts) + patience
    step = (
        _listing(facts, best, limit)
        or _unchecked(facts, best)
        or _silence(facts, best, patience, worth)
        or _conclusion(facts, best)
    )
    if isinstance(step, Waiting):
        return replace(step, actions=(*step.actions, *looks(facts, worth)))
    return step


def floor_of(facts: Facts) -> Checkpoint | None:
    """The floor below which nothing is restored; None: a damaged one.

    A floor whose record was withheld may be good, so it still counts. One beyond what a rollback goes back to does not.
    """
    floor, persistent = facts.status.floor, facts.seen.persistent
    if floor in facts.status.bad or (floor is not None and _beyond(facts, floor)):
        return None
    unjudged = persistent.read_epoch == facts.world.epoch and floor in persistent.unjudged
    return None if unjudged and not _withheld(persistent, floor) else floor


def _beyond(facts: Facts, checkpoint: Checkpoint) -> bool:
    """Whether a rollback leaves this checkpoint behind."""
    most = ceiling(facts)
    return most is not None and checkpoint.step > most


def _withheld(persistent: PersistentSeen, floor: Checkpoint | None) -> bool:
    """Whether the tier did not give a record of it, and gave none that is damaged."""
    layouts = {m.layout for m in persistent.entries or () if m.save.checkpoint == floor}
    its = [one for one in persistent.left_out if one.checkpoint == floor or one.digest in layouts]
    return bool(its) and all(one.silent for one in its)


def _draining(facts: Facts) -> Waiting | None:
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


def _began(facts: Facts) -> float:
    """When silence began to count: an operator that came during a claim has not asked anybody before."""
    return max(facts.world.changed_seconds, facts.seen.term_seconds)


def _best(facts: Facts) -> Checkpoint | None:
    """The newest checkpoint that was read to be complete, on the lineage, and not below the floor."""
    floor = floor_of(facts)
    return newest(c for c in _readable(facts) if floor is None or c.step >= floor.step)


def _readable(facts: Facts) -> list[Checkpoint]:
    """Lists what was read to be complete on the lineage, and is not beyond what a rollback goes back to."""
    epoch = facts.running_epoch
    if not epoch:
        return []
    reading = reading_at(facts, facts.world.epoch)
    found = complete(reading, facts.status.lineage, epoch, bad_of(facts), facts.seen.covers)
    return [checkpoint for checkpoint in found if not _beyond(facts, checkpoint)]


def _worth_waiting(facts: Facts, best: Checkpoint | None) -> float:
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


def _listing(facts: Facts, best: Checkpoint | None, limit: float) -> Waiting | None:
    """The persistent tier, listed after the last index was read."""
    persistent, epoch = facts.seen.persistent, facts.world.epoch
    if facts.spec.checkpoint.persistent is None or not facts.running_epoch or ceiling(facts) == 0:
        return None
    latest = max(limit, _began(facts) + LONGEST_LISTING_SECONDS)
    if best is not None and facts.now >= latest:
        return None
    if persistent.read_epoch == epoch:
        # data moves from memory to the persistent tier: what a holder lost since may be there by now
        unread = (h.since_seconds for h in facts.seen.holders if h.state not in ("Ready", "Proxied"))
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


def _unchecked(facts: Facts, best: Checkpoint | None) -> Waiting | None:
    """A newer checkpoint has all its ranks, and whether they cover every tensor is not known yet."""
    reading = reading_at(facts, facts.world.epoch)
    lost = facts.seen.persistent.lost_layouts  # nobody will bring these
    unknown = {s for s in layouts_to_check(reading) - set(facts.seen.covers) if not s & lost}
    if not unknown or not facts.running_epoch:
        return None
    assumed = {**facts.seen.covers, **dict.fromkeys(unknown, True)}
    newer = [
        c for c, ranks in reading.manifests().items() if _is_wanted(facts, c, best) and is_complete(ranks, assumed)
    ]
    until = facts.world.changed_seconds + facts.spec.checkpoint.holder_return_seconds
    if not newer or facts.now >= until:
        return None
    return Waiting(f"checking that the layouts of {max(newer)} cover every tensor", until_seconds=until)


def _is_wanted(facts: Facts, checkpoint: Checkpoint, best: Checkpoint | None) -> bool:
    """Whether it would be restored rather than `best`, were it whole."""
    return (
        checkpoint not in bad_of(facts)
        and on_lineage(facts.status.lineage, checkpoint, facts.running_epoch)
        and (best is None or checkpoint.step > best.step)
        and not _beyond(facts, checkpoint)
    )


def has_nothing_newer(facts: Facts, holder: HolderSeen | None, best: Checkpoint | None) -> bool:
    """Whether a holder's sealed index has no part of what is wanted.

    None comes behind the seal, however long the holder is silent afterwards.
    """
    if holder is None or holder.read_epoch != facts.world.epoch:
        return False
    return not any(_is_wanted(facts, m.save.checkpoint, best) for m in holder.entries)


def _silence(facts: Facts, best: Checkpoint | None, patience: float, worth: float) -> Waiting | None:
    """Each that may have what is wanted is waited for since it fell silent, also one that was read before.

    One that lives, as far as anybody can tell, is waited for as long as what it may hold is worth, for lost sight is no
    lost data; so is nobody else.
    """
    if total_loss.accepted(facts):
        return None
    began, blind = _began(facts), set(most_unseen(facts))
    until, alive = dict[HolderId, float](), dict[HolderId, str]()
    for endpoint in awaited(facts, worth):
        holder, known = endpoint.holder, facts.holders.get(endpoint.holder)
        if has_nothing_newer(facts, known, best):
            continue
        start = max(began, known.since_seconds) if known is not None else began
        why = living(facts, endpoint)
        if why:
            alive[holder] = why
        until[holder] = start + (worth if why else patience)
        if not why and worth > patience:
            asked = answers_awaited(facts, endpoint)
            until[holder] = max(until[holder], asked, start + min(worth, UNSEEN_SECONDS) if endpoint in blind else 0.0)
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
        f"waiting for {names}, which the operator cannot reach: {alive[seen]}. To continue without it, {total_loss.acceptance(facts)}",
        (),
        again,
    )


def _conclusion(facts: Facts, best: Checkpoint | None) -> Choice:
    status, world = facts.status, facts.world
    unknown = _beyond_status(facts)
    if unknown is not None and (best is None or unknown.step > best.step) and not total_loss.accepted(facts):
        return _offered(facts, unknown, best)
    silent = tuple(silent_holders(facts))
    persistent = facts.spec.checkpoint.persistent is not None and bool(facts.running_epoch)
    unlisted = persistent and facts.seen.persistent.read_epoch != world.epoch
    if best is not None:
        return Chosen(best, silent, unlisted)
    if ceiling(facts) == 0:
        return initial_restore_point(facts, silent)
    if unlisted:
        return Waiting("no checkpoint is left in memory and the persistent tier does not answer: waiting for it")
    left_out = facts.seen.persistent.left_out if persistent else ()
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
        return _listed_after(facts, total_loss.GONE_SECONDS, again) or FloorGone(
            floor, f"{gone}, nor in memory: {older}, which is there, is restored"
        )
    policy = facts.spec.checkpoint.on_total_loss
    if nothing_to_lose or total_loss.accepted(facts):
        return initial_restore_point(facts, silent)
    if policy == "Wait":
        return _lost(facts, left_out)
    late = _late_uploads(facts) if persistent else None
    if late is not None:
        return late
    if policy == "Restart":
        return initial_restore_point(facts, silent)
    return TotalLoss(
        f"{total_loss.lost(facts, left_out)}; "
        f"spec.checkpoint.onTotalLoss: Restart would begin again at {origin_of(status) or 'step 0'}"
    )


def _beyond_status(facts: Facts) -> Checkpoint | None:
    """The newest complete checkpoint of an epoch after all that status knows: status was restored from a backup."""
    persistent = facts.seen.persistent
    if persistent.read_epoch != facts.world.epoch or ceiling(facts) == 0:
        return None
    found = TierReading({}, persistent.entries).manifests().items()
    later = [c for c, ranks in found if facts.running_epoch < c.epoch <= HIGHEST_EPOCH and c not in bad_of(facts)
             and is_complete(ranks, facts.seen.covers)]  # fmt: skip
    return max(later, key=lambda c: (c.epoch, c.step), default=None)


def _offered(facts: Facts, unknown: Checkpoint, best: Checkpoint | None) -> Waiting:
    """Steps that are stored are not trained again without a word: a person chooses."""
    text = (
        f"the persistent tier has {unknown}, of an epoch that this job's status does not know (the newest it knows is"
        f" {facts.running_epoch}; was it restored from a backup?). The job trains and removes nothing until you choose."
        f" To continue from {unknown}, create a new job with spec.checkpoint.restoreFrom that names this job's folder and"
        f" step {unknown.step}. To continue from {best or 'step 0'} instead, {total_loss.acceptance(facts)}"
    )
    return Waiting(text, lost=text)


def _lost(facts: Facts, left_out: tuple[LeftOut, ...]) -> Waiting:
    """Holders that come back are read as ever; of the persistent tier nobody tells, so it is listed now and then."""
    text = total_loss.waiting(facts, left_out)
    if facts.spec.checkpoint.persistent is None:
        return Waiting(text, lost=text)
    actions, again = _list_again(facts, total_loss.LIST_AGAIN_SECONDS)
    return Waiting(text, actions, again, lost=text)


def _older_than_floor(facts: Facts) -> Checkpoint | None:
    """The newest that can be read below a floor that cannot, in a listing that withheld nothing.

    Somebody deleted what was stored last, a bucket's lifecycle rule for example. To wait for it, or to begin anew, would lose what is
    there as well.
    """
    floor = floor_of(facts)
    return newest(c for c in _readable(facts) if c.step < floor.step) if floor is not None else None


def _late_uploads(facts: Facts) -> Waiting | None:
    """What ends a job, or begins it again, is decided by a listing that no upload of the old epoch can come after."""
    reason = "no checkpoint is left, unless an upload that had begun still arrives in the persistent tier"
    return _listed_after(
        facts, total_loss.LATE_UPLOAD_SECONDS, f"{reason}: it is listed once more before the job is given up"
    )


def _listed_after(facts: Facts, seconds: float, reason: str) -> Waiting | None:
    """None: the tier was listed so long after the failure."""
    persistent, settled = facts.seen.persistent, facts.world.changed_seconds + seconds
    if persistent.asked_seconds is not None and persistent.asked_seconds >= settled:
        return None
    if facts.now >= settled:
        return listing(facts, replace(persistent, asked_seconds=None))
    return Waiting(reason, until_seconds=settled)


def _once_more(facts: Facts, left_out: tuple[LeftOut, ...]) -> Waiting:
    """Some record was not given: what it says decides, so the tier is listed again until it is."""
    named = next(one for one in left_out if one.silent)
    actions, again = _list_again(facts, UNANSWERED_AGAIN_SECONDS)
    reason = f"no other checkpoint is left, and the persistent tier does not return a record that decides: {named}"
    return Waiting(f"{reason}. It is listed again; make the tier answer, or remove that record", actions, again)


def _list_again(facts: Facts, pause_seconds: float) -> tuple[tuple[ListPersistentTier, ...], float]:
    """Another listing once the pause behind the last is over, and when that is."""
    again = (facts.seen.persistent.asked_seconds or facts.now) + pause_seconds
    there = min((s.index for s in facts.sessions.values() if is_responsive(facts, s)), default=None)
    actions = (ListPersistentTier(facts.world.epoch, there),) if there is not None and facts.now >= again else ()
    return actions, again


def describe(world: World, parent: Checkpoint | None) -> str:
    return f"epoch {world.epoch} restores {parent}" if parent else f"epoch {world.epoch} begins at step 0"
