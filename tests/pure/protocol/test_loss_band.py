"""Which losses are out of band: one that is far above the last ones, and none that a sound training has."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.protocol.progress import MIN_STEPS, WINDOW_STEPS, AnomalyRun, RecentValues, describe_spike


def after(values: list[float]) -> RecentValues:
    recent = RecentValues()
    for value in values:
        recent = recent.with_value(value)
    return recent


def spikes(values: list[float]) -> list[int]:
    """Steps of a run, from 1 on, that are out of band."""
    recent, found = RecentValues(), []
    for step, value in enumerate(values, 1):
        if describe_spike("loss", value, recent):
            found.append(step)
        recent = recent.with_value(value)
    return found


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("falls steeply, then slowly", [11 * math.exp(-step / 20) + 2 for step in range(400)]),
        ("a learning rate that warms up", [8 - step / 100 + (0.3 if step % 7 == 0 else 0) for step in range(300)]),
        ("the same to the last digit", [0.5] * 200),
        ("nothing but zeros", [0.0] * 200),
        ("below zero", [-3 - step / 100 for step in range(200)]),
        ("rises slowly", [2 + step / 1000 for step in range(500)]),
    ],
)
def test_a_sound_training_has_no_spike(name: str, values: list[float]) -> None:
    assert spikes(values) == [], name


def test_noise_of_a_batch_is_none() -> None:
    rng = random.Random(7)
    assert spikes([2.5 + rng.gauss(0, 0.2) for _ in range(20_000)]) == []


def test_a_loss_that_leaps_is_one_for_as_long_as_it_is_unusual() -> None:
    rng = random.Random(1)
    run = [2.5 + rng.gauss(0, 0.05) for _ in range(100)] + [9.0] * 100 + [2.5] * 10
    found = spikes(run)
    assert found[:3] == [101, 102, 103]
    assert 20 <= len(found) <= WINDOW_STEPS, "what has lasted for half of the window is the new normal"
    assert 201 not in found, "a loss that falls back is no spike"


def test_the_sentence_has_the_numbers() -> None:
    text = describe_spike("gradient norm", 40.0, after([1.0] * MIN_STEPS))
    assert text == "gradient norm is 40: the median of the last 16 steps is 1, and more than 1.1 is a spike"
    assert describe_spike("loss", 40.0, after([1.0] * (MIN_STEPS - 1))) == ""


@given(st.lists(st.floats(allow_nan=True), max_size=200))
def test_whatever_is_told_the_window_is_bounded_and_finite(values: list[float]) -> None:
    recent = after(values)
    assert len(recent.values) <= WINDOW_STEPS
    assert all(map(math.isfinite, recent.values))
    limit = recent.spike_limit()
    assert limit is None or not math.isnan(limit)


def test_what_a_checkpoint_says_of_odd_steps_is_taken_up_again() -> None:
    odd = AnomalyRun().with_step(8, "spike", "far").with_step(9, "not-finite", "nan").with_step(10, "", "")
    assert AnomalyRun.from_stored_values(odd.stored_values) == odd
    assert (odd.last_step, odd.first_step, odd.kind) == (9, 8, "not-finite")
    assert AnomalyRun().stored_values == {}
    assert AnomalyRun.from_stored_values({}) == AnomalyRun()
