"""Every PromQL of the dashboards and alerts, evaluated by a real Prometheus that scraped a real job with a failure in it.

The job is a `surefoot local` run whose second node is killed and returns: the real operator and the real agents export
on ports of their own. Two things exist on a cluster only, and stand beside it here: the companion of a memory-tier pod
(the real one, beside the Redis of one of the run's nodes), and the operator's watches (its real cache, over a stand-in
API server); tests/cluster/test_scenario_metrics.py has them from a cluster. No expression is exempt: each must return
numbers, and all but those in `expressions.QUIET` must move.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support import expressions, local_run
from support.servers.prometheus import Prometheus, program, scraping
from surefoot_operator.fabric.processes.run_folder import read_json
from surefoot_operator.fabric.processes.run_records import NodeRecord, from_json

SUPPORT = Path(__file__).parents[1] / "support"
SECONDS = 180.0
"""A limit for what never comes: a loaded machine takes most of a minute to import torch for three workers at once."""
STORY = ["WorldClaimed", "WorldCommitted", "Restored"]


@dataclass
class Scene:
    run: local_run.LocalRun
    prometheus: Prometheus


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("dashboards")
    targets = folder / "targets"
    targets.mkdir()
    job = local_run.Job(
        steps=160,
        workers=3,
        elastic=(2, 3),
        memory={"sizeLimit": "64Mi"},
        persistent={"uri": (folder / "persistent").as_uri(), "intervalSteps": 10},
        gates=(20, 150),
        trainer=("--pace", "0.05"),
    )
    program("prometheus")
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(
            local_run.running(folder, job, "--metrics", *local_run.faults("node:1@step=30,for=2"))
        )
        files = [str(run.run_folder.metrics / "*.json"), str(targets / "*.json")]
        prometheus = stack.enter_context(scraping(folder, files, expressions.ALERTS))
        stack.enter_context(_process("watched_cluster.py", folder, targets / "cluster.json"))
        run.wait_for_step(20)
        stack.enter_context(_companion(run, folder, targets / "companion.json"))
        # a first count of each is there before the failure, as in a job of hours
        _until(run, lambda: len(prometheus.series("surefoot_step == 20")) == 3)
        run.open_gate(20)
        _until(run, lambda: any("restored" in text for text in run.told("Restored")))
        yield Scene(run, prometheus)


@contextlib.contextmanager
def _process(script: str, folder: Path, told: Path) -> Iterator[None]:
    """A script of `support`, until the end of the test."""
    command = [sys.executable, str(SUPPORT / "programs" / script), str(told)]
    with (folder / f"{script}.log").open("wb") as log, _ended(subprocess.Popen(command, stdout=log, stderr=log)):
        yield


@contextlib.contextmanager
def _companion(run: local_run.LocalRun, folder: Path, told: Path) -> Iterator[None]:
    """The memory tier's own, beside the first node's Redis; on a cluster its scrape is labelled with the node."""
    body = read_json(run.run_folder.node("node-0"))
    holder = from_json(NodeRecord, body or {}).holder
    assert holder is not None
    password = folder / "password"
    password.write_text(holder.admin_password)
    environment = {
        "SUREFOOT_COMPANION_PORT": "0",
        "SUREFOOT_COMPANION_REDIS_HOST": holder.host,
        "SUREFOOT_COMPANION_REDIS_PORT": str(holder.port),
        "SUREFOOT_MEMORY_PASSWORD_FILE": str(password),
        "SUREFOOT_COMPANION_FILL_SHARE": "0",
    }
    command = [sys.executable, "-m", "surefoot.holder.companion"]
    path = folder / "companion.log"
    with path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})
    with _ended(process):
        _until(run, lambda: "figures at port" in path.read_text())
        port = path.read_text().partition("figures at port ")[2].split()[0]
        told.write_text(json.dumps([{"targets": [f"127.0.0.1:{port}"], "labels": {"node": "node-0"}}]))
        yield


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until(run: local_run.LocalRun, condition: Callable[[], bool]) -> None:
    run.wait("what the test waits for", condition, SECONDS)


def test_every_expression_returns_data_of_a_run_with_a_failure(scene: Scene) -> None:
    assert len(expressions.of_dashboards()) > 40
    deadline = time.monotonic() + SECONDS
    while lacking := expressions.lacking(scene.prometheus):
        scene.run.look()
        assert time.monotonic() < deadline, "\n".join(f"{why}: {what}" for what, why in lacking.items())


def test_every_expression_that_may_rest_exists() -> None:
    named = {name for e in expressions.of_dashboards() for name in (e.where, e.where.partition(": ")[0])}
    assert set(expressions.QUIET) - named == set()


def test_alerts_are_judged_without_error_and_stay_silent_through_a_recovery(scene: Scene) -> None:
    rules = scene.prometheus.rules()
    assert {rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] != "ok"} == {}
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
    assert len(rules) == len({rule["name"] for rule in rules}) > 15


def test_no_series_names_a_rank_or_a_pod(scene: Scene) -> None:
    """Only labels whose values are few; the companion's node is its scrape's."""
    allowed = {"namespace", "job", "worker", "tier", "phase", "source", "reason", "what", "kind", "cause", "state"}
    allowed |= {"le", "call", "category", "error", "node", "__name__", "instance"}
    series = scene.prometheus.series('{__name__=~"surefoot_.+"}')
    found = {label for one in series for label in one["metric"]}
    assert found - allowed == set()
    assert {one["metric"]["worker"] for one in series if "worker" in one["metric"]} == {"0", "1", "2"}


def test_what_happened_was_told_once_each_with_why(scene: Scene) -> None:
    """The last one: it ends the run."""
    done = scene.run.finish()
    assert done.report["outcome"] == "Complete"
    told = [(event.reason, event.message) for event in done.events]
    assert len(set(told)) == len(told)
    reasons = [reason for reason, _ in told]
    epochs = len(done.report["epochs"])
    assert reasons.count("WorldClaimed") >= reasons.count("WorldCommitted") == epochs
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
