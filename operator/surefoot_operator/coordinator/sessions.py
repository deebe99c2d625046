"""Tracks each agent's session, and applies every message of an agent to it.

Pure: time is an argument. `surefoot_operator.coordinator.agent_channel` and the simulator call it for each hello,
message and broken connection; the planner reads the resulting `ObservedSession`s. Nothing here is durable: agents
report everything again to a new coordinator.

Reports belong to a generation. `ObservedSession.generation` is the newest one that the agent's trainers were started
for. Its step, exit, exit code, barrier step and unreadable save are about that generation, even after the trainers have
stopped (`stopped` may be newer). A report of an older generation is ignored, so a late message cannot end a newer one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from surefoot.protocol.bounds import MAX_CAUSE_CHARACTERS, MAX_DETAIL_CHARACTERS, truncate_text
from surefoot.protocol.hangs import MAX_LEARNED_STEPS
from surefoot.protocol.identities import WorkerId
from surefoot.protocol.messages import (
    BarrierReached,
    Finished,
    FromAgent,
    HangReport,
    Heartbeat,
    Hello,
    HelloRejected,
    ListAllServers,
    NodeHealth,
    Notice,
    StoreReady,
    TrainerFailure,
    TrainersStopped,
    UnreadableSave,
)
from surefoot.protocol.progress import NO_PROGRESS, Progress, subtract_activity
from surefoot_operator.api.status import Membership
from surefoot_operator.coordinator import conversations
from surefoot_operator.coordinator.pending_requests import PendingRequests
from surefoot_operator.job_snapshot import (
    MAX_WINDOWS,
    ActivityHistory,
    ActivityWindow,
    HangEvidence,
    ObservedExit,
    ObservedSession,
    Timings,
)

# ---- activity of ranks -----------------------------------------------------------------------------------------------
# Cuts the activity counts that an agent reports as running totals into windows. A window spans enough observations of
# each rank and several steps, so an evaluation that the script does not announce fills one window, however long it
# takes. The first window of a generation is dropped: a rank that has just started on a new node still reads data and
# compiles code that its peers have cached, and would be mistaken for a straggler.

MIN_WINDOW_OBSERVATIONS = 48
"""Observations of each rank in one window, at least; about ten seconds."""

MIN_WINDOW_STEPS = 4
"""Training steps in one window, at least."""


def add_activity(history: ActivityHistory, progress: Progress) -> ActivityHistory:
    """Adds the activity totals of one heartbeat of the same generation."""
    changes = tuple(
        subtract_activity(*pair) for pair in zip(history.window_start_totals, progress.activities, strict=False)
    )
    activities = tuple(activity for activity in changes if activity is not None)
    if len(activities) != len(progress.activities) or len(history.window_start_totals) != len(progress.activities):
        return ActivityHistory(progress.activities, progress.step)  # first report of this generation, or of some rank
    if (
        progress.step - history.window_start_step < MIN_WINDOW_STEPS
        or min(activity.observations for activity in activities) < MIN_WINDOW_OBSERVATIONS
    ):
        return history
    window = (ActivityWindow(history.window_start_step, activities),) if history.warmed_up else ()
    return ActivityHistory(
        progress.activities, progress.step, (*history.windows, *window)[-MAX_WINDOWS:], warmed_up=True
    )


# ---- clocks and round trips of agents --------------------------------------------------------------------------------
# Collects recent step times, stalls, flush times and activity from one agent's heartbeats. Agents report at once when a
# save is staged and when it has all its copies; the time between the two is its flush time. A new generation starts
# with empty timings, because another world size has other step times.

MAX_TIMED_SAVES = 9
"""Saves, the newest, whose stall and flush times are remembered."""


def add_timings(timings: Timings, beat: Heartbeat, has_new_step: bool, now: float) -> Timings:
    """Adds the times in one heartbeat of the same generation.

    Args:
        timings: What earlier heartbeats reported.
        beat: The heartbeat.
        has_new_step: Whether it reports a step that no earlier one did.
        now: Unix time at which it arrived, in seconds.
    """
    progress = beat.progress
    if has_new_step and progress.step_seconds is not None:
        timings = replace(timings, steps=(*timings.steps, progress.step_seconds)[-MAX_LEARNED_STEPS:])
    if progress.activities:
        timings = replace(timings, activity=add_activity(timings.activity, progress))
    if progress.stall_seconds is not None and timings.stalls[-1:] != (progress.stall_seconds,):
        timings = replace(timings, stalls=(*timings.stalls, progress.stall_seconds)[-MAX_TIMED_SAVES:])
    # the flush of an older generation's save may end in this one; its time counts for neither
    pending_saves = [c for c in beat.pending if c.generation == beat.generation]
    new_flush_seconds = [
        now - staged_seconds for c, staged_seconds in timings.pending.items() if c not in pending_saves
    ]
    if new_flush_seconds or len(pending_saves) != len(timings.pending):
        staged_seconds_by_save = {c: timings.pending.get(c, now) for c in pending_saves}
        timings = replace(
            timings, pending=staged_seconds_by_save, flushes=(*timings.flushes, *new_flush_seconds)[-MAX_TIMED_SAVES:]
        )
    return timings


# ---- sessions --------------------------------------------------------------------------------------------------------

MAX_NOTICES = 64
"""Notices of agents, the newest, that wait for the reconciler to record them as events."""

MAX_CLOCK_SKEW_SECONDS = 30.0
"""Larger differences between a node's clock and the operator's are reported; TLS and signed requests bear minutes."""


@dataclass(frozen=True, slots=True)
class Session:
    """The session of one worker's newest agent."""

    observed: ObservedSession
    """The part of the session that the planner reads."""
    hello_generation: int = 0
    """Generation whose trainers ran when the agent last connected; 0: none ran."""
    store: tuple[int, str] | None = None
    """(generation, host:port) of the TCPStore that this agent hosts; None: it has reported none."""
    wants_all_servers: bool = False
    """Whether the agent asked on this connection for the list of all memory servers."""
    replaced_incarnations: frozenset[str] = frozenset()
    """Earlier incarnations of this worker's agent; one that was frozen and thaws must not connect again."""

    @property
    def worker(self) -> WorkerId:
        """The worker, with its attempt, whose agent this is."""
        return WorkerId(self.observed.index, self.observed.attempt)


@dataclass(frozen=True, slots=True)
class Sessions:
    """All sessions of one job, with its membership and the requests to its agents."""

    job: str
    """Namespace and name of the job, as agents give them in their hello."""
    term_seconds: float
    """Unix time at which this coordinator began to lead the job."""
    requests: PendingRequests
    """Requests that agents have not answered, and the results of those that they have."""
    by_worker: Mapping[WorkerId, Session] = field(default_factory=dict)
    """The newest session of each worker that has connected."""
    membership: Membership | None = None
    """The membership in the stored status; None: no generation was claimed yet."""
    notices: tuple[tuple[WorkerId, Notice], ...] = ()
    """Notices of agents that the reconciler has not taken yet, oldest first."""
    worker_by_incarnation: Mapping[str, WorkerId] = field(default_factory=dict)
    """The worker of each agent incarnation that has a session."""
    last_retry_later_seconds: float = 0.0
    """Unix time at which an agent's hello was last rejected with "retry"; 0: never."""


def create_sessions(job: str, now: float) -> Sessions:
    """Creates the state of a new coordinator, which knows no session yet.

    Request numbers start at the time in milliseconds, so that no two coordinators use the same number.
    """
    return Sessions(job, now, PendingRequests(next_request=int(now * 1000)))


def list_observed_sessions(sessions: Sessions) -> tuple[ObservedSession, ...]:
    """Lists the sessions for a snapshot, ordered by worker."""
    return tuple(sessions.by_worker[worker].observed for worker in sorted(sessions.by_worker))


def hello_rejection(
    sessions: Sessions, hello: Hello, existing_workers: frozenset[WorkerId] | None
) -> HelloRejected | None:
    """Returns why this hello must be rejected; None: it is accepted.

    `existing_workers`: the workers that exist on the platform; None: not listed yet.
    """
    worker = WorkerId(hello.index, hello.attempt)
    if hello.job != sessions.job:
        return HelloRejected(f"this coordinator serves job {sessions.job}, not {hello.job}", retry=False)
    if existing_workers is None:
        return HelloRejected("this coordinator has just started and does not know its workers yet", retry=True)
    if worker not in existing_workers:
        newest_attempt = max((w.attempt for w in existing_workers if w.index == worker.index), default=0)
        if newest_attempt > worker.attempt:
            return HelloRejected(f"{worker} was replaced by attempt {newest_attempt}", retry=False)
        return HelloRejected(f"{worker} is not among the workers of this job", retry=True)
    session = sessions.by_worker.get(worker)
    if session is not None and hello.incarnation in session.replaced_incarnations:
        return HelloRejected(f"agent {hello.incarnation} was replaced by a newer agent of {worker}", retry=False)
    other_worker = sessions.worker_by_incarnation.get(hello.incarnation)
    if other_worker is not None and other_worker != worker:
        return HelloRejected(
            f"incarnation {hello.incarnation} is already {other_worker}: each agent start needs its own", retry=False
        )
    return None


def record_retry_later(sessions: Sessions, now: float) -> Sessions:
    """Records that a hello was rejected with "retry", so an agent may be alive that has no session yet."""
    return replace(sessions, last_retry_later_seconds=now)


def apply_hello(sessions: Sessions, hello: Hello, now: float) -> Sessions:
    """Applies an accepted hello; an agent that restarted begins with an empty session."""
    worker = WorkerId(hello.index, hello.attempt)
    old_session = sessions.by_worker.get(worker)
    if old_session is not None and old_session.observed.incarnation == hello.incarnation:
        session = replace(
            old_session,
            observed=replace(old_session.observed, connected=True, since_seconds=now, last_message_seconds=now),
        )
    else:
        replaced = (
            frozenset()
            if old_session is None
            else old_session.replaced_incarnations | {old_session.observed.incarnation}
        )
        observed = ObservedSession(hello.index, hello.attempt, hello.incarnation, hello.node, True, now, now)
        session = Session(observed, replaced_incarnations=replaced)
        speakers = {**sessions.worker_by_incarnation, hello.incarnation: worker}
        if old_session is not None:
            speakers.pop(old_session.observed.incarnation, None)
        requests = conversations.drop_requests_to(sessions.requests, worker)
        sessions = replace(sessions, requests=requests, worker_by_incarnation=speakers)
    session = _enter_generation(session, hello.generation)
    stopped = max(session.observed.stopped, hello.stopped)
    store = (hello.generation, hello.store) if hello.store and hello.generation else session.store
    session = replace(
        session,
        observed=replace(session.observed, stopped=stopped, warm=hello.is_warm),
        hello_generation=hello.generation,
        store=store,
        wants_all_servers=False,
    )
    return _with_session(sessions, session)


def is_adopted(sessions: Sessions, worker: WorkerId) -> bool:
    """Whether this agent connected while its trainers were running the committed generation.

    The plan after such a hello may be delayed. After a change of leader all agents of a job reconnect this way, and one
    plan for each of them took as long as all the connections did.
    """
    membership, session = sessions.membership, sessions.by_worker[worker]
    return (
        membership is not None and membership.state == "Committed" and session.hello_generation == membership.generation
    )


def record_disconnect(sessions: Sessions, worker: WorkerId, now: float) -> Sessions:
    """Records that this worker's connection broke; its facts stay."""
    session = sessions.by_worker.get(worker)
    if session is None or not session.observed.connected:
        return sessions
    return _with_session(
        sessions, replace(session, observed=replace(session.observed, connected=False, since_seconds=now))
    )


def drop_removed_workers(sessions: Sessions, existing_workers: Iterable[WorkerId]) -> Sessions:
    """Drops disconnected sessions of workers that no longer exist.

    A worker that finished the committed generation is kept, because its pod may be deleted before the others finish.
    Without its session the job would start another generation and repeat finished steps.
    """
    existing = set(existing_workers)
    removed_workers = {
        w
        for w, s in sessions.by_worker.items()
        if w not in existing and not s.observed.connected and not _has_finished(sessions, s.observed)
    }
    if not removed_workers:
        return sessions
    requests = sessions.requests
    for worker in removed_workers:
        requests = conversations.drop_requests_to(requests, worker)
    remaining_sessions = {w: s for w, s in sessions.by_worker.items() if w not in removed_workers}
    speakers = {incarnation: w for incarnation, w in sessions.worker_by_incarnation.items() if w not in removed_workers}
    return replace(sessions, by_worker=remaining_sessions, requests=requests, worker_by_incarnation=speakers)


def _has_finished(sessions: Sessions, observed: ObservedSession) -> bool:
    membership = sessions.membership
    is_committed = (
        membership is not None and membership.state == "Committed" and membership.generation == observed.generation
    )
    return is_committed and observed.finished == 0


def apply_membership(sessions: Sessions, membership: Membership | None) -> Sessions:
    """Takes over the membership in the status, and drops requests of other generations."""
    if membership == sessions.membership:
        return sessions
    generation, is_committed = (
        (membership.generation, membership.state == "Committed") if membership is not None else (0, False)
    )
    return replace(
        sessions,
        membership=membership,
        requests=conversations.drop_requests_of_other_generations(sessions.requests, generation, is_committed),
    )


def apply_message(sessions: Sessions, worker: WorkerId, message: FromAgent, now: float) -> Sessions:
    """Applies one message of a connected agent, other than its hello."""
    session = sessions.by_worker.get(worker)
    if session is None:
        return sessions
    session = replace(session, observed=replace(session.observed, last_message_seconds=now))
    match message:
        case Heartbeat():
            session = apply_heartbeat(sessions.membership, session, message, now)
        case TrainersStopped():
            session = apply_trainers_stopped(session, message.generation, now)
        case StoreReady():
            session = replace(session, store=(message.generation, message.address))
        case TrainerFailure() | BarrierReached() | UnreadableSave() | Finished():
            session = _apply_report(session, message, now)
        case ListAllServers():
            session = replace(session, wants_all_servers=True)
        case HangReport():
            session = _apply_hang_report(session, message)
        case NodeHealth():
            session, clock_message = _apply_node_health(session, message, now)
            new_notices = ((worker, Notice("ClockSkew", clock_message)),) if clock_message else ()
            sessions = replace(sessions, notices=(*sessions.notices, *new_notices)[-MAX_NOTICES:])
        case Notice():
            sessions = replace(sessions, notices=(*sessions.notices, (worker, message))[-MAX_NOTICES:])
        case _:
            sessions = replace(sessions, requests=conversations.apply_reply(sessions.requests, worker, message, now))
    return _with_session(sessions, session)


def find_store_address(sessions: Sessions) -> str | None:
    """Returns the address of the committed generation's TCPStore; None until its host has reported it."""
    membership = sessions.membership
    if membership is None or membership.state != "Committed" or not membership.members:
        return None
    host = membership.members[0]
    session = sessions.by_worker.get(WorkerId(host.index, host.attempt))
    if session is None or session.observed.incarnation != host.incarnation or session.store is None:
        return None
    generation, address = session.store
    return address if generation == membership.generation else None


def _with_session(sessions: Sessions, session: Session) -> Sessions:
    return replace(sessions, by_worker={**sessions.by_worker, session.worker: session})


def _enter_generation(session: Session, generation: int) -> Session:
    """Clears the reports of older generations if `generation` is newer; 0 (no trainer runs) clears nothing."""
    if generation <= session.observed.generation:
        return session
    blank = replace(
        session.observed,
        generation=generation,
        progress=NO_PROGRESS,
        step_at_seconds=None,
        timings=Timings(),
        exit=None,
        finished=None,
        finished_steps=0,
        final_saves_reported=False,
        barrier_step=None,
        unreadable_report=None,
        hang_evidence=None,
    )
    return replace(session, observed=blank)


def apply_heartbeat(membership: Membership | None, session: Session, beat: Heartbeat, now: float) -> Session:
    """Applies a heartbeat.

    Copies nothing but this session, because nearly all messages are heartbeats.
    """
    session = _enter_generation(session, beat.generation)
    old = session.observed
    progress, has_new_step, pause_changed, timings = old.progress, False, False, old.timings
    if beat.generation == old.generation and beat.generation:
        start_step = (
            membership.parent.step
            if membership is not None and membership.generation == beat.generation and membership.parent
            else 0
        )
        has_new_step = beat.progress.step > max(progress.step, start_step)
        timings = add_timings(timings, beat, has_new_step, now)
        # the start or end of an announced pause is a sign of life: the wait for the next step begins again
        pause_changed = old.step_at_seconds is not None and beat.progress.pause_reason != progress.pause_reason
        progress = beat.progress.merge_over(progress)
    observed = replace(
        old,
        last_message_seconds=now,
        stopped=max(old.stopped, beat.stopped),
        warm=beat.is_warm,
        pending=beat.pending,
        saved=beat.saved,
        copies=beat.copies,
        final_saves_reported=old.finished is not None,
        terminating=beat.terminating,
        progress=progress,
        step_at_seconds=now if has_new_step or pause_changed else old.step_at_seconds,
        timings=timings,
    )
    return replace(session, observed=observed)


def apply_trainers_stopped(session: Session, generation: int, now: float) -> Session:
    """Applies an agent's report that none of its trainers runs.

    Changes nothing but this session: all agents of a generation send this report within moments of each other.
    """
    old = session.observed
    return replace(session, observed=replace(old, last_message_seconds=now, stopped=max(old.stopped, generation)))


def _apply_hang_report(session: Session, message: HangReport) -> Session:
    session = _enter_generation(session, message.generation)
    if message.generation != session.observed.generation:
        return session
    evidence = (
        HangEvidence(message.step, message.stacks, message.moves, message.collectives) if message.stacks else None
    )
    return replace(session, observed=replace(session.observed, hang_evidence=evidence))


def _apply_node_health(session: Session, message: NodeHealth, now: float) -> tuple[Session, str]:
    """Stores an agent's node health report; returns a message if the node's clock has just become wrong, else ""."""
    old_observed, skew = session.observed, message.clock_seconds - now if message.clock_seconds else None
    is_off = skew is not None and abs(skew) > MAX_CLOCK_SKEW_SECONDS
    was_off = (
        old_observed.clock_skew_seconds is not None and abs(old_observed.clock_skew_seconds) > MAX_CLOCK_SKEW_SECONDS
    )
    clock_message = ""
    if is_off and not was_off and skew is not None:
        direction = "fast" if skew > 0 else "slow"
        clock_message = (
            f"the clock of node {old_observed.node} is {abs(skew):.0f} s {direction} compared with the operator's:"
            " check its time synchronization"
        )
    is_unchanged = [(finding.reason, finding.blame) for finding in message.findings] == [
        (finding.reason, finding.blame) for finding in old_observed.findings
    ]
    observed = replace(
        old_observed,
        findings=message.findings,
        findings_seconds=old_observed.findings_seconds if is_unchanged else now,
        clock_skew_seconds=skew,
    )
    return replace(session, observed=observed), clock_message


def _apply_report(
    session: Session, message: TrainerFailure | BarrierReached | UnreadableSave | Finished, now: float
) -> Session:
    """Applies a report about one generation; a report of an older generation than the session's is ignored."""
    generation = message.generation
    session = _enter_generation(session, generation)
    old = session.observed
    if generation != old.generation:
        return session
    if isinstance(message, BarrierReached):
        return replace(session, observed=replace(old, barrier_step=message.step))
    if isinstance(message, UnreadableSave):
        report = (message.checkpoint, message.absent, truncate_text(message.detail, MAX_CAUSE_CHARACTERS))
        # "every copy is corrupt" replaces "a copy is absent"; of one kind the first report is kept
        keeps_old_report = old.unreadable_report is not None and (not old.unreadable_report[1] or message.absent)
        return session if keeps_old_report else replace(session, observed=replace(old, unreadable_report=report))
    if isinstance(message, Finished):
        return replace(session, observed=replace(old, finished=message.exit_code, finished_steps=message.steps))
    # the first failure is the cause; a failure that merely follows from another rank's is replaced by it
    if old.exit is not None and (message.is_secondary or not old.exit.secondary):
        return session
    new_exit = ObservedExit(
        message.generation, message.rank, message.code,
        truncate_text(message.cause, MAX_CAUSE_CHARACTERS), message.is_secondary, now,
        message.kind, truncate_text(message.detail, MAX_DETAIL_CHARACTERS), message.oom_scope,
    )  # fmt: skip
    at_seconds = new_exit.received_seconds if old.exit is None else old.exit.received_seconds
    observed = replace(old, exit=replace(new_exit, received_seconds=at_seconds))
    if message.step > old.progress.step:
        observed = replace(observed, progress=replace(old.progress, step=message.step))
    return replace(session, observed=observed)
