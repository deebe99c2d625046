"""Decides the agent's next state and commands from one event.

Pure: `transition(state, event) -> (state, commands)`; `agent_process` carries the commands out. Held here: trainers start at
most once per epoch; only a newer epoch (or leaving) stops them; `stopped` is said only when every older trainer is
reaped; facts of the epoch are said again to whichever coordinator answers next.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.agent import agent_state as on
from surefoot.agent.agent_state import AgentState, Command, Event, HangObservation, LocalRank, is_idle_between
from surefoot.ipc.trainer_messages import (
    AllServers,
    Attach,
    Detach,
    PauseReport,
    RequestAllServers,
    RestoreDone,
    RestoreFailed,
    StepReport,
)
from surefoot.protocol.hangs import MOST_STEPS, learned_limit_seconds
from surefoot.protocol.messages import (
    Assign,
    Barrier,
    BarrierReached,
    BarrierReply,
    Finished,
    FromAgent,
    HangReport,
    IntervalExponent,
    ListAllServers,
    MemoryServers,
    Notice,
    StopTrainers,
    StoreReady,
    TrainerFailure,
    TrainersStopped,
    UnreadableSave,
    Welcome,
)
from surefoot.protocol.progress import Progress

# ---- stacks of ranks without a step ----------------------------------------------------------------------------------
# Decides when to take the stacks of trainers that complete no step. Pure; called below at each tick, step and pause,
# and when stacks arrive. An agent reports only its own ranks: a rank that waits for another node's rank looks like one
# that hangs. Only the operator, which hears all agents, can tell them apart.

Step = tuple[AgentState, tuple[on.Command, ...]]


def observe_if_due(state: AgentState, standing_seconds: float) -> Step:
    """Looks at each half of the suspect time."""
    limit = state.step_limit_seconds
    suspect = limit if state.paused else learned_limit_seconds(state.gaps, limit)
    if 2 * standing_seconds <= (state.observation_count + 1) * suspect:
        return state, ()
    # whoever finds the hang first kills its ranks, and all others end with them before they could be asked
    stacks = "" if state.stacks is None else state.stacks
    return replace(state, stacks=stacks, observation_count=state.observation_count + 1), (
        on.CollectStacks(state.started),
    )


def report_or_withdraw(state: AgentState, look: HangObservation | None) -> Step:
    """Says where all local ranks are, or takes it back."""
    before = state.last_observation
    stands = before is not None and look is not None and is_idle_between(before, look)
    if before is not None and look is not None and stands and not look.collectives:
        look = replace(
            look, collectives=before.collectives
        )  # a recorder that is late now was heard before, and nothing moved
    state = replace(state, last_observation=look)
    if look is None or state.paused:
        return _withdrawn(state)
    # of what moves, a collective made between two looks says nothing of where all ranks are at one moment
    known = stands or (before is not None and before.collectives == look.collectives)
    calls = look.collectives if known else ()
    fact = HangReport(state.started, state.step, look.stacks, moves=not stands, collectives=calls)
    if fact in state.facts:
        return state, ()
    return replace(state, facts=(*_without(state), fact)), (on.Send(fact),)


def reset_observation(state: AgentState, at: float) -> Step:
    """Forgets what was seen, at a step or a pause."""
    return _withdrawn(replace(state, progress_at=at, stacks=None, last_observation=None, observation_count=0))


def _withdrawn(state: AgentState) -> Step:
    facts = _without(state)
    if facts == state.facts:
        return state, ()
    return replace(state, facts=facts), (on.Send(HangReport(state.started, state.step)),)


def _without(state: AgentState) -> tuple[FromAgent, ...]:
    return tuple(fact for fact in state.facts if not isinstance(fact, HangReport))


# ---- search for memory servers ---------------------------------------------------------------------------------------
# Asks the coordinator for all memory servers when a trainer needs them. The trainer waits for the answer: if it
# searched only the servers it knows, it would report a checkpoint as lost that another server holds.


def request_servers_if_needed(assign: Assign) -> tuple[Command, ...]:
    """Asks at once where ranks will need all holders anyway.

    In a world of another size than its restore point's every rank reads of every other's; the answer comes while trainers
    begin.
    """
    parent = assign.parent
    if not assign.is_partial or parent is None or parent.imported:
        return ()
    size = next((size for epoch, _, size in assign.lineage if epoch == parent.generation), assign.world_size)
    return request_all_servers(assign.generation) if size != assign.world_size else ()


def request_servers_for_trainer(state: AgentState, rank: int) -> Step:
    """A trainer asks for every holder of the epoch."""
    assign = state.assign
    if assign is None or assign.generation != state.started:
        return state, ()  # overtaken: its trainers are being ended
    if not assign.is_partial:
        return state, (on.SendToTrainers(AllServers(assign.servers), rank),)
    return replace(state, awaiting_all_servers=state.awaiting_all_servers | {rank}), request_all_servers(
        assign.generation
    )


def send_servers_to_trainers(state: AgentState) -> Step:
    """Tells the ranks that sought all holders, once those are known."""
    assign = state.assign
    if not state.awaiting_all_servers or assign is None or assign.is_partial or assign.generation != state.started:
        return state, ()
    servers = AllServers(assign.servers)
    return replace(state, awaiting_all_servers=frozenset()), tuple(
        on.SendToTrainers(servers, r) for r in sorted(state.awaiting_all_servers)
    )


def repeat_server_request(state: AgentState) -> tuple[Command, ...]:
    """Asks a coordinator that has just begun what the former was asked."""
    return (
        request_all_servers(state.assign.generation) if state.awaiting_all_servers and state.assign is not None else ()
    )


def request_all_servers(epoch: int) -> tuple[Command, ...]:
    """Asks the coordinator, once more if need be."""
    return (on.Send(ListAllServers(epoch)),)


# ---- state machine ---------------------------------------------------------------------------------------------------


def next_state(state: AgentState, event: Event) -> Step:
    """The next state, and what to do now, in this order."""
    if state.shut_down:
        return state, ()
    after, said = _take(state, event)
    commands = list(said)
    # one decision can open the way to the next (reaped → stopped → started): a handful of rounds at most
    while True:
        after, more = _proceed(after)
        if not more:
            return after, tuple(commands)
        commands.extend(more)


def _take(state: AgentState, event: Event) -> Step:
    match event:
        case on.WarmChanged(warm):
            return replace(state, warm=warm), (on.SendHeartbeat(),)
        case Welcome():
            return state, (*(on.Send(fact) for fact in state.facts), *repeat_server_request(state), on.SendHeartbeat())
        case Assign():
            return _assigned(state, event)
        case MemoryServers():
            return _apply_servers(state, event)
        case Barrier():
            return _apply_barrier(state, event)
        case IntervalExponent(epoch, level):
            if epoch != state.claimed or level == state.interval_exponent:
                return state, ()
            return replace(state, interval_exponent=level), (on.SendToTrainers(event),)
        case StopTrainers(epoch):
            if epoch > state.claimed:
                return _claim(state, epoch), ()
            # heard again: a coordinator that returned asks anew, and is told anew
            return state, (on.Send(TrainersStopped(state.stopped)),) if state.stopped >= epoch else ()
        case on.ShutdownRequested(code):
            return replace(_leave(state, code), termination=None), ()
        case on.TerminationRequested(code, departure):
            if state.terminating is not None:
                return state, ()
            return replace(_leave(state, code), termination=departure), (on.SendHeartbeat(),)
        case on.Flushed(epoch):
            return (replace(state, flushing=False, flushed=True) if epoch == state.started else state), ()
        case on.StacksCollected(epoch, detail, look):
            if epoch != state.started:
                return state, ()
            if state.killing:
                return _report_exit_with_stacks(state, detail)
            # asked for before a step that was made since: then it says nothing any more
            return (
                (state, ()) if state.observation_count == 0 else report_or_withdraw(replace(state, stacks=detail), look)
            )
        case on.StoreStarted(epoch, address):
            if epoch != state.claimed:
                return state, ()
            return _fact(replace(state, store=address), StoreReady(epoch, address))
        case on.StoreExited(epoch, detail):
            return _store_lost(state, epoch, detail)
        case on.Ticked(at):
            return _tick(state, at)
        case on.TrainerExited(epoch, local):
            rank = _rank(state, epoch, local)
            return (state, ()) if rank is None else _exited(state, rank, event)
        case on.TrainerMessage(generation, local):
            rank = _rank(state, generation, local)
            return (state, ()) if rank is None else _from_trainer(state, rank, event)


def _proceed(state: AgentState) -> Step:
    """The next thing that the state calls for, or nothing."""
    if state.shut_down:
        return state, ()
    if state.alive:
        overtaken = state.claimed > state.started or (state.terminating is not None and state.termination is None)
        if overtaken and not state.killing:
            text = "no step for long when a newer epoch came"
            return _end(
                state,
                TrainerFailure(state.started, -1, -9, text, True, state.step, "hang") if state.hang_suspected else None,
            )
        return state, ()
    if state.stopped < state.claimed:
        return replace(state, stopped=state.claimed), (
            on.StopStore(state.claimed),
            on.Send(TrainersStopped(state.claimed)),
        )
    finished = _finished(state)
    if (finished or state.terminating is not None) and not state.flushed:
        return (state, ()) if state.flushing else (replace(state, flushing=True), (on.Flush(state.started),))
    if finished and not any(isinstance(fact, Finished) for fact in state.facts):
        return _fact(state, Finished(state.started, 0, state.step))
    if state.terminating is not None:
        return replace(state, shut_down=True), (on.Exit(_exit_code(state.terminating, state)),)
    return _start(state)


def _leave(state: AgentState, code: int) -> AgentState:
    """This worker is to end. The code is that of the first who asked."""
    return state if state.terminating is not None else replace(state, terminating=code, flushed=False)


def _exit_code(asked: int, state: AgentState) -> int:
    """The worker's exit code: that of a trainer that failed by itself, so that a container's status shows it."""
    own = next((r.code for r in state.ranks if r.code is not None and r.code > 0), None)
    return own if asked and own is not None else asked


def _start(state: AgentState) -> Step:
    assign = state.assign
    if assign is None or assign.generation <= state.started or not state.warm:
        return state, ()
    if assign.hosts_store and state.store_generation < assign.generation:
        return replace(state, store_generation=assign.generation), (on.StartStore(assign.generation),)
    store = state.store or assign.store
    if store is None:
        return state, ()
    ranks = tuple(LocalRank(local=i, rank=assign.first_rank + i) for i in range(assign.local_ranks))
    fresh = replace(
        state,
        started=assign.generation,
        ranks=ranks,
        killing=False,
        flushing=False,
        flushed=False,
        barrier=None,
        progress_at=None,
        stacks=None,
        gaps=(),
        observation_count=0,
        last_observation=None,
        awaiting_all_servers=frozenset(),
        started_seconds=None,
        exit_report=None,
    )
    return fresh, (on.StartTrainers(assign, store), *request_servers_if_needed(assign), on.SendHeartbeat())


def _finished(state: AgentState) -> bool:
    done = bool(state.ranks) and all(r.code == 0 for r in state.ranks)
    return done and state.started == state.claimed


def _claim(state: AgentState, epoch: int) -> AgentState:
    """A newer epoch is known: nothing of an older one counts any more."""
    return replace(state, claimed=epoch, assign=None, store=None, facts=(), barrier=None, interval_exponent=0)


def _assigned(state: AgentState, assign: Assign) -> Step:
    if assign.generation < state.claimed:
        return state, ()
    if assign.generation > state.claimed:
        state = _claim(state, assign.generation)
    state = replace(state, assign=assign)
    after, found = send_servers_to_trainers(state)
    return after, (on.Retarget(assign.tier), *found)


def _apply_servers(state: AgentState, servers: MemoryServers) -> Step:
    if state.assign is None or servers.generation != state.assign.generation:
        return state, ()
    changed = replace(
        state.assign,
        servers=servers.servers,
        targets=servers.targets,
        rank_targets=servers.rank_targets,
        replicas=servers.replicas,
        servers_unreachable=servers.servers_unreachable,
        is_partial=servers.is_partial,
    )
    after, found = send_servers_to_trainers(replace(state, assign=changed))
    return after, (on.Retarget(servers), *found)


def _apply_barrier(state: AgentState, barrier: Barrier) -> Step:
    here = barrier.generation == state.started == state.claimed and state.alive and not state.killing
    if here and state.termination is not None and barrier.phase != "cancelled":
        state = replace(
            state, termination=replace(state.termination, barrier_announced_by=state.termination.barrier_reached_by)
        )
    if barrier.phase == "proposed":
        if not here or not all(r.attached and r.alive and not r.closed for r in state.ranks):
            return state, (on.Send(BarrierReply(barrier.generation, barrier.step, accepted=False)),)
        if state.barrier is not None and state.barrier.step == barrier.step and all(r.accepted for r in state.ranks):
            return state, (on.Send(BarrierReply(barrier.generation, barrier.step, accepted=True)),)
        ranks = tuple(replace(r, accepted=None) for r in state.ranks)
        return replace(state, barrier=barrier, ranks=ranks), (on.SendToTrainers(barrier),)
    if not here:
        return state, ()
    if barrier.phase == "bound":
        return replace(state, barrier=barrier), (on.SendToTrainers(barrier),)
    ranks = tuple(replace(r, accepted=None, at_barrier=None) for r in state.ranks)
    facts = tuple(fact for fact in state.facts if not isinstance(fact, BarrierReached))
    return replace(state, barrier=None, ranks=ranks, facts=facts), (on.SendToTrainers(barrier),)


def _store_lost(state: AgentState, epoch: int, detail: str) -> Step:
    if epoch != state.claimed:
        return state, ()
    if state.started == epoch:
        return state, (
            on.Send(Notice("TCPStoreExited", f"the store of epoch {epoch} ended while trainers ran: {detail}")),
        )
    assign = state.assign
    first = assign.first_rank if assign is not None else 0
    # the epoch cannot start; `started` moves on so that it is not tried a second time
    return _fact(
        replace(state, started=epoch, ranks=()),
        TrainerFailure(epoch, first, 1, f"the epoch's store could not be hosted: {detail}", is_secondary=False, step=0),
    )


def _tick(state: AgentState, at: float) -> Step:
    state = replace(
        state,
        ticked_at=at,
        started_seconds=at if state.alive and state.started_seconds is None else state.started_seconds,
    )
    if state.termination is not None and at >= state.termination.barrier_announced_by:
        state = replace(state, termination=None)
    if state.progress_at is None or not state.alive or state.killing:
        return state, ()
    waiting = any(r.at_barrier is not None or r.closed or not r.alive for r in state.ranks)
    since, limit = 0.0 if waiting else at - state.progress_at, state.step_limit_seconds
    if since <= limit:
        return observe_if_due(state, since)
    doing = f" of {state.paused}" if state.paused else ""
    cause = f"hang: no step for {limit:g} s{doing} after step {state.step}"
    return _end(
        state,
        TrainerFailure(state.started, _behind(state), -9, cause, is_secondary=False, step=state.step, kind="hang"),
    )


def _end(state: AgentState, word: TrainerFailure | None) -> Step:
    """Kills the remaining trainers; takes their stacks first if they are stalled, since nobody can afterwards."""
    if state.hang_suspected:
        return replace(state, killing=True, exit_report=word), (on.CollectStacks(state.started),)
    after, said = (state, ()) if word is None else _fact(state, replace(word, detail=word.detail or state.stacks or ""))
    # survivors first: every millisecond they live is a millisecond in which they block on a dead peer
    return replace(after, killing=True), ((on.KillTrainers(state.started), *said) if state.alive else said)


def _report_exit_with_stacks(state: AgentState, detail: str) -> Step:
    word, state = state.exit_report, replace(state, exit_report=None)
    kill = (on.KillTrainers(state.started),) if state.alive else ()
    if word is None:
        return state, kill
    word = replace(word, detail=detail or state.stacks or "")
    after, said = _fact(state, word) if state.started == state.claimed else (state, (on.Send(word),))
    return after, (*said, *kill)


def _behind(state: AgentState) -> int:
    """The one local rank at an earlier step than all others here; −1 in a tie, which proves nothing."""
    slow = [r.rank for r in state.ranks if r.step == state.step]
    return slow[0] if len(slow) == 1 < len(state.ranks) else -1


def _rank(state: AgentState, generation: int, local: int) -> LocalRank | None:
    """Finds a local rank of the started generation; None: it is an older one's."""
    return next((r for r in state.ranks if r.local == local), None) if generation == state.started else None


def _from_trainer(state: AgentState, rank: LocalRank, event: on.TrainerMessage) -> Step:
    message = event.message
    match message:
        case Attach():
            return _with(state, rank, attached=True), ()
        case StepReport(progress):
            return _stepped(state, rank, progress, event.at)
        case PauseReport():
            return _paused(state, rank, message, event.at)
        case Detach(save_requested=offered):
            progress = replace(rank.progress, final_save_step=rank.step if offered else 0)
            return _with(state, rank, closed=True, progress=progress), (on.SendHeartbeat(),)
        case BarrierReply():
            return _apply_barrier_reply(state, rank, message)
        case BarrierReached(step=step):
            after = _with(state, rank, at_barrier=step)
            return _fact(after, message) if all(r.at_barrier == step for r in after.ranks) else (after, ())
        case RestoreDone(source=source, anomalies=odd):
            after = _with(state, rank, source=source, progress=replace(rank.progress, **odd.progress_fields))
            return after, (on.SendHeartbeat(),) if after.restored else ()
        case RequestAllServers():
            return request_servers_for_trainer(state, rank.rank)
        case RestoreFailed(checkpoint, absent, detail):
            return _fact(state, UnreadableSave(state.started, checkpoint, rank.rank, absent, detail))


def _exited(state: AgentState, mine: LocalRank, event: on.TrainerExited) -> Step:
    after = _with(state, mine, alive=False, code=event.code)
    if event.code == 0 or state.killing:
        return after, (on.SendHeartbeat(),) if event.code == 0 or not after.alive else ()
    blamed = next((r for r in state.ranks if r.local == event.cause_local), mine)
    fact = TrainerFailure(
        state.started, blamed.rank, event.code, event.cause, event.secondary, state.step, oom_scope=event.oom
    )
    return _end(after, fact)


def _stepped(state: AgentState, rank: LocalRank, progress: Progress, at: float) -> Step:
    first = state.step == 0
    if progress.stall_seconds is None:  # most steps are not saved
        progress = replace(progress, stall_seconds=rank.progress.stall_seconds)
    gaps = state.gaps
    if rank.local == 0 and progress.step_seconds is not None:  # ranks of one worker step together
        gaps = (*gaps, progress.step_seconds)[-MOST_STEPS:]
    after, said = reset_observation(replace(_with(state, rank, progress=progress), gaps=gaps), at)
    return after, (*said, on.SendHeartbeat()) if first and after.step > 0 else said


def _paused(state: AgentState, rank: LocalRank, pause: PauseReport, at: float) -> Step:
    """The announced pause of a rank begins or ends: either is a sign of life, and the time counts anew from it."""
    after = _with(state, rank, paused=pause.reason, pause_seconds=pause.seconds)
    if state.progress_at is None:
        return after, (on.SendHeartbeat(),)
    after, said = reset_observation(after, at)
    return after, (*said, on.SendHeartbeat())


def _apply_barrier_reply(state: AgentState, rank: LocalRank, reply: BarrierReply) -> Step:
    """Passes on the first refusal of a local rank, or the acceptance of the last one."""
    if state.barrier is None or state.barrier.step != reply.step or rank.accepted is not None:
        return state, ()
    refused_before = any(r.accepted is False for r in state.ranks)
    after = _with(state, rank, accepted=reply.accepted)
    is_first_refusal = not reply.accepted and not refused_before
    return after, (on.Send(reply),) if is_first_refusal or all(r.accepted for r in after.ranks) else ()


def _with(state: AgentState, rank: LocalRank, **changes: object) -> AgentState:
    """The state with one rank changed."""
    changed = replace(rank, **changes)  # type: ignore[arg-type]  # field names are checked by replace itself
    return replace(state, ranks=tuple(changed if r.local == rank.local else r for r in state.ranks))


def _fact(state: AgentState, fact: FromAgent) -> Step:
    """Sends what stays true for this epoch, now and again on every Welcome."""
    return replace(state, facts=(*state.facts, fact)), (on.Send(fact),)
