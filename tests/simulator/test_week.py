"""The week of a large job adds up, and its parts follow from what they are said to follow from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from simulator.large_job import node_is_lost, trainer_fails, work_of
from simulator.week import LLAMA_3, WEEK, Costs, Fleet, Way, faults_of, spent
from simulator.week_report import rows_of, ways
from support.fakes.fake_world import FakeWorld

SMALL = Fleet(nodes=64)
EFFECTS = ("trainer fails", "ranks hang", "node is lost", "node is left")
FREE = Costs(0.0, 0.0, dict.fromkeys(EFFECTS, 0.0), dict.fromkeys(EFFECTS, 0.0), dict.fromkeys(EFFECTS, 0.0), 0.0)  # type: ignore[arg-type]  # keys are effects


def test_the_table_is_that_of_the_report() -> None:
    assert sum(count for cause, (count, _) in LLAMA_3.items() if cause != "planned") == 419


def test_as_many_faults_come_as_the_fleet_s_size_says() -> None:
    weeks = [sum(1 for _ in faults_of(Fleet(), seed)) for seed in range(40)]
    assert sum(weeks) / len(weeks) == pytest.approx((419 + 47) * 7 / 54, rel=0.05)
    assert [at for at, _ in faults_of(Fleet(), 3)] == [at for at, _ in faults_of(Fleet(), 3)], "a seed is a history"


def test_what_costs_nothing_loses_but_the_steps_since_the_last_save() -> None:
    hourly = Way("hourly", FREE, 3600.0)
    found = spent(Fleet(), hourly, 1)
    assert (found.saving, found.recovering) == (0.0, 0.0)
    assert found.repeated == pytest.approx(found.incidents * 1800.0, rel=0.3), "half an interval each, on average"
    assert spent(Fleet(), replace(hourly, every_seconds=6.0), 1).repeated < found.repeated / 100


def test_a_node_that_is_left_in_order_costs_no_step_where_the_job_holds_for_it() -> None:
    none = {name: (0 if effect != "node is left" else count, effect) for name, (count, effect) in LLAMA_3.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("simulator.week.LLAMA_3", none)
        found = spent(Fleet(faults=10.0), Way("ours", replace(FREE, stall=0.1), None, holds=True), 1)
    assert found.incidents > 20
    assert found.repeated == 0.0


def test_a_job_without_a_spare_waits_for_one_or_goes_on_without() -> None:
    bare = Fleet(faults=4.0, spares=0)
    waits, shrinks = (spent(bare, Way("w", FREE, 600.0, shrinks=on), 1) for on in (False, True))
    assert waits.recovering > 0.5 * WEEK
    assert shrinks.recovering == 0.0
    assert 0.0 < shrinks.missing < 0.02 * WEEK


@pytest.mark.parametrize("strike", [trainer_fails, node_is_lost])
def test_an_incident_asks_in_proportion_to_the_workers(strike: Callable[[FakeWorld], None]) -> None:
    few, many = (work_of(count, strike) for count in (8, 64))
    assert many.rounds == few.rounds, "rounds do not grow with the job"
    assert 3 * 8 - 3 <= few.messages <= 3 * 8
    assert 3 * 64 - 3 <= many.messages <= 3 * 64


def test_the_report_has_a_row_for_each_way_and_rate_and_ours_comes_first() -> None:
    rows = rows_of(SMALL, (1.0, 4.0), range(3))
    assert len(rows) == 2 * len(ways(SMALL))
    for row in rows:
        lost = row["recovering"] + row["repeated"] + row["saving"] + row["missing"]
        assert row["goodput"] == pytest.approx(1.0 - lost / WEEK, abs=0.01)
    best = max(rows, key=lambda row: (row["faults"], row["goodput"]))
    assert best["way"] == "ours, auto"
