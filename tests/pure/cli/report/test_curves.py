"""Curves are thinned without losing a spike, and axes have round ticks in their range."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from surefoot_operator.cli.report.charts import logarithmic_ticks, needs_logarithm, select_finite, thin_curve, ticks

VALUES = st.floats(-1e6, 1e6)


@given(st.lists(VALUES, min_size=1, max_size=2000), st.integers(2, 50))
def test_a_thinned_curve_keeps_its_ends_and_its_extremes(values: list[float], columns: int) -> None:
    points = [(float(step), value) for step, value in enumerate(values, 1)]
    found = thin_curve(points, columns)
    assert len(found) <= 2 * columns + 2
    assert (found[0], found[-1]) == (points[0], points[-1])
    assert {min(v for _, v in found), max(v for _, v in found)} == {min(values), max(values)}
    assert found == sorted(set(found) & set(points))


def test_one_spike_among_a_hundred_thousand_steps_is_still_there() -> None:
    points = [(float(step), 9.0 if step == 54_321 else 1.0) for step in range(100_000)]
    assert (54_321.0, 9.0) in thin_curve(points, 900)


@given(VALUES, st.floats(1e-3, 1e6), st.integers(2, 12))
def test_ticks_lie_in_the_range_and_are_few(low: float, spread: float, most: int) -> None:
    found = ticks(low, low + spread, most)
    assert len(found) <= most + 1
    assert all(low - spread * 1e-6 <= one <= low + spread * 1.000001 for one in found)


def test_ticks_are_round() -> None:
    assert ticks(0, 97, 10) == [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert ticks(2.6, 5.6, 6) == [3.0, 3.5, 4.0, 4.5, 5.0, 5.5]
    assert ticks(3, 3, 5) == [3]
    assert logarithmic_ticks(0.002, 30, 6) == [0.01, 0.1, 1.0, 10.0]
    assert len(logarithmic_ticks(1e-300, 1e300, 6)) <= 7


def test_a_loss_that_falls_by_much_wants_a_logarithm() -> None:
    assert needs_logarithm([100.0, 1.0])
    assert not needs_logarithm([100.0, 0.0])
    assert not needs_logarithm([5.0, 2.0])
    assert not needs_logarithm([])


def test_what_is_no_number_is_on_no_axis() -> None:
    assert select_finite([(1, 2.0), (2, math.nan), (3, math.inf), (5, -1e308), (4, 1.0)]) == [(1.0, 2.0), (4.0, 1.0)]
