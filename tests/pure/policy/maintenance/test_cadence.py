"""How often to save: what was asked for or costs least, never faster than saves arrive, and steady."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.save_schedule import HIGHEST_LEVEL as TRAINERS_HIGHEST
from surefoot.save_schedule import Schedule
from surefoot_operator.policy.maintenance.save_intervals import (
    HIGHEST_LEVEL,
    HYSTERESIS,
    Cadence,
    Inputs,
    IntervalRequest,
    best_seconds,
    cadence,
    readable_seconds,
)

DAY = 86400.0
some = st.floats(1e-3, 1e4)
levels = st.none() | st.integers(0, HIGHEST_LEVEL)
wishes = st.builds(IntervalRequest, st.integers(1, 20), st.none() | some, st.integers(0, 6))
measured = st.builds(Inputs, st.floats(1e-3, 100.0), some, st.none() | some, st.floats(10.0, 1e8))


def chosen(wish: IntervalRequest, inputs: Inputs, present: int | None = None) -> Cadence:
    found = cadence(wish, inputs, present)
    assert found is not None
    return found


def length(wish: IntervalRequest, inputs: Inputs, level: int) -> float:
    return (wish.base_steps << level) * (inputs.step_seconds or 0.0)


@pytest.mark.parametrize(
    ("wish", "inputs", "steps", "why"),
    [
        (IntervalRequest(1, 10.0), Inputs(0.1, 0.01, 0.2, DAY), 64, "at most every 10 s was requested"),
        (IntervalRequest(1, 10.0), Inputs(0.1, None, None, DAY), 64, "at most every 10 s was requested"),
        (IntervalRequest(10, 10.0), Inputs(0.1, 0.01, 0.2, DAY), 80, "at most every 10 s was requested"),
        (IntervalRequest(1, 10.0), Inputs(30.0, 0.01, 0.2, DAY), 1, "at most every 10 s was requested"),
        (IntervalRequest(1, 1.0), Inputs(0.1, 0.01, 3.0, DAY), 64, "at most every 1 s was requested, but a save takes 3 s to arrive"),
        (IntervalRequest(1, 1.0, least_level=5), Inputs(0.1, 0.01, 0.2, DAY), 32, "but the memory tier is not saved to more often"),
        # sqrt(2 * 0.02 s * 10 days) = 186 s
        (IntervalRequest(1), Inputs(1.0, 0.02, 0.5, 10 * DAY), 256, "every 3.1 min costs least, where a save costs 0.02 s"),
        (IntervalRequest(1), Inputs(1.0, 0.0, 0.5, 10 * DAY), 1, "every 0 s costs least"),
        (IntervalRequest(1), Inputs(1.0, 0.0, 7.0, 10 * DAY), 16, "but a save takes 7 s to arrive, and the next waits for that"),
    ],
)  # fmt: skip
def test_what_is_chosen_and_why(wish: IntervalRequest, inputs: Inputs, steps: int, why: str) -> None:
    found = chosen(wish, inputs)
    assert wish.base_steps << found.level == steps
    assert why in found.reason


@pytest.mark.parametrize(
    ("wish", "inputs"),
    [(IntervalRequest(1, 10.0), Inputs(None, 0.01, 0.2, DAY)), (IntervalRequest(1), Inputs(0.1, None, None, DAY))],
)
def test_nothing_is_chosen_before_it_is_measured(wish: IntervalRequest, inputs: Inputs) -> None:
    assert cadence(wish, inputs, None) is None


@given(st.floats(1e-3, 10.0), st.floats(10.0, 1e8))
def test_the_best_interval_costs_less_than_any_other(cost: float, incident: float) -> None:
    def lost_share(interval: float) -> float:
        return cost / interval + interval / (2 * incident)

    best = best_seconds(cost, incident)
    assert lost_share(best) <= min(lost_share(best * 1.1), lost_share(best / 1.1))
    # what rounding to a power of two may cost
    assert lost_share(best * math.sqrt(2)) <= 1.07 * lost_share(best)


@given(wishes, measured, some, levels)
def test_dearer_saves_are_made_no_oftener(
    wish: IntervalRequest, inputs: Inputs, more: float, present: int | None
) -> None:
    dearer = replace(inputs, cost_seconds=(inputs.cost_seconds or 0.0) + more)
    assert chosen(wish, dearer, present).level >= chosen(wish, inputs, present).level


@given(wishes, measured, st.floats(1.0, 1000.0), levels)
def test_more_incidents_are_saved_against_no_less_often(
    wish: IntervalRequest, inputs: Inputs, times: float, present: int | None
) -> None:
    oftener = replace(inputs, incident_seconds=inputs.incident_seconds / times)
    assert chosen(wish, oftener, present).level <= chosen(wish, inputs, present).level


@given(wishes, measured, levels)
def test_the_next_save_is_never_due_before_the_last_has_arrived(
    wish: IntervalRequest, inputs: Inputs, present: int | None
) -> None:
    level = chosen(wish, inputs, present).level
    assert level == HIGHEST_LEVEL or length(wish, inputs, level) >= (inputs.drain_seconds or 0.0)


@given(wishes, measured, levels)
def test_seconds_are_a_promise_that_only_drains_and_the_tier_below_break(
    wish: IntervalRequest, inputs: Inputs, present: int | None
) -> None:
    level = chosen(wish, replace(inputs, drain_seconds=None), present).level
    if wish.seconds is not None and level > wish.least_level:
        assert length(wish, inputs, level) <= wish.seconds * (1 + 1e-9)


@given(wishes, measured, st.floats(-0.95 * HYSTERESIS, 0.95 * HYSTERESIS))
def test_a_choice_stays_while_what_is_measured_wavers(wish: IntervalRequest, inputs: Inputs, wavering: float) -> None:
    first = chosen(wish, inputs).level
    again = replace(inputs, step_seconds=(inputs.step_seconds or 0.0) * 2**wavering)
    assert chosen(wish, again, first).level == first


@given(wishes, measured, levels)
def test_a_choice_is_made_once(wish: IntervalRequest, inputs: Inputs, present: int | None) -> None:
    level = chosen(wish, inputs, present).level
    assert chosen(wish, inputs, level).level == level


@given(wishes, measured, levels)
def test_a_tier_is_saved_to_at_steps_that_the_one_below_has(
    wish: IntervalRequest, inputs: Inputs, present: int | None
) -> None:
    level = chosen(wish, inputs, present).level
    below = Schedule(wish.base_steps)
    assert level >= wish.least_level
    for step in range(1, 4):
        assert below.due(step * (wish.base_steps << level), wish.least_level)


def test_trainers_know_every_level_that_may_be_chosen() -> None:
    assert TRAINERS_HIGHEST == HIGHEST_LEVEL
    assert Schedule(1).due(1 << HIGHEST_LEVEL, HIGHEST_LEVEL)
    assert not Schedule(1).due(1 << (HIGHEST_LEVEL - 1), HIGHEST_LEVEL)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0123, "0.012 s"), (6.4, "6.4 s"), (119.0, "120 s"), (186.0, "3.1 min"), (7300.0, "2 h"), (8.64e6, "100 days")],
)
def test_times_are_said_as_people_say_them(seconds: float, words: str) -> None:
    assert readable_seconds(seconds) == words
