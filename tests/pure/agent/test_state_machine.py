"""What an agent decides, by tables and by random lives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.lives import WELCOME, assign, from_rank, live, running, sent, step
from surefoot.agent import agent_state as on
from surefoot.agent.agent_state import AgentState, Departure
from surefoot.agent.coordinator_requests import epoch_in_charge, sound_steps
from surefoot.agent.state_machine import transition
from surefoot.ipc.trainer_messages import Attach, Closing, FindHolders, Pausing, RestoreDone, RestoreFailed, Stepped
from surefoot.protocol.checkpoints.retention import SoundSteps
from surefoot.protocol.checkpoints.save_state import Settled
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.messages import (
    Barrier,
    BarrierReached,
    BarrierReply,
    Exited,
    Finished,
    Holders,
    Stop,
    Stopped,
    StoreReady,
    UnreadableSave,
)
from surefoot.protocol.progress import OddSteps, Progress, of_worker


def test_trainers_start_when_warm_and_the_store_is_known() -> None:
    life, said = live(assign(1))
    assert not any(isinstance(c, on.StartStore) for c in said), "not warm yet"
    life, said = live(on.WarmChanged(True), life=life)
    assert on.StartStore(1) in said
    life, said = live(on.StoreUp(1, "h:1"), life=life)
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
    life, said = live(Stop(2, ""), life=running())
    assert said == [on.KillTrainers(1)]
    life, said = live(on.TrainerExited(1, 0, -9), life=life)
    assert sent(said) == []
    life, said = live(on.TrainerExited(1, 1, -9), life=life)
    assert sent(said) == [Stopped(2)]
    assert on.StopStore(2) in said
    _, said = live(Stop(2, ""), life=life)
    assert sent(said) == [Stopped(2)], "a coordinator that returned asks again"


def test_a_newer_assignment_stops_first_and_starts_then() -> None:
    life, said = live(assign(2), life=running(ranks=1))
    assert not any(isinstance(c, on.StartStore | on.StartTrainers) for c in said)
    life, said = live(on.TrainerExited(1, 0, -9), life=life)
    assert [type(c) for c in said if not isinstance(c, on.Beat)] == [on.StopStore, on.Send, on.StartStore]
    _, said = live(on.StoreUp(2, "h:2"), life=life)
    assert any(isinstance(c, on.StartTrainers) and c.assign.epoch == 2 for c in said)


@pytest.mark.parametrize("event", [Stop(1, ""), Stop(0, ""), assign(0), on.StoreUp(0, "old:1")])
def test_an_older_word_changes_nothing(event: on.Event) -> None:
    life = running()
    after, said = live(event, life=life)
    assert after == life
    assert not any(isinstance(c, on.KillTrainers | on.StartTrainers) for c in said)


def test_the_first_exit_is_said_and_the_survivors_killed_before() -> None:
    life, said = live(on.TrainerExited(1, 1, 1, "ValueError: x", False, 1), life=running())
    assert said == [on.KillTrainers(1), on.Send(Exited(1, 1, 1, "ValueError: x", secondary=False, step=0))]
    _, said = live(on.TrainerExited(1, 0, -9, "killed by SIGKILL"), life=life)
    assert sent(said) == []


def test_what_happened_is_said_again_to_whoever_welcomes_us() -> None:
    life, _ = live(on.TrainerExited(1, 1, 1, "x", False, 1), on.TrainerExited(1, 0, -9), life=running())
    _, said = live(WELCOME, life=life)
    assert [type(m) for m in sent(said)] == [StoreReady, Exited]
    life, _ = live(Stop(2, ""), life=life)
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
    life, said = live(on.StoreUp(2, "h:2"), on.Flushed(1), on.TrainerExited(2, 0, 0), life=life)
    assert on.Flush(2) in said
    assert not any(isinstance(m, Finished) for m in sent(said))


def test_a_worker_ends_with_the_code_of_the_trainer_that_failed() -> None:
    for asked, codes, expected in ((1, (42, -9), 42), (0, (0, 0), 0), (0, (42, -9), 0), (1, (-9, -9), 1)):
        life = running()
        for local, code in enumerate(codes):
            life, _ = live(on.TrainerExited(1, local, code), life=life)
        life, _ = live(on.LeaveAsked(asked), life=life)
        _, said = live(on.Flushed(1), life=life)
        assert said[-1] == on.Exit(expected)


def test_leaving_kills_flushes_and_exits_in_this_order() -> None:
    life, said = live(on.LeaveAsked(143), life=running(ranks=1))
    assert said == [on.KillTrainers(1)]
    life, said = live(on.TrainerExited(1, 0, -9), life=life)
    assert on.Flush(1) in said
    life, said = live(on.Flushed(1), life=life)
    assert said == [on.Exit(143)]
    _, said = live(on.Flushed(1), assign(5), on.WarmChanged(True), life=life)
    assert said == []


def test_a_rank_that_ended_well_is_told_of_at_once() -> None:
    life, said = live(on.TrainerExited(1, 1, 0), life=running())
    assert said == [on.Beat()]
    assert life.progress.ended == (1,)


@pytest.mark.parametrize(
    "event",
    [from_rank(1, 0, BarrierReached(1, 2)), from_rank(1, 0, Closing(0)), on.TrainerExited(1, 0, 0)],
    ids=["held", "closed", "done"],
)
def test_whoever_waits_or_is_done_does_not_hang(event: on.Event) -> None:
    life = replace(running(), step_timeout_seconds=10.0)
    _, said = live(step(1, 0, 1), step(1, 1, 1), event, on.Ticked(1000.0), life=life)
    assert not any(isinstance(c, on.KillTrainers) for c in said)


def test_a_step_that_the_own_ranks_have_finished_proves_nothing_of_the_others_yet() -> None:
    """A rank that had frozen in step 12 could still tell that its loss was odd, when 10 had gone for 11 (seed 74823)."""
    sound = sound_steps(Progress(12), 2)
    assert sound is not None
    assert sound.prove(Checkpoint(1, 9))
    assert not sound.prove(Checkpoint(1, 10))
    assert sound_steps(Progress(0), 2) == SoundSteps(0, 0, 2)
    assert sound_steps(Progress(12), 0) is None


def test_what_a_worker_offered_is_what_all_its_ranks_did() -> None:
    life, _ = live(step(1, 0, 7), step(1, 1, 7), from_rank(1, 0, Closing(0, True)), life=running())
    assert life.progress.offered == 0
    also, said = live(from_rank(1, 1, Closing(0, True)), life=life)
    assert also.progress.offered == 7
    assert on.Beat() in said, "whoever decides hears of it at once"
    assert live(from_rank(1, 1, Closing(0, False)), life=life)[0].progress.offered == 0


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
    life, _ = live(on.WarmChanged(True), assign(1), on.StoreUp(1, "h:1"))
    _, said = live(Barrier(1, 8, "proposed"), life=life)
    assert sent(said) == [BarrierReply(1, 8, accepted=False)]
    _, said = live(Barrier(2, 8, "proposed"), life=running())
    assert sent(said) == [BarrierReply(2, 8, accepted=False)]


def test_changed_holders_are_kept_for_trainers_that_attach_later() -> None:
    holders = Holders(1, (), (), 3)
    life, said = live(holders, life=running())
    assert on.Retarget(holders) in said
    assert life.assign is not None
    assert life.assign.replicas == 3
    _, said = live(Holders(2, (), (), 3), life=life)
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
    odd = OddSteps(4, 3, "not-finite", "the loss of step 4 is nan")
    life, _ = live(from_rank(1, 1, RestoreDone(0, "memory", 0, 0.0, odd)), life=running())
    assert (life.progress.step, life.progress.odd_step, life.progress.odd_since) == (0, 4, 3)


def test_a_checkpoint_that_cannot_be_read_is_reported_with_its_rank() -> None:
    _, said = live(from_rank(1, 1, RestoreFailed(Checkpoint(0, 4), False, "bad")), life=running())
    assert sent(said) == [UnreadableSave(1, Checkpoint(0, 4), 1, False, "bad")]


def test_a_store_that_does_not_come_up_fails_the_epoch_once() -> None:
    life, _ = live(on.WarmChanged(True), assign(1))
    life, said = live(on.StoreLost(1, "no torch"), life=life)
    (exited,) = sent(said)
    assert isinstance(exited, Exited)
    assert "no torch" in exited.cause
    _, said = live(assign(1, store="h:1"), life=life)
    assert not any(isinstance(c, on.StartTrainers) for c in said)


def test_a_heartbeat_goes_out_at_once_with_the_first_step_of_all() -> None:
    life, said = live(step(1, 0, 41), life=running())
    assert on.Beat() not in said
    life, said = live(step(1, 1, 41), life=life)
    assert on.Beat() in said
    _, said = live(step(1, 0, 42), step(1, 1, 42), life=life)
    assert said == []


def settled(local: int, number: int, upto: int) -> on.TrainerMessage:
    return from_rank(1, local, Stepped(Progress(number, settled=Settled(upto)), None, False))


def test_a_loss_that_is_no_number_on_any_rank_is_no_number_on_the_worker() -> None:
    """Each rank of a data-parallel world has a loss of its own, and the first one's may be the last that is lost."""
    bad, good, silent = (Progress(5, loss_is_finite=finite) for finite in (False, True, None))
    for told, found in (((good, bad), False), ((good, good), True), ((silent, bad), False), ((silent, silent), None)):
        life, _ = live(*(from_rank(1, i, Stepped(one, None, False)) for i, one in enumerate(told)), life=running())
        assert life.progress.loss_is_finite is found
    assert of_worker([]) == Progress()


def test_a_step_is_settled_once_no_local_rank_can_save_it_any_more() -> None:
    life, _ = live(settled(0, 41, 40), settled(1, 41, 29), life=running())
    assert life.progress.settled.upto == 29, "a copy of step 30 is still under way"
    life, _ = live(settled(1, 42, 41), life=life)
    assert life.progress.settled.upto == 40
    assert AgentState().progress.settled.upto == 0


def test_only_the_first_member_of_a_running_epoch_keeps_the_memory_tier_and_only_while_nobody_leads() -> None:
    life = running()
    assert epoch_in_charge(life, away_seconds=29.0) is None
    assert epoch_in_charge(life, away_seconds=31.0) == life.assign
    assert epoch_in_charge(replace(life, assign=replace(assign(1), group_rank=1)), 31.0) is None
    stopping, _ = live(Stop(2, ""), life=life)
    assert epoch_in_charge(stopping, 31.0) is None
    assert epoch_in_charge(AgentState(), 31.0) is None


epochs = st.integers(0, 4)
locals_ = st.integers(0, 1)
FROM_RANKS = st.one_of(
    st.builds(Attach, locals_, epochs, st.just(0)),
    st.builds(BarrierReply, epochs, st.integers(0, 9), st.booleans()),
    st.builds(BarrierReached, epochs, st.integers(0, 9)),
    st.builds(Closing, st.integers(0, 9), st.booleans()),
    st.builds(RestoreDone, st.integers(0, 9), st.just("memory"), st.just(0), st.just(0.0)),
    st.builds(Pausing, st.sampled_from(["", "evaluation"]), st.just(None)),
    st.just(FindHolders()),
)
EVENTS = st.one_of(
    st.builds(on.WarmChanged, st.booleans()),
    st.just(WELCOME),
    st.builds(assign, epochs, st.booleans(), st.sampled_from([None, "o:1"])),
    st.builds(Stop, epochs, st.just("")),
    st.builds(on.StoreUp, epochs, st.just("h:1")),
    st.builds(on.StoreLost, epochs, st.just("gone")),
    st.builds(on.TrainerExited, epochs, locals_, st.sampled_from([0, 1, -9])),
    st.builds(step, epochs, locals_, st.integers(1, 9), st.floats(0, 100)),
    st.builds(Barrier, epochs, st.integers(0, 9), st.sampled_from(["proposed", "bound", "cancelled"])),
    st.builds(from_rank, epochs, locals_, FROM_RANKS),
    st.builds(on.Flushed, epochs),
    st.builds(on.LeaveAsked, st.just(3)),
    st.builds(on.DepartureAsked, st.just(4), st.builds(Departure, st.floats(0, 1000), st.floats(0, 2000))),
    st.builds(on.Ticked, st.floats(0, 2000)),
)


@given(st.lists(EVENTS, max_size=60))
def test_in_every_life_trainers_start_once_an_epoch_and_never_beside_older_ones(events: list[on.Event]) -> None:
    life, started, alive, exits = AgentState(), [], set(), 0
    stopped = 0
    for event in events:
        if isinstance(event, on.TrainerExited):
            if (event.epoch, event.local) not in alive:
                continue  # only what lives can die
            alive.discard((event.epoch, event.local))
        claimed = life.claimed
        life, commands = transition(life, event)
        assert life.claimed >= claimed
        for command in commands:
            match command:
                case on.StartTrainers(new, _):
                    assert not alive, "two epochs' trainers at once"
                    assert new.epoch == life.claimed
                    assert new.epoch >= life.stopped
                    started.append(new.epoch)
                    alive = {(new.epoch, i) for i in range(new.local_ranks)}
                case on.Send(Stopped(epoch)):
                    assert not any(e < epoch for e, _ in alive), "said to be reaped, and lives"
                    assert epoch >= stopped
                    stopped = epoch
                case on.Exit():
                    assert not alive
                    exits += 1
    assert started == sorted(set(started)), "an epoch was started twice, or an older one after a newer"
    assert exits <= 1
