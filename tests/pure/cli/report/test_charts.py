"""Tests of `cli.report.charts`."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from surefoot_operator.cli.report.charts import (
    BarPart,
    Chart,
    ChartMark,
    Curve,
    Drawing,
    XBand,
    draw_bar,
    draw_chart,
    logarithmic_ticks,
    needs_logarithm,
    select_finite,
    thin_curve,
    ticks,
)

# ---- charts ----------------------------------------------------------------------------------------------------------
# What a chart draws lies within its frame, and its marks can be told apart.

FINITE = st.floats(-1e12, 1e12)
FALLING = [(float(step), 1.0 / (step + 1)) for step in range(1000)]


def drawings(
    points: list[tuple[float, float]], marks: tuple[ChartMark, ...] = (), bands: tuple[XBand, ...] = ()
) -> list[Drawing]:
    return draw_chart(Chart("loss", "t", "d", "step", "loss", (Curve("kept", tuple(points)),), bands, marks))


@given(st.lists(st.tuples(st.integers(0, 10**6), FINITE), min_size=1, max_size=60))
def test_every_point_lies_in_the_frame(points: list[tuple[int, float]]) -> None:
    given_points = [(float(x), y) for x, y in sorted(points)]
    for drawing in drawings(given_points):
        for x, y in drawing.points(drawing.chart.curves[0]):
            assert -0.01 <= x <= drawing.width + 0.01
            assert -0.01 <= y <= drawing.height + 0.01


def test_marks_on_each_other_are_one_and_those_apart_are_two() -> None:
    wide, _ = drawings(
        FALLING, (ChartMark(500, "1", "a"), ChartMark(500, "2", "b"), ChartMark(900, "3", "c", planned=True))
    )
    assert [mark[3:] for mark in wide.marks()] == [("1–2", "a; b", False), ("3", "c", True)]


def test_a_mark_beyond_the_last_step_is_drawn_at_the_edge() -> None:
    for drawing in drawings(FALLING, (ChartMark(1e9, "1", "a"),)):
        [(_, left, width, *_)] = drawing.marks()
        assert 0 <= left <= left + width <= drawing.width


@given(st.lists(st.integers(0, 999), max_size=150))
def test_marks_never_lie_on_each_other_and_none_is_lost(steps: list[int]) -> None:
    marks = tuple(ChartMark(step, str(number), "x") for number, step in enumerate(sorted(steps), 1))
    for drawing in drawings(FALLING, marks):
        boxes = [(left, width) for _, left, width, *_ in drawing.marks()]
        assert all(left >= 0 and left + width <= drawing.width + 0.02 for left, width in boxes)
        assert all(left + width <= following for (left, width), (following, _) in pairwise(boxes))
        labels = [label.split("–") for _, _, _, label, *_ in drawing.marks()]
        numbers = [number for label in labels for number in range(int(label[0]), int(label[-1]) + 1)]
        assert numbers == list(range(1, len(steps) + 1))


def test_bands_beyond_the_curve_are_left_out() -> None:
    for drawing in drawings(FALLING, bands=(XBand(0, 999, "epoch 1, 2 ranks"), XBand(2000, 3000, "epoch 2, 2 ranks"))):
        assert [label for _, _, label, _ in drawing.bands()] == ["epoch 1, 2 ranks"]


def test_a_bar_has_the_whole_width_for_the_longest_and_a_number_where_there_is_room() -> None:
    parts = [BarPart(1, 1.0, "a"), BarPart(2, 0.0, "b"), BarPart(3, 0.1, "c"), BarPart(4, 2.9, "d")]
    boxes = [(part.number, round(x, 2), round(width, 2), numbered) for part, x, width, numbered in draw_bar(parts, 4.0)]
    assert boxes == [(1, 0.0, 25.0, True), (3, 25.0, 2.5, False), (4, 27.5, 72.5, True)]
    assert list(draw_bar(parts, 0.0)) == []


# ---- curves ----------------------------------------------------------------------------------------------------------
# Curves are thinned without losing a spike, and axes have round ticks in their range.

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
