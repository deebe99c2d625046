"""`python -m bench observability`: what it says of each expression, and how it draws the dashboards without Grafana."""

from __future__ import annotations

import re
from typing import Any

import pytest

from observability import readings
from observability.dashboards_page import NOT_GRAFANA, Board, Boards, boards_page, legend
from observability.panel_drawing import Line, Panel, Span, buckets, color_of, shown
from support.expressions import Expression, of_choices, wrong


def series(*numbers: str, **labels: str) -> dict[str, Any]:
    return {"metric": labels, "values": [[100.0 + place, number] for place, number in enumerate(numbers)]}


STEPS = Expression("Step: {{job}}", "max(surefoot_job_step)", written="max(surefoot_job_step{$job})", legend="{{job}}")


def test_an_expression_is_told_with_its_samples_and_the_number_that_says_most() -> None:
    said = readings.of(STEPS, [series("1", "NaN", job="a"), series("7", "9", "+Inf", job="b")])
    assert (said["series"], said["samples"]) == (2, 3)
    assert said["example"] == {"labels": {"job": "b"}, "value": 9.0, "at": 101.0}
    assert (said["expression"], said["asked"]) == (STEPS.written, STEPS.promql)
    assert "lacks" not in said
    assert "why_zero" not in said


@pytest.mark.parametrize(
    ("found", "lacks"),
    [
        ([], "no numbers"),
        ([series("NaN", job="a")], "no numbers"),
        ([series("0", job="a")], "nothing but zeros"),
        ([series("1")], "its legend names labels that it has not: job"),
    ],
)
def test_what_an_expression_lacks_is_a_defect(found: list[dict[str, Any]], lacks: str) -> None:
    assert wrong(STEPS, found) == lacks
    said = readings.of(STEPS, found)
    assert readings.defects([said], []) == [f"{STEPS.where}: {STEPS.promql}: {lacks}"]
    assert readings.counted([said])["lacking"] == 1


def test_what_may_be_zero_says_why() -> None:
    resting = Expression("What failed: watches", "sum(x)", may_rest=True)
    assert readings.of(resting, [series("0")])["why_zero"] == "nothing of it did"


def test_an_alert_is_told_with_what_it_compares_and_why_it_is_silent() -> None:
    rule = {"name": "Old", "query": "age > 5", "duration": 60, "state": "inactive", "health": "ok"}
    compared = readings.of(Expression("Old", "age", may_rest=True), [series("3")])
    said = readings.of_alert(rule, [compared, readings.of(STEPS, [])])
    assert [one["samples"] for one in said["compares"]] == [1]
    assert "never true" in said["why_empty"]
    broken = readings.of_alert({**rule, "state": "firing", "health": "err"}, [])
    assert readings.defects([], [said, broken]) == ["alert Old is judged err", "alert Old is firing"]


def test_metrics_that_nobody_is_shown_are_named_once_each() -> None:
    exported = {"surefoot_a_bucket", "surefoot_a_sum", "surefoot_a_created", "surefoot_job_step", "surefoot_b"}
    assert readings.unused(exported, [readings.of(STEPS, [])]) == ["surefoot_a", "surefoot_b"]


def test_names_above_the_panels_are_asked_as_grafana_asks() -> None:
    assert {one.promql for one in of_choices()} == {
        "group by (namespace) (surefoot_job_phase)",
        'group by (job) (surefoot_job_phase{namespace=~".*"})',
    }
    assert len({one.board for one in of_choices()}) == len(of_choices()) / 2


def test_a_histograms_own_counts_are_what_a_bucket_has_more_than_the_one_below() -> None:
    lines = [Line("", ((1.0, 5.0), (2.0, 9.0)), "+Inf"), Line("", ((1.0, 2.0), (2.0, 9.0)), "0.5")]
    assert buckets(lines) == [("0.5", ((1.0, 2.0), (2.0, 9.0))), ("+Inf", ((1.0, 3.0), (2.0, 0.0)))]


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (0.0123, "s", "12.3 ms"),
        (0.0, "s", "0 s"),
        (300.0, "s", "5 min"),
        (2048.0, "bytes", "2 KiB"),
        (2500.0, "Bps", "2.5 kB/s"),
        (0.5, "percentunit", "50 %"),
        (3.0, "none", "3"),
    ],
)
def test_a_value_is_shown_in_its_panels_unit(value: float, unit: str, words: str) -> None:
    assert shown(value, unit) == words


def test_a_colour_is_that_of_the_highest_bound_that_is_reached() -> None:
    bounds = ((None, "green"), (1.0, "orange"), (5.0, "red"))
    assert [color_of(value, bounds) for value in (0.0, 1.0, 9.0)] == ["green", "orange", "red"]


def test_a_legend_is_filled_with_labels() -> None:
    assert legend("{{job}} {{tier}}", {"job": "a", "tier": "memory"}) == "a memory"


def test_a_series_that_has_ended_shows_no_value_of_now() -> None:
    on, over = Line("Running", ((10.0, 0.0), (11.0, 1.0), (12.0, 1.0))), Line("Pending", ((10.0, 1.0), (10.5, 1.0)))
    panel = Panel("timeseries", "Jobs by phase", "about", "none", 8, (on, over))
    page = boards_page(Boards(9.0, 12.0, (Board("Title", "about", (panel,), ()),)))
    assert re.findall(r"</i>(\w+) <b>(.*?)</b>", page) == [("Running", "1"), ("Pending", "ended")]


def test_the_page_says_that_it_is_not_grafana_and_breaks_lines_where_samples_are_missing() -> None:
    gap = Line("<b>", ((10.0, 1.0), (11.0, 2.0), (15.0, 3.0)))
    lines = Panel("timeseries", "Lines", "about", "none", 8, (gap,))
    empty = Panel("heatmap", "Empty", "about", "s", 8, ())
    phase = Panel("stat", "Phase", "about", "none", 4, (Line("a Running", ((15.0, 1.0),)),), ((None, "blue"),), True)
    board = Board("Title", "About.", ("Row", lines, empty, phase), (Span(12.0, 12.0, "node-lost", "Incidents"),))
    page = boards_page(Boards(10.0, 15.0, (board,)))
    assert NOT_GRAFANA.partition(".")[0] in page
    assert "node-lost (Incidents)" in page
    assert "&lt;b&gt;" in page
    assert "<script" not in page
    [path, *_] = re.findall(r'<path d="([^"]+)"', page)
    assert path.count("M") == 2
    assert page.count("No data") == 2, "for wide and for narrow screens"
    assert "a Running</div>" in page


def test_a_panel_is_drawn_as_its_json_wants_it() -> None:
    """A logarithmic axis, words for values, a sorted table, shares that reach 100 %, and no legend of a line of zeros."""
    times = (10.0, 11.0)

    def line(name: str, value: float) -> Line:
        return Line(name, tuple((at, value) for at in times))

    latencies = Panel("timeseries", "L", "a", "s", 8, (line("stall", 0.001), line("upload", 100.0)), logarithmic=True)
    shares = Panel("timeseries", "S", "a", "s", 8, (line("a", 3.0), line("b", 1.0), line("c", 0.0)), stacking="percent")
    yes = Panel("stat", "P", "a", "none", 4, (line("gpt", 1.0),), words={1.0: ("Yes", "green")})
    worst = Panel("table", "T", "a", "none", 8, (line("n/fine", 1.0), line("n/bad", 5.0)))
    page = boards_page(Boards(10.0, 11.0, (Board("B", "a", (latencies, yes, worst), (), (("Closed", (shares,)),)),)))
    assert {"10 ms", "1 s", "100 s"} <= set(re.findall(r'class="end">(.*?)</text>', page))
    assert "color:var(--green)" in page
    assert page.index("n/bad") < page.index("n/fine")
    assert "<summary>Closed (1 panels)</summary>" in page
    assert "100 %</text>" in page
    assert re.findall(r"</i>([abc]) <b>(.*?)</b>", page) == [("a", "3 s"), ("b", "1 s")]
