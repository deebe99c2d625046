"""When an agent says that nothing moves in its trainers, and when it takes that back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.lives import WELCOME, from_rank, live, running, sent, step
from surefoot.agent import agent_state as on
from surefoot.agent.agent_state import Activity, AgentState, Look
from surefoot.ipc.trainer_messages import Pausing
from surefoot.protocol.hangs import Collective, RankPlace
from surefoot.protocol.messages import Exited, StuckRanks

PLACES = (RankPlace((0,), "a", "in all_reduce", waiting=True), RankPlace((1,), "b", "in load", waiting=False))
FIRST = StuckRanks(1, 12, PLACES, moves=True)
"""What the first look is told as: nobody knows yet whether anything moves."""
ELSEWHERE = (RankPlace((0, 1), "c", "in forward", waiting=False),)


def look(at: float, places: tuple[RankPlace, ...] = PLACES, io: int = 0, cpu: float = 0.0) -> Look:
    return Look(at, places, Activity(io, cpu))


def stepping(steps: int = 12) -> AgentState:
    """Two ranks made so many steps of 0.1 s each, the last at 100: suspect after 120 s of 600."""
    events = [step(1, local, number, at=100.0) for number in range(1, steps + 1) for local in (0, 1)]
    return live(*events, life=running())[0]


def seen(life: AgentState, *looks: Look | None) -> tuple[AgentState, list[object]]:
    """Each look is asked for by a tick, and answered."""
    said: list[object] = []
    for number, one in enumerate(looks, 1):
        life, commands = live(on.Ticked(100.1 + 60.0 * number), life=life)
        assert commands == [on.TakeStacks(1)]
        life, commands = live(on.StacksTaken(1, "rank 1: in load", one), life=life)
        said += sent(commands)
    return life, said


def told(life: AgentState) -> list[object]:
    """What whoever answers next is told of it."""
    return [fact for fact in life.facts if isinstance(fact, StuckRanks)]


def test_two_looks_that_are_alike_are_told() -> None:
    life, said = seen(stepping(), look(160.0), look(220.0), look(280.0))
    assert said == [FIRST, StuckRanks(1, 12, PLACES)], "once"
    _, again = live(WELCOME, life=life)
    assert StuckRanks(1, 12, PLACES) in sent(again), "whoever answers next is told too"


@pytest.mark.parametrize(
    "second",
    [look(220.0, ELSEWHERE), look(220.0, io=2 << 20), look(220.0, cpu=30.0), None],
    ids=["another stack", "reading", "somebody computes", "no stack"],
)
def test_what_moves_is_told_as_no_proof(second: Look | None) -> None:
    said = seen(stepping(), look(160.0), second)[1]
    after = StuckRanks(1, 12) if second is None else StuckRanks(1, 12, second.places, moves=True)
    assert said == ([FIRST] if after == FIRST else [FIRST, after])


def test_collectives_are_told_once_nothing_moved_between_two_looks() -> None:
    calls = (Collective((0, 1), "default_pg", 7, "all_reduce", "", "scheduled"),)
    later = (replace(calls[0], number=8),)
    first, second = replace(look(160.0), collectives=calls), replace(look(220.0), collectives=calls)
    assert seen(stepping(), first, second)[1] == [FIRST, StuckRanks(1, 12, PLACES, collectives=calls)]
    assert seen(stepping(), first, replace(second, collectives=later))[1] == [FIRST], "it moves"
    silent = look(220.0)
    for looks in ((first, silent), (look(160.0), second), (first, silent, replace(look(280.0), collectives=calls))):
        assert seen(stepping(), *looks)[1] == [FIRST, StuckRanks(1, 12, PLACES, collectives=calls)], (
            "one answer is enough"
        )
    reads = replace(look(220.0, io=5 << 20), collectives=calls)
    moving = StuckRanks(1, 12, PLACES, moves=True, collectives=calls)
    assert seen(stepping(), first, reads)[1] == [FIRST, moving], "of what moves, two that are alike"
    assert seen(stepping(), look(160.0), reads)[1] == [FIRST]


def test_what_moves_again_proves_nothing_any_more() -> None:
    life, said = seen(stepping(), look(160.0), look(220.0), look(280.0, io=5 << 20))
    assert said == [FIRST, StuckRanks(1, 12, PLACES), FIRST]
    assert told(life) == [FIRST]


def test_what_cannot_be_seen_any_more_is_taken_back() -> None:
    life, said = seen(stepping(), look(160.0), look(220.0), None)
    assert said == [FIRST, StuckRanks(1, 12, PLACES), StuckRanks(1, 12)]
    assert not told(life)


@pytest.mark.parametrize("event", [step(1, 0, 13, at=230.0), from_rank(1, 0, Pausing("evaluation", None), 230.0)])
def test_a_step_or_a_pause_takes_it_back(event: on.Event) -> None:
    life, _ = seen(stepping(), look(160.0), look(220.0))
    life, said = live(event, life=life)
    assert StuckRanks(1, 12) in sent(said)
    assert (told(life), life.look, life.looks) == ([], None, 0)


def test_a_look_that_was_asked_for_before_a_step_says_nothing() -> None:
    life, _ = live(on.Ticked(160.1), step(1, 0, 13, at=161.0), step(1, 1, 13, at=161.0), life=stepping())
    life, said = live(on.StacksTaken(1, "rank 1: in load", look(161.0)), life=life)
    assert (said, life.look, life.stacks) == ([], None, None)


def test_of_few_steps_nothing_is_learned_and_the_look_is_at_half_of_the_ceiling() -> None:
    life, said = live(on.Ticked(399.0), life=stepping(3))
    assert said == []
    assert live(on.Ticked(401.0), life=life)[1] == [on.TakeStacks(1)]


def test_an_agent_ends_nobody_for_it() -> None:
    life, said = seen(stepping(), *(look(100.0 + 60.0 * number) for number in range(1, 9)))
    assert [type(message) for message in said] == [StuckRanks, StuckRanks]
    assert life.alive
    assert not life.killing


def test_within_a_pause_the_time_is_what_was_announced() -> None:
    life = replace(stepping(), step_timeout_seconds=10.0)
    life, said = live(from_rank(1, 1, Pausing("evaluation", 300.0), 105.0), life=life)
    assert on.Beat() in said
    assert (life.progress.paused, life.progress.pause_seconds) == ("evaluation", 300.0)
    life, said = live(on.Ticked(404.0), on.StacksTaken(1, "", look(404.0)), life=life)
    assert [c for c in said if isinstance(c, on.Send)] == []
    late, said = live(on.Ticked(405.1), on.StacksTaken(1, ""), life=life)
    assert isinstance(sent(said)[0], Exited)
    assert sent(said)[0].cause == "hang: no step for 300 s of evaluation after step 12"  # type: ignore[attr-defined]
    over, _ = live(from_rank(1, 1, Pausing("", None), 404.5), life=life)
    assert (over.progress.paused, over.step_limit_seconds) == ("", 10.0)
    assert live(on.Ticked(414.0), life=over)[0].killing is False, "the time counts from the pause's end"
    assert late.killing
