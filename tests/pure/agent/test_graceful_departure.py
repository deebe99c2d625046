"""How a worker that is told to end (SIGTERM: its pod is deleted) leaves a world that still trains."""

from __future__ import annotations

import pytest

from support.lives import from_rank, live, running, sent, step
from surefoot.agent import agent_state as on
from surefoot.agent.agent_state import Departure, Event
from surefoot.protocol.messages import Barrier, BarrierReached, BarrierReply, Finished, Stop, Stopped

PART = on.DepartureAsked(143, Departure(word_by=105.0, part_by=110.0))


def test_a_worker_that_is_to_end_trains_until_its_world_is_left_in_order() -> None:
    life, said = live(PART, on.Ticked(104.0), life=running(ranks=1))
    assert said == [on.Beat()], "its leaving is told, and training goes on"
    life, said = live(Barrier(1, 8, "proposed"), from_rank(1, 0, BarrierReply(1, 8, True)), life=life)
    assert sent(said) == [BarrierReply(1, 8, accepted=True)]
    life, said = live(Barrier(1, 8, "bound"), on.Ticked(109.0), from_rank(1, 0, BarrierReached(1, 8)), life=life)
    assert sent(said) == [BarrierReached(1, 8)]
    assert life.alive, "its save may still be on its way to other nodes"
    life, said = live(Stop(2, ""), life=life)
    assert said == [on.KillTrainers(1)]
    life, said = live(on.TrainerExited(1, 0, -9), life=life)
    assert (sent(said), said[-1]) == ([Stopped(2)], on.Flush(1))
    _, said = live(on.Flushed(1), life=life)
    assert said == [on.Exit(143)]


@pytest.mark.parametrize(
    "word",
    [
        (on.Ticked(105.0),),
        (Barrier(1, 8, "cancelled"), on.Ticked(105.0)),
        (Barrier(0, 8, "proposed"), on.Ticked(105.0)),
        (Barrier(1, 8, "proposed"), on.Ticked(109.9), on.Ticked(110.0)),
        (on.LeaveAsked(0),),
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
    again = on.DepartureAsked(143, Departure(word_by=105.5, part_by=110.5))
    assert live(again, life=life) == (life, [])


def test_a_worker_that_is_to_end_and_trains_nothing_ends_at_once() -> None:
    _, said = live(PART, on.Flushed(0))
    assert said[-1] == on.Exit(143)


def test_a_worker_that_comes_to_the_end_of_the_job_while_it_is_to_end_says_so() -> None:
    life, _ = live(PART, step(1, 0, 9), on.TrainerExited(1, 0, 0), life=running(ranks=1))
    _, said = live(on.Flushed(1), life=life)
    assert (sent(said), said[-1]) == ([Finished(1, 0, 9)], on.Exit(143))
