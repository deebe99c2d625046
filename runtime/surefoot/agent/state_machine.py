"""Decides the agent's next state and commands from one event.

Pure: `next_state(state, event) -> (state, commands)`; `agent_process` carries the commands out. Invariants:

- Trainers are started at most once per generation; only a newer generation, a failure or the worker's end stops them.
- TrainersStopped is sent only when every trainer of an older generation is reaped.
- Facts of a generation are sent again to every coordinator that connects later.
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
from surefoot.protocol.hangs import MAX_LEARNED_STEPS, hang_suspicion_seconds
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
# Decides when to collect the stacks of trainers that complete no step. Pure; called at each tick, step and pause, and
# when stacks arrive. An agent reports only its own ranks: a rank that waits for another node's rank looks like one that
# hangs. Only the operator, which gets the reports of all agents, can distinguish them.

Step = tuple[AgentState, tuple[on.Command, ...]]


def observe_if_due(state: AgentState, stalled_seconds: float) -> Step:
    """Requests stacks each time another half of the suspected hang's time has passed without a step."""
    timeout_seconds = state.step_limit_seconds
    suspect_seconds = (
        timeout_seconds if state.pause_reason else hang_suspicion_seconds(state.step_durations_seconds, timeout_seconds)
    )
    if 2 * stalled_seconds <= (state.observation_count + 1) * suspect_seconds:
        return state, ()
    # collect before the timeout: the first agent to find the hang kills its ranks, and all others end with them
    stacks = "" if state.stacks is None else state.stacks
    return replace(state, stacks=stacks, observation_count=state.observation_count + 1), (
        on.CollectStacks(state.started_generation),
    )


def report_or_withdraw(state: AgentState, observation: HangObservation | None) -> Step:
    """Reports the stacks of all local ranks to the coordinator, or withdraws the last report."""
    previous = state.last_observation
    is_idle = previous is not None and observation is not None and is_idle_between(previous, observation)
    if previous is not None and observation is not None and is_idle and not observation.collectives:
        observation = replace(
            observation, collectives=previous.collectives
        )  # a rank that did not report now reported before, and nothing has changed
    state = replace(state, last_observation=observation)
    if observation is None or state.pause_reason:
        return _withdraw_report(state)
    # collectives that changed between two observations do not describe all ranks at one moment
    is_consistent = is_idle or (previous is not None and previous.collectives == observation.collectives)
    collectives = observation.collectives if is_consistent else ()
    report = HangReport(
        state.started_generation, state.step, observation.stacks, moves=not is_idle, collectives=collectives
    )
    if report in state.facts:
        return state, ()
    return replace(state, facts=(*_facts_without_report(state), report)), (on.Send(report),)


def reset_observation(state: AgentState, at: float) -> Step:
    """Resets the search for a hang after a step or a pause report at time `at`."""
    return _withdraw_report(replace(state, progress_at=at, stacks=None, last_observation=None, observation_count=0))


def _withdraw_report(state: AgentState) -> Step:
    facts = _facts_without_report(state)
    if facts == state.facts:
        return state, ()
    return replace(state, facts=facts), (on.Send(HangReport(state.started_generation, state.step)),)


def _facts_without_report(state: AgentState) -> tuple[FromAgent, ...]:
    return tuple(fact for fact in state.facts if not isinstance(fact, HangReport))


# ---- search for memory servers ---------------------------------------------------------------------------------------
# Requests the complete list of memory servers from the coordinator when a trainer needs it. The trainer waits for it: if
# it searched only the servers that it knows, it would report a checkpoint as lost that another server has.


def request_servers_if_needed(assign: Assign) -> tuple[Command, ...]:
    """Requests the complete list at once if the world size differs from that of the parent checkpoint.

    Every rank then reads parts of all old ranks' saves; the list comes while the trainers start.
    """
    parent = assign.parent
    if not assign.is_partial or parent is None or parent.is_imported:
        return ()
    parent_world_size = next(
        (parent_world_size for generation, _, parent_world_size in assign.lineage if generation == parent.generation),
        assign.world_size,
    )
    return request_all_servers(assign.generation) if parent_world_size != assign.world_size else ()


def request_servers_for_trainer(state: AgentState, rank: int) -> Step:
    """Handles a trainer's request for all memory servers: answers it, or requests the list from the coordinator."""
    assign = state.assign
    if assign is None or assign.generation != state.started_generation:
        return state, ()  # a newer generation is claimed and this one's trainers are being stopped
    if not assign.is_partial:
        return state, (on.SendToTrainers(AllServers(assign.servers), rank),)
    return replace(state, awaiting_all_servers=state.awaiting_all_servers | {rank}), request_all_servers(
        assign.generation
    )


def send_servers_to_trainers(state: AgentState) -> Step:
    """Sends the complete list of memory servers to the ranks that wait for it, once it is known."""
    assign = state.assign
    if (
        not state.awaiting_all_servers
        or assign is None
        or assign.is_partial
        or assign.generation != state.started_generation
    ):
        return state, ()
    servers = AllServers(assign.servers)
    return replace(state, awaiting_all_servers=frozenset()), tuple(
        on.SendToTrainers(servers, r) for r in sorted(state.awaiting_all_servers)
    )


def repeat_server_request(state: AgentState) -> tuple[Command, ...]:
    """Repeats an unanswered request to a coordinator that has just sent its Welcome."""
    return (
        request_all_servers(state.assign.generation) if state.awaiting_all_servers and state.assign is not None else ()
    )


def request_all_servers(generation: int) -> tuple[Command, ...]:
    """Returns the command that requests all memory servers of a generation from the coordinator."""
    return (on.Send(ListAllServers(generation)),)


# ---- state machine ---------------------------------------------------------------------------------------------------


def next_state(state: AgentState, event: Event) -> Step:
    """Returns the state after an event and the commands to carry out, in order."""
    if state.shut_down:
        return state, ()
    new_state, first_commands = _apply_event(state, event)
    commands = list(first_commands)
    # one decision can enable the next (reaped → stopped → started): repeat until there is none, a few times at most
    while True:
        new_state, more_commands = _advance(new_state)
        if not more_commands:
            return new_state, tuple(commands)
        commands.extend(more_commands)


def _apply_event(state: AgentState, event: Event) -> Step:
    match event:
        case on.WarmChanged(warm):
            return replace(state, is_warm=warm), (on.SendHeartbeat(),)
        case Welcome():
            return state, (*(on.Send(fact) for fact in state.facts), *repeat_server_request(state), on.SendHeartbeat())
        case Assign():
            return _apply_assignment(state, event)
        case MemoryServers():
            return _apply_servers(state, event)
        case Barrier():
            return _apply_barrier(state, event)
        case IntervalExponent(generation, exponent):
            if generation != state.claimed_generation or exponent == state.interval_exponent:
                return state, ()
            return replace(state, interval_exponent=exponent), (on.SendToTrainers(event),)
        case StopTrainers(generation):
            if generation > state.claimed_generation:
                return _claim_generation(state, generation), ()
            # a repeated order: a restarted coordinator asks again and needs the reply again
            return state, (on.Send(TrainersStopped(state.stopped_below)),) if state.stopped_below >= generation else ()
        case on.ShutdownRequested(code):
            return replace(_mark_terminating(state, code), termination_grace=None), ()
        case on.TerminationRequested(code, grace):
            if state.termination_exit_code is not None:
                return state, ()
            return replace(_mark_terminating(state, code), termination_grace=grace), (on.SendHeartbeat(),)
        case on.Flushed(generation):
            return (
                replace(state, flushing=False, flushed=True) if generation == state.started_generation else state
            ), ()
        case on.StacksCollected(generation, detail, observation):
            if generation != state.started_generation:
                return state, ()
            if state.killing:
                return _report_exit_with_stacks(state, detail)
            # stacks that were requested before a step which has finished since are obsolete
            if state.observation_count == 0:
                return state, ()
            return report_or_withdraw(replace(state, stacks=detail), observation)
        case on.StoreStarted(generation, address):
            if generation != state.claimed_generation:
                return state, ()
            return _add_fact(replace(state, store_address=address), StoreReady(generation, address))
        case on.StoreExited(generation, detail):
            return _apply_store_exit(state, generation, detail)
        case on.Ticked(at):
            return _apply_tick(state, at)
        case on.TrainerExited(generation, local):
            rank = _find_rank(state, generation, local)
            return (state, ()) if rank is None else _apply_exit(state, rank, event)
        case on.TrainerMessage(generation, local):
            rank = _find_rank(state, generation, local)
            return (state, ()) if rank is None else _apply_trainer_message(state, rank, event)


def _advance(state: AgentState) -> Step:
    """Takes the next action that the state alone requires; no commands: there is none."""
    if state.shut_down:
        return state, ()
    # running trainers of an older generation, or of a worker that must end, are killed first
    if state.has_running_trainers:
        must_stop = state.claimed_generation > state.started_generation or (
            state.termination_exit_code is not None and state.termination_grace is None
        )
        if must_stop and not state.killing:
            detail = "no step for long when a newer generation was claimed"
            return _kill_trainers(
                state,
                TrainerFailure(state.started_generation, -1, -9, detail, True, state.step, "hang")
                if state.hang_suspected
                else None,
            )
        return state, ()
    # all trainers have ended: the coordinator may restart the ranks elsewhere
    if state.stopped_below < state.claimed_generation:
        return replace(state, stopped_below=state.claimed_generation), (
            on.StopStore(state.claimed_generation),
            on.Send(TrainersStopped(state.claimed_generation)),
        )
    # a finished or ending worker flushes its staged saves before it reports that or exits
    finished = _has_finished(state)
    if (finished or state.termination_exit_code is not None) and not state.flushed:
        return (state, ()) if state.flushing else (replace(state, flushing=True), (on.Flush(state.started_generation),))
    if finished and not any(isinstance(fact, Finished) for fact in state.facts):
        return _add_fact(state, Finished(state.started_generation, 0, state.step))
    if state.termination_exit_code is not None:
        return replace(state, shut_down=True), (on.Exit(_exit_code(state.termination_exit_code, state)),)
    return _start_generation(state)


def _mark_terminating(state: AgentState, code: int) -> AgentState:
    """Marks this worker as terminating; the exit code is that of the first request."""
    return (
        state if state.termination_exit_code is not None else replace(state, termination_exit_code=code, flushed=False)
    )


def _exit_code(requested_code: int, state: AgentState) -> int:
    """Returns a failed trainer's exit code, if there is one, so that the container's status shows it."""
    trainer_code = next((r.exit_code for r in state.ranks if r.exit_code is not None and r.exit_code > 0), None)
    return trainer_code if requested_code and trainer_code is not None else requested_code


def _start_generation(state: AgentState) -> Step:
    assign = state.assign
    if assign is None or assign.generation <= state.started_generation or not state.is_warm:
        return state, ()
    if assign.hosts_store and state.store_generation < assign.generation:
        return replace(state, store_generation=assign.generation), (on.StartStore(assign.generation),)
    store = state.store_address or assign.store
    if store is None:
        return state, ()
    ranks = tuple(LocalRank(local=i, rank=assign.first_rank + i) for i in range(assign.local_ranks))
    started = replace(
        state,
        started_generation=assign.generation,
        ranks=ranks,
        killing=False,
        flushing=False,
        flushed=False,
        barrier=None,
        progress_at=None,
        stacks=None,
        step_durations_seconds=(),
        observation_count=0,
        last_observation=None,
        awaiting_all_servers=frozenset(),
        started_seconds=None,
        exit_report=None,
    )
    return started, (on.StartTrainers(assign, store), *request_servers_if_needed(assign), on.SendHeartbeat())


def _has_finished(state: AgentState) -> bool:
    all_exited = bool(state.ranks) and all(r.exit_code == 0 for r in state.ranks)
    return all_exited and state.started_generation == state.claimed_generation


def _claim_generation(state: AgentState, generation: int) -> AgentState:
    """Records a newer generation and discards everything that belongs to an older one."""
    return replace(
        state,
        claimed_generation=generation,
        assign=None,
        store_address=None,
        facts=(),
        barrier=None,
        interval_exponent=0,
    )


def _apply_assignment(state: AgentState, assign: Assign) -> Step:
    if assign.generation < state.claimed_generation:
        return state, ()
    if assign.generation > state.claimed_generation:
        state = _claim_generation(state, assign.generation)
    state = replace(state, assign=assign)
    new_state, server_messages = send_servers_to_trainers(state)
    return new_state, (on.Retarget(assign.tier), *server_messages)


def _apply_servers(state: AgentState, servers: MemoryServers) -> Step:
    if state.assign is None or servers.generation != state.assign.generation:
        return state, ()
    assign = replace(
        state.assign,
        servers=servers.servers,
        targets=servers.targets,
        rank_targets=servers.rank_targets,
        replicas=servers.replicas,
        servers_unreachable=servers.servers_unreachable,
        is_partial=servers.is_partial,
    )
    new_state, server_messages = send_servers_to_trainers(replace(state, assign=assign))
    return new_state, (on.Retarget(servers), *server_messages)


def _apply_barrier(state: AgentState, barrier: Barrier) -> Step:
    is_current = (
        barrier.generation == state.started_generation == state.claimed_generation
        and state.has_running_trainers
        and not state.killing
    )
    if is_current and state.termination_grace is not None and barrier.phase != "cancelled":
        state = replace(
            state,
            termination_grace=replace(
                state.termination_grace, barrier_announced_by=state.termination_grace.barrier_reached_by
            ),
        )
    if barrier.phase == "proposed":
        if not is_current or not all(r.attached and r.alive and not r.closed for r in state.ranks):
            return state, (on.Send(BarrierReply(barrier.generation, barrier.step, accepted=False)),)
        if (
            state.barrier is not None
            and state.barrier.step == barrier.step
            and all(r.barrier_accepted for r in state.ranks)
        ):
            return state, (on.Send(BarrierReply(barrier.generation, barrier.step, accepted=True)),)
        ranks = tuple(replace(r, barrier_accepted=None) for r in state.ranks)
        return replace(state, barrier=barrier, ranks=ranks), (on.SendToTrainers(barrier),)
    if not is_current:
        return state, ()
    if barrier.phase == "bound":
        return replace(state, barrier=barrier), (on.SendToTrainers(barrier),)
    ranks = tuple(replace(r, barrier_accepted=None, at_barrier=None) for r in state.ranks)
    facts = tuple(fact for fact in state.facts if not isinstance(fact, BarrierReached))
    return replace(state, barrier=None, ranks=ranks, facts=facts), (on.SendToTrainers(barrier),)


def _apply_store_exit(state: AgentState, generation: int, detail: str) -> Step:
    if generation != state.claimed_generation:
        return state, ()
    if state.started_generation == generation:
        return state, (
            on.Send(
                Notice("TCPStoreExited", f"the store of generation {generation} ended while trainers ran: {detail}")
            ),
        )
    assign = state.assign
    first_rank = assign.first_rank if assign is not None else 0
    # the generation cannot start; `started` is set so that it is not tried a second time
    return _add_fact(
        replace(state, started_generation=generation, ranks=()),
        TrainerFailure(
            generation,
            first_rank,
            1,
            f"the generation's store could not be started: {detail}",
            is_secondary=False,
            step=0,
        ),
    )


def _apply_tick(state: AgentState, at: float) -> Step:
    state = replace(
        state,
        ticked_at=at,
        started_seconds=at if state.has_running_trainers and state.started_seconds is None else state.started_seconds,
    )
    if state.termination_grace is not None and at >= state.termination_grace.barrier_announced_by:
        state = replace(state, termination_grace=None)
    if state.progress_at is None or not state.has_running_trainers or state.killing:
        return state, ()
    is_step_expected = any(r.at_barrier is not None or r.closed or not r.alive for r in state.ranks)
    stalled_seconds, timeout_seconds = 0.0 if is_step_expected else at - state.progress_at, state.step_limit_seconds
    if stalled_seconds <= timeout_seconds:
        return observe_if_due(state, stalled_seconds)
    pause_text = f" of {state.pause_reason}" if state.pause_reason else ""
    cause = f"hang: no step for {timeout_seconds:g} s{pause_text} after step {state.step}"
    return _kill_trainers(
        state,
        TrainerFailure(
            state.started_generation, _slowest_rank(state), -9, cause, is_secondary=False, step=state.step, kind="hang"
        ),
    )


def _kill_trainers(state: AgentState, failure: TrainerFailure | None) -> Step:
    """Kills the remaining trainers and reports `failure`; collects their stacks first if a hang is suspected."""
    if state.hang_suspected:
        return replace(state, killing=True, exit_report=failure), (on.CollectStacks(state.started_generation),)
    new_state, report_commands = (
        (state, ())
        if failure is None
        else _add_fact(state, replace(failure, detail=failure.detail or state.stacks or ""))
    )
    # kill before reporting: survivors only block on a dead peer
    return replace(new_state, killing=True), (
        (on.KillTrainers(state.started_generation), *report_commands) if state.has_running_trainers else report_commands
    )


def _report_exit_with_stacks(state: AgentState, detail: str) -> Step:
    failure, state = state.exit_report, replace(state, exit_report=None)
    kill_commands = (on.KillTrainers(state.started_generation),) if state.has_running_trainers else ()
    if failure is None:
        return state, kill_commands
    failure = replace(failure, detail=detail or state.stacks or "")
    new_state, report_commands = (
        _add_fact(state, failure)
        if state.started_generation == state.claimed_generation
        else (state, (on.Send(failure),))
    )
    return new_state, (*report_commands, *kill_commands)


def _slowest_rank(state: AgentState) -> int:
    """Returns the only local rank at an earlier step than all others; −1: several are, which proves nothing."""
    slowest_ranks = [r.rank for r in state.ranks if r.step == state.step]
    return slowest_ranks[0] if len(slowest_ranks) == 1 < len(state.ranks) else -1


def _find_rank(state: AgentState, generation: int, local: int) -> LocalRank | None:
    """Finds a local rank of the started generation; None: it belongs to an older generation."""
    return next((r for r in state.ranks if r.local == local), None) if generation == state.started_generation else None


def _apply_trainer_message(state: AgentState, rank: LocalRank, event: on.TrainerMessage) -> Step:
    message = event.message
    match message:
        case Attach():
            return _with_rank(state, rank, attached=True), ()
        case StepReport(progress):
            return _apply_step(state, rank, progress, event.at)
        case PauseReport():
            return _apply_pause(state, rank, message, event.at)
        case Detach(save_requested=save_requested):
            progress = replace(rank.progress, final_save_step=rank.step if save_requested else 0)
            return _with_rank(state, rank, closed=True, progress=progress), (on.SendHeartbeat(),)
        case BarrierReply():
            return _apply_barrier_reply(state, rank, message)
        case BarrierReached(step=step):
            new_state = _with_rank(state, rank, at_barrier=step)
            return (
                _add_fact(new_state, message) if all(r.at_barrier == step for r in new_state.ranks) else (new_state, ())
            )
        case RestoreDone(source=source, anomalies=anomalies):
            new_state = _with_rank(
                state, rank, restore_source=source, progress=replace(rank.progress, **anomalies.progress_fields)
            )
            return new_state, (on.SendHeartbeat(),) if new_state.restored else ()
        case RequestAllServers():
            return request_servers_for_trainer(state, rank.rank)
        case RestoreFailed(checkpoint, absent, detail):
            return _add_fact(state, UnreadableSave(state.started_generation, checkpoint, rank.rank, absent, detail))


def _apply_exit(state: AgentState, exited_rank: LocalRank, event: on.TrainerExited) -> Step:
    new_state = _with_rank(state, exited_rank, alive=False, exit_code=event.code)
    if event.code == 0 or state.killing:
        return new_state, (on.SendHeartbeat(),) if event.code == 0 or not new_state.has_running_trainers else ()
    failed_rank = next((r for r in state.ranks if r.local == event.cause_local), exited_rank)
    failure = TrainerFailure(
        state.started_generation,
        failed_rank.rank,
        event.code,
        event.cause,
        event.secondary,
        state.step,
        oom_scope=event.oom,
    )
    return _kill_trainers(new_state, failure)


def _apply_step(state: AgentState, rank: LocalRank, progress: Progress, at: float) -> Step:
    was_before_first_step = state.step == 0
    if progress.stall_seconds is None:  # most steps are not saved
        progress = replace(progress, stall_seconds=rank.progress.stall_seconds)
    step_gaps = state.step_durations_seconds
    if rank.local == 0 and progress.step_seconds is not None:  # ranks of one worker step together
        step_gaps = (*step_gaps, progress.step_seconds)[-MAX_LEARNED_STEPS:]
    new_state, reset_commands = reset_observation(
        replace(_with_rank(state, rank, progress=progress), step_durations_seconds=step_gaps), at
    )
    return new_state, (
        *reset_commands,
        on.SendHeartbeat(),
    ) if was_before_first_step and new_state.step > 0 else reset_commands


def _apply_pause(state: AgentState, rank: LocalRank, pause: PauseReport, at: float) -> Step:
    """Records that a rank's announced pause starts or ends; either is a sign of life and resets the step timeout."""
    new_state = _with_rank(state, rank, pause_reason=pause.reason, pause_seconds=pause.seconds)
    if state.progress_at is None:
        return new_state, (on.SendHeartbeat(),)
    new_state, reset_commands = reset_observation(new_state, at)
    return new_state, (*reset_commands, on.SendHeartbeat())


def _apply_barrier_reply(state: AgentState, rank: LocalRank, reply: BarrierReply) -> Step:
    """Sends this worker's reply to a barrier: at the first local rank's rejection, or the last one's acceptance."""
    if state.barrier is None or state.barrier.step != reply.step or rank.barrier_accepted is not None:
        return state, ()
    was_rejected = any(r.barrier_accepted is False for r in state.ranks)
    new_state = _with_rank(state, rank, barrier_accepted=reply.accepted)
    is_first_rejection = not reply.accepted and not was_rejected
    return new_state, (on.Send(reply),) if is_first_rejection or all(
        r.barrier_accepted for r in new_state.ranks
    ) else ()


def _with_rank(state: AgentState, rank: LocalRank, **changes: object) -> AgentState:
    """Returns the state with fields of one rank changed."""
    changed_rank = replace(rank, **changes)  # type: ignore[arg-type]  # field names are checked by replace itself
    return replace(state, ranks=tuple(changed_rank if r.local == rank.local else r for r in state.ranks))


def _add_fact(state: AgentState, fact: FromAgent) -> Step:
    """Sends a message that stays true for this generation, now and again on every Welcome."""
    return replace(state, facts=(*state.facts, fact)), (on.Send(fact),)
