"""What a chart draws lies within its frame, and its marks can be told apart."""

from __future__ import annotations

import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from surefoot_operator.cli.report.charts import FRAMES, Chart, ChartMark, Curve, XBand, axes_of, drawn_chart

FINITE = st.floats(-1e12, 1e12)


def chart(points: list[tuple[float, float]], marks: tuple[ChartMark, ...] = (), bands: tuple[XBand, ...] = ()) -> Chart:
    return Chart("loss", "t", "d", "step", "loss", (Curve("kept", tuple(points)),), bands, marks)


@given(st.lists(st.tuples(st.integers(0, 10**6), FINITE), min_size=1, max_size=60))
def test_every_point_lies_in_the_frame(points: list[tuple[int, float]]) -> None:
    given_points = [(float(x), y) for x, y in sorted(points)]
    for frame in FRAMES:
        axes = axes_of(chart(given_points), frame)
        for x, y in given_points:
            assert -0.01 <= axes.x(x) <= frame.width + 0.01
            assert -0.01 <= axes.y(y) <= frame.height + 0.01


def test_marks_on_each_other_are_one_and_those_apart_are_two() -> None:
    points = [(float(step), 1.0 / (step + 1)) for step in range(100)]
    near = drawn_chart(
        chart(points, (ChartMark(50, "1", "a"), ChartMark(50, "2", "b"), ChartMark(90, "3", "c", planned=True)))
    ).text
    wide = near.split("</svg>")[0]
    assert re.findall(r'<text x="[\d.]+" y="33">([^<]+)<', wide) == ["1–2", "3"]
    assert "<title>a; b</title>" in wide
    assert re.findall(r' rx="([\d.]+)"', wide) == ["9.5", "2"]  # round a failure, square a plan
    assert '<g class="mark planned">' in wide


def test_a_mark_beyond_the_last_step_is_drawn_at_the_edge() -> None:
    points = [(float(step), 1.0) for step in range(10)]
    wide = drawn_chart(chart(points, (ChartMark(1e9, "1", "a"),))).text.split("</svg>")[0]
    left, width = (float(one) for one in re.findall(r'<rect x="([\d.]+)" y="19" width="([\d.]+)"', wide)[0])
    assert 0 <= left <= left + width <= FRAMES[0].width


@given(st.lists(st.integers(0, 999), max_size=150))
def test_marks_never_lie_on_each_other_and_none_is_lost(steps: list[int]) -> None:
    points = [(float(step), 1.0) for step in range(1000)]
    marks = tuple(ChartMark(step, str(number), "x") for number, step in enumerate(sorted(steps), 1))
    for drawing, frame in zip(drawn_chart(chart(points, marks)).text.split("</svg>"), FRAMES, strict=False):
        boxes = [(float(x), float(w)) for x, w in re.findall(r'<rect x="([\d.]+)" y="19" width="([\d.]+)"', drawing)]
        assert all(x >= 0 and x + w <= frame.width + 0.02 for x, w in boxes)
        assert all(x + w <= further for (x, w), (further, _) in pairwise(boxes))
        labels = [text.split("–") for text in re.findall(r'y="33">([^<]+)<', drawing)]
        told = [number for label in labels for number in range(int(label[0]), int(label[-1]) + 1)]
        assert told == list(range(1, len(steps) + 1))


def test_bands_beyond_the_curve_are_left_out() -> None:
    points = [(float(step), 1.0) for step in range(10)]
    found = drawn_chart(chart(points, bands=(XBand(0, 9, "epoch 1, 2 ranks"), XBand(20, 30, "epoch 2, 2 ranks")))).text
    assert "epoch 1" in found
    assert "epoch 2" not in found
