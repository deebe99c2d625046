"""When to save: the sets of due steps nest, and ranks that back off meet again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.save_schedule import LOWER_AFTER, MAX_BACKOFF, MAX_EXPONENT, RankBackoff, SaveSchedule

schedules = st.builds(SaveSchedule, st.integers(1, 50), st.none() | st.integers(1, 500))


@given(schedules, st.integers(0, 100_000), st.integers(0, MAX_EXPONENT - 1))
def test_what_a_higher_level_saves_a_lower_one_saves_too(schedule: SaveSchedule, step: int, level: int) -> None:
    if schedule.is_due(step, level + 1):
        assert schedule.is_due(step, level)


@given(st.integers(1, 50), st.integers(1, 10_000), st.integers(0, MAX_EXPONENT))
def test_a_step_is_due_iff_it_is_a_multiple_of_the_interval_doubled_level_times(k: int, step: int, level: int) -> None:
    assert SaveSchedule(k).is_due(step, level) == (step % (k * 2**level) == 0)


@given(st.integers(1, 50), st.integers(1, 500), st.integers(1, 10_000), st.integers(0, MAX_EXPONENT))
def test_steps_for_the_persistent_tier_depend_on_the_step_alone(k: int, wanted: int, step: int, level: int) -> None:
    schedule = SaveSchedule(k, wanted)
    if schedule.is_upload_due(step):
        assert schedule.is_due(step, level)
        assert step % k == 0
    else:
        assert schedule.is_due(step, level) == SaveSchedule(k).is_due(step, level)


def test_the_persistent_interval_is_rounded_up_to_whole_memory_intervals() -> None:
    schedule = SaveSchedule(10, 25)
    assert [step for step in range(100) if schedule.is_upload_due(step)] == [30, 60, 90]


def test_step_nought_is_never_due() -> None:
    assert not SaveSchedule(1, 1).is_due(0, 0)


def test_a_skip_raises_the_level_and_a_streak_lowers_it_by_one() -> None:
    backoff = RankBackoff().back_off(0).back_off(1)
    assert backoff == RankBackoff(2, 0)
    for _ in range(LOWER_AFTER - 1):
        backoff = backoff.count_staged()
    assert backoff.exponent == 2
    assert backoff.count_staged() == RankBackoff(1, 0)


def test_a_skip_ends_the_streak() -> None:
    backoff = RankBackoff(1, LOWER_AFTER - 1).back_off(1)
    assert backoff == RankBackoff(2, 0)


def test_a_skip_counts_from_the_level_that_the_coordinator_asked_for() -> None:
    assert RankBackoff().back_off(6) == RankBackoff(7, 0)
    assert RankBackoff().back_off(MAX_BACKOFF + 3).exponent == MAX_BACKOFF + 3


def test_the_level_stays_between_nought_and_the_highest() -> None:
    backoff = RankBackoff()
    for _ in range(MAX_BACKOFF + 5):
        backoff = backoff.back_off(backoff.exponent)
    assert backoff.exponent == MAX_BACKOFF
    assert RankBackoff().count_staged() == RankBackoff()


@pytest.mark.parametrize("none", [None, 0])
def test_without_persistent_steps_the_level_alone_decides(none: int | None) -> None:
    schedule = SaveSchedule(1, none)
    assert [step for step in range(33) if schedule.is_due(step, 3)] == [8, 16, 24, 32]
    assert not any(schedule.is_upload_due(step) for step in range(33))


@pytest.mark.parametrize(("interval", "persistent"), [(0, None), (-1, None), (1, -5)])
def test_an_interval_below_one_step_is_refused(interval: int, persistent: int | None) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SaveSchedule(interval, persistent)
