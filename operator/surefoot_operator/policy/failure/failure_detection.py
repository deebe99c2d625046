"""Detects failed trainers, lost workers and hangs, and blames a rank, a node or the program.

Pure; called by `plan`. The platform's status of pods and nodes is authoritative. A broken connection or a missing
heartbeat counts only if no rank has reported a step after it. If these are the only signs and most workers show them,
the operator assumes that its own network is partitioned and decides nothing: it would else restart a healthy job.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from surefoot.protocol.hangs import find_collective_outlier, find_stack_outlier, hang_suspicion_seconds
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.text import join_names
from surefoot_operator.api.status import Member
from surefoot_operator.job_snapshot import HangEvidence, ObservedExit, ObservedSession, ObservedWorker
from surefoot_operator.policy.core.availability import NO_CONTACT_SECONDS, announced_termination, is_node_lost
from surefoot_operator.policy.core.facts import (
    RECONNECT_GRACE_SECONDS,
    JobFacts,
    MembershipFacts,
    MembershipNodeFacts,
    cached_per_snapshot,
    has_stepped,
    is_responsive,
    last_step_seconds,
    member_sessions,
    progress_proof_end,
    seconds_per_step,
    sessions_in_generation,
    step_of,
    worker_id,
)
from surefoot_operator.policy.failure.unhealthy_nodes import unhealthy_nodes

# ---- failures --------------------------------------------------------------------------------------------------------
# Defines Failure, why a generation cannot continue, and Recheck, the time of the next observation.


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a generation cannot continue, and its cause.

    Worker, node and rank are given only where they are proved to be the cause.
    """

    kind: str
    """Machine-readable kind, as in the incident: `hang`, `node-lost`, `trainer-failed` …"""
    reason: str
    """Sentence for events and the status."""
    first_sign_seconds: float
    """Unix time of the first observation that pointed to the failure."""
    worker: int | None = None
    node: str | None = None
    caused_by_program: bool = False
    """Whether the training program is to blame; such restarts count for `backoffLimit`."""
    exit_code: int | None = None
    unreadable_checkpoint: Checkpoint | None = None
    corroborated: bool = True
    """False if a broken connection or missing heartbeats are the only sign."""
    unexplained: bool = False
    """Whether the cause is unknown or may be the node's. Counts for `maxNoProgressRestarts` if it repeats without a new step."""
    expected: bool = False
    """Whether the worker's end was announced, as by a pod deletion. No restart budget counts it."""
    rank: int | None = None
    detail: str = ""
    """Further lines for the incident, such as a traceback."""


@dataclass(frozen=True, slots=True)
class Recheck:
    """Nothing is lost yet; observe again at `at_seconds` (Unix time)."""

    at_seconds: float


# ---- members that never connected to a new leader --------------------------------------------------------------------
# Judges members whose agent has not yet connected to a new leader. The heartbeat timeout does not apply to them: the
# agent may still be reconnecting. Such a member counts as lost once at least half of the members are connected, none has
# connected for RECONNECT_RETRY_SECONDS, and either an agent reports a rank's exit or a step is overdue. A step takes every
# rank, so an overdue step is the same evidence that a leader has of a connected member whose heartbeats stop.

RECONNECT_RETRY_SECONDS = 1.0
"""Time of one failed connection attempt and the pause after it: within it, every living agent tries once more."""

_ABSENT_RECHECK_SECONDS = 0.25


@cached_per_snapshot
def connection_deadline(facts: MembershipFacts) -> float:
    """Returns when every living agent must have tried to connect, judged by the newest connection."""
    newest_connection_seconds = max(
        (s.since_seconds for s in facts.sessions.values() if s.connected), default=-math.inf
    )
    return max(facts.term_seconds, facts.retry_later_seconds, newest_connection_seconds) + RECONNECT_RETRY_SECONDS


@cached_per_snapshot
def most_members_connected(facts: MembershipFacts) -> bool:
    """Whether at least half of the members have a responsive agent connected to this leader."""
    responsive_count = sum(s is not None and is_responsive(facts, s) for _, s in member_sessions(facts))
    return responsive_count > 0 and 2 * responsive_count >= len(facts.members)


@cached_per_snapshot
def absent_member_deadline(facts: MembershipFacts) -> float | None:
    """Returns how long to wait for members that never connected; None: the others give no evidence against them."""
    if not most_members_connected(facts):
        return None
    generation = facts.membership.generation
    if any(s.exit is not None and s.exit.generation == generation for s in sessions_in_generation(facts, generation)):
        return connection_deadline(facts)
    last_step_at_seconds, step_seconds = last_step_seconds(facts, generation), seconds_per_step(facts)
    if last_step_at_seconds is None or step_seconds is None:
        return None
    overdue = last_step_at_seconds + 2 * step_seconds + facts.spec.health_policy.heartbeat_seconds
    reported_since = any(
        _is_training(facts, s) and s.last_message_seconds >= overdue for s in sessions_in_generation(facts, generation)
    )
    # a heartbeat sent before the step was overdue is no evidence that the step is missing
    return max(
        connection_deadline(facts), overdue if reported_since else max(overdue, facts.now + _ABSENT_RECHECK_SECONDS)
    )


def _is_training(facts: JobFacts, session: ObservedSession) -> bool:
    return session.finished is None and is_responsive(facts, session)


# ---- faults of nodes -------------------------------------------------------------------------------------------------
# Separates failures of the node from failures of the program. A rank that its node kills (out of memory, a bad GPU) exits
# like a rank whose program failed. Unnoticed, that exit would use up the program's restart budget, and the node would
# not be inspected.


def blame_node_if_evident(facts: MembershipNodeFacts, failure: Failure, exit_report: ObservedExit) -> Failure:
    """Returns the failure with the blame on the node if its checks or its OOM killer show that.

    A repetition without a new step still counts as no progress: a program without a memory limit may fill a node.
    """
    node_problem = unhealthy_nodes(facts).get(failure.node) if failure.node is not None else None
    if node_problem is not None:
        reason = f"{failure.reason}; node {failure.node} is unhealthy: {node_problem}"
        return replace(failure, reason=reason, caused_by_program=False, unexplained=True)
    if exit_report.oom != "node":
        return failure
    failure = replace(failure, caused_by_program=False, unexplained=True)
    # with a memory limit for the whole pod, the container's counters cannot separate that limit from the node's memory
    return replace(failure, node=None) if _has_pod_limit(facts) else failure


def blame_oom_killer(failure: Failure, worker: ObservedWorker | None) -> Failure:
    """Returns the failure with a reason that names the OOM killer if it killed the worker's whole container.

    The platform does not report whose memory limit was exceeded, so the failure counts only if it repeats without a new step.
    """
    if worker is None or not worker.oom_killed:
        return failure
    reason = (
        f"the kernel's OOM killer ended the container of worker {worker.index} (OOMKilled): its memory limit, or the memory of"
        f" node {worker.node}, was used up; raise resources.limits.memory, or use less memory per rank"
    )
    return replace(failure, reason=reason, unexplained=True)


def _has_pod_limit(facts: JobFacts) -> bool:
    """Whether the pod template limits the memory of the whole pod."""
    limits = facts.spec.template.raw.get("spec", {}).get("resources", {}).get("limits", {})
    return "memory" in limits


# ---- the rank that differs -------------------------------------------------------------------------------------------
# Names the one rank that differs from all others in a hang. Stacks show a rank at another place in the program;
# collectives show a rank at the same place that waits in another collective. If they disagree, no rank is blamed.


@dataclass(frozen=True, slots=True)
class OutlierRank:
    """The evidence of a hang, and the one rank that differs from all others.

    `rank` None: there is evidence, but no culprit.
    """

    rank: int | None
    text: str
    """The difference: continues a sentence whose subject is the rank; a whole sentence if `rank` is None."""
    is_program_fault: bool = False
    """True if the program's ranks took different code paths, so that no node is at fault."""


def find_hang_outlier(evidence: Sequence[HangEvidence]) -> OutlierRank | None:
    """Returns the rank that differs from all others in stack or collective; None if there is none."""
    # A collective counts only if every rank that reported a stack also reported its collectives.
    places = [place for worker_evidence in evidence for place in worker_evidence.stacks]
    calls = [call for worker_evidence in evidence for call in worker_evidence.collectives]
    by_stack = find_stack_outlier(places)
    covers_same_ranks = {rank for call in calls for rank in call.ranks} == {
        rank for place in places for rank in place.ranks
    }
    by_call = find_collective_outlier(calls) if covers_same_ranks else None
    if by_call is None:
        return None if by_stack is None else OutlierRank(by_stack[0], f"is {by_stack[1]}, all others wait elsewhere")
    if by_stack is None or by_call.rank is None:
        return OutlierRank(by_call.rank, by_call.text, by_call.is_program_fault)
    rank, place = by_stack
    if rank != by_call.rank:
        return OutlierRank(
            None,
            f"no rank is blamed: by its stack, rank {rank} differs ({place}); by its collectives,"
            f" rank {by_call.rank}, which {by_call.text}",
        )
    return OutlierRank(rank, f"is {place}, all others wait elsewhere, and {by_call.text}", by_call.is_program_fault)


# ---- hangs -----------------------------------------------------------------------------------------------------------
# Detects hangs and identifies the rank that is late. In synchronous training one rank that hangs stops all of them,
# mostly at the same step. If several ranks are equally late, or only a watchdog's timer ran out first, the culprit is
# unknown: then no rank is blamed, and no node is excluded.

_MAX_NAMED = 8


def detect_hang(facts: MembershipFacts) -> Failure | Recheck | None:
    """Returns a hang or a missed startup deadline, or when to recheck."""
    generation = facts.membership.generation
    if not _unfinished_sessions(facts):
        return None
    # The first step may take long (compilation, data loading), so it has a deadline of its own.
    if not has_stepped(facts, generation):
        limit_seconds = facts.spec.run_policy.startup_deadline_seconds
        deadline_seconds = max(facts.membership.changed_seconds, facts.term_seconds) + limit_seconds
        reason = f"generation {generation} made no first step within startupDeadlineSeconds ({limit_seconds:g} s)"
        return (
            Recheck(deadline_seconds)
            if facts.now < deadline_seconds
            else Failure("startup", reason, deadline_seconds, caused_by_program=True)
        )
    last_step_at_seconds = last_step_seconds(facts, generation)
    if last_step_at_seconds is None:
        return None
    # Stacks of all ranks can show a hang long before the step timeout.
    stack_hang = _hang_by_stacks(facts, last_step_at_seconds)
    if stack_hang is not None:
        return stack_hang
    deadline_seconds = last_step_at_seconds + _hang_timeout_seconds(facts)
    return Recheck(deadline_seconds) if facts.now < deadline_seconds else _build_hang_failure(facts, deadline_seconds)


def _hang_timeout_seconds(facts: MembershipFacts) -> float:
    """Returns the longest allowed time without a step, whatever the stacks show; announced pauses extend it."""
    announced_pauses_seconds = [
        s.progress.pause_seconds or 0.0 for s in _unfinished_sessions(facts) if s.progress.pause_reason
    ]
    return max(facts.spec.health_policy.step_timeout_seconds, *announced_pauses_seconds, 0.0)


def _hang_by_stacks(facts: MembershipFacts, last_seconds: float) -> Failure | Recheck | None:
    """Detects a hang before the step timeout if the stacks of all ranks show no progress.

    It does not apply while a rank has announced a pause, nor at the step of the last hang: if the program really needs long
    there, the second time only the step timeout decides.
    """
    generation, running = facts.membership.generation, _unfinished_sessions(facts)
    incident = facts.status.incidents[-1] if facts.status.incidents else None
    is_at_step_of_last_hang = (
        incident is not None and incident.kind == "hang" and step_of(facts, generation) <= incident.last_step + 1
    )
    reports = _collect_hang_evidence(facts)
    if (
        is_at_step_of_last_hang
        or reports is None
        or any(report.is_progressing for report in reports)
        or any(s.progress.pause_reason for s in running)
    ):
        return None
    max_seconds = facts.spec.health_policy.step_timeout_seconds
    step_times = [seconds for s in running for seconds in s.timings.steps]
    deadline_seconds = last_seconds + hang_suspicion_seconds(step_times, max_seconds)
    if facts.now < deadline_seconds:
        return Recheck(deadline_seconds)
    if deadline_seconds >= last_seconds + max_seconds:
        return None
    evidence = (
        f"no step for {deadline_seconds - last_seconds:.0f} s, although steps take {median(step_times):.2g} s: two"
        " observations of every rank show the same stack and no I/O"
    )
    return _build_hang_failure(facts, deadline_seconds, evidence)


def find_reported_hang(facts: MembershipFacts) -> Failure | None:
    """Returns the hang that agents reported because their own watchdog timers ran out first."""
    generation = facts.membership.generation
    hang_exits = [
        s.exit
        for _, s in member_sessions(facts)
        if s is not None and s.exit is not None and s.exit.generation == generation and s.exit.kind == "hang"
    ]
    return _build_hang_failure(facts, min(e.received_seconds for e in hang_exits)) if hang_exits else None


def _build_hang_failure(facts: MembershipFacts, at_seconds: float, evidence: str | None = None) -> Failure:
    """Builds the failure, and blames the one rank with another stack, collective or step, if there is one."""
    members = [s for _, s in member_sessions(facts) if s is not None]
    if evidence is None:
        pause_reason = next((s.progress.pause_reason for s in members if s.progress.pause_reason), "")
        pause_clause = f", while it had announced {pause_reason}" if pause_reason else ""
        evidence = f"no step for stepTimeoutSeconds ({_hang_timeout_seconds(facts):g} s){pause_clause}"
    outlier = _find_outlier(facts)
    if outlier is not None and outlier.rank is not None:
        worker = facts.membership.members[outlier.rank // facts.spec.nproc_per_node]
        location = f"rank {outlier.rank} on worker {worker.index} {outlier.text}"
        if outlier.is_program_fault:
            location += ": the program's ranks take different code paths, no node is at fault"
        node = None if outlier.is_program_fault else worker.node
        return replace(
            Failure("hang", f"{evidence}; {location}", at_seconds, worker.index, node, True), rank=outlier.rank
        )
    if outlier is not None:
        return Failure("hang", f"{evidence}; {outlier.text}", at_seconds, caused_by_program=True)
    rearmost = _rearmost_session(facts)
    failure = Failure(
        "hang",
        f"{evidence}; {_describe_steps(facts, rearmost)}",
        at_seconds,
        caused_by_program=all(is_responsive(facts, s) for s in members),
    )
    return (
        failure
        if rearmost is None
        else replace(failure, worker=rearmost.index, node=rearmost.node, rank=_rank_of_rearmost(facts, rearmost))
    )


def _find_outlier(facts: MembershipFacts) -> OutlierRank | None:
    """Returns the rank that differs in stack or collective; None: the evidence is incomplete or names none."""
    reports = _collect_hang_evidence(facts)
    return None if reports is None else find_hang_outlier(reports)


def _collect_hang_evidence(facts: MembershipFacts) -> tuple[HangEvidence, ...] | None:
    """Returns the evidence of all ranks about the missing step; None while an agent is silent or has sent none."""
    reports = tuple(
        s.hang_evidence
        for s in _unfinished_sessions(facts)
        if s.hang_evidence is not None and s.hang_evidence.step == s.progress.step and is_responsive(facts, s)
    )
    return reports if len(reports) == len(facts.membership.members) else None


def _unfinished_sessions(facts: MembershipFacts) -> list[ObservedSession]:
    """Lists the members' sessions whose trainers have not finished the present generation."""
    generation = facts.membership.generation
    return [
        s for _, s in member_sessions(facts) if s is not None and (s.finished is None or s.generation != generation)
    ]


def _rearmost_session(facts: MembershipFacts) -> ObservedSession | None:
    """Returns the only worker at the lowest step; None if there are several or an agent is not responsive."""
    running = _unfinished_sessions(facts)
    if len(running) < len(facts.membership.members) or not all(is_responsive(facts, s) for s in running):
        return None
    if len(running) == 1:
        return running[0] if _identified_rank(running[0]) is not None else None
    lowest_step = min(s.progress.step for s in running)
    sessions_at_lowest_step = [s for s in running if s.progress.step == lowest_step]
    return sessions_at_lowest_step[0] if len(sessions_at_lowest_step) == 1 else None


def _describe_steps(facts: MembershipFacts, rearmost: ObservedSession | None) -> str:
    """Describes which ranks are at which step, and which exited with code 0."""
    running = _unfinished_sessions(facts)
    lowest_step = min((s.progress.step for s in running), default=0)
    sessions_at_lowest_step = [s for s in running if s.progress.step == lowest_step]
    workers_with_exits = [
        s.index for _, s in member_sessions(facts) if s is not None and (s.progress.exited_ranks or s.finished == 0)
    ]
    exit_clause = (
        f"; ranks of {_list_workers(workers_with_exits)} have exited with code 0" if workers_with_exits else ""
    )
    if rearmost is not None:
        rank = _rank_of_rearmost(facts, rearmost)
        subject = f"worker {rearmost.index}" if rank is None else f"rank {rank} on worker {rearmost.index}"
        return f"{subject} is at step {rearmost.progress.step}, all others are further{exit_clause}"
    if len(sessions_at_lowest_step) == len(running):
        return f"no rank is late: all are at step {lowest_step}{exit_clause}"
    return f"{_list_workers([s.index for s in sessions_at_lowest_step])} are at step {lowest_step}, others further{exit_clause}"


def _list_workers(indexes: list[int]) -> str:
    return f"worker{'s' if len(indexes) > 1 else ''} {join_names(indexes, _MAX_NAMED)}"


def _rank_of_rearmost(facts: JobFacts, session: ObservedSession) -> int | None:
    """Returns the global rank of this worker that hangs; None if it runs several and none is identified."""
    if facts.spec.nproc_per_node > 1:
        return _identified_rank(session)
    return next(
        group_rank for group_rank, member in enumerate(facts.membership.members) if member.index == session.index
    )


def _identified_rank(session: ObservedSession) -> int | None:
    """Returns the rank that this worker's agent reported as hanging; None: it reported none."""
    exit_report = session.exit
    return (
        exit_report.rank
        if exit_report is not None
        and exit_report.generation == session.generation
        and exit_report.kind == "hang"
        and exit_report.rank >= 0
        else None
    )


# ---- failure detection -----------------------------------------------------------------------------------------------

RECONNECT_SECONDS = 1.0
"""A living agent whose connection broke is back by then: it retries at once, plus TLS and the token review."""
_RECHECK_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Detection:
    """The failures of one observation, most likely cause first."""

    failures: tuple[Failure, ...] = ()
    partition_reason: str | None = None
    """Why nothing is decided: the operator itself may be partitioned. None: failures may be acted on."""
    recheck_seconds: tuple[float, ...] = ()
    """Unix times at which a suspicion becomes a failure or ends."""


def detect_failures(facts: MembershipNodeFacts) -> Detection:
    """Finds everything that ended the committed generation, as known now."""
    generation = facts.membership.generation
    exits = [
        s for s in sessions_in_generation(facts, generation) if s.exit is not None and s.exit.generation == generation
    ]
    failures: list[Failure] = []
    recheck_times: list[float] = []
    last_message_times: list[float] = []
    # Judge each member by itself. Nearly all are well, and cost one check.
    for worker_id_of_member, (member, session) in zip(facts.members, member_sessions(facts), strict=True):
        worker = facts.workers.get(worker_id_of_member)
        if session is not None and _is_well(facts, worker, session):
            last_message_times.append(session.last_message_seconds)
            continue
        finding = _judge_member(facts, member, (worker, session), has_trainer_exits=bool(exits))
        if isinstance(finding, Failure):
            failures.append(
                replace(finding, expected=not finding.caused_by_program and bool(announced_termination(facts, member)))
            )
        elif finding is not None:
            recheck_times.append(finding.at_seconds)
    if last_message_times:
        recheck_times.append(min(last_message_times) + facts.spec.health_policy.heartbeat_timeout_seconds)
    # A majority that is merely silent points to the operator's own network, unless a trainer reports that its peers are gone.
    uncorroborated = [failure for failure in failures if not failure.corroborated]
    if not exits and len(facts.membership.members) > 1 and 2 * len(uncorroborated) > len(facts.membership.members):
        names = join_names([failure.worker for failure in uncorroborated])
        partition_reason = (
            f"no heartbeat from workers {names} (a majority), and nothing else reports them lost: waiting, because the"
            " operator's own network may be partitioned"
        )
        failures = [failure for failure in failures if failure.corroborated]
    else:
        partition_reason = None
    hang = find_reported_hang(facts)
    failures += (hang,) if hang is not None else ()
    # a missing step is the effect of any failure found so far, and then no finding of its own
    for finding in (
        _judge_secondary_failures(facts, exits, failures),
        None if failures or exits else detect_hang(facts),
    ):
        if isinstance(finding, Failure):
            failures.append(finding)
        elif finding is not None:
            recheck_times.append(finding.at_seconds)
    failures.sort(key=lambda failure: failure.first_sign_seconds)
    return Detection(tuple(failures), partition_reason, tuple(recheck_times))


def _is_well(facts: JobFacts, worker: ObservedWorker | None, session: ObservedSession) -> bool:
    """Whether nothing speaks against a member: a cheap check first, because nearly all members pass it."""
    has_no_report = session.exit is None and session.unreadable_report is None and session.finished is None
    is_running = worker is not None and worker.phase not in ("Succeeded", "Failed")
    return has_no_report and is_running and is_responsive(facts, session)


def _judge_member(
    facts: MembershipNodeFacts,
    member: Member,
    observed: tuple[ObservedWorker | None, ObservedSession | None],
    has_trainer_exits: bool,
) -> Failure | Recheck | None:
    """Judges one member: failed, to be rechecked, or well (None)."""
    # A trainer that finished is no failure, even if its pod or connection is gone by now.
    generation, (worker, session) = facts.membership.generation, observed
    if session is not None and session.generation == generation and session.finished == 0:
        return None
    # The platform's status is authoritative, so it is checked before anything that agents report.
    platform_failure = _failure_by_platform(facts, member, worker, session)
    if platform_failure is not None:
        return platform_failure
    if session is None:
        newer_session = facts.sessions.get(worker_id(member))
        if newer_session is not None:
            reason = f"the agent of worker {member.index} was restarted"
            return Failure("agent-lost", reason, newer_session.since_seconds, member.index, member.node)
        return _judge_never_connected(facts, member)
    # A hang is not one member's failure: it is judged for all ranks together.
    if session.exit is not None and session.exit.generation == generation and not session.exit.secondary:
        return None if session.exit.kind == "hang" else _trainer_failure(facts, session, member)
    if session.unreadable_report is not None and session.generation == generation:
        return _unreadable_failure(facts, session, member)
    # What remains is weak evidence: a broken connection, or missing heartbeats.
    if not session.connected:
        return _judge_broken_connection(facts, session, member, has_trainer_exits)
    return _judge_silence(facts, session, member)


def _failure_by_platform(
    facts: MembershipNodeFacts, member: Member, worker: ObservedWorker | None, session: ObservedSession | None
) -> Failure | None:
    """Returns the failure that the platform's status of the pod or node proves; None: it proves none."""
    first_sign_seconds = session.since_seconds if session is not None and not session.connected else facts.now
    node_is_lost = is_node_lost(facts, member.node)
    if worker is not None and worker.phase == "Succeeded" and not worker.exit_code:
        return None
    has_ended = worker is None or worker.phase in ("Succeeded", "Failed")
    if node_is_lost and (has_ended or (session is not None and not is_responsive(facts, session))):
        node = facts.nodes.get(member.node)
        node_reason = node.reason or node.unconfirmed_failure if node is not None else ""
        reason_clause = f": {node_reason}" if node_reason else ""
        return Failure(
            "node-lost",
            f"node {member.node} of worker {member.index} is lost{reason_clause}",
            first_sign_seconds,
            *_worker_and_node_of(member),
        )
    if not has_ended:
        return None
    if worker is None:
        return Failure(
            "agent-lost", f"worker {member.index} was deleted", first_sign_seconds, *_worker_and_node_of(member)
        )
    detail = f" ({worker.message})" if worker.message else ""
    reason = f"worker {member.index} {worker.exit_description}{detail}"
    return blame_oom_killer(Failure("agent-lost", reason, first_sign_seconds, *_worker_and_node_of(member)), worker)


def _judge_never_connected(facts: MembershipNodeFacts, member: Member) -> Failure | Recheck | None:
    """Judges a member that has never connected to this leader."""
    worker = facts.workers.get(worker_id(member))
    if worker is not None and worker.phase == "Succeeded":
        return None
    absent_deadline, contact_deadline = absent_member_deadline(facts), facts.term_seconds + NO_CONTACT_SECONDS
    if absent_deadline is not None and facts.now >= absent_deadline:
        reason = f"worker {member.index} has not connected to this leader, and the connected workers make no step"
        return Failure("worker-silent", reason, absent_deadline, *_worker_and_node_of(member), corroborated=False)
    if facts.now < contact_deadline:
        return Recheck(contact_deadline if absent_deadline is None else min(contact_deadline, absent_deadline))
    if worker is not None and worker.phase == "Running" and not is_node_lost(facts, member.node):
        return None
    reason = f"worker {member.index} has not connected since this operator started, and nothing reports it running"
    return Failure("worker-silent", reason, contact_deadline, *_worker_and_node_of(member))


def _trainer_failure(facts: MembershipNodeFacts, session: ObservedSession, member: Member) -> Failure | None:
    """Builds the failure of a trainer that exited, with the blame on the node if that is evident."""
    exit_report = session.exit
    if exit_report is None:
        return None
    exit_text = f"signal {-exit_report.code}" if exit_report.code < 0 else f"exit code {exit_report.code}"
    cause_clause = f": {exit_report.cause}" if exit_report.cause else ""
    reason = f"rank {exit_report.rank} on worker {member.index} ended with {exit_text}{cause_clause}"
    at_seconds = exit_report.received_seconds
    failure = Failure(
        "trainer-failed",
        reason,
        at_seconds,
        *_worker_and_node_of(member),
        True,
        exit_report.code,
        rank=exit_report.rank,
    )
    return blame_node_if_evident(facts, failure, exit_report)


def _unreadable_failure(facts: JobFacts, session: ObservedSession, member: Member) -> Failure | None:
    """Builds the failure of a restore that found a checkpoint missing or damaged."""
    if session.unreadable_report is None:
        return None
    checkpoint, is_missing, detail = session.unreadable_report
    if is_missing:
        reason = f"no memory server has all parts of {checkpoint} ({detail})"
        # our own tiers are read again before the next choice; a source job's checkpoint is not, and must not be chosen again
        return Failure(
            "unreadable",
            reason,
            facts.now,
            *_worker_and_node_of(member),
            unreadable_checkpoint=checkpoint if checkpoint.is_imported else None,
        )
    reason = f"every copy of some block of {checkpoint} is damaged ({detail})"
    return Failure("unreadable", reason, facts.now, *_worker_and_node_of(member), unreadable_checkpoint=checkpoint)


def _judge_broken_connection(
    facts: MembershipFacts, session: ObservedSession, member: Member, has_trainer_exits: bool
) -> Failure | Recheck | None:
    """Judges a member whose connection broke: lost, or when to recheck.

    A broken connection alone proves nothing: a reset link and a dead process cause the same. The platform reports a dead
    process, or peers report broken collectives. Without these, a step must be overdue by reports of other ranks, or the agent
    must stay away for the heartbeat timeout.
    """
    if not has_trainer_exits:
        progress_deadline = progress_proof_end(facts, session.since_seconds)
        if progress_deadline is not None:
            return Recheck(progress_deadline)
        silence_deadline = session.since_seconds + facts.spec.health_policy.heartbeat_timeout_seconds
        overdue_seconds = min(silence_deadline, _step_overdue_seconds(facts, session.since_seconds))
        if facts.now < overdue_seconds:
            return Recheck(overdue_seconds)
        if facts.now < silence_deadline and not _is_step_confirmed_missing(facts, overdue_seconds):
            return Recheck(min(silence_deadline, facts.now + _RECHECK_SECONDS))
    reason = f"the connection to worker {member.index} broke and was not re-established"
    return Failure("agent-lost", reason, session.since_seconds, *_worker_and_node_of(member), corroborated=False)


def _step_overdue_seconds(facts: MembershipFacts, since_seconds: float) -> float:
    """Returns from when on a missing step is evidence about a connection that broke at `since_seconds`."""
    last_step_at_seconds, step_seconds = last_step_seconds(facts, facts.membership.generation), seconds_per_step(facts)
    if last_step_at_seconds is None or step_seconds is None:
        return float("inf")
    # others report a step with their next heartbeat
    next_report_seconds = last_step_at_seconds + 2 * step_seconds + facts.spec.health_policy.heartbeat_seconds
    return max(since_seconds + RECONNECT_SECONDS, next_report_seconds)


def _is_step_confirmed_missing(facts: MembershipFacts, overdue_seconds: float) -> bool:
    """Whether another rank reported after `overdue_seconds`, still without a further step."""
    return any(
        s.connected and s.last_message_seconds >= overdue_seconds
        for s in sessions_in_generation(facts, facts.membership.generation)
    )


def _judge_silence(facts: MembershipFacts, session: ObservedSession, member: Member) -> Failure | Recheck | None:
    """Judges a member whose connection is open but whose heartbeats stopped: lost, or when to recheck."""
    silence_deadline = session.last_message_seconds + facts.spec.health_policy.heartbeat_timeout_seconds
    if facts.now <= silence_deadline:
        return Recheck(silence_deadline)
    # others report their steps with each heartbeat, however many they make in between
    progress_deadline = progress_proof_end(facts, session.last_message_seconds)
    if progress_deadline is not None:
        return Recheck(progress_deadline)
    timeout_seconds = facts.spec.health_policy.heartbeat_timeout_seconds
    reason = f"worker {member.index} sent no heartbeat for more than {timeout_seconds:g} seconds"
    return Failure("worker-silent", reason, silence_deadline, *_worker_and_node_of(member), corroborated=False)


def _judge_secondary_failures(
    facts: MembershipFacts, exits: list[ObservedSession], failures: list[Failure]
) -> Failure | Recheck | None:
    """Judges trainers that exited because a peer's connection broke while no first cause is known."""
    if failures or not exits:
        return None
    # Wait a moment: the first cause may be reported after its effects.
    first_exit = min((s.exit for s in exits if s.exit is not None), key=lambda e: e.received_seconds)
    deadline_seconds = first_exit.received_seconds + RECONNECT_GRACE_SECONDS
    if facts.now < deadline_seconds:
        return Recheck(deadline_seconds)
    secondary_text = f"rank {first_exit.rank} lost its peers ({first_exit.cause or 'connection broke'})"
    # A rank that exited with code 0 while others train, or a terminating worker, explains the broken connections.
    finished_ranks = [
        (member, session, rank)
        for member, session in member_sessions(facts)
        if session is not None and session.generation == facts.membership.generation
        for rank in session.progress.exited_ranks
    ]
    terminating_member = next((m for m in facts.membership.members if announced_termination(facts, m)), None)
    if not finished_ranks and terminating_member is not None:
        reason = f"worker {terminating_member.index} {announced_termination(facts, terminating_member)}, and ended before all ranks could save at a barrier: {secondary_text}"
        return Failure(
            "agent-lost", reason, first_exit.received_seconds, *_worker_and_node_of(terminating_member), expected=True
        )
    if not finished_ranks:
        failure = Failure(
            "trainer-failed", f"{secondary_text}, cause unknown", first_exit.received_seconds, exit_code=first_exit.code
        )
        return replace(failure, unexplained=True)
    member, session, rank = finished_ranks[0]
    unlisted_clause = f", and {len(finished_ranks) - 1} more," if len(finished_ranks) > 1 else ""
    reason = (
        f"rank {rank} on worker {member.index}{unlisted_clause} exited with code 0 after step {session.progress.step} while"
        f" others still train: {secondary_text}"
    )
    if len(finished_ranks) > 1:
        return Failure("trainer-failed", reason, first_exit.received_seconds, caused_by_program=True, exit_code=0)
    return Failure(
        "trainer-failed", reason, first_exit.received_seconds, *_worker_and_node_of(member), True, 0, rank=rank
    )


def find_dead_member(facts: MembershipNodeFacts) -> Failure | None:
    """Returns the failure of the first member that ended or stopped sending heartbeats; None: all live."""
    for worker, (member, session) in zip(facts.members, member_sessions(facts), strict=True):
        platform_failure = _failure_by_platform(facts, member, facts.workers.get(worker), session)
        if platform_failure is not None:
            return platform_failure
        newer_session = facts.sessions.get(worker)
        if session is None and newer_session is not None:
            reason = f"the agent of worker {member.index} was restarted"
            return Failure("agent-lost", reason, newer_session.since_seconds, *_worker_and_node_of(member))
        if session is None:
            continue
        if facts.now > session.last_message_seconds + facts.spec.health_policy.heartbeat_timeout_seconds:
            reason = f"worker {member.index} sends no more heartbeats"
            return Failure("worker-silent", reason, session.last_message_seconds, *_worker_and_node_of(member))
    return None


def _worker_and_node_of(member: Member) -> tuple[int, str]:
    return member.index, member.node
