"""Waits between calls that are made again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.protocol.timeouts import Backoff

BACKOFF = Backoff(0.5, 8.0)


def test_waits_double_from_the_first_to_the_longest() -> None:
    assert [BACKOFF.wait_seconds(failures) for failures in range(1, 8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert BACKOFF.wait_seconds(0) == 0.5, "nothing failed yet"


@given(st.integers(0, 10**6), st.floats(0.0, 1.0))
def test_jitter_takes_at_most_half_and_nothing_ever_exceeds_the_limit(failures: int, drawn: float) -> None:
    whole = BACKOFF.wait_seconds(failures)
    assert whole / 2 <= BACKOFF.wait_seconds(failures, drawn) <= whole <= BACKOFF.max_seconds


def test_a_count_that_grows_for_ever_overflows_nothing_even_without_a_limit() -> None:
    assert Backoff(0.1).wait_seconds(10**9) == pytest.approx(0.1 * 2**30)
