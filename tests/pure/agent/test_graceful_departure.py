"""How a worker that is told to end (SIGTERM: its pod is deleted) leaves a world that still trains."""

from __future__ import annotations

import pytest

from support.lives import live, running, sent, step
from surefoot.agent import agent_state as on
from surefoot.agent.agent_state import Departure, Event
from surefoot.protocol.messages import Finished, Held, Hold, HoldAnswer, Stopped

PART = on.DepartureAsked(143, Departure(word_by=105.0, part_by=110.0))


def test_a_worker_that_is_to_end_trains_until_its_world_is_left_in_order() -> None:
    life, said = live(PART, on.Ticked(104.0), life=running(ranks=1))
    assert said == [on.Beat()], "its leaving is told, and training goes on"
    life, said = live(on.HoldAsked(Hold(1, 8, "propose")), on.HoldAnswered(1, 0, 8, True), life=life)
    assert sent(said) == [HoldAnswer(1, 8, accepted=True)]
    life, said = live(on.HoldAsked(Hold(1, 8, "bind")), on.Ticked(109.0), on.HoldReached(1, 0, 8), life=life)
    assert sent(said) == [Held(1, 8)]
    assert life.alive, "its save may still be on its way to other nodes"
    life, said = live(on.StopAsked(2), life=life)
    assert said == [on.KillTrainers(1)]
    life, said = live(on.TrainerExited(1, 0, -9), life=life)
    assert (sent(said), said[-1]) == ([Stopped(2)], on.Flush(1))
    _, said = live(on.Flushed(1), life=life)
    assert said == [on.Exit(143)]


@pytest.mark.parametrize(
    "word",
    [
        (on.Ticked(105.0),),
        (on.HoldAsked(Hold(1, 8, "cancel")), on.Ticked(105.0)),
        (on.HoldAsked(Hold(0, 8, "propose")), on.Ticked(105.0)),
        (on.HoldAsked(Hold(1, 8, "propose")), on.Ticked(109.9), on.Ticked(110.0)),
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
    life, _ = live(PART, on.HoldAsked(Hold(1, 8, "propose")), life=running(ranks=1))
    again = on.DepartureAsked(143, Departure(word_by=105.5, part_by=110.5))
    assert live(again, life=life) == (life, [])


def test_a_worker_that_is_to_end_and_trains_nothing_ends_at_once() -> None:
    _, said = live(PART, on.Flushed(0))
    assert said[-1] == on.Exit(143)


def test_a_worker_that_comes_to_the_end_of_the_job_while_it_is_to_end_says_so() -> None:
    life, _ = live(PART, step(1, 0, 9), on.TrainerExited(1, 0, 0), life=running(ranks=1))
    _, said = live(on.Flushed(1), life=life)
    assert (sent(said), said[-1]) == ([Finished(1, 0, 9)], on.Exit(143))
