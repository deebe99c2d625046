"""`python -m cluster.scenarios.fleet`: a thousand jobs of ten workers on a real API server, whose pods no machine runs.

What is measured is the operator as it is installed (two replicas, the chart's settings): cold start, memory, how soon it answers a pod that
goes, what it asks of the API server. Agents do not connect: jobs wait for them, half-started, for as long as it takes. Rows go to
build/scale-cluster.json, which `python -m bench.scale` puts into its summary.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from cluster import engines, layout
from cluster.api import Api
from cluster.processes import wait
from cluster.scenarios.api_calls import api_calls, since
from cluster.scenarios.installed import Installed, answered
from cluster.scenarios.kwok import PODS_OF_A_NODE, simulated_job, simulated_nodes
from cluster.scenarios.operator_figures import figure, figures, machine_load, metrics_of

SPACE = "fleet"
PODS = f"/api/v1/namespaces/{SPACE}/pods"
JOBS = f"/apis/surefoot.dev/v1alpha1/namespaces/{SPACE}/trainingjobs"
REPORT = layout.PROJECT / "build" / "scale-cluster.json"
WORKERS = 10
CHURN_A_MINUTE = 0.01
"""Share of the pods that go."""
MAKING_SECONDS = 1800.0
STARTING_SECONDS = 300.0
ANSWER_SECONDS = 60.0
_JOB_SERIES = re.compile(r'^surefoot_job_phase\{job="([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Made:
    """A worker's pod as the API server told of it: when, and which attempt it is."""

    at: float
    attempt: int
    name: str


@dataclass
class PodWatch:
    """When pods of the fleet's jobs were made; a thread of its own reads the watch."""

    api: Api
    made: dict[tuple[str, int], Made] = field(default_factory=dict)
    """By job's uid and worker's index, the newest."""
    count: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.ended.is_set():
            try:
                query = f"{PODS}?watch=1&resourceVersion={self._listed()}&timeoutSeconds=600"
                for line in self.api.lines(query, 600.0):
                    if line["type"] == "ADDED":
                        self._learn(line["object"]["metadata"])
                    if self.ended.is_set():
                        return
            except (OSError, HTTPException, ValueError):  # away, or a line cut in the middle
                self.ended.wait(0.2)

    def _listed(self) -> str:
        """Learns of what came while nobody watched, in pages; where to watch on."""
        more = ""
        while True:
            page = self.api.call("GET", f"{PODS}?limit=200&continue={more}")
            for item in page["items"]:
                self._learn(item["metadata"])
            more = page["metadata"].get("continue", "")
            if not more:
                return str(page["metadata"]["resourceVersion"])

    def _learn(self, metadata: dict[str, Any]) -> None:
        labels = metadata.get("labels", {})
        if "surefoot.dev/job-uid" not in labels:
            return
        place, attempt = (
            (labels["surefoot.dev/job-uid"], int(labels["surefoot.dev/worker-index"])),
            int(labels["surefoot.dev/attempt"]),
        )
        with self.changed:
            known = self.made.get(place)
            if known is not None and known.attempt >= attempt:
                return
            self.made[place] = Made(time.time(), attempt, metadata["name"])
            self.count += 1
            self.changed.notify_all()

    def wait(self, what: str, condition: Callable[[], bool], seconds: float) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, seconds), (
                f"not within {seconds:g} s: {what}; {self.count} pods made"
            )


class Fleet:
    """The installed operator, and jobs on nodes that are simulated."""

    def __init__(self, installed: Installed) -> None:
        self.installed, self.api = installed, installed.api
        self.watch = PodWatch(Api(installed.facts.kubeconfig))
        self._chance = random.Random(1)

    @contextmanager
    def watched(self) -> Iterator[None]:
        thread = threading.Thread(target=self.watch.run, name="pods of the fleet", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.watch.ended.set()  # the thread ends with the server's next word, at the latest with the process

    # ---- rows -------------------------------------------------------------------------------------------------------

    def one_job(self, workers: int) -> dict[str, Any]:
        """One job is asked for; from then until its last pod is there."""
        before, began = self.watch.count, time.time()
        self.api.call("POST", JOBS, simulated_job(f"of-{workers}", SPACE, workers))
        self.watch.wait(f"{workers} pods", lambda: self.watch.count - before >= workers, MAKING_SECONDS)
        seconds = max(one.at for one in self.watch.made.values()) - began
        self._remove(f"of-{workers}")
        return {"pods": workers, "seconds": round(seconds, 2), **machine_load()}

    def many_jobs(self, jobs: int) -> dict[str, Any]:
        """Asked for one after another; until every pod is there."""
        before, began, calls = self.watch.count, time.time(), api_calls()
        for number in range(jobs):
            self.api.call("POST", JOBS, simulated_job(f"job-{number:04d}", SPACE, WORKERS))
        asked = time.time() - began
        self.watch.wait("every pod", lambda: self.watch.count - before >= jobs * WORKERS, MAKING_SECONDS)
        row = {"jobs": jobs, "pods": jobs * WORKERS, "asked_seconds": round(asked, 1)}
        row["seconds"] = round(time.time() - began, 1)
        return {**row, "api_calls": since(api_calls(), calls), **self._figures(), **machine_load()}

    def cold_start(self, jobs: int) -> dict[str, Any]:
        """The leader's process is killed: from the moment that one leads again until it has reconciled every job."""
        calls, killed, before = api_calls(), time.time(), self._leader()

        def leads() -> bool:
            text = self._metrics()
            fresh = self._leader() != before or figure(text, "process_start_time_seconds") > killed - 1.0
            return fresh and 'surefoot_operator_leader{shard="0"} 1.0' in text

        self.installed.kill_leader()
        led = self._when("one leads again", leads)
        done = self._when("every job is reconciled", lambda: len(set(_JOB_SERIES.findall(self._metrics()))) >= jobs)
        row = {"jobs": jobs, "led_after_seconds": round(led - killed, 2), "seconds": round(done - led, 2)}
        return {**row, "api_calls": since(api_calls(), calls), **self._figures(), **machine_load()}

    def churn(self, minutes: float) -> dict[str, Any]:
        """Pods go at an even pace; of each, the seconds until its replacement is there."""
        pause = 60.0 / (CHURN_A_MINUTE * len(self.watch.made))
        calls, before, began = api_calls(), self._figures(), time.time()
        asked = dict[tuple[str, int], tuple[int, float]]()
        seconds: list[float] = []
        while time.time() - began < minutes * 60:
            place = self._chance.choice([p for p in self.watch.made if p not in asked])
            made = self.watch.made[place]
            asked[place] = (made.attempt, time.time())
            self.api.call("DELETE", f"{PODS}/{made.name}")
            time.sleep(pause)  # the pace is what is asked for
        for place, (attempt, at) in asked.items():
            self.watch.wait("an answer", lambda p=place, a=attempt: self.watch.made[p].attempt > a, ANSWER_SECONDS)  # type: ignore[misc]
            seconds.append(self.watch.made[place].at - at)
        shown = {"median": statistics.median(seconds), "p99": ninety_nine_percent(seconds), "longest": max(seconds)}
        return {
            "pods_gone": len(seconds),
            "reaction_seconds": {name: round(value, 3) for name, value in shown.items()},
            **self._cost(began, calls, before),
        }

    def at_rest(self, minutes: float) -> dict[str, Any]:
        """Nothing happens."""
        calls, before, began = api_calls(), self._figures(), time.time()
        time.sleep(minutes * 60)  # what is measured is that nothing happens
        return self._cost(began, calls, before)

    def _cost(self, began: float, calls: dict[str, int], before: dict[str, Any]) -> dict[str, Any]:
        """What the operator has cost since then."""
        minutes, after = (time.time() - began) / 60, self._figures()
        cores = (after["cpu_seconds"] - before["cpu_seconds"]) / minutes / 60
        per_minute = {what: round(n / minutes, 1) for what, n in since(api_calls(), calls).items()}
        return {"api_calls_per_minute": per_minute, "cpu_cores": round(cores, 3), **after, **machine_load()}

    # ---- seeing -----------------------------------------------------------------------------------------------------

    def _remove(self, name: str) -> None:
        self.api.call("DELETE", f"{JOBS}/{name}")
        gone = wait(lambda: answered(lambda: not self.api.answers(f"{JOBS}/{name}")), MAKING_SECONDS)
        assert gone, f"{name} does not go"
        nothing = wait(lambda: answered(lambda: not self.api.call("GET", f"{PODS}?limit=1")["items"]), MAKING_SECONDS)
        assert nothing, f"the pods of {name} do not go"
        with self.watch.changed:
            self.watch.made.clear()

    def _when(self, what: str, condition: Callable[[], bool]) -> float:
        assert wait(lambda: answered(condition), STARTING_SECONDS), f"not within {STARTING_SECONDS:g} s: {what}"
        return time.time()

    def _leader(self) -> str:
        pod = self.installed.leader()
        return "" if pod is None else str(pod["metadata"]["name"])

    def _metrics(self) -> str:
        return metrics_of(self.api, self._leader())

    def _figures(self) -> dict[str, Any]:
        return figures(self._metrics())


def ninety_nine_percent(values: list[float]) -> float:
    return sorted(values)[max(0, math.ceil(0.99 * len(values)) - 1)]


def measured(installed: Installed, jobs: int, minutes: float, sizes: list[int]) -> dict[str, Any]:
    """All rows, one after the other; what was measured is in the report as soon as it is."""
    rows: dict[str, Any] = {}
    fleet = Fleet(installed)

    def told(name: str, row: dict[str, Any]) -> None:
        rows[name] = row
        print(f"{name}: {json.dumps(row)}", flush=True)
        _write(rows)

    with fleet.watched():
        for workers in sizes:
            told(f"one job of {workers}", fleet.one_job(workers))
        told("many jobs", fleet.many_jobs(jobs))
        told("cold start", fleet.cold_start(jobs))
        told("at rest", fleet.at_rest(minutes))
        told("churn", fleet.churn(minutes))
    return rows


def _write(rows: dict[str, Any], report: Path = REPORT) -> None:
    report.parent.mkdir(exist_ok=True)
    made = report.with_suffix(".new")
    made.write_text(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=2) + "\n")
    made.replace(report)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster.scenarios.fleet", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=3.0, help="of rest, and of churn")
    parser.add_argument("--one-job", type=int, nargs="*", default=[300, 2000], help="sizes of a job that comes alone")
    given = parser.parse_args()
    installed = Installed(engines.choose(), SPACE)
    most = max(given.jobs * WORKERS, *given.one_job, 1)
    was = installed.is_there()
    with simulated_nodes(installed.facts, math.ceil(1.2 * most / PODS_OF_A_NODE)):
        installed.up()
        installed.api.create(
            "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}}
        )
        try:
            measured(installed, given.jobs, given.minutes, given.one_job)
        finally:
            installed.api.call("DELETE", f"/api/v1/namespaces/{SPACE}")
            if not was:
                installed.down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
