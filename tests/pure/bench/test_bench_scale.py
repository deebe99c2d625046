"""What the scale bench makes of the rows that a cluster gave, and how those are reckoned."""

from __future__ import annotations

from typing import Any

import pytest
from bench import scale
from bench.scale_summary import MEASURED_ON_LINES, ON_A_CLUSTER, summary

from cluster.scenarios import fleet
from cluster.scenarios.operator_figures import longest_lag

ROW: dict[str, Any] = {"workers": 10, "plan_ms": 1.0, "check_ms": 1.0, "maintain_ms": 1.0, "status_bytes": 900}


def cluster(jobs: int) -> dict[str, Any]:
    return {
        "one job of 300": {"pods": 300, "seconds": 3.5},
        "cold start": {"jobs": jobs, "seconds": 4.0, "rss_mib": 180.0},
        "churn": {"reaction_seconds": {"p99": 0.4}, "api_calls_per_minute": {"create pods": 100.0, "list pods": 2.5}},
    }


def test_each_key_is_told_by_its_row_and_what_was_not_measured_is_null() -> None:
    found = summary([ROW], [], cluster(1000))
    assert found == {
        **dict.fromkeys((*ON_A_CLUSTER, *MEASURED_ON_LINES)),
        "cold_start_seconds_1000_jobs": 4.0,
        "rss_mb_1000_jobs": 180.0,
        "reaction_p99_seconds": 0.4,
        "api_requests_per_minute": 102.5,
        "pods_300_seconds": 3.5,
    }
    assert set(summary([ROW], [], {}).values()) == {None}


def test_figures_of_fewer_jobs_do_not_pass_for_those_of_a_thousand() -> None:
    found = summary([ROW], [], cluster(50))
    assert found["cold_start_seconds_1000_jobs"] is None
    assert found["rss_mb_1000_jobs"] is None


@pytest.mark.parametrize(
    ("values", "found"), [([1.0], 1.0), ([float(n) for n in range(1, 101)], 99.0), ([3.0, 1.0, 2.0], 3.0)]
)
def test_one_in_a_hundred_is_slower(values: list[float], found: float) -> None:
    assert fleet.ninety_nine_percent(values) == found


def test_the_loop_was_never_later_than_the_bound_of_the_last_bucket_that_grew() -> None:
    name = "surefoot_operator_loop_lag_seconds_bucket"
    text = f'{name}{{le="0.01"}} 90.0\n{name}{{le="0.1"}} 99.0\n{name}{{le="1.0"}} 99.0\n{name}{{le="+Inf"}} %s\n'
    assert longest_lag(text % "99.0") == 0.1
    assert longest_lag(text % "100.0") is None


def test_every_part_of_the_bench_runs_with_the_operator_as_it_is() -> None:
    """What nobody runs between two benches ends at the first change of what it stands in for."""
    row = scale.measured(3)
    assert row["workers"] == 3
    assert min(row[name] for name in ("plan_ms", "check_ms", "maintain_ms", "heartbeat_decoded_and_applied_us")) > 0
    assert row["told"]["first"]["messages"] >= 3
    assert row["told"]["same_again"]["messages"] == 0
