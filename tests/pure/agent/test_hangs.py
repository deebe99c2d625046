"""When an agent takes its trainers for hung, and where they are said to have stood."""

from __future__ import annotations

from dataclasses import replace

from support.lives import from_rank, live, running, sent, step
from surefoot.agent import agent_state as on
from surefoot.protocol.messages import (
    BarrierReached,
    Exited,
    Stop,
)


def test_a_hang_is_counted_from_the_first_step_only() -> None:
    life = replace(running(), step_timeout_seconds=10.0)
    life, said = live(on.Ticked(1000.0), life=life)
    assert said == [], "before the first step there may be minutes of compilation"
    life, _ = live(step(1, 0, 1, at=1000.0), step(1, 1, 1, at=1001.0), step(1, 0, 2, at=1001.5), life=life)
    life, said = live(on.Ticked(1006.0), life=life)
    assert said == []
    life, said = live(on.Ticked(1007.0), on.Ticked(1011.0), life=life)
    assert said == [on.TakeStacks(1)], "once at half of the time"
    life, said = live(on.Ticked(1012.0), life=life)
    assert said == [on.TakeStacks(1)], "where they stand is asked before they are killed"
    life, said = live(on.Ticked(1013.0), on.StacksTaken(1, "rank 1: in load"), life=life)
    (exited,) = sent(said)
    assert isinstance(exited, Exited)
    assert (exited.kind, exited.rank, exited.step) == ("hang", 1, 1)
    assert exited.cause == "hang: no step for 10 s after step 1"
    assert exited.detail == "rank 1: in load"
    assert said[-1] == on.KillTrainers(1)


def test_trainers_that_stand_when_a_newer_epoch_comes_are_asked_where() -> None:
    life, _ = live(step(1, 0, 3, at=100.0), step(1, 1, 3, at=100.0), on.Ticked(100.0), life=running())
    _, said = live(Stop(2, ""), life=life)
    assert said == [on.KillTrainers(1)], "a training that moves is not kept waiting"
    life, said = live(on.Ticked(106.0), Stop(2, ""), life=life)
    assert said == [on.TakeStacks(1)]
    life, said = live(on.StacksTaken(1, "rank 0: in all_reduce"), life=life)
    assert [type(command) for command in said] == [on.Send, on.KillTrainers]
    assert sent(said)[0].detail == "rank 0: in all_reduce"
    assert life.facts == (), "of the epoch that is over"


def test_the_peer_of_a_hang_is_asked_where_it_stands_although_its_own_time_is_not_up() -> None:
    life = replace(running(), step_timeout_seconds=4.0)
    life, _ = live(step(1, 0, 3, at=100.0), step(1, 1, 3, at=100.0), life=life)
    life, said = live(on.Ticked(102.1), life=life)
    assert said == [on.TakeStacks(1)], "half of it is"
    life, said = live(on.Ticked(103.9), life=life)
    assert said == []
    _, said = live(Stop(2, ""), life=life)
    assert said == [on.TakeStacks(1)]


def test_trainers_that_hold_or_fail_at_once_are_not_asked_where_they_stand() -> None:
    life, _ = live(step(1, 0, 3, at=100.0), step(1, 1, 3, at=100.0), on.Ticked(100.0), life=running())
    _, said = live(on.TrainerExited(1, 0, 1, "ValueError: x"), life=life)
    assert said[0] == on.KillTrainers(1)
    held, _ = live(
        from_rank(1, 0, BarrierReached(1, 3)), from_rank(1, 1, BarrierReached(1, 3)), on.Ticked(200.0), life=life
    )
    _, said = live(Stop(2, ""), life=held)
    assert said == [on.KillTrainers(1)]


def test_trainers_that_another_agents_kill_ends_have_said_before_where_they_stood() -> None:
    life = replace(running(), step_timeout_seconds=10.0)
    life, _ = live(step(1, 0, 3, at=100.0), step(1, 1, 3, at=100.0), life=life)
    life, said = live(on.Ticked(105.1), life=life)
    assert said == [on.TakeStacks(1)]
    life, said = live(on.StacksTaken(1, "rank 0, 1: in all_reduce"), life=life)
    assert said == [], "nobody is ended for it"
    # the finder ended its ranks: here all collectives break together, and nobody is left to be asked
    life, said = live(on.TrainerExited(1, 1, 1, "RuntimeError: reset", True, 1), life=life)
    life, said = live(on.TrainerExited(1, 0, 1, "RuntimeError: reset", True, 0), on.StacksTaken(1, ""), life=life)
    (exited,) = sent(said)
    assert (exited.cause, exited.detail) == ("RuntimeError: reset", "rank 0, 1: in all_reduce")


def test_where_trainers_stood_is_forgotten_with_their_next_step() -> None:
    life = replace(running(), step_timeout_seconds=10.0)
    life, _ = live(step(1, 0, 3, at=100.0), step(1, 1, 3, at=100.0), on.Ticked(105.1), life=life)
    life, _ = live(
        on.StacksTaken(1, "rank 0: in evaluate"), step(1, 0, 4, at=106.0), step(1, 1, 4, at=106.0), life=life
    )
    life, said = live(on.Ticked(106.1), on.TrainerExited(1, 0, 1, "ValueError: x"), life=life)
    assert [exited.detail for exited in sent(said)] == [""]
    _, said = live(on.Ticked(112.0), life=life)
    assert on.TakeStacks(1) not in said, "they are being ended"


def test_stacks_that_come_when_the_trainers_have_ended_by_themselves_are_said_too() -> None:
    life, _ = live(step(1, 0, 3, at=100.0), step(1, 1, 3, at=100.0), on.Ticked(106.0), life=running())
    life, said = live(on.TrainerExited(1, 0, 1, "RuntimeError: timed out", True, 0), life=life)
    assert said == [on.TakeStacks(1)]
    life, said = live(on.TrainerExited(1, 1, 1), on.StacksTaken(1, "rank 1: in load"), life=life)
    (exited,) = sent(said)
    assert (exited.cause, exited.detail) == ("RuntimeError: timed out", "rank 1: in load")
    assert on.KillTrainers(1) not in said


def test_a_hang_in_which_all_stand_alike_names_no_rank() -> None:
    for ranks in (1, 2):
        life = replace(running(ranks=ranks), step_timeout_seconds=10.0)
        life, _ = live(*(step(1, local, 3, at=1.0) for local in range(ranks)), life=life)
        _, said = live(on.Ticked(12.0), on.StacksTaken(1, ""), life=life)
        (exited,) = sent(said)
        assert isinstance(exited, Exited)
        assert (exited.kind, exited.rank) == ("hang", -1)
