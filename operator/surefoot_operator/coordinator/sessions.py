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
    Exited,
    Finished,
    FromAgent,
    Heartbeat,
    Hello,
    HoldersWanted,
    NodeHealth,
    Notice,
    Refused,
    Stopped,
    StoreReady,
    StuckRanks,
    UnreadableSave,
)
from surefoot.protocol.progress import NOTHING_TOLD, Progress, between
from surefoot_operator.api.status import World
from surefoot_operator.coordinator import conversations
from surefoot_operator.coordinator.pending_requests import PendingRequests
from surefoot_operator.job_snapshot import (
    MOST_WINDOWS,
    ExitSeen,
    PaceSeen,
    PaceWindow,
    SessionSeen,
    StandingSeen,
    Timings,
)

# ---- activity of ranks -----------------------------------------------------------------------------------------------
# Cuts the looks that an agent tells as totals into windows. A window has enough looks of each rank, and some steps: one
# evaluation that a program does not announce is one window, however long it takes. Nor does the first of an epoch
# count: who has just been started, on another node than the others, reads and compiles what they have had for long.

WINDOW_LOOKS = 48
"""Of each rank: some ten seconds."""

WINDOW_STEPS = 4


def paced(seen: PaceSeen, told: Progress) -> PaceSeen:
    """Adds what one heartbeat of the same epoch tells of paces."""
    windows = tuple(between(*pair) for pair in zip(seen.marked, told.paces, strict=False))
    whole = tuple(one for one in windows if one is not None)
    if len(whole) != len(told.paces) or len(seen.marked) != len(told.paces):
        return PaceSeen(told.paces, told.step)  # the first word of this epoch, or not all ranks told before
    if told.step - seen.marked_step < WINDOW_STEPS or min(one.looks for one in whole) < WINDOW_LOOKS:
        return seen
    window = (PaceWindow(seen.marked_step, whole),) if seen.warmed_up else ()
    return PaceSeen(told.paces, told.step, (*seen.windows, *window)[-MOST_WINDOWS:], warmed_up=True)


# ---- clocks and round trips of agents --------------------------------------------------------------------------------
# Collects recent steps, stalls, drains and paces from one agent's heartbeats. Agents report at once when a save is
# staged and when it has all its copies; the time between is its drain. Ends with the epoch, since another world has
# other steps.

MOST_SAVES = 9
"""Newest ones that count."""


def timed(timings: Timings, beat: Heartbeat, grown: bool, now: float) -> Timings:
    """Adds one heartbeat of the same epoch.

    `grown`: it reports a new step.
    """
    told = beat.progress
    if grown and told.step_seconds is not None:
        timings = replace(timings, steps=(*timings.steps, told.step_seconds)[-MOST_STEPS:])
    if told.paces:
        timings = replace(timings, pace=paced(timings.pace, told))
    if told.stall_seconds is not None and timings.stalls[-1:] != (told.stall_seconds,):
        timings = replace(timings, stalls=(*timings.stalls, told.stall_seconds)[-MOST_SAVES:])
    own = [c for c in beat.pending if c.epoch == beat.epoch]  # an older epoch's drain may have met its end
    done = [now - since for c, since in timings.pending.items() if c not in own]
    if done or len(own) != len(timings.pending):
        pending = {c: timings.pending.get(c, now) for c in own}
        timings = replace(timings, pending=pending, drains=(*timings.drains, *done)[-MOST_SAVES:])
    return timings


# ---- sessions --------------------------------------------------------------------------------------------------------

MOST_NOTICES = 64

SKEW_SECONDS = 30.0
"""A node's clock this far from the operator's is told: signatures and certificates bear a few minutes."""


@dataclass(frozen=True, slots=True)
class Session:
    """The session of one worker's newest agent."""

    seen: SessionSeen
    hello_epoch: int = 0
    """Epoch that was running when it last connected: not 0 means that it is adopted, not started."""
    store: tuple[int, str] | None = None
    """(epoch, host:port) of the store that this agent hosts."""
    wants_holders: bool = False
    """Asked on this line to be told of every holder."""
    replaced: frozenset[str] = frozenset()
    """Incarnations that were this worker before; a thawed one must not come back."""

    @property
    def worker(self) -> WorkerId:
        return WorkerId(self.seen.index, self.seen.attempt)


@dataclass(frozen=True, slots=True)
class Sessions:
    """All sessions of one job, with the world they belong to."""

    job: str
    term_seconds: float
    orders: PendingRequests
    by_worker: Mapping[WorkerId, Session] = field(default_factory=dict)
    world: World | None = None
    notices: tuple[tuple[WorkerId, Notice], ...] = ()
    speakers: Mapping[str, WorkerId] = field(default_factory=dict)
    """Whose agent each incarnation is that has a session."""
    turned_away_seconds: float = 0.0
    """When an agent was last asked to come again; 0: none was."""


def begin(job: str, now: float) -> Sessions:
    """Begins a term without any session.

    Requests are numbered from the time on, so that no two terms share a number.
    """
    return Sessions(job, now, PendingRequests(next_request=int(now * 1000)))


def seen(sessions: Sessions) -> tuple[SessionSeen, ...]:
    """Lists the sessions for a snapshot, ordered by worker."""
    return tuple(sessions.by_worker[worker].seen for worker in sorted(sessions.by_worker))


def refusal(sessions: Sessions, hello: Hello, known: frozenset[WorkerId] | None) -> Refused | None:
    """Says why this hello is refused; None: it is accepted.

    `known`: the fabric's workers; None: not known yet.
    """
    worker = WorkerId(hello.index, hello.attempt)
    if hello.job != sessions.job:
        return Refused(f"this coordinator serves job {sessions.job}, not {hello.job}", retry=False)
    if known is None:
        return Refused("this coordinator has just started and does not know its workers yet", retry=True)
    if worker not in known:
        newer = max((w.attempt for w in known if w.index == worker.index), default=0)
        if newer > worker.attempt:
            return Refused(f"{worker} was replaced by attempt {newer}", retry=False)
        return Refused(f"{worker} is not among the workers of this job", retry=True)
    session = sessions.by_worker.get(worker)
    if session is not None and hello.incarnation in session.replaced:
        return Refused(f"agent {hello.incarnation} was replaced by a newer agent of {worker}", retry=False)
    other = sessions.speakers.get(hello.incarnation)
    if other is not None and other != worker:
        return Refused(
            f"incarnation {hello.incarnation} is already {other}: each agent start needs its own", retry=False
        )
    return None


def turned_away(sessions: Sessions, now: float) -> Sessions:
    """Records that an agent was asked to come again.

    Not all that live have joined then.
    """
    return replace(sessions, turned_away_seconds=now)


def connected(sessions: Sessions, hello: Hello, now: float) -> Sessions:
    """Applies an accepted hello; a new incarnation starts without facts."""
    worker = WorkerId(hello.index, hello.attempt)
    old = sessions.by_worker.get(worker)
    if old is not None and old.seen.incarnation == hello.incarnation:
        session = replace(old, seen=replace(old.seen, connected=True, since_seconds=now, heard_seconds=now))
    else:
        replaced = frozenset() if old is None else old.replaced | {old.seen.incarnation}
        fresh = SessionSeen(hello.index, hello.attempt, hello.incarnation, hello.node, True, now, now)
        session = Session(fresh, replaced=replaced)
        speakers = {**sessions.speakers, hello.incarnation: worker}
        if old is not None:
            speakers.pop(old.seen.incarnation, None)
        orders = conversations.drop_worker(sessions.orders, worker)
        sessions = replace(sessions, orders=orders, speakers=speakers)
    session = _in_epoch(session, hello.epoch)
    stopped = max(session.seen.stopped, hello.stopped)
    store = (hello.epoch, hello.store) if hello.store and hello.epoch else session.store
    session = replace(
        session,
        seen=replace(session.seen, stopped=stopped, warm=hello.warm),
        hello_epoch=hello.epoch,
        store=store,
        wants_holders=False,
    )
    return _with(sessions, session)


def is_adopted(sessions: Sessions, worker: WorkerId) -> bool:
    """Whether this agent came while its trainers run the committed epoch.

    Such a word can wait for others: behind a new leader all agents of a job come so, and a plan for each of them took as
    long as their lines.
    """
    world, session = sessions.world, sessions.by_worker[worker]
    return world is not None and world.state == "Committed" and session.hello_epoch == world.epoch


def broken(sessions: Sessions, worker: WorkerId, now: float) -> Sessions:
    """Records that this worker's connection broke; its facts stay."""
    session = sessions.by_worker.get(worker)
    if session is None or not session.seen.connected:
        return sessions
    return _with(sessions, replace(session, seen=replace(session.seen, connected=False, since_seconds=now)))


def forgotten(sessions: Sessions, known: Iterable[WorkerId]) -> Sessions:
    """Drops disconnected sessions of workers that no longer exist.

    One that finished the committed epoch stays: its pod may be gone before the others have finished, and a world of
    which it is missing would be begun again for steps that are made.
    """
    keep = set(known)
    gone = {
        w
        for w, s in sessions.by_worker.items()
        if w not in keep and not s.seen.connected and not _has_finished(sessions, s.seen)
    }
    if not gone:
        return sessions
    orders = sessions.orders
    for worker in gone:
        orders = conversations.drop_worker(orders, worker)
    kept = {w: s for w, s in sessions.by_worker.items() if w not in gone}
    speakers = {incarnation: w for incarnation, w in sessions.speakers.items() if w not in gone}
    return replace(sessions, by_worker=kept, orders=orders, speakers=speakers)


def _has_finished(sessions: Sessions, seen: SessionSeen) -> bool:
    world = sessions.world
    committed = world is not None and world.state == "Committed" and world.epoch == seen.epoch
    return committed and seen.finished == 0


def ruled(sessions: Sessions, world: World | None) -> Sessions:
    """Takes over `status.world`; requests of another one are void."""
    if world == sessions.world:
        return sessions
    epoch, committed = (world.epoch, world.state == "Committed") if world is not None else (0, False)
    return replace(
        sessions, world=world, orders=conversations.drop_other_generations(sessions.orders, epoch, committed)
    )


def heard(sessions: Sessions, worker: WorkerId, message: FromAgent, now: float) -> Sessions:
    """Applies one message of a connected agent."""
    session = sessions.by_worker.get(worker)
    if session is None:
        return sessions
    session = replace(session, seen=replace(session.seen, heard_seconds=now))
    match message:
        case Heartbeat():
            session = beaten(sessions.world, session, message, now)
        case Stopped():
            session = stopped(session, message.epoch, now)
        case StoreReady():
            session = replace(session, store=(message.epoch, message.address))
        case Exited() | BarrierReached() | UnreadableSave() | Finished():
            session = _fact(session, message, now)
        case HoldersWanted():
            session = replace(session, wants_holders=True)
        case StuckRanks():
            session = _standing(session, message)
        case NodeHealth():
            session, skewed = _examined(session, message, now)
            told = ((worker, Notice("ClockSkew", skewed)),) if skewed else ()
            sessions = replace(sessions, notices=(*sessions.notices, *told)[-MOST_NOTICES:])
        case Notice():
            sessions = replace(sessions, notices=(*sessions.notices, (worker, message))[-MOST_NOTICES:])
        case _:
            sessions = replace(sessions, orders=conversations.apply_reply(sessions.orders, worker, message, now))
    return _with(sessions, session)


def store_address(sessions: Sessions) -> str | None:
    """The committed epoch's store address; None until its host reports it."""
    world = sessions.world
    if world is None or world.state != "Committed" or not world.members:
        return None
    host = world.members[0]
    session = sessions.by_worker.get(WorkerId(host.index, host.attempt))
    if session is None or session.seen.incarnation != host.incarnation or session.store is None:
        return None
    epoch, address = session.store
    return address if epoch == world.epoch else None


def _with(sessions: Sessions, session: Session) -> Sessions:
    return replace(sessions, by_worker={**sessions.by_worker, session.worker: session})


def _in_epoch(session: Session, epoch: int) -> Session:
    """Facts of an older epoch end where a newer one begins; 0 (nothing runs) ends nothing."""
    if epoch <= session.seen.epoch:
        return session
    blank = replace(
        session.seen,
        epoch=epoch,
        progress=NOTHING_TOLD,
        step_at_seconds=None,
        timings=Timings(),
        exit=None,
        finished=None,
        finished_steps=0,
        saves_told=False,
        barrier_step=None,
        unreadable=None,
        standing=None,
    )
    return replace(session, seen=blank)


def beaten(world: World | None, session: Session, beat: Heartbeat, now: float) -> Session:
    """Applies a heartbeat, copying no more than what is seen.

    Nearly all messages are heartbeats.
    """
    session = _in_epoch(session, beat.epoch)
    old = session.seen
    progress, grown, turned, timings = old.progress, False, False, old.timings
    if beat.epoch == old.epoch and beat.epoch:
        begun = world.parent.step if world is not None and world.epoch == beat.epoch and world.parent else 0
        grown = beat.progress.step > max(progress.step, begun)
        timings = timed(timings, beat, grown, now)
        # a pause that is announced, or over, is a sign of life, and the time to the next step counts from it
        turned = old.step_at_seconds is not None and beat.progress.paused != progress.paused
        progress = beat.progress.after(progress)
    fresh = replace(
        old,
        heard_seconds=now,
        stopped=max(old.stopped, beat.stopped),
        warm=beat.warm,
        pending=beat.pending,
        saved=beat.saved,
        copies=beat.copies,
        saves_told=old.finished is not None,
        leaving=beat.leaving,
        progress=progress,
        step_at_seconds=now if grown or turned else old.step_at_seconds,
        timings=timings,
    )
    return replace(session, seen=fresh)


def stopped(session: Session, epoch: int, now: float) -> Session:
    """Applies an agent's word that nothing of it runs any more.

    It ends no request and moves no store: each agent of a world says it, within moments.
    """
    old = session.seen
    return replace(session, seen=replace(old, heard_seconds=now, stopped=max(old.stopped, epoch)))


def _standing(session: Session, message: StuckRanks) -> Session:
    session = _in_epoch(session, message.epoch)
    if message.epoch != session.seen.epoch:
        return session
    told = StandingSeen(message.step, message.places, message.moves, message.collectives) if message.places else None
    return replace(session, seen=replace(session.seen, standing=told))


def _examined(session: Session, message: NodeHealth, now: float) -> tuple[Session, str]:
    """What an agent finds on its node now; and, where its clock turns out to be far off, a sentence on that."""
    old, skew = session.seen, message.clock_seconds - now if message.clock_seconds else None
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
    return replace(session, seen=fresh), skewed


def _fact(session: Session, message: Exited | BarrierReached | UnreadableSave | Finished, now: float) -> Session:
    """Takes what happened in an epoch; what an older one still has to say does not matter any more."""
    generation = message.generation if isinstance(message, BarrierReached) else message.epoch
    session = _in_epoch(session, generation)
    old = session.seen
    if generation != old.epoch:
        return session
    if isinstance(message, BarrierReached):
        return replace(session, seen=replace(old, barrier_step=message.step))
    if isinstance(message, UnreadableSave):
        report = (message.checkpoint, message.absent, shorten_text(message.detail, MAX_CAUSE_CHARACTERS))
        # That every copy is bad outranks that one is absent, and the first report of a kind is as good as the next.
        keep = old.unreadable is not None and (not old.unreadable[1] or message.absent)
        return session if keep else replace(session, seen=replace(old, unreadable=report))
    if isinstance(message, Finished):
        return replace(session, seen=replace(old, finished=message.exit_code, finished_steps=message.steps))
    if old.exit is not None and (message.secondary or not old.exit.secondary):
        return session
    exit_seen = ExitSeen(
        message.epoch, message.rank, message.code,
        shorten_text(message.cause, MAX_CAUSE_CHARACTERS), message.secondary, now,
        message.kind, shorten_text(message.detail, MAX_DETAIL_CHARACTERS), message.oom,
    )  # fmt: skip
    at_seconds = exit_seen.at_seconds if old.exit is None else old.exit.at_seconds
    seen = replace(old, exit=replace(exit_seen, at_seconds=at_seconds))
    if message.step > old.progress.step:
        seen = replace(seen, progress=replace(old.progress, step=message.step))
    return replace(session, seen=seen)
