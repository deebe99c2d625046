"""Detects lost workers and hangs in the committed world, and blames a rank, a node or the program.

Pure; called by `plan`. Pod and node status is authoritative. A lost connection or a missed heartbeat counts only if no
rank has reported a step after it. If most workers look lost by that alone, the operator assumes that it is partitioned
itself and decides nothing: otherwise it would restart a healthy job.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from surefoot.protocol.hangs import find_outlier, find_outlier_rank, learned_limit_seconds
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.text import join_names
from surefoot_operator.api.status import Member
from surefoot_operator.job_snapshot import HangEvidence, ObservedExit, ObservedSession, ObservedWorker
from surefoot_operator.policy.core.availability import NO_CONTACT_SECONDS, announced_termination, node_lost
from surefoot_operator.policy.core.facts import (
    RECONNECT_GRACE_SECONDS,
    JobFacts,
    WorldFacts,
    WorldNodeFacts,
    cached_per_snapshot,
    has_stepped,
    is_responsive,
    last_step_seconds,
    member_sessions,
    progressing_until,
    seconds_per_step,
    sessions_in_generation,
    step_of,
    worker_id,
)
from surefoot_operator.policy.failure.unhealthy_nodes import unhealthy_nodes

# ---- failures --------------------------------------------------------------------------------------------------------
# Defines Loss, the reason why a world cannot continue, and Recheck, the time to look again.


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why an epoch cannot continue, and who caused it.

    `at_seconds`: the first sign. Worker, node and rank only where the cause is proved.
    """

    kind: str
    reason: str
    first_sign_seconds: float
    worker: int | None = None
    node: str | None = None
    caused_by_program: bool = False
    exit_code: int | None = None
    unreadable_checkpoint: Checkpoint | None = None
    corroborated: bool = True
    """False: only a broken line or silence says so."""
    unexplained: bool = False
    """Nothing proves that the program did it: its cause was not seen, or it may be its node's. Where it comes again and again
    without a new step, it counts."""
    expected: bool = False
    """Somebody wanted the worker to end and said so: nothing that a budget counts."""
    rank: int | None = None
    detail: str = ""
    """More lines for people."""


@dataclass(frozen=True, slots=True)
class Recheck:
    """Nothing is lost yet; look again at this Unix time."""

    at_seconds: float


# ---- members that a new leader never heard ---------------------------------------------------------------------------
# Judges members whose agent has not yet connected to a new leader. The heartbeat timeout does not apply to them: the
# agent may still be reconnecting. Such a member counts as lost once at least half of the members are connected, none
# has connected for QUIET_SECONDS, and either an agent reports a rank's exit or a step is overdue. A step takes every
# rank, so a missing step is the same evidence that a leader has of a member that fell silent.

RECONNECT_RETRY_SECONDS = 1.0
"""A try that is not answered and the pause behind it: who lives has tried once more since the others came."""

_ABSENT_RECHECK_SECONDS = 0.25


@cached_per_snapshot
def connection_deadline(facts: WorldFacts) -> float:
    """When nobody is on the way here any more.

    As far as those tell who came.
    """
    came = max((s.since_seconds for s in facts.sessions.values() if s.connected), default=-math.inf)
    return max(facts.term_seconds, facts.turned_away_seconds, came) + RECONNECT_RETRY_SECONDS


@cached_per_snapshot
def most_members_connected(facts: WorldFacts) -> bool:
    """Whether this leader hears at least half of the world's members."""
    heard = sum(s is not None and is_responsive(facts, s) for _, s in member_sessions(facts))
    return heard > 0 and 2 * heard >= len(facts.members)


@cached_per_snapshot
def absent_member_deadline(facts: WorldFacts) -> float | None:
    """Until when members never heard are waited for.

    None: the others do not tell.
    """
    if not most_members_connected(facts):
        return None
    epoch = facts.membership.generation
    if any(s.exit is not None and s.exit.generation == epoch for s in sessions_in_generation(facts, epoch)):
        return connection_deadline(facts)
    last, usual = last_step_seconds(facts, epoch), seconds_per_step(facts)
    if last is None or usual is None:
        return None
    overdue = last + 2 * usual + facts.spec.health_policy.heartbeat_seconds
    told = any(_trains(facts, s) and s.last_message_seconds >= overdue for s in sessions_in_generation(facts, epoch))
    # what was said before the step was overdue says nothing about it
    return max(connection_deadline(facts), overdue if told else max(overdue, facts.now + _ABSENT_RECHECK_SECONDS))


def _trains(facts: JobFacts, session: ObservedSession) -> bool:
    return session.finished is None and is_responsive(facts, session)


# ---- faults of nodes -------------------------------------------------------------------------------------------------
# Tells failures of the node from failures of the program. A rank that its node kills (out of memory, a bad GPU) exits
# like a rank whose program failed. Unnoticed, that exit would use up the program's restart budget, and nobody would
# inspect the node.


def blame_node_if_evident(facts: WorldNodeFacts, loss: Failure, told: ObservedExit) -> Failure:
    """Blames the node, not the program, where that is evident.

    What comes again without a new step counts all the same: a program without a memory limit may fill a node.
    """
    sick = unhealthy_nodes(facts).get(loss.node) if loss.node is not None else None
    if sick is not None:
        return replace(
            loss, reason=f"{loss.reason}; its node is sick: {sick}", caused_by_program=False, unexplained=True
        )
    if told.oom != "node":
        return loss
    loss = replace(loss, caused_by_program=False, unexplained=True)
    # with a limit for the whole pod the container's own counters do not tell that limit from the node's memory
    return replace(loss, node=None) if _has_pod_limit(facts) else loss


def container_killed(loss: Failure, worker: ObservedWorker | None) -> Failure:
    """Names the OOM killer where it ended a worker's whole container.

    Whose limit it was its fabric does not know: it counts only where it comes again without a new step.
    """
    if worker is None or not worker.oom_killed:
        return loss
    reason = (
        f"the kernel's OOM killer ended the container of worker {worker.index} (OOMKilled): its memory limit, or the memory of"
        f" node {worker.node}, was used up; raise resources.limits.memory, or use less a rank"
    )
    return replace(loss, reason=reason, unexplained=True)


def _has_pod_limit(facts: JobFacts) -> bool:
    limits = facts.spec.template.raw.get("spec", {}).get("resources", {}).get("limits", {})
    return "memory" in limits


# ---- the rank that differs -------------------------------------------------------------------------------------------
# Names the one rank that differs from all others. Stacks show a rank at another place in the program; collectives show
# a rank at the same place that waits in another collective. If the two methods name different ranks, no rank is blamed.


@dataclass(frozen=True, slots=True)
class OutlierRank:
    """What tells a rank from all others.

    `rank` None: evidence without a culprit.
    """

    rank: int | None
    text: str
    """How it stands out: follows on the rank's name; a whole sentence where nobody is named."""
    program: bool = False
    """The program's ranks took unlike paths: its node has no part in it."""


def find_hang_outlier(told: Sequence[HangEvidence]) -> OutlierRank | None:
    """Who differs from all others; None where nobody does."""
    places = [place for one in told for place in one.stacks]
    calls = [call for one in told for call in one.collectives]
    by_stack = find_outlier_rank(places)
    known = {rank for call in calls for rank in call.ranks} == {rank for place in places for rank in place.ranks}
    by_call = find_outlier(calls) if known else None
    if by_call is None:
        return (
            None if by_stack is None else OutlierRank(by_stack[0], f"stands {by_stack[1]}, all others wait elsewhere")
        )
    if by_stack is None or by_call.rank is None:
        return OutlierRank(by_call.rank, by_call.text, by_call.program)
    rank, place = by_stack
    if rank != by_call.rank:
        return OutlierRank(
            None,
            f"nobody is named: by its stack rank {rank} differs ({place}), by its collectives"
            f" rank {by_call.rank}, which {by_call.text}",
        )
    return OutlierRank(rank, f"stands {place}, all others wait elsewhere, and {by_call.text}", by_call.program)


# ---- hangs -----------------------------------------------------------------------------------------------------------
# Detects hangs and identifies the rank that is behind. In synchronous training one rank that hangs stops all of them,
# mostly at the same step. A tie proves nothing, nor does whose timer ran out first: then nobody is blamed, and no node
# is excluded for it.

_MAX_NAMED = 8


def detect_hang(facts: WorldFacts) -> Failure | Recheck | None:
    """Reports a missing first or further step, or when to recheck."""
    epoch = facts.membership.generation
    if not _running(facts):
        return None
    if not has_stepped(facts, epoch):
        limit = facts.spec.run_policy.startup_deadline_seconds
        due = max(facts.membership.changed_seconds, facts.term_seconds) + limit
        reason = f"epoch {epoch} made no first step within startupDeadlineSeconds ({limit:g} s)"
        return Recheck(due) if facts.now < due else Failure("startup", reason, due, caused_by_program=True)
    last = last_step_seconds(facts, epoch)
    if last is None:
        return None
    early = _hang_by_stacks(facts, last)
    if early is not None:
        return early
    due = last + _limit_seconds(facts)
    return Recheck(due) if facts.now < due else _hang(facts, due)


def _limit_seconds(facts: WorldFacts) -> float:
    """After how long a world without a step hangs, whatever its ranks seem to do."""
    paused = [s.progress.pause_seconds or 0.0 for s in _running(facts) if s.progress.pause_reason]
    return max(facts.spec.health_policy.step_timeout_seconds, *paused, 0.0)


def _hang_by_stacks(facts: WorldFacts, last_seconds: float) -> Failure | Recheck | None:
    """A hang that every rank's stack shows, sooner than a time alone could tell.

    Not while any rank has announced a pause, nor at the step where the last hang was found: if a program really stands
    there for long, its limit decides the second time.
    """
    epoch, running = facts.membership.generation, _running(facts)
    incident = facts.status.incidents[-1] if facts.status.incidents else None
    again = incident is not None and incident.kind == "hang" and step_of(facts, epoch) <= incident.last_step + 1
    told = _without_step(facts)
    if (
        again
        or told is None
        or any(one.is_progressing for one in told)
        or any(s.progress.pause_reason for s in running)
    ):
        return None
    ceiling = facts.spec.health_policy.step_timeout_seconds
    usual = [seconds for s in running for seconds in s.timings.steps]
    due = last_seconds + learned_limit_seconds(usual, ceiling)
    if facts.now < due:
        return Recheck(due)
    if due >= last_seconds + ceiling:
        return None
    evidence = (
        f"no step for {due - last_seconds:.0f} s, and steps take {median(usual):.2g} s: in no rank did stack or I/O"
        " move between two looks"
    )
    return _hang(facts, due, evidence)


def reported_hang(facts: WorldFacts) -> Failure | None:
    """The hang that agents report whose own timers ran out first."""
    epoch = facts.membership.generation
    told = [
        s.exit
        for _, s in member_sessions(facts)
        if s is not None and s.exit is not None and s.exit.generation == epoch and s.exit.kind == "hang"
    ]
    return _hang(facts, min(e.at_seconds for e in told)) if told else None


def _hang(facts: WorldFacts, at_seconds: float, evidence: str | None = None) -> Failure:
    """Blames the one rank that stands elsewhere, or at an earlier step, than all others, if there is one."""
    members = [s for _, s in member_sessions(facts) if s is not None]
    if evidence is None:
        paused = next((s.progress.pause_reason for s in members if s.progress.pause_reason), "")
        doing = f", while it had announced {paused}" if paused else ""
        evidence = f"no step for stepTimeoutSeconds ({_limit_seconds(facts):g} s){doing}"
    odd = _outlier(facts)
    if odd is not None and odd.rank is not None:
        worker = facts.membership.members[odd.rank // facts.spec.nproc_per_node]
        where = f"rank {odd.rank} on worker {worker.index} {odd.text}"
        if odd.program:
            where += ": the program's ranks take unlike paths, no node is at fault"
        node = None if odd.program else worker.node
        return replace(Failure("hang", f"{evidence}; {where}", at_seconds, worker.index, node, True), rank=odd.rank)
    if odd is not None:
        return Failure("hang", f"{evidence}; {odd.text}", at_seconds, caused_by_program=True)
    slow = _behind(facts)
    loss = Failure(
        "hang",
        f"{evidence}; {_where(facts, slow)}",
        at_seconds,
        caused_by_program=all(is_responsive(facts, s) for s in members),
    )
    return loss if slow is None else replace(loss, worker=slow.index, node=slow.node, rank=_rank(facts, slow))


def _outlier(facts: WorldFacts) -> OutlierRank | None:
    told = _without_step(facts)
    return None if told is None else find_hang_outlier(told)


def _without_step(facts: WorldFacts) -> tuple[HangEvidence, ...] | None:
    """Where all ranks are without a step since the present one; None while any agent has not said so, or is not heard."""
    told = tuple(
        s.hang_evidence
        for s in _running(facts)
        if s.hang_evidence is not None and s.hang_evidence.step == s.progress.step and is_responsive(facts, s)
    )
    return told if len(told) == len(facts.membership.members) else None


def _running(facts: WorldFacts) -> list[ObservedSession]:
    epoch = facts.membership.generation
    return [s for _, s in member_sessions(facts) if s is not None and (s.finished is None or s.generation != epoch)]


def _behind(facts: WorldFacts) -> ObservedSession | None:
    """The worker that proves to be behind; None if that is not one, or somebody's place is not known."""
    running = _running(facts)
    if len(running) < len(facts.membership.members) or not all(is_responsive(facts, s) for s in running):
        return None
    if len(running) == 1:
        return running[0] if _identified_rank(running[0]) is not None else None
    least = min(s.progress.step for s in running)
    slow = [s for s in running if s.progress.step == least]
    return slow[0] if len(slow) == 1 else None


def _where(facts: WorldFacts, slow: ObservedSession | None) -> str:
    running = _running(facts)
    least = min((s.progress.step for s in running), default=0)
    late = [s for s in running if s.progress.step == least]
    over = [
        s.index for _, s in member_sessions(facts) if s is not None and (s.progress.exited_ranks or s.finished == 0)
    ]
    ended = f"; of {_workers(over)} ranks have ended with code 0" if over else ""
    if slow is not None:
        rank = _rank(facts, slow)
        who = f"worker {slow.index}" if rank is None else f"rank {rank} on worker {slow.index}"
        return f"{who} is at step {slow.progress.step}, all others are further{ended}"
    if len(late) == len(running):
        return f"no rank is behind: all are at step {least}{ended}"
    return f"{_workers([s.index for s in late])} are at step {least}, others further{ended}"


def _workers(indexes: list[int]) -> str:
    return f"worker{'s' if len(indexes) > 1 else ''} {join_names(indexes, _MAX_NAMED)}"


def _rank(facts: JobFacts, session: ObservedSession) -> int | None:
    """Which rank of this worker it is, as far as that is known."""
    if facts.spec.nproc_per_node > 1:
        return _identified_rank(session)
    return next(place for place, member in enumerate(facts.membership.members) if member.index == session.index)


def _identified_rank(session: ObservedSession) -> int | None:
    told = session.exit
    return (
        told.rank
        if told is not None and told.generation == session.generation and told.kind == "hang" and told.rank >= 0
        else None
    )


# ---- failure detection -----------------------------------------------------------------------------------------------

RECONNECT_SECONDS = 1.0
"""A living agent is back on a line that broke by then: it tries at once, and TLS and the token's review take their time."""
_RECHECK_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Detection:
    """The losses found, likeliest cause first."""

    losses: tuple[Failure, ...] = ()
    frozen: str | None = None
    recheck_seconds: tuple[float, ...] = ()


def detect_failures(facts: WorldNodeFacts) -> Detection:
    """Finds everything that ended the committed epoch, as known now."""
    epoch = facts.membership.generation
    exits = [s for s in sessions_in_generation(facts, epoch) if s.exit is not None and s.exit.generation == epoch]
    losses: list[Failure] = []
    recheck: list[float] = []
    heard: list[float] = []
    for identity, (member, session) in zip(facts.members, member_sessions(facts), strict=True):
        worker = facts.workers.get(identity)
        if session is not None and _is_well(facts, worker, session):
            heard.append(session.last_message_seconds)
            continue
        found = _member(facts, member, (worker, session), epoch_dead=bool(exits))
        if isinstance(found, Failure):
            losses.append(
                replace(found, expected=not found.caused_by_program and bool(announced_termination(facts, member)))
            )
        elif found is not None:
            recheck.append(found.at_seconds)
    if heard:
        recheck.append(min(heard) + facts.spec.health_policy.heartbeat_timeout_seconds)
    unwitnessed = [loss for loss in losses if not loss.corroborated]
    if not exits and len(facts.membership.members) > 1 and 2 * len(unwitnessed) > len(facts.membership.members):
        names = join_names([loss.worker for loss in unwitnessed])
        frozen = (
            f"no heartbeat from workers {names} (a majority), but nothing else reports them lost: "
            "waiting, the operator may have lost its network"
        )
        losses = [loss for loss in losses if loss.corroborated]
    else:
        frozen = None
    told = reported_hang(facts)
    losses += (told,) if told is not None else ()
    # a step that does not come is the effect of whatever else is known, and then says nothing of its own
    for found in (_secondary_failures(facts, exits, losses), None if losses or exits else detect_hang(facts)):
        if isinstance(found, Failure):
            losses.append(found)
        elif found is not None:
            recheck.append(found.at_seconds)
    losses.sort(key=lambda loss: loss.first_sign_seconds)
    return Detection(tuple(losses), frozen, tuple(recheck))


def _is_well(facts: JobFacts, worker: ObservedWorker | None, session: ObservedSession) -> bool:
    """Whether nothing speaks against a member: of nearly all in every round, which are looked at once each."""
    quiet = session.exit is None and session.unreadable_report is None and session.finished is None
    runs = worker is not None and worker.phase not in ("Succeeded", "Failed")
    return quiet and runs and is_responsive(facts, session)


def _member(
    facts: WorldNodeFacts, member: Member, known: tuple[ObservedWorker | None, ObservedSession | None], epoch_dead: bool
) -> Failure | Recheck | None:
    """Judges one member: lost, to be looked at again, or well (None)."""
    epoch, (worker, session) = facts.membership.generation, known
    if session is not None and session.generation == epoch and session.finished == 0:
        return None
    certain = _by_platform(facts, member, worker, session)
    if certain is not None:
        return certain
    if session is None:
        other = facts.sessions.get(worker_id(member))
        if other is not None:
            reason = f"the agent of worker {member.index} was restarted"
            return Failure("agent-lost", reason, other.since_seconds, member.index, member.node)
        return _never_connected(facts, member)
    if session.exit is not None and session.exit.generation == epoch and not session.exit.secondary:
        return None if session.exit.kind == "hang" else _exited(facts, session, member)
    if session.unreadable_report is not None and session.generation == epoch:
        return _unreadable(facts, session, member)
    if not session.connected:
        return _broken(facts, session, member, epoch_dead)
    return _silent(facts, session, member)


def _by_platform(
    facts: WorldNodeFacts, member: Member, worker: ObservedWorker | None, session: ObservedSession | None
) -> Failure | None:
    sign = session.since_seconds if session is not None and not session.connected else facts.now
    gone = node_lost(facts, member.node)
    if worker is not None and worker.phase == "Succeeded" and not worker.exit_code:
        return None
    over = worker is None or worker.phase in ("Succeeded", "Failed")
    if gone and (over or (session is not None and not is_responsive(facts, session))):
        node = facts.nodes.get(member.node)
        said = node.reason or node.unconfirmed_failure if node is not None else ""
        why = f": {said}" if said else ""
        return Failure("node-lost", f"node {member.node} of worker {member.index} is gone{why}", sign, *_at(member))
    if not over:
        return None
    if worker is None:
        return Failure("agent-lost", f"worker {member.index} was deleted", sign, *_at(member))
    detail = f" ({worker.message})" if worker.message else ""
    reason = f"worker {member.index} {worker.exit_description}{detail}"
    return container_killed(Failure("agent-lost", reason, sign, *_at(member)), worker)


def _never_connected(facts: WorldNodeFacts, member: Member) -> Failure | Recheck | None:
    worker = facts.workers.get(worker_id(member))
    if worker is not None and worker.phase == "Succeeded":
        return None
    told, due = absent_member_deadline(facts), facts.term_seconds + NO_CONTACT_SECONDS
    if told is not None and facts.now >= told:
        reason = f"worker {member.index} has not come to this leader, and the others, which have, make no step"
        return Failure("worker-silent", reason, told, *_at(member), corroborated=False)
    if facts.now < due:
        return Recheck(due if told is None else min(due, told))
    if worker is not None and worker.phase == "Running" and not node_lost(facts, member.node):
        return None
    reason = f"worker {member.index} has not connected since this operator started, and nothing reports it running"
    return Failure("worker-silent", reason, due, *_at(member))


def _exited(facts: WorldNodeFacts, session: ObservedSession, member: Member) -> Failure | None:
    exit_seen = session.exit
    if exit_seen is None:
        return None
    how = f"signal {-exit_seen.code}" if exit_seen.code < 0 else f"exit code {exit_seen.code}"
    cause = f": {exit_seen.cause}" if exit_seen.cause else ""
    reason = f"rank {exit_seen.rank} on worker {member.index} ended with {how}{cause}"
    at = exit_seen.at_seconds
    loss = Failure("trainer-failed", reason, at, *_at(member), True, exit_seen.code, rank=exit_seen.rank)
    return blame_node_if_evident(facts, loss, exit_seen)


def _unreadable(facts: JobFacts, session: ObservedSession, member: Member) -> Failure | None:
    if session.unreadable_report is None:
        return None
    checkpoint, absent, detail = session.unreadable_report
    if absent:
        reason = f"no holder has all of {checkpoint} any more ({detail})"
        # only our own tiers are read anew before the next choice: an older job's, once gone, must not be chosen again
        return Failure(
            "unreadable",
            reason,
            facts.now,
            *_at(member),
            unreadable_checkpoint=checkpoint if checkpoint.imported else None,
        )
    reason = f"every copy of some block of {checkpoint} is damaged ({detail})"
    return Failure("unreadable", reason, facts.now, *_at(member), unreadable_checkpoint=checkpoint)


def _broken(facts: WorldFacts, session: ObservedSession, member: Member, epoch_dead: bool) -> Failure | Recheck | None:
    """A line that broke is no witness: a reset link and a dead process look alike.

    A process that died is told by the fabric, or by peers whose collectives broke. Failing that, others say that a step
    is overdue; and an agent that does not come back within the heartbeat timeout is as silent as one without a word.
    """
    if not epoch_dead:
        moving = progressing_until(facts, session.since_seconds)
        if moving is not None:
            return Recheck(moving)
        silent = session.since_seconds + facts.spec.health_policy.heartbeat_timeout_seconds
        overdue = min(silent, _overdue_seconds(facts, session.since_seconds))
        if facts.now < overdue:
            return Recheck(overdue)
        if facts.now < silent and not _has_no_further_step(facts, overdue):
            return Recheck(min(silent, facts.now + _RECHECK_SECONDS))
    reason = f"the connection to worker {member.index} broke and was not re-established"
    return Failure("agent-lost", reason, session.since_seconds, *_at(member), corroborated=False)


def _overdue_seconds(facts: WorldFacts, since_seconds: float) -> float:
    """From when on a step that has not come says something about a line that broke at `since_seconds`."""
    last, usual = last_step_seconds(facts, facts.membership.generation), seconds_per_step(facts)
    if last is None or usual is None:
        return float("inf")
    # others tell of a step with their next heartbeat
    told = last + 2 * usual + facts.spec.health_policy.heartbeat_seconds
    return max(since_seconds + RECONNECT_SECONDS, told)


def _has_no_further_step(facts: WorldFacts, overdue_seconds: float) -> bool:
    """Whether another rank said so late that it has no further step: nobody reports steps at the moment they are made."""
    return any(
        s.connected and s.last_message_seconds >= overdue_seconds
        for s in sessions_in_generation(facts, facts.membership.generation)
    )


def _silent(facts: WorldFacts, session: ObservedSession, member: Member) -> Failure | Recheck | None:
    due = session.last_message_seconds + facts.spec.health_policy.heartbeat_timeout_seconds
    if facts.now <= due:
        return Recheck(due)
    # others tell of their steps with each heartbeat, however many they make in between
    moving = progressing_until(facts, session.last_message_seconds)
    if moving is not None:
        return Recheck(moving)
    silence = facts.spec.health_policy.heartbeat_timeout_seconds
    reason = f"worker {member.index} sent no heartbeat for more than {silence:g} seconds"
    return Failure("worker-silent", reason, due, *_at(member), corroborated=False)


def _secondary_failures(
    facts: WorldFacts, exits: list[ObservedSession], losses: list[Failure]
) -> Failure | Recheck | None:
    """Trainers that ended because a peer's connection broke, with no first cause in sight."""
    if losses or not exits:
        return None
    first = min((s.exit for s in exits if s.exit is not None), key=lambda e: e.at_seconds)
    due = first.at_seconds + RECONNECT_GRACE_SECONDS
    if facts.now < due:
        return Recheck(due)
    echo = f"rank {first.rank} lost its peers ({first.cause or 'connection broke'})"
    left = [
        (member, session, rank)
        for member, session in member_sessions(facts)
        if session is not None and session.generation == facts.membership.generation
        for rank in session.progress.exited_ranks
    ]
    gone = next((m for m in facts.membership.members if announced_termination(facts, m)), None)
    if not left and gone is not None:
        reason = (
            f"worker {gone.index} {announced_termination(facts, gone)}, and ended before its world could hold: {echo}"
        )
        return Failure("agent-lost", reason, first.at_seconds, *_at(gone), expected=True)
    if not left:
        loss = Failure("trainer-failed", f"{echo}, cause unknown", first.at_seconds, exit_code=first.code)
        return replace(loss, unexplained=True)
    member, session, rank = left[0]
    more = f", and {len(left) - 1} more," if len(left) > 1 else ""
    reason = f"rank {rank} on worker {member.index}{more} ended with code 0 after step {session.progress.step} while others train: {echo}"
    if len(left) > 1:
        return Failure("trainer-failed", reason, first.at_seconds, caused_by_program=True, exit_code=0)
    return Failure("trainer-failed", reason, first.at_seconds, *_at(member), True, 0, rank=rank)


def observed_death(facts: WorldNodeFacts) -> Failure | None:
    """Finds the first member that ended or is no longer heard."""
    for identity, (member, session) in zip(facts.members, member_sessions(facts), strict=True):
        certain = _by_platform(facts, member, facts.workers.get(identity), session)
        if certain is not None:
            return certain
        other = facts.sessions.get(identity)
        if session is None and other is not None:
            reason = f"the agent of worker {member.index} was restarted"
            return Failure("agent-lost", reason, other.since_seconds, *_at(member))
        if session is None:
            continue
        if facts.now > session.last_message_seconds + facts.spec.health_policy.heartbeat_timeout_seconds:
            reason = f"worker {member.index} sends no heartbeats any more"
            return Failure("worker-silent", reason, session.last_message_seconds, *_at(member))
    return None


def _at(member: Member) -> tuple[int, str]:
    return member.index, member.node
