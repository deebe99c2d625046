"""Tracks each agent's session: what every message changes.

Pure: time is an argument. Called by `surefoot_operator.coordinator.agent_channel` and the simulator for each hello, message and broken
connection; plans are made from `seen`. Nothing here is durable: agents report it all to a new coordinator.

Facts belong to an epoch: `epoch` of a session is the newest one its trainers were started for, and step, exit,
finished, barrier_step and unreadable are about that one, also after its trainers have stopped (`stopped` grows beyond it).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from surefoot.protocol.bounds import MAX_CAUSE_CHARACTERS, MAX_DETAIL_CHARACTERS, shorten_text
from surefoot.protocol.hangs import MOST_STEPS
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
from surefoot.protocol.progress import NO_PROGRESS, Progress, subtract
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
# Cuts the looks that an agent tells as totals into windows. A window has enough looks of each rank, and some steps: one
# evaluation that a program does not announce is one window, however long it takes. Nor does the first of an epoch
# count: who has just been started, on another node than the others, reads and compiles what they have had for long.

WINDOW_OBSERVATIONS = 48
"""Of each rank: some ten seconds."""

WINDOW_STEPS = 4


def add_activity(seen: ActivityHistory, told: Progress) -> ActivityHistory:
    """Adds what one heartbeat of the same epoch tells of paces."""
    windows = tuple(subtract(*pair) for pair in zip(seen.window_start_totals, told.activities, strict=False))
    whole = tuple(one for one in windows if one is not None)
    if len(whole) != len(told.activities) or len(seen.window_start_totals) != len(told.activities):
        return ActivityHistory(told.activities, told.step)  # the first word of this epoch, or not all ranks told before
    if (
        told.step - seen.window_start_step < WINDOW_STEPS
        or min(one.observations for one in whole) < WINDOW_OBSERVATIONS
    ):
        return seen
    window = (ActivityWindow(seen.window_start_step, whole),) if seen.warmed_up else ()
    return ActivityHistory(told.activities, told.step, (*seen.windows, *window)[-MAX_WINDOWS:], warmed_up=True)


# ---- clocks and round trips of agents --------------------------------------------------------------------------------
# Collects recent steps, stalls, drains and paces from one agent's heartbeats. Agents report at once when a save is
# staged and when it has all its copies; the time between is its drain. Ends with the epoch, since another world has
# other steps.

MAX_SAVES = 9
"""Newest ones that count."""


def add_timings(timings: Timings, beat: Heartbeat, grown: bool, now: float) -> Timings:
    """Adds one heartbeat of the same epoch.

    `grown`: it reports a new step.
    """
    told = beat.progress
    if grown and told.step_seconds is not None:
        timings = replace(timings, steps=(*timings.steps, told.step_seconds)[-MOST_STEPS:])
    if told.activities:
        timings = replace(timings, pace=add_activity(timings.pace, told))
    if told.stall_seconds is not None and timings.stalls[-1:] != (told.stall_seconds,):
        timings = replace(timings, stalls=(*timings.stalls, told.stall_seconds)[-MAX_SAVES:])
    own = [c for c in beat.pending if c.generation == beat.generation]  # an older epoch's drain may have met its end
    done = [now - since for c, since in timings.pending.items() if c not in own]
    if done or len(own) != len(timings.pending):
        pending = {c: timings.pending.get(c, now) for c in own}
        timings = replace(timings, pending=pending, flushes=(*timings.flushes, *done)[-MAX_SAVES:])
    return timings


# ---- sessions --------------------------------------------------------------------------------------------------------

MAX_NOTICES = 64

SKEW_SECONDS = 30.0
"""A node's clock this far from the operator's is told: signatures and certificates bear a few minutes."""


@dataclass(frozen=True, slots=True)
class Session:
    """The session of one worker's newest agent."""

    observed: ObservedSession
    hello_generation: int = 0
    """Epoch that was running when it last connected: not 0 means that it is adopted, not started."""
    store: tuple[int, str] | None = None
    """(epoch, host:port) of the store that this agent hosts."""
    wants_servers: bool = False
    """Asked on this line to be told of every holder."""
    replaced: frozenset[str] = frozenset()
    """Incarnations that were this worker before; a thawed one must not come back."""

    @property
    def worker(self) -> WorkerId:
        return WorkerId(self.observed.index, self.observed.attempt)


@dataclass(frozen=True, slots=True)
class Sessions:
    """All sessions of one job, with the world they belong to."""

    job: str
    term_seconds: float
    orders: PendingRequests
    by_worker: Mapping[WorkerId, Session] = field(default_factory=dict)
    membership: Membership | None = None
    notices: tuple[tuple[WorkerId, Notice], ...] = ()
    speakers: Mapping[str, WorkerId] = field(default_factory=dict)
    """Whose agent each incarnation is that has a session."""
    turned_away_seconds: float = 0.0
    """When an agent was last asked to come again; 0: none was."""


def new_sessions(job: str, now: float) -> Sessions:
    """Begins a term without any session.

    Requests are numbered from the time on, so that no two terms share a number.
    """
    return Sessions(job, now, PendingRequests(next_request=int(now * 1000)))


def observed_sessions(sessions: Sessions) -> tuple[ObservedSession, ...]:
    """Lists the sessions for a snapshot, ordered by worker."""
    return tuple(sessions.by_worker[worker].observed for worker in sorted(sessions.by_worker))


def rejection(sessions: Sessions, hello: Hello, known: frozenset[WorkerId] | None) -> HelloRejected | None:
    """Says why this hello is refused; None: it is accepted.

    `known`: the fabric's workers; None: not known yet.
    """
    worker = WorkerId(hello.index, hello.attempt)
    if hello.job != sessions.job:
        return HelloRejected(f"this coordinator serves job {sessions.job}, not {hello.job}", retry=False)
    if known is None:
        return HelloRejected("this coordinator has just started and does not know its workers yet", retry=True)
    if worker not in known:
        newer = max((w.attempt for w in known if w.index == worker.index), default=0)
        if newer > worker.attempt:
            return HelloRejected(f"{worker} was replaced by attempt {newer}", retry=False)
        return HelloRejected(f"{worker} is not among the workers of this job", retry=True)
    session = sessions.by_worker.get(worker)
    if session is not None and hello.incarnation in session.replaced:
        return HelloRejected(f"agent {hello.incarnation} was replaced by a newer agent of {worker}", retry=False)
    other = sessions.speakers.get(hello.incarnation)
    if other is not None and other != worker:
        return HelloRejected(
            f"incarnation {hello.incarnation} is already {other}: each agent start needs its own", retry=False
        )
    return None


def record_retry_later(sessions: Sessions, now: float) -> Sessions:
    """Records that an agent was asked to come again.

    Not all that live have joined then.
    """
    return replace(sessions, turned_away_seconds=now)


def apply_hello(sessions: Sessions, hello: Hello, now: float) -> Sessions:
    """Applies an accepted hello; a new incarnation starts without facts."""
    worker = WorkerId(hello.index, hello.attempt)
    old = sessions.by_worker.get(worker)
    if old is not None and old.observed.incarnation == hello.incarnation:
        session = replace(
            old, observed=replace(old.observed, connected=True, since_seconds=now, last_message_seconds=now)
        )
    else:
        replaced = frozenset() if old is None else old.replaced | {old.observed.incarnation}
        fresh = ObservedSession(hello.index, hello.attempt, hello.incarnation, hello.node, True, now, now)
        session = Session(fresh, replaced=replaced)
        speakers = {**sessions.speakers, hello.incarnation: worker}
        if old is not None:
            speakers.pop(old.observed.incarnation, None)
        orders = conversations.drop_worker(sessions.orders, worker)
        sessions = replace(sessions, orders=orders, speakers=speakers)
    session = _in_generation(session, hello.generation)
    stopped = max(session.observed.stopped, hello.stopped)
    store = (hello.generation, hello.store) if hello.store and hello.generation else session.store
    session = replace(
        session,
        observed=replace(session.observed, stopped=stopped, warm=hello.is_warm),
        hello_generation=hello.generation,
        store=store,
        wants_servers=False,
    )
    return _with(sessions, session)


def is_adopted(sessions: Sessions, worker: WorkerId) -> bool:
    """Whether this agent came while its trainers run the committed epoch.

    Such a word can wait for others: behind a new leader all agents of a job come so, and a plan for each of them took as
    long as their lines.
    """
    world, session = sessions.membership, sessions.by_worker[worker]
    return world is not None and world.state == "Committed" and session.hello_generation == world.generation


def connection_broken(sessions: Sessions, worker: WorkerId, now: float) -> Sessions:
    """Records that this worker's connection broke; its facts stay."""
    session = sessions.by_worker.get(worker)
    if session is None or not session.observed.connected:
        return sessions
    return _with(sessions, replace(session, observed=replace(session.observed, connected=False, since_seconds=now)))


def drop_gone_workers(sessions: Sessions, known: Iterable[WorkerId]) -> Sessions:
    """Drops disconnected sessions of workers that no longer exist.

    One that finished the committed epoch stays: its pod may be gone before the others have finished, and a world of
    which it is missing would be begun again for steps that are made.
    """
    keep = set(known)
    gone = {
        w
        for w, s in sessions.by_worker.items()
        if w not in keep and not s.observed.connected and not _has_finished(sessions, s.observed)
    }
    if not gone:
        return sessions
    orders = sessions.orders
    for worker in gone:
        orders = conversations.drop_worker(orders, worker)
    kept = {w: s for w, s in sessions.by_worker.items() if w not in gone}
    speakers = {incarnation: w for incarnation, w in sessions.speakers.items() if w not in gone}
    return replace(sessions, by_worker=kept, orders=orders, speakers=speakers)


def _has_finished(sessions: Sessions, seen: ObservedSession) -> bool:
    world = sessions.membership
    committed = world is not None and world.state == "Committed" and world.generation == seen.generation
    return committed and seen.finished == 0


def apply_membership(sessions: Sessions, world: Membership | None) -> Sessions:
    """Takes over `status.membership`; requests of another one are void."""
    if world == sessions.membership:
        return sessions
    epoch, committed = (world.generation, world.state == "Committed") if world is not None else (0, False)
    return replace(
        sessions, membership=world, orders=conversations.drop_other_generations(sessions.orders, epoch, committed)
    )


def apply_message(sessions: Sessions, worker: WorkerId, message: FromAgent, now: float) -> Sessions:
    """Applies one message of a connected agent."""
    session = sessions.by_worker.get(worker)
    if session is None:
        return sessions
    session = replace(session, observed=replace(session.observed, last_message_seconds=now))
    match message:
        case Heartbeat():
            session = apply_heartbeat(sessions.membership, session, message, now)
        case TrainersStopped():
            session = apply_stopped(session, message.generation, now)
        case StoreReady():
            session = replace(session, store=(message.generation, message.address))
        case TrainerFailure() | BarrierReached() | UnreadableSave() | Finished():
            session = _apply_report(session, message, now)
        case ListAllServers():
            session = replace(session, wants_servers=True)
        case HangReport():
            session = _hang_evidence(session, message)
        case NodeHealth():
            session, skewed = _apply_node_health(session, message, now)
            told = ((worker, Notice("ClockSkew", skewed)),) if skewed else ()
            sessions = replace(sessions, notices=(*sessions.notices, *told)[-MAX_NOTICES:])
        case Notice():
            sessions = replace(sessions, notices=(*sessions.notices, (worker, message))[-MAX_NOTICES:])
        case _:
            sessions = replace(sessions, orders=conversations.apply_reply(sessions.orders, worker, message, now))
    return _with(sessions, session)


def store_address(sessions: Sessions) -> str | None:
    """The committed epoch's store address; None until its host reports it."""
    world = sessions.membership
    if world is None or world.state != "Committed" or not world.members:
        return None
    host = world.members[0]
    session = sessions.by_worker.get(WorkerId(host.index, host.attempt))
    if session is None or session.observed.incarnation != host.incarnation or session.store is None:
        return None
    epoch, address = session.store
    return address if epoch == world.generation else None


def _with(sessions: Sessions, session: Session) -> Sessions:
    return replace(sessions, by_worker={**sessions.by_worker, session.worker: session})


def _in_generation(session: Session, epoch: int) -> Session:
    """Facts of an older epoch end where a newer one begins; 0 (nothing runs) ends nothing."""
    if epoch <= session.observed.generation:
        return session
    blank = replace(
        session.observed,
        generation=epoch,
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


def apply_heartbeat(world: Membership | None, session: Session, beat: Heartbeat, now: float) -> Session:
    """Applies a heartbeat, copying no more than what is seen.

    Nearly all messages are heartbeats.
    """
    session = _in_generation(session, beat.generation)
    old = session.observed
    progress, grown, turned, timings = old.progress, False, False, old.timings
    if beat.generation == old.generation and beat.generation:
        begun = world.parent.step if world is not None and world.generation == beat.generation and world.parent else 0
        grown = beat.progress.step > max(progress.step, begun)
        timings = add_timings(timings, beat, grown, now)
        # a pause that is announced, or over, is a sign of life, and the time to the next step counts from it
        turned = old.step_at_seconds is not None and beat.progress.pause_reason != progress.pause_reason
        progress = beat.progress.merge_over(progress)
    fresh = replace(
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
        step_at_seconds=now if grown or turned else old.step_at_seconds,
        timings=timings,
    )
    return replace(session, observed=fresh)


def apply_stopped(session: Session, epoch: int, now: float) -> Session:
    """Applies an agent's word that nothing of it runs any more.

    It ends no request and moves no store: each agent of a world says it, within moments.
    """
    old = session.observed
    return replace(session, observed=replace(old, last_message_seconds=now, stopped=max(old.stopped, epoch)))


def _hang_evidence(session: Session, message: HangReport) -> Session:
    session = _in_generation(session, message.generation)
    if message.generation != session.observed.generation:
        return session
    told = HangEvidence(message.step, message.stacks, message.moves, message.collectives) if message.stacks else None
    return replace(session, observed=replace(session.observed, hang_evidence=told))


def _apply_node_health(session: Session, message: NodeHealth, now: float) -> tuple[Session, str]:
    """What an agent finds on its node now; and, where its clock turns out to be far off, a sentence on that."""
    old, skew = session.observed, message.clock_seconds - now if message.clock_seconds else None
    off = skew is not None and abs(skew) > SKEW_SECONDS
    was_off = old.clock_skew_seconds is not None and abs(old.clock_skew_seconds) > SKEW_SECONDS
    skewed = ""
    if off and not was_off and skew is not None:
        side = "ahead of" if skew > 0 else "behind"
        skewed = f"the clock of node {old.node} is {abs(skew):.0f} s {side} the operator's"
    same = [(one.reason, one.blame) for one in message.findings] == [(one.reason, one.blame) for one in old.findings]
    fresh = replace(
        old,
        findings=message.findings,
        findings_seconds=old.findings_seconds if same else now,
        clock_skew_seconds=skew,
    )
    return replace(session, observed=fresh), skewed


def _apply_report(
    session: Session, message: TrainerFailure | BarrierReached | UnreadableSave | Finished, now: float
) -> Session:
    """Takes what happened in an epoch; what an older one still has to say does not matter any more."""
    generation = message.generation
    session = _in_generation(session, generation)
    old = session.observed
    if generation != old.generation:
        return session
    if isinstance(message, BarrierReached):
        return replace(session, observed=replace(old, barrier_step=message.step))
    if isinstance(message, UnreadableSave):
        report = (message.checkpoint, message.absent, shorten_text(message.detail, MAX_CAUSE_CHARACTERS))
        # That every copy is bad outranks that one is absent, and the first report of a kind is as good as the next.
        keep = old.unreadable_report is not None and (not old.unreadable_report[1] or message.absent)
        return session if keep else replace(session, observed=replace(old, unreadable_report=report))
    if isinstance(message, Finished):
        return replace(session, observed=replace(old, finished=message.exit_code, finished_steps=message.steps))
    if old.exit is not None and (message.is_secondary or not old.exit.secondary):
        return session
    exit_seen = ObservedExit(
        message.generation, message.rank, message.code,
        shorten_text(message.cause, MAX_CAUSE_CHARACTERS), message.is_secondary, now,
        message.kind, shorten_text(message.detail, MAX_DETAIL_CHARACTERS), message.oom_scope,
    )  # fmt: skip
    at_seconds = exit_seen.at_seconds if old.exit is None else old.exit.at_seconds
    seen = replace(old, exit=replace(exit_seen, at_seconds=at_seconds))
    if message.step > old.progress.step:
        seen = replace(seen, progress=replace(old.progress, step=message.step))
    return replace(session, observed=seen)
