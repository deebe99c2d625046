"""Tests of `agent.agent_state`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.lives import WELCOME, assign, from_rank, live, running, sent, step
from surefoot.agent import agent_state as on
from surefoot.agent.agent_state import AgentState, Event, HangObservation, ProcessActivity, TerminationGrace
from surefoot.agent.coordinator_requests import generation_to_collect, loss_history_of
from surefoot.agent.state_machine import next_state
from surefoot.ipc.trainer_messages import (
    Attach,
    Detach,
    PauseReport,
    RequestAllServers,
    RestoreDone,
    RestoreFailed,
    StepReport,
)
from surefoot.protocol.checkpoints.retention import LossHistory
from surefoot.protocol.checkpoints.save_state import ClosedSteps
from surefoot.protocol.hangs import Collective, RankStack
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.messages import (
    Barrier,
    BarrierReached,
    BarrierReply,
    Finished,
    HangReport,
    MemoryServers,
    StopTrainers,
    StoreReady,
    TrainerFailure,
    TrainersStopped,
    UnreadableSave,
)
from surefoot.protocol.progress import AnomalyRun, Progress, merge_rank_progress

# ---- state machine ---------------------------------------------------------------------------------------------------
# What an agent decides, by tables and by random lives.


def test_trainers_start_when_warm_and_the_store_is_known() -> None:
    life, said = live(assign(1))
    assert not any(isinstance(c, on.StartStore) for c in said), "not warm yet"
    life, said = live(on.WarmChanged(True), life=life)
    assert on.StartStore(1) in said
    life, said = live(on.StoreStarted(1, "h:1"), life=life)
    assert StoreReady(1, "h:1") in sent(said)
    assert on.StartTrainers(assign(1), "h:1") in said


def test_a_member_that_hosts_nothing_waits_for_the_store() -> None:
    life, said = live(on.WarmChanged(True), assign(1, hosts=False))
    assert not any(isinstance(c, on.StartTrainers) for c in said)
    whole = assign(1, hosts=False, store="other:7")
    _, said = live(whole, life=life)
    assert on.StartTrainers(whole, "other:7") in said


def test_an_assignment_heard_again_starts_nothing() -> None:
    _, said = live(assign(1), assign(1, store="h:1"), life=running())
    assert not any(isinstance(c, on.StartTrainers | on.KillTrainers | on.StartStore) for c in said)


def test_trainers_that_ended_are_not_started_again_in_their_epoch() -> None:
    life = running(ranks=1)
    _, said = live(on.TrainerExited(1, 0, 1, "x"), assign(1, ranks=1), on.WarmChanged(True), life=life)
    assert not any(isinstance(c, on.StartTrainers) for c in said)


def test_stopped_is_said_once_everything_is_reaped() -> None:
    life, said = live(StopTrainers(2, ""), life=running())
    assert said == [on.KillTrainers(1)]
    life, said = live(on.TrainerExited(1, 0, -9), life=life)
    assert sent(said) == []
    life, said = live(on.TrainerExited(1, 1, -9), life=life)
    assert sent(said) == [TrainersStopped(2)]
    assert on.StopStore(2) in said
    _, said = live(StopTrainers(2, ""), life=life)
    assert sent(said) == [TrainersStopped(2)], "a coordinator that returned asks again"


def test_a_newer_assignment_stops_first_and_starts_then() -> None:
    life, said = live(assign(2), life=running(ranks=1))
    assert not any(isinstance(c, on.StartStore | on.StartTrainers) for c in said)
    life, said = live(on.TrainerExited(1, 0, -9), life=life)
    assert [type(c) for c in said if not isinstance(c, on.SendHeartbeat)] == [on.StopStore, on.Send, on.StartStore]
    _, said = live(on.StoreStarted(2, "h:2"), life=life)
    assert any(isinstance(c, on.StartTrainers) and c.assign.generation == 2 for c in said)


@pytest.mark.parametrize("event", [StopTrainers(1, ""), StopTrainers(0, ""), assign(0), on.StoreStarted(0, "old:1")])
def test_an_older_word_changes_nothing(event: on.Event) -> None:
    life = running()
    after, said = live(event, life=life)
    assert after == life
    assert not any(isinstance(c, on.KillTrainers | on.StartTrainers) for c in said)


def test_the_first_exit_is_said_and_the_survivors_killed_before() -> None:
    life, said = live(on.TrainerExited(1, 1, 1, "ValueError: x", False, 1), life=running())
    assert said == [on.KillTrainers(1), on.Send(TrainerFailure(1, 1, 1, "ValueError: x", is_secondary=False, step=0))]
    _, said = live(on.TrainerExited(1, 0, -9, "killed by SIGKILL"), life=life)
    assert sent(said) == []


def test_what_happened_is_said_again_to_whoever_welcomes_us() -> None:
    life, _ = live(on.TrainerExited(1, 1, 1, "x", False, 1), on.TrainerExited(1, 0, -9), life=running())
    _, said = live(WELCOME, life=life)
    assert [type(m) for m in sent(said)] == [StoreReady, TrainerFailure]
    life, _ = live(StopTrainers(2, ""), life=life)
    _, said = live(WELCOME, life=life)
    assert sent(said) == [], "facts belong to their epoch"


def test_finished_means_exited_and_drained() -> None:
    life, said = live(
        step(1, 0, 9), step(1, 1, 9), on.TrainerExited(1, 0, 0), on.TrainerExited(1, 1, 0), life=running()
    )
    assert on.Flush(1) in said
    assert sent(said) == []
    _, said = live(on.Flushed(1), life=life)
    assert sent(said) == [Finished(1, 0, 9)]


def test_a_flush_of_an_older_epoch_finishes_nothing() -> None:
    life, _ = live(on.TrainerExited(1, 0, 0), assign(2, ranks=1), life=running(ranks=1))
    life, said = live(on.StoreStarted(2, "h:2"), on.Flushed(1), on.TrainerExited(2, 0, 0), life=life)
    assert on.Flush(2) in said
    assert not any(isinstance(m, Finished) for m in sent(said))


def test_a_worker_ends_with_the_code_of_the_trainer_that_failed() -> None:
    for asked, codes, expected in ((1, (42, -9), 42), (0, (0, 0), 0), (0, (42, -9), 0), (1, (-9, -9), 1)):
        life = running()
        for local, code in enumerate(codes):
            life, _ = live(on.TrainerExited(1, local, code), life=life)
        life, _ = live(on.ShutdownRequested(asked), life=life)
        _, said = live(on.Flushed(1), life=life)
        assert said[-1] == on.Exit(expected)


def test_leaving_kills_flushes_and_exits_in_this_order() -> None:
    life, said = live(on.ShutdownRequested(143), life=running(ranks=1))
    assert said == [on.KillTrainers(1)]
    life, said = live(on.TrainerExited(1, 0, -9), life=life)
    assert on.Flush(1) in said
    life, said = live(on.Flushed(1), life=life)
    assert said == [on.Exit(143)]
    _, said = live(on.Flushed(1), assign(5), on.WarmChanged(True), life=life)
    assert said == []


def test_a_rank_that_ended_well_is_told_of_at_once() -> None:
    life, said = live(on.TrainerExited(1, 1, 0), life=running())
    assert said == [on.SendHeartbeat()]
    assert life.progress.exited_ranks == (1,)


@pytest.mark.parametrize(
    "event",
    [from_rank(1, 0, BarrierReached(1, 2)), from_rank(1, 0, Detach(0)), on.TrainerExited(1, 0, 0)],
    ids=["held", "closed", "done"],
)
def test_whoever_waits_or_is_done_does_not_hang(event: on.Event) -> None:
    life = replace(running(), step_timeout_seconds=10.0)
    _, said = live(step(1, 0, 1), step(1, 1, 1), event, on.Ticked(1000.0), life=life)
    assert not any(isinstance(c, on.KillTrainers) for c in said)


def test_a_step_that_the_own_ranks_have_finished_proves_nothing_of_the_others_yet() -> None:
    """A rank that had frozen in step 12 could still tell that its loss was odd, when 10 had gone for 11 (seed 74823)."""
    sound = loss_history_of(Progress(12), 2)
    assert sound is not None
    assert sound.is_known_good(Checkpoint(1, 9))
    assert not sound.is_known_good(Checkpoint(1, 10))
    assert loss_history_of(Progress(0), 2) == LossHistory(0, 0, 2)
    assert loss_history_of(Progress(12), 0) is None


def test_what_a_worker_offered_is_what_all_its_ranks_did() -> None:
    life, _ = live(step(1, 0, 7), step(1, 1, 7), from_rank(1, 0, Detach(0, True)), life=running())
    assert life.progress.final_save_step == 0
    also, said = live(from_rank(1, 1, Detach(0, True)), life=life)
    assert also.progress.final_save_step == 7
    assert on.SendHeartbeat() in said, "whoever decides hears of it at once"
    assert live(from_rank(1, 1, Detach(0, False)), life=life)[0].progress.final_save_step == 0


def test_a_hold_needs_every_rank_and_is_held_when_all_stand() -> None:
    life, said = live(Barrier(1, 8, "proposed"), life=running())
    assert said == [on.SendToTrainers(Barrier(1, 8, "proposed"))]
    life, said = live(from_rank(1, 0, BarrierReply(1, 8, True)), life=life)
    assert sent(said) == []
    life, said = live(from_rank(1, 1, BarrierReply(1, 8, True)), life=life)
    assert sent(said) == [BarrierReply(1, 8, accepted=True)]
    life, said = live(Barrier(1, 8, "proposed"), life=life)
    assert sent(said) == [BarrierReply(1, 8, accepted=True)], "asked again by a coordinator that returned"
    life, said = live(from_rank(1, 0, BarrierReached(1, 8)), from_rank(1, 1, BarrierReached(1, 8)), life=life)
    assert sent(said) == [BarrierReached(1, 8)]
    life, said = live(Barrier(1, 0, "cancelled"), WELCOME, life=life)
    assert BarrierReached(1, 8) not in sent(said)


def test_one_rank_that_is_already_there_refuses_the_hold_once() -> None:
    events = (
        Barrier(1, 8, "proposed"),
        from_rank(1, 1, BarrierReply(1, 8, False)),
        from_rank(1, 0, BarrierReply(1, 8, True)),
    )
    _, said = live(*events, life=running())
    assert sent(said) == [BarrierReply(1, 8, accepted=False)]


def test_a_hold_is_refused_where_a_rank_cannot_be_asked() -> None:
    life, _ = live(on.WarmChanged(True), assign(1), on.StoreStarted(1, "h:1"))
    _, said = live(Barrier(1, 8, "proposed"), life=life)
    assert sent(said) == [BarrierReply(1, 8, accepted=False)]
    _, said = live(Barrier(2, 8, "proposed"), life=running())
    assert sent(said) == [BarrierReply(2, 8, accepted=False)]


def test_changed_holders_are_kept_for_trainers_that_attach_later() -> None:
    holders = MemoryServers(1, (), (), 3)
    life, said = live(holders, life=running())
    assert on.Retarget(holders) in said
    assert life.assign is not None
    assert life.assign.replicas == 3
    _, said = live(MemoryServers(2, (), (), 3), life=life)
    assert said == []


def test_restoring_is_done_when_every_rank_is() -> None:
    life, _ = live(from_rank(1, 0, RestoreDone(0, "memory", 0, 0.0)), life=running())
    assert (life.restored, life.restored_from) == (False, None)
    one, _ = live(from_rank(1, 1, RestoreDone(0, "memory", 0, 0.0)), life=life)
    assert (one.restored, one.restored_from) == (True, "memory")
    two, _ = live(from_rank(1, 1, RestoreDone(0, "persistent", 0, 0.0)), life=life)
    assert two.restored_from == "mixed"
    none, _ = live(
        from_rank(1, 0, RestoreDone(0, "none", 0, 0.0)), from_rank(1, 1, RestoreDone(0, "none", 0, 0.0)), life=running()
    )
    assert (none.restored, none.restored_from) == (True, None)


def test_odd_steps_before_the_parent_are_told_before_there_is_one_of_its_own() -> None:
    odd = AnomalyRun(4, 3, "not-finite", "the loss of step 4 is nan")
    life, _ = live(from_rank(1, 1, RestoreDone(0, "memory", 0, 0.0, odd)), life=running())
    assert (life.progress.step, life.progress.anomaly_step, life.progress.anomaly_since_step) == (0, 4, 3)


def test_a_checkpoint_that_cannot_be_read_is_reported_with_its_rank() -> None:
    _, said = live(from_rank(1, 1, RestoreFailed(Checkpoint(0, 4), False, "bad")), life=running())
    assert sent(said) == [UnreadableSave(1, Checkpoint(0, 4), 1, False, "bad")]


def test_a_store_that_does_not_come_up_fails_the_epoch_once() -> None:
    life, _ = live(on.WarmChanged(True), assign(1))
    life, said = live(on.StoreExited(1, "no torch"), life=life)
    (exited,) = sent(said)
    assert isinstance(exited, TrainerFailure)
    assert "no torch" in exited.cause
    _, said = live(assign(1, store="h:1"), life=life)
    assert not any(isinstance(c, on.StartTrainers) for c in said)


def test_a_heartbeat_goes_out_at_once_with_the_first_step_of_all() -> None:
    life, said = live(step(1, 0, 41), life=running())
    assert on.SendHeartbeat() not in said
    life, said = live(step(1, 1, 41), life=life)
    assert on.SendHeartbeat() in said
    _, said = live(step(1, 0, 42), step(1, 1, 42), life=life)
    assert said == []


def settled(local: int, number: int, upto: int) -> on.TrainerMessage:
    return from_rank(1, local, StepReport(Progress(number, closed_steps=ClosedSteps(upto)), None, False))


def test_a_loss_that_is_no_number_on_any_rank_is_no_number_on_the_worker() -> None:
    """Each rank of a data-parallel world has a loss of its own, and the first one's may be the last that is lost."""
    bad, good, silent = (Progress(5, loss_is_finite=finite) for finite in (False, True, None))
    for told, found in (((good, bad), False), ((good, good), True), ((silent, bad), False), ((silent, silent), None)):
        life, _ = live(*(from_rank(1, i, StepReport(one, None, False)) for i, one in enumerate(told)), life=running())
        assert life.progress.loss_is_finite is found
    assert merge_rank_progress([]) == Progress()


def test_a_step_is_settled_once_no_local_rank_can_save_it_any_more() -> None:
    life, _ = live(settled(0, 41, 40), settled(1, 41, 29), life=running())
    assert life.progress.closed_steps.closed_up_to == 29, "a copy of step 30 is still under way"
    life, _ = live(settled(1, 42, 41), life=life)
    assert life.progress.closed_steps.closed_up_to == 40
    assert AgentState().progress.closed_steps.closed_up_to == 0


def test_only_the_first_member_of_a_running_epoch_keeps_the_memory_tier_and_only_while_nobody_leads() -> None:
    life = running()
    assert generation_to_collect(life, away_seconds=29.0) is None
    assert generation_to_collect(life, away_seconds=31.0) == life.assign
    assert generation_to_collect(replace(life, assign=replace(assign(1), group_rank=1)), 31.0) is None
    stopping, _ = live(StopTrainers(2, ""), life=life)
    assert generation_to_collect(stopping, 31.0) is None
    assert generation_to_collect(AgentState(), 31.0) is None


epochs = st.integers(0, 4)
locals_ = st.integers(0, 1)
FROM_RANKS = st.one_of(
    st.builds(Attach, locals_, epochs, st.just(0)),
    st.builds(BarrierReply, epochs, st.integers(0, 9), st.booleans()),
    st.builds(BarrierReached, epochs, st.integers(0, 9)),
    st.builds(Detach, st.integers(0, 9), st.booleans()),
    st.builds(RestoreDone, st.integers(0, 9), st.just("memory"), st.just(0), st.just(0.0)),
    st.builds(PauseReport, st.sampled_from(["", "evaluation"]), st.just(None)),
    st.just(RequestAllServers()),
)
EVENTS = st.one_of(
    st.builds(on.WarmChanged, st.booleans()),
    st.just(WELCOME),
    st.builds(assign, epochs, st.booleans(), st.sampled_from([None, "o:1"])),
    st.builds(StopTrainers, epochs, st.just("")),
    st.builds(on.StoreStarted, epochs, st.just("h:1")),
    st.builds(on.StoreExited, epochs, st.just("gone")),
    st.builds(on.TrainerExited, epochs, locals_, st.sampled_from([0, 1, -9])),
    st.builds(step, epochs, locals_, st.integers(1, 9), st.floats(0, 100)),
    st.builds(Barrier, epochs, st.integers(0, 9), st.sampled_from(["proposed", "bound", "cancelled"])),
    st.builds(from_rank, epochs, locals_, FROM_RANKS),
    st.builds(on.Flushed, epochs),
    st.builds(on.ShutdownRequested, st.just(3)),
    st.builds(on.TerminationRequested, st.just(4), st.builds(TerminationGrace, st.floats(0, 1000), st.floats(0, 2000))),
    st.builds(on.Ticked, st.floats(0, 2000)),
)


@given(st.lists(EVENTS, max_size=60))
def test_in_every_life_trainers_start_once_an_epoch_and_never_beside_older_ones(events: list[on.Event]) -> None:
    life, started, alive, exits = AgentState(), [], set(), 0
    stopped = 0
    for event in events:
        if isinstance(event, on.TrainerExited):
            if (event.generation, event.local) not in alive:
                continue  # only what lives can die
            alive.discard((event.generation, event.local))
        claimed = life.claimed_generation
        life, commands = next_state(life, event)
        assert life.claimed_generation >= claimed
        for command in commands:
            match command:
                case on.StartTrainers(new, _):
                    assert not alive, "two epochs' trainers at once"
                    assert new.generation == life.claimed_generation
                    assert new.generation >= life.stopped_below
                    started.append(new.generation)
                    alive = {(new.generation, i) for i in range(new.local_ranks)}
                case on.Send(TrainersStopped(epoch)):
                    assert not any(e < epoch for e, _ in alive), "said to be reaped, and lives"
                    assert epoch >= stopped
                    stopped = epoch
                case on.Exit():
                    assert not alive
                    exits += 1
    assert started == sorted(set(started)), "an epoch was started twice, or an older one after a newer"
    assert exits <= 1


# ---- stuck ranks -----------------------------------------------------------------------------------------------------
# When an agent says that nothing moves in its trainers, and when it takes that back.

PLACES = (RankStack((0,), "a", "in all_reduce", is_waiting=True), RankStack((1,), "b", "in load", is_waiting=False))
FIRST = HangReport(1, 12, PLACES, moves=True)
"""What the first look is told as: nobody knows yet whether anything moves."""
ELSEWHERE = (RankStack((0, 1), "c", "in forward", is_waiting=False),)


def look(at: float, places: tuple[RankStack, ...] = PLACES, io: int = 0, cpu: float = 0.0) -> HangObservation:
    return HangObservation(at, places, ProcessActivity(io, cpu))


def stepping(steps: int = 12) -> AgentState:
    """Two ranks made so many steps of 0.1 s each, the last at 100: suspect after 120 s of 600."""
    events = [step(1, local, number, at=100.0) for number in range(1, steps + 1) for local in (0, 1)]
    return live(*events, life=running())[0]


def seen(life: AgentState, *looks: HangObservation | None) -> tuple[AgentState, list[object]]:
    """Each look is asked for by a tick, and answered."""
    said: list[object] = []
    for number, one in enumerate(looks, 1):
        life, commands = live(on.Ticked(100.1 + 60.0 * number), life=life)
        assert commands == [on.CollectStacks(1)]
        life, commands = live(on.StacksCollected(1, "rank 1: in load", one), life=life)
        said += sent(commands)
    return life, said


def told(life: AgentState) -> list[object]:
    """What whoever answers next is told of it."""
    return [fact for fact in life.facts if isinstance(fact, HangReport)]


def test_two_looks_that_are_alike_are_told() -> None:
    life, said = seen(stepping(), look(160.0), look(220.0), look(280.0))
    assert said == [FIRST, HangReport(1, 12, PLACES)], "once"
    _, again = live(WELCOME, life=life)
    assert HangReport(1, 12, PLACES) in sent(again), "whoever answers next is told too"


@pytest.mark.parametrize(
    "second",
    [look(220.0, ELSEWHERE), look(220.0, io=2 << 20), look(220.0, cpu=30.0), None],
    ids=["another stack", "reading", "somebody computes", "no stack"],
)
def test_what_moves_is_told_as_no_proof(second: HangObservation | None) -> None:
    said = seen(stepping(), look(160.0), second)[1]
    after = HangReport(1, 12) if second is None else HangReport(1, 12, second.stacks, moves=True)
    assert said == ([FIRST] if after == FIRST else [FIRST, after])


def test_collectives_are_told_once_nothing_moved_between_two_looks() -> None:
    calls = (Collective((0, 1), "default_pg", 7, "all_reduce", "", "scheduled"),)
    later = (replace(calls[0], number=8),)
    first, second = replace(look(160.0), collectives=calls), replace(look(220.0), collectives=calls)
    assert seen(stepping(), first, second)[1] == [FIRST, HangReport(1, 12, PLACES, collectives=calls)]
    assert seen(stepping(), first, replace(second, collectives=later))[1] == [FIRST], "it moves"
    silent = look(220.0)
    for looks in ((first, silent), (look(160.0), second), (first, silent, replace(look(280.0), collectives=calls))):
        assert seen(stepping(), *looks)[1] == [FIRST, HangReport(1, 12, PLACES, collectives=calls)], (
            "one answer is enough"
        )
    reads = replace(look(220.0, io=5 << 20), collectives=calls)
    moving = HangReport(1, 12, PLACES, moves=True, collectives=calls)
    assert seen(stepping(), first, reads)[1] == [FIRST, moving], "of what moves, two that are alike"
    assert seen(stepping(), look(160.0), reads)[1] == [FIRST]


def test_what_moves_again_proves_nothing_any_more() -> None:
    life, said = seen(stepping(), look(160.0), look(220.0), look(280.0, io=5 << 20))
    assert said == [FIRST, HangReport(1, 12, PLACES), FIRST]
    assert told(life) == [FIRST]


def test_what_cannot_be_seen_any_more_is_taken_back() -> None:
    life, said = seen(stepping(), look(160.0), look(220.0), None)
    assert said == [FIRST, HangReport(1, 12, PLACES), HangReport(1, 12)]
    assert not told(life)


@pytest.mark.parametrize("event", [step(1, 0, 13, at=230.0), from_rank(1, 0, PauseReport("evaluation", None), 230.0)])
def test_a_step_or_a_pause_takes_it_back(event: on.Event) -> None:
    life, _ = seen(stepping(), look(160.0), look(220.0))
    life, said = live(event, life=life)
    assert HangReport(1, 12) in sent(said)
    assert (told(life), life.last_observation, life.observation_count) == ([], None, 0)


def test_a_look_that_was_asked_for_before_a_step_says_nothing() -> None:
    life, _ = live(on.Ticked(160.1), step(1, 0, 13, at=161.0), step(1, 1, 13, at=161.0), life=stepping())
    life, said = live(on.StacksCollected(1, "rank 1: in load", look(161.0)), life=life)
    assert (said, life.last_observation, life.stacks) == ([], None, None)


def test_of_few_steps_nothing_is_learned_and_the_look_is_at_half_of_the_ceiling() -> None:
    life, said = live(on.Ticked(399.0), life=stepping(3))
    assert said == []
    assert live(on.Ticked(401.0), life=life)[1] == [on.CollectStacks(1)]


def test_an_agent_ends_nobody_for_it() -> None:
    life, said = seen(stepping(), *(look(100.0 + 60.0 * number) for number in range(1, 9)))
    assert [type(message) for message in said] == [HangReport, HangReport]
    assert life.has_running_trainers
    assert not life.killing


def test_within_a_pause_the_time_is_what_was_announced() -> None:
    life = replace(stepping(), step_timeout_seconds=10.0)
    life, said = live(from_rank(1, 1, PauseReport("evaluation", 300.0), 105.0), life=life)
    assert on.SendHeartbeat() in said
    assert (life.progress.pause_reason, life.progress.pause_seconds) == ("evaluation", 300.0)
    life, said = live(on.Ticked(404.0), on.StacksCollected(1, "", look(404.0)), life=life)
    assert [c for c in said if isinstance(c, on.Send)] == []
    late, said = live(on.Ticked(405.1), on.StacksCollected(1, ""), life=life)
    assert isinstance(sent(said)[0], TrainerFailure)
    assert sent(said)[0].cause == "hang: no step for 300 s of evaluation after step 12"  # type: ignore[attr-defined]
    over, _ = live(from_rank(1, 1, PauseReport("", None), 404.5), life=life)
    assert (over.progress.pause_reason, over.step_limit_seconds) == ("", 10.0)
    assert live(on.Ticked(414.0), life=over)[0].killing is False, "the time counts from the pause's end"
    assert late.killing


# ---- hangs -----------------------------------------------------------------------------------------------------------
# When an agent takes its trainers for hung, and where they are said to have stood.


def test_a_hang_is_counted_from_the_first_step_only() -> None:
    life = replace(running(), step_timeout_seconds=10.0)
    life, said = live(on.Ticked(1000.0), life=life)
    assert said == [], "before the first step there may be minutes of compilation"
    life, _ = live(step(1, 0, 1, at=1000.0), step(1, 1, 1, at=1001.0), step(1, 0, 2, at=1001.5), life=life)
    life, said = live(on.Ticked(1006.0), life=life)
    assert said == []
    life, said = live(on.Ticked(1007.0), on.Ticked(1011.0), life=life)
    assert said == [on.CollectStacks(1)], "once at half of the time"
    life, said = live(on.Ticked(1012.0), life=life)
    assert said == [on.CollectStacks(1)], "where they stand is asked before they are killed"
    life, said = live(on.Ticked(1013.0), on.StacksCollected(1, "rank 1: in load"), life=life)
    (exited,) = sent(said)
    assert isinstance(exited, TrainerFailure)
    assert (exited.kind, exited.rank, exited.step) == ("hang", 1, 1)
    assert exited.cause == "hang: no step for 10 s after step 1"
    assert exited.detail == "rank 1: in load"
    assert said[-1] == on.KillTrainers(1)


def test_trainers_that_stand_when_a_newer_epoch_comes_are_asked_where() -> None:
    life, _ = live(step(1, 0, 3, at=100.0), step(1, 1, 3, at=100.0), on.Ticked(100.0), life=running())
    _, said = live(StopTrainers(2, ""), life=life)
    assert said == [on.KillTrainers(1)], "a training that moves is not kept waiting"
    life, said = live(on.Ticked(106.0), StopTrainers(2, ""), life=life)
    assert said == [on.CollectStacks(1)]
    life, said = live(on.StacksCollected(1, "rank 0: in all_reduce"), life=life)
    assert [type(command) for command in said] == [on.Send, on.KillTrainers]
    assert sent(said)[0].detail == "rank 0: in all_reduce"
    assert life.facts == (), "of the epoch that is over"


def test_the_peer_of_a_hang_is_asked_where_it_stands_although_its_own_time_is_not_up() -> None:
    life = replace(running(), step_timeout_seconds=4.0)
    life, _ = live(step(1, 0, 3, at=100.0), step(1, 1, 3, at=100.0), life=life)
    life, said = live(on.Ticked(102.1), life=life)
    assert said == [on.CollectStacks(1)], "half of it is"
    life, said = live(on.Ticked(103.9), life=life)
    assert said == []
    _, said = live(StopTrainers(2, ""), life=life)
    assert said == [on.CollectStacks(1)]


def test_trainers_that_hold_or_fail_at_once_are_not_asked_where_they_stand() -> None:
    life, _ = live(step(1, 0, 3, at=100.0), step(1, 1, 3, at=100.0), on.Ticked(100.0), life=running())
    _, said = live(on.TrainerExited(1, 0, 1, "ValueError: x"), life=life)
    assert said[0] == on.KillTrainers(1)
    held, _ = live(
        from_rank(1, 0, BarrierReached(1, 3)), from_rank(1, 1, BarrierReached(1, 3)), on.Ticked(200.0), life=life
    )
    _, said = live(StopTrainers(2, ""), life=held)
    assert said == [on.KillTrainers(1)]


def test_trainers_that_another_agents_kill_ends_have_said_before_where_they_stood() -> None:
    life = replace(running(), step_timeout_seconds=10.0)
    life, _ = live(step(1, 0, 3, at=100.0), step(1, 1, 3, at=100.0), life=life)
    life, said = live(on.Ticked(105.1), life=life)
    assert said == [on.CollectStacks(1)]
    life, said = live(on.StacksCollected(1, "rank 0, 1: in all_reduce"), life=life)
    assert said == [], "nobody is ended for it"
    # the finder ended its ranks: here all collectives break together, and nobody is left to be asked
    life, said = live(on.TrainerExited(1, 1, 1, "RuntimeError: reset", True, 1), life=life)
    life, said = live(on.TrainerExited(1, 0, 1, "RuntimeError: reset", True, 0), on.StacksCollected(1, ""), life=life)
    (exited,) = sent(said)
    assert (exited.cause, exited.detail) == ("RuntimeError: reset", "rank 0, 1: in all_reduce")


def test_where_trainers_stood_is_forgotten_with_their_next_step() -> None:
    life = replace(running(), step_timeout_seconds=10.0)
    life, _ = live(step(1, 0, 3, at=100.0), step(1, 1, 3, at=100.0), on.Ticked(105.1), life=life)
    life, _ = live(
        on.StacksCollected(1, "rank 0: in evaluate"), step(1, 0, 4, at=106.0), step(1, 1, 4, at=106.0), life=life
    )
    life, said = live(on.Ticked(106.1), on.TrainerExited(1, 0, 1, "ValueError: x"), life=life)
    assert [exited.detail for exited in sent(said)] == [""]
    _, said = live(on.Ticked(112.0), life=life)
    assert on.CollectStacks(1) not in said, "they are being ended"


def test_stacks_that_come_when_the_trainers_have_ended_by_themselves_are_said_too() -> None:
    life, _ = live(step(1, 0, 3, at=100.0), step(1, 1, 3, at=100.0), on.Ticked(106.0), life=running())
    life, said = live(on.TrainerExited(1, 0, 1, "RuntimeError: timed out", True, 0), life=life)
    assert said == [on.CollectStacks(1)]
    life, said = live(on.TrainerExited(1, 1, 1), on.StacksCollected(1, "rank 1: in load"), life=life)
    (exited,) = sent(said)
    assert (exited.cause, exited.detail) == ("RuntimeError: timed out", "rank 1: in load")
    assert on.KillTrainers(1) not in said


def test_a_hang_in_which_all_stand_alike_names_no_rank() -> None:
    for ranks in (1, 2):
        life = replace(running(ranks=ranks), step_timeout_seconds=10.0)
        life, _ = live(*(step(1, local, 3, at=1.0) for local in range(ranks)), life=life)
        _, said = live(on.Ticked(12.0), on.StacksCollected(1, ""), life=life)
        (exited,) = sent(said)
        assert isinstance(exited, TrainerFailure)
        assert (exited.kind, exited.rank) == ("hang", -1)


# ---- graceful departure ----------------------------------------------------------------------------------------------
# How a worker that is told to end (SIGTERM: its pod is deleted) leaves a world that still trains.

PART = on.TerminationRequested(143, TerminationGrace(barrier_announced_by=105.0, barrier_reached_by=110.0))


def test_a_worker_that_is_to_end_trains_until_its_world_is_left_in_order() -> None:
    life, said = live(PART, on.Ticked(104.0), life=running(ranks=1))
    assert said == [on.SendHeartbeat()], "its leaving is told, and training goes on"
    life, said = live(Barrier(1, 8, "proposed"), from_rank(1, 0, BarrierReply(1, 8, True)), life=life)
    assert sent(said) == [BarrierReply(1, 8, accepted=True)]
    life, said = live(Barrier(1, 8, "bound"), on.Ticked(109.0), from_rank(1, 0, BarrierReached(1, 8)), life=life)
    assert sent(said) == [BarrierReached(1, 8)]
    assert life.has_running_trainers, "its save may still be on its way to other nodes"
    life, said = live(StopTrainers(2, ""), life=life)
    assert said == [on.KillTrainers(1)]
    life, said = live(on.TrainerExited(1, 0, -9), life=life)
    assert (sent(said), said[-1]) == ([TrainersStopped(2)], on.Flush(1))
    _, said = live(on.Flushed(1), life=life)
    assert said == [on.Exit(143)]


@pytest.mark.parametrize(
    "word",
    [
        (on.Ticked(105.0),),
        (Barrier(1, 8, "cancelled"), on.Ticked(105.0)),
        (Barrier(0, 8, "proposed"), on.Ticked(105.0)),
        (Barrier(1, 8, "proposed"), on.Ticked(109.9), on.Ticked(110.0)),
        (on.ShutdownRequested(0),),
    ],
    ids=["no word", "a cancelled halt", "another epoch's", "a halt that never comes", "retired"],
)
def test_a_worker_that_is_to_end_waits_no_longer_than_somebody_sees_to_it(word: tuple[Event, ...]) -> None:
    life, said = live(PART, *word[:-1], life=running(ranks=1))
    assert on.KillTrainers(1) not in said
    life, said = live(word[-1], life=life)
    assert said == [on.KillTrainers(1)]
    _, said = live(on.TrainerExited(1, 0, -9), on.Flushed(1), life=life)
    assert said[-1] == on.Exit(143)


def test_a_signal_that_is_repeated_changes_nothing() -> None:
    life, _ = live(PART, Barrier(1, 8, "proposed"), life=running(ranks=1))
    again = on.TerminationRequested(143, TerminationGrace(barrier_announced_by=105.5, barrier_reached_by=110.5))
    assert live(again, life=life) == (life, [])


def test_a_worker_that_is_to_end_and_trains_nothing_ends_at_once() -> None:
    _, said = live(PART, on.Flushed(0))
    assert said[-1] == on.Exit(143)


def test_a_worker_that_comes_to_the_end_of_the_job_while_it_is_to_end_says_so() -> None:
    life, _ = live(PART, step(1, 0, 9), on.TrainerExited(1, 0, 0), life=running(ranks=1))
    _, said = live(on.Flushed(1), life=life)
    assert (sent(said), said[-1]) == ([Finished(1, 0, 9)], on.Exit(143))


# ---- trains ----------------------------------------------------------------------------------------------------------
# When copies have to spare the network: while trainers here go on with steps, and not a moment longer.


def test_who_runs_trains() -> None:
    assert running().is_training


@pytest.mark.parametrize(
    "ended",
    [
        StopTrainers(2, ""),
        on.ShutdownRequested(143),
        on.TerminationRequested(143, TerminationGrace(1.0, 9.0)),
        Barrier(1, 40, "proposed"),
        on.TrainerExited(1, 0, 1, "a fault"),
    ],
    ids=["stopped", "leaves", "is to leave", "holds", "failed"],
)
def test_where_a_world_ends_or_halts_nothing_is_spared(ended: on.Event) -> None:
    life, _ = live(ended, life=running(ranks=1))
    assert not life.is_training


def test_an_assignment_alone_trains_nothing() -> None:
    life, _ = live(on.WarmChanged(True), assign(1))
    assert not life.is_training
