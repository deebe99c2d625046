"""Every PromQL of the dashboards and alerts, evaluated by a real Prometheus that scraped a real job with a failure in it.

The job is a `surefoot local` run whose second node is killed and returns: the real operator and the real agents export
on ports of their own. Two things exist on a cluster only, and stand beside it here: the companion of a memory-tier pod
(the real one, beside the Redis of one of the run's nodes), and the operator's watches (its real cache, over a stand-in
API server). No expression is exempt: each must return numbers, and all but those in `QUIET` must move.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from support import local_run
from support.prometheus import Prometheus, program, scraping
from surefoot_operator.fabric.processes.folder import read_json
from surefoot_operator.fabric.processes.records import node_from_json

ROOT = Path(__file__).parents[2]
FILES = ROOT / "charts" / "surefoot" / "files"
ALERTS = FILES / "alerts.yaml"
SECONDS = 60.0

QUIET = {
    "Saves that failed": "every save was taken",
    "Saves that were skipped": "every due save found a slot",
    "Saves under way": "a save of some kilobytes drains between two scrapes",
    "Restored bytes by source: read again: {{reason}}": "no copy was bad",
    "Steps lost and restarts: {{job}} steps": "the newest checkpoint may be that of the last step",
    "Evictions and failed calls: evicted keys": "a holder never evicts",
    "Evictions and failed calls: {{call}}": "calls to the killed node fail only if one was under way",
    "What failed": "nothing of it did",
}
"""Expressions that may be zero all the time, and why: a panel's title, or title and legend."""


@dataclass(frozen=True)
class Expression:
    """`where` it stands, and what a run of seconds makes of Grafana's variables in it."""

    where: str
    promql: str

    def __str__(self) -> str:
        return f"{self.where}: {self.promql}"


def dashboard_expressions() -> list[Expression]:
    found = []
    for path in sorted((FILES / "dashboards").glob("*.json")):
        dashboard = json.loads(path.read_text())
        found += [Expression(a["name"], _filled(a["expr"])) for a in dashboard["annotations"]["list"] if "expr" in a]
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                where = f"{panel['title']}: {target['legendFormat']}"
                found.append(Expression(where, _filled(target["expr"])))
    return found


def alert_expressions() -> list[Expression]:
    """What each alert compares with a bound: both sides of an `and`, for that must be there while all is well."""
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    return [
        Expression(r["alert"], _compared(part)) for r in rules for part in re.split(r" and on \([^)]*\) ", r["expr"])
    ]


def _filled(expression: str) -> str:
    for variable, value in {"$__rate_interval": "10s", "$__range": "1h", "$namespace": ".*", "$job": ".*"}.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression, expression
    return expression


def _compared(expression: str) -> str:
    left = re.fullmatch(r"(.+) (?:>|<|==) [0-9.]+", expression)
    assert left is not None, f"an alert compares something with a number: {expression}"
    return left.group(1)


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
        prometheus = stack.enter_context(scraping(folder, files, ALERTS))
        stack.enter_context(_process("watched_cluster.py", folder, targets / "cluster.json"))
        run.wait_for_step(20)
        stack.enter_context(_companion(run, folder, targets / "companion.json"))
        # a first count of each is there before the failure, as in a job of hours
        _until(run, lambda: len(prometheus.series("surefoot_step == 20")) == 3)
        run.open_gate(20)
        _until(run, lambda: any("restored" in text for text in run.told("Restored")))
        yield Scene(run, prometheus)
        assert run.finish().report["outcome"] == "Complete"


@contextlib.contextmanager
def _process(script: str, folder: Path, told: Path) -> Iterator[None]:
    """A script of `support`, until the end of the test."""
    command = [sys.executable, str(ROOT / "tests" / "support" / script), str(told)]
    with (folder / f"{script}.log").open("wb") as log, _ended(subprocess.Popen(command, stdout=log, stderr=log)):
        yield


@contextlib.contextmanager
def _companion(run: local_run.LocalRun, folder: Path, told: Path) -> Iterator[None]:
    """The memory tier's own, beside the first node's Redis; on a cluster its scrape is labelled with the node."""
    body = read_json(run.run_folder.node("node-0"))
    holder = node_from_json(body or {}).holder
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


def _numbers(series: list[dict[str, Any]]) -> list[float]:
    return [number for one in series for _, text in one["values"] if math.isfinite(number := float(text))]


def _lacking(scene: Scene) -> dict[str, str]:
    """Expressions that do not show what they should, and what they show instead."""
    lacking = {}
    for expression in (*dashboard_expressions(), *alert_expressions()):
        numbers = _numbers(scene.prometheus.series(expression.promql))
        panel = expression.where.partition(": ")[0]
        still = expression in alert_expressions() or expression.where in QUIET or panel in QUIET
        if not numbers:
            lacking[str(expression)] = "no numbers"
        elif not still and not any(numbers):
            lacking[str(expression)] = "nothing but zeros"
    return lacking


def test_every_expression_returns_data_of_a_run_with_a_failure(scene: Scene) -> None:
    assert len(dashboard_expressions()) > 40
    deadline = time.monotonic() + SECONDS
    while lacking := _lacking(scene):
        scene.run.look()
        assert time.monotonic() < deadline, "\n".join(f"{why}: {what}" for what, why in lacking.items())


def test_every_quiet_expression_exists() -> None:
    names = {e.where for e in dashboard_expressions()}
    assert {q for q in QUIET if q not in names and q not in {n.partition(": ")[0] for n in names}} == set()


def test_alerts_are_judged_without_error_and_stay_silent_through_a_recovery(scene: Scene) -> None:
    rules = scene.prometheus.rules()
    assert {rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] != "ok"} == {}
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
    assert len(rules) == len({rule["name"] for rule in rules}) > 15


def test_no_series_names_a_rank_or_a_pod(scene: Scene) -> None:
    """Only labels whose values are few; the companion's node is its scrape's."""
    allowed = {"namespace", "job", "worker", "tier", "phase", "source", "reason", "what", "kind", "cause", "state"}
    allowed |= {"le", "call", "error", "node", "__name__", "instance"}
    series = scene.prometheus.series('{__name__=~"surefoot_.+"}')
    found = {label for one in series for label in one["metric"]}
    assert found - allowed == set()
    assert {one["metric"]["worker"] for one in series if "worker" in one["metric"]} == {"0", "1", "2"}
