"""Every PromQL of the dashboards and alerts, evaluated by a real Prometheus that scraped a real job with a failure in it.

No expression is exempt: each must return numbers, and all but those in `expressions.QUIET` must move. What of it a
cluster alone has, tests/cluster/test_scenario_metrics.py has from a cluster.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from support import expressions
from support.scraped_run import SECONDS, ScrapedRun, scraped_run
from support.servers.prometheus import program

# a second limit for the scene: what never comes must be named by the test, and not cut off by the tier's timeout
pytestmark = pytest.mark.timeout(60 + 3 * SECONDS)

STORY = ["GenerationClaimed", "GenerationCommitted", "Restored"]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScrapedRun]:
    program("prometheus")
    with scraped_run(tmp_path_factory.mktemp("dashboards")) as found:
        yield found


def test_every_expression_returns_data_of_a_run_with_a_failure(scene: ScrapedRun) -> None:
    assert len(expressions.of_dashboards()) > 40
    deadline = time.monotonic() + SECONDS
    while lacking := expressions.lacking(scene.prometheus):
        scene.run.look()
        assert time.monotonic() < deadline, "\n".join(f"{why}: {what}" for what, why in lacking.items())


def test_every_expression_that_may_rest_exists() -> None:
    named = {name for e in expressions.of_dashboards() for name in (e.where, e.where.partition(": ")[0])}
    assert set(expressions.QUIET) - named == set()


def test_alerts_are_judged_without_error_and_stay_silent_through_a_recovery(scene: ScrapedRun) -> None:
    rules = scene.prometheus.rules()
    assert {rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] != "ok"} == {}
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
    assert len(rules) == len({rule["name"] for rule in rules}) > 15


def test_no_series_names_a_rank_or_a_pod(scene: ScrapedRun) -> None:
    """Only labels whose values are few; the companion's node is its scrape's."""
    allowed = {"namespace", "job", "worker", "tier", "phase", "source", "reason", "what", "kind", "cause", "state"}
    allowed |= {"le", "call", "category", "error", "node", "server", "shard", "__name__", "instance"}
    series = scene.prometheus.series('{__name__=~"surefoot_.+"}')
    found = {label for one in series for label in one["metric"]}
    assert found - allowed == set()
    assert {one["metric"]["worker"] for one in series if "worker" in one["metric"]} == {"0", "1", "2"}


def test_what_happened_was_told_once_each_with_why(scene: ScrapedRun) -> None:
    """The last one: it ends the run."""
    done = scene.run.finish()
    assert done.report["outcome"] == "Complete"
    told = [(event.reason, event.message) for event in done.events]
    assert len(set(told)) == len(told)
    reasons = [reason for reason, _ in told]
    epochs = len(done.report["generations"])
    assert reasons.count("GenerationClaimed") >= reasons.count("GenerationCommitted") == epochs
    over = [incident for incident in done.report["incidents"] if incident["first_step_seconds"] is not None]
    assert (reasons.count("Restored"), reasons.count("JobComplete")) == (len(over), 1)
    assert "CheckpointProtected" in reasons
    story = [(reason, text) for reason, text in told if reason in ("WorkerLost", *STORY)]
    lost = [place for place, (reason, _) in enumerate(story) if reason == "WorkerLost"]
    assert lost, "the second node was killed"
    for place in lost:
        assert [reason for reason, _ in story[place + 1 : place + 4]] == STORY
        assert story[place + 1][1].endswith(f" is claimed: {story[place][1]}")
    assert any("with 2 ranks" in story[place + 3][1] for place in lost)
