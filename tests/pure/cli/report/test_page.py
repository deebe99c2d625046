"""The page is whole, asks nobody for anything, runs nothing, and stays small, whatever the job was."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.builders import running
from support.ledgers import BEGAN, FAILED, broken_run, lines
from support.stored import view_of_snapshot
from surefoot.protocol.checkpoints.completeness import LineageEntry
from surefoot.protocol.text import escape_control_characters
from surefoot_operator.api.status import CheckpointLatency, DataProgress, Incident, LatencyQuantiles
from surefoot_operator.api.time_spent import CATEGORIES
from surefoot_operator.cli.jobs.read_jobs import JobView, stored_job
from surefoot_operator.cli.local.run_event import RunEvent
from surefoot_operator.cli.local.run_report import Checkpoints, Comparison, RunRecords
from surefoot_operator.cli.report.page import MAX_TEXT_CHARACTERS, duration, render_page, write_value
from surefoot_operator.cli.report.report_data import ReportFacts, gather_facts

ONE_EPOCH = (LineageEntry(1, None, 1),)
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>]]>&lt;"


class Page(HTMLParser):
    """A page as a browser reads it: its elements, their nesting and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in ("meta", "br", "path"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag != "path":
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(facts: ReportFacts) -> Page:
    found = Page(render_page(facts, "1.2.3"))
    assert found.tags["script"] == found.tags["img"] == found.tags["link"] == found.tags["iframe"] == 0
    assert not [name for name, _ in found.attributes if name in ("src", "href", "srcset") or name.startswith("on")]
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in found.attributes
    assert len(found.ids) == len(set(found.ids))
    for _, named in [one for one in found.attributes if one[0] == "aria-labelledby"]:
        assert set(named.split()) <= set(found.ids)
    return found


def view() -> JobView:
    seen = running()
    status = replace(seen.status, incidents=(FAILED,), start_seconds=BEGAN, completion_seconds=BEGAN + 26, step=20)
    return view_of_snapshot(replace(seen, status=status), RunEvent(BEGAN, "Restored", "goes on", False))


def of_run(run: RunRecords) -> ReportFacts:
    return gather_facts(view(), "here", run)


def test_a_run_with_a_failure_is_told_whole() -> None:
    compared = Comparison(8.9e-16, 2e-13, False, 20)
    run = replace(broken_run(), comparison=compared, checkpoints=Checkpoints(4, 24_800_000, 0.01))
    found = read(of_run(run))
    for said in (
        "team/gpt", "node-lost: node node-1 is gone", "first new step, restored from memory, 2 steps lost", "0.300 s",
        "steps that a failure undid", "The same job without faults has the same curve, to 9e-16", "2e-13 (checkpoint of step 20)", "24.8 MB each",
        "generation 2, 1 rank", "median 10 ms", "2 → 1 ranks", "surefoot 1.2.3",
    ):  # fmt: skip
        assert said in found.text, said
    assert found.tags["svg"] >= 6  # two charts for two widths, a recovery, the job's time, keys


@pytest.mark.parametrize(
    ("comparison", "incidents", "sentence"),
    [
        (Comparison(8.9e-16, 2e-17, False, 20), (FAILED,), "1 node lost, training continued after 3 s, 0 samples lost, result identical to 9e-16."),
        (Comparison(0.0, 0.0, True, 20), (), "No failure, 0 samples lost, result identical bit for bit."),
        (Comparison(0.05), (FAILED, replace(FAILED, first_step_seconds=BEGAN + 17)), "2 nodes lost, training continued after at most 4 s, 0 samples lost, result differs from the undisturbed run by up to 0.05."),
        (None, (replace(FAILED, kind="trainer-failed", first_step_seconds=None),), "1 trainer failed, training has not continued yet, 0 samples lost."),
        (None, (replace(FAILED, kind="numerics"), replace(FAILED, kind="planned")), "1 loss anomaly, 1 planned change, training continued after at most 3 s, 0 samples lost."),
    ],
    ids=["equal", "nothing happened", "differs", "recovering", "kinds"],
)  # fmt: skip
def test_a_page_begins_with_its_verdict(
    comparison: Comparison | None, incidents: tuple[Incident, ...], sentence: str
) -> None:
    text = read(of_run(replace(broken_run(), comparison=comparison, incidents=incidents))).text
    assert sentence in text
    assert text.index(sentence) < text.index("Steps")


def test_a_page_shows_checkpoint_latency_first_and_calls_no_generation_an_epoch() -> None:
    facts = of_run(broken_run())
    latency = CheckpointLatency(LatencyQuantiles(0.01, 0.02), LatencyQuantiles(0.03, 0.09), LatencyQuantiles(2, 3))
    text = read(replace(facts, latency=latency)).text
    cards = (
        "Checkpoint latency: stall",
        "Checkpoint latency: replicated",
        "Checkpoint latency: persistent",
        "Recovery",
    )
    places = [text.index(card) for card in (*cards, "Steps")]
    assert places == sorted(places)
    assert "p99 90 ms" in text
    assert not re.search("epoch|holder", text, re.IGNORECASE)


def test_two_curves_are_drawn_only_where_they_differ() -> None:
    drawn = {
        difference: render_page(of_run(replace(broken_run(), comparison=Comparison(difference))), "1").count(
            'class="curve undisturbed" d="M5'
        )
        for difference in (0.0, 1e-9, 0.01, None)
    }
    assert drawn == {0.0: 0, 1e-9: 0, 0.01: 3, None: 3}  # two widths, and the key


def test_of_a_cluster_the_page_has_what_the_loader_told_and_no_more() -> None:
    seen = running()
    told = replace(seen, status=replace(seen.status, data=DataProgress(1.25, 48.0)))
    text = read(gather_facts(view_of_snapshot(told), "a cluster")).text
    assert "A cluster keeps no samples of each step" in text
    assert "passes over the data1.25" in text
    assert "48, at the pace of the last steps" in text
    assert "No loader has told" not in text


def test_each_category_of_seconds_has_its_words_and_a_swatch() -> None:
    seconds = {name: float(place) for place, name in enumerate(CATEGORIES, 1)}
    found = read(replace(of_run(broken_run()), seconds=seconds, goodput=0.25))
    assert "Goodput25.0%" in found.text
    for place, name in enumerate(CATEGORIES, 1):
        assert f"{name}: " in found.text
        assert ("class", f"swatch c{place}") in found.attributes
    assert (
        "a-category-of-a-newer-operator"
        in read(replace(of_run(broken_run()), seconds={"a-category-of-a-newer-operator": 3.0})).text
    )


def test_what_strangers_wrote_is_text() -> None:
    bad = replace(FAILED, kind=HOSTILE, reason=HOSTILE, node=HOSTILE, restored_from=HOSTILE, detail=HOSTILE)
    found = view()
    stored = replace(found.stored, name=HOSTILE, namespace=HOSTILE, uid=HOSTILE, phase=HOSTILE, problems=(HOSTILE,))
    assert stored.status is not None
    stored = replace(stored, status=replace(stored.status, message=HOSTILE))
    events = (RunEvent(1.0, HOSTILE, HOSTILE, True),)
    looked = replace(found, stored=stored, events=events, unread=(HOSTILE,))
    run = replace(broken_run(), incidents=(bad,), comparison=Comparison(None, None, None, None, HOSTILE))
    seen = read(gather_facts(looked, HOSTILE, run))
    assert seen.text.count(HOSTILE) >= 10


@given(st.text(max_size=300))
def test_any_text_stays_text(text: str) -> None:
    """Whatever an event says, as a line of a log that it quotes: no string becomes an element or breaks out of one."""
    stored = replace(view().stored, name="gpt", namespace=text)
    looked = replace(view(), stored=stored, events=(RunEvent(1.0, "Failed", f"{text}", True),))
    found = read(gather_facts(looked, "here"))
    assert escape_control_characters(text).replace("\r", "\n") in found.text
    assert found.tags == read(gather_facts(replace(looked, events=(RunEvent(1.0, "Failed", "x", True),)), "here")).tags


def test_long_text_is_cut_and_numbers_have_no_idle_digits() -> None:
    assert len(write_value("x" * 10_000)) <= MAX_TEXT_CHARACTERS
    numbers = [write_value(value) for value in (1.0, 1.25, 1.239, -0.001, 0.0, 1e6)]
    assert numbers == ["1", "1.25", "1.24", "0", "0", "1000000"]
    assert [duration(seconds) for seconds in (0, 0.012, 1.62, 276, 7800)] == [
        "0 s", "12 ms", "1.62 s", "4 min 36 s", "2 h 10 min",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "body", [{}, {"metadata": None, "spec": 3}, {"metadata": {"name": "x"}, "status": {"phase": "Odd"}}]
)
def test_a_job_of_which_nothing_is_known_is_a_page(body: dict[str, object]) -> None:
    found = read(gather_facts(JobView(now=BEGAN, stored=stored_job(body)), "here"))
    for said in ("Nothing happened", "No worker is known", "has not started"):
        assert said in found.text


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (RunRecords((), (), ()), "No step has a loss to be drawn"),
        (RunRecords(tuple(lines("0-1", 0, 1, range(1, 9), BEGAN, lambda _: None)), ONE_EPOCH, ()), "No step has a loss"),
        (RunRecords(tuple(lines("0-1", 0, 1, range(1, 9), BEGAN, lambda _: math.nan)), ONE_EPOCH, ()), "8 steps had a loss"),
        (RunRecords(tuple(lines("0-1", 0, 1, range(1, 2), BEGAN)), ONE_EPOCH, ()), "from 1 at step 1 to 1 at step 1"),
        (RunRecords(tuple(lines("0-1", 0, 1, range(1, 9), BEGAN, lambda _: 0.0)), ONE_EPOCH, ()), "no incident"),
        (RunRecords(tuple(lines("0-1", 0, 1, range(1, 9), BEGAN, lambda s: 10.0 ** -s)), ONE_EPOCH, ()), "logarithmic"),
        (RunRecords(tuple(lines("0-1", 0, 1, range(1, 9), BEGAN, lambda s: (-1) ** s * 1e299)), ONE_EPOCH, ()), "1e+299 at step 8"),
    ],
    ids=["no steps", "no loss", "nan", "one step", "flat", "falls by decades", "huge"],
)  # fmt: skip
def test_odd_runs_are_a_page(run: RunRecords, said: str) -> None:
    assert said in read(of_run(run)).text


def test_a_recovery_that_goes_on_says_so() -> None:
    halfway = replace(FAILED, first_step_seconds=None, committed_seconds=None, world_size_after=None, steps_lost=None)
    assert "still recovering" in read(of_run(replace(broken_run(), incidents=(halfway,)))).text


def test_an_incident_with_stamps_out_of_order_draws_no_negative_bar() -> None:
    odd = replace(FAILED, stopped_seconds=BEGAN + 12, committed_seconds=BEGAN + 20)
    found = read(of_run(replace(broken_run(), incidents=(odd,))))
    assert not [value for name, value in found.attributes if name in ("width", "x") and value.startswith("-")]


@pytest.mark.gate_only
def test_a_hundred_thousand_steps_and_a_thousand_incidents_stay_small() -> None:
    steps = 100_000
    told = tuple(
        lines("0-1", 0, 1, range(1, steps + 1), BEGAN, lambda step: 5 / math.sqrt(step) + (step * 7919 % 97) / 500)
    )
    many = tuple(
        replace(
            FAILED,
            detected_seconds=BEGAN + 90 * i,
            last_step=90 * i,
            generation=i,
            reason="x" * 5000,
            detail="y" * 50_000,
        )
        for i in range(1, 1000)
    )
    events = tuple(RunEvent(BEGAN + i, "Restored", "z" * 5000, False) for i in range(5000))
    text = render_page(gather_facts(replace(view(), events=events), "here", RunRecords(told, ONE_EPOCH, many)), "1")
    assert len(text.encode()) < 2_000_000
    assert "949 oldest incidents are left out" in text
