"""`python -m cluster.scenarios.many_lines --jobs 50 --workers 40`: jobs that train beside each other, as the operator sees them.

The operator is as it is installed, its API server, holders and TLS lines are real. The workers' pods run on simulated nodes, and
their agents are scripted: they show real pod-bound tokens, beat, and make steps, and save nothing: a job that loses a worker
begins anew with its replacement. At the end a leading replica is killed. Rows go to build/scale-lines-SHARDS.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bench.scripted_agents import ScriptedWorker

from cluster import engines, layout
from cluster.processes import run, wait
from cluster.scenarios.installed import NAMESPACE, Installed, answered
from cluster.scenarios.kwok import PODS_OF_A_NODE, simulated_job, simulated_nodes
from cluster.scenarios.operator_figures import figures, machine_load, metrics_of
from cluster.scenarios.scripted_lines import CoordinatorAddresses, ScriptedLines
from surefoot_operator.controller.leader.election_rules import shard_of

SPACE = "lines"
PODS = f"/api/v1/namespaces/{SPACE}/pods"
ACCOUNT = f"/api/v1/namespaces/{SPACE}/serviceaccounts/default"
JOBS = f"/apis/surefoot.dev/v1alpha1/namespaces/{SPACE}/trainingjobs"
SOURCES = IPv4Network("10.97.0.0/16")
"""What agents connect from; local to the host while they do."""
SPARE_NODES = 4
PLACED_SECONDS = 600.0
JOINED_SECONDS = 300.0
ORDERS_SECONDS = 60.0
RESTING_SECONDS = 20.0
PROCESSES = 2
LOSSES = 5
"""Jobs that lose a worker, one after another."""


@dataclass(frozen=True)
class Placed:
    """A worker's pod that runs."""

    job: str
    index: int
    attempt: int
    name: str
    uid: str
    node: str


class JobsOnLines:
    """The installed operator, and jobs whose agents are scripted."""

    def __init__(self, installed: Installed, jobs: int, workers: int, shards: int) -> None:
        self.installed, self.api = installed, installed.api
        self._jobs, self._workers, self._shards = jobs, workers, shards
        self._addresses = CoordinatorAddresses(installed, shards, layout.RUNS / "coordinators.json")
        self._lines: ScriptedLines | None = None
        self._placed: dict[tuple[str, int], Placed] = {}
        self._sources: dict[tuple[str, int], IPv4Address] = {}
        """An address for each place: an operator bounds how many strangers knock from one."""
        self._epochs: dict[str, int] = {}
        self._chance = random.Random(1)

    @property
    def lines(self) -> ScriptedLines:
        assert self._lines is not None, "begin() comes first"
        return self._lines

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
        self._addresses.close()

    # ---- rows -------------------------------------------------------------------------------------------------------

    def begin(self) -> dict[str, Any]:
        """From the first hello until every job trains; tokens are made before."""
        for number in range(self._jobs):
            self.api.call("POST", JOBS, simulated_job(f"job-{number:03d}", SPACE, self._workers))
        wanted = self._jobs * self._workers
        assert wait(lambda: answered(lambda: len(self._running()) >= wanted), PLACED_SECONDS), "the pods do not run"
        self._placed = self._running()
        first = next(iter(self._placed.values()))
        url, authority = self._told(first)
        self._addresses.start(url)
        self._lines = ScriptedLines(authority, self._addresses.file, PROCESSES)
        agents = [self._agent(placed, url) for placed in self._placed.values()]
        before, began = self._figures(), time.monotonic()
        self.lines.join(agents)
        self.lines.until("all agents are in", wanted, JOINED_SECONDS)
        joined = time.monotonic() - began
        self._epochs = {placed.job: 1 for placed in self._placed.values()}
        self._heard("assigns", self._epochs, self._workers)
        trained = max(self.lines.heard(job, 1)["last_assign"] for job in self._epochs) - began
        row: dict[str, Any] = {"jobs": self._jobs, "workers": self._workers, "shards": self._shards}
        row |= {"joined_seconds": round(joined, 2), "committed_seconds": round(trained, 2)}
        return {**row, **self._since(before, began), **machine_load()}

    def at_rest(self) -> dict[str, Any]:
        """Nothing comes but heartbeats and steps."""
        before, began = self._figures(), time.monotonic()
        time.sleep(RESTING_SECONDS)  # what is measured is that nothing else happens
        found = self._since(before, began)
        beats = sum(row["cores"] for row in found["replicas"].values()) / (self._jobs * self._workers * 2)
        return {**found, "heartbeat_microseconds_rounds_included": round(beats * 1e6, 1), **machine_load()}

    def losses(self) -> dict[str, Any]:
        """One worker of one job after another."""
        each = self._lost(self._chance.sample(sorted(self._epochs), min(LOSSES, self._jobs)), apart=True)
        return {"jobs": len(each), **_spread(each), **machine_load()}

    def all_at_once(self) -> dict[str, Any]:
        """One worker of every job in one moment, as of a rack that fails."""
        before, began = self._figures(), time.monotonic()
        each = self._lost(sorted(self._epochs))
        return {"jobs": len(each), **_spread(each), **self._since(before, began), **machine_load()}

    def killed(self) -> dict[str, Any]:
        """SIGKILL to a replica: until the agents of its shards are in again; who else noticed."""
        led = self.installed.leaders(self._shards)
        dead = led[0]
        moved = {job for job in self._epochs if led[shard_of(job, self._shards)] == dead}
        before = self.lines.lines()
        there = sum(lines for lines, _, _ in before.values())
        began = time.monotonic()
        self.installed.engine.kill_container(NAMESPACE, dead)

        def back() -> bool:
            now = self.lines.lines()
            again = all(now[job][1] - before[job][1] >= before[job][0] for job in moved)
            return again and sum(lines for lines, _, _ in now.values()) >= there

        assert wait(back, JOINED_SECONDS), f"not all are in again: {self.lines.lines()}"
        now = self.lines.lines()
        seconds = max(now[job][2] for job in moved) - began
        time.sleep(RESTING_SECONDS)  # whoever was wrongly missed would be told so by then
        now = self.lines.lines()
        disturbed = sum(now[job][1] - before[job][1] for job in now if job not in moved)
        worlds = sum(self.lines.heard(job, epoch + 1)["stops"] > 0 for job, epoch in self._epochs.items())
        row: dict[str, Any] = {"jobs_moved": len(moved), "agents_moved": sum(before[job][0] for job in moved)}
        row |= {"back_seconds": round(seconds, 2), "lines_of_other_shards_broken": disturbed}
        return {**row, "worlds_stopped": worlds, **machine_load()}

    # ---- doing ------------------------------------------------------------------------------------------------------

    def _lost(self, jobs: list[str], apart: bool = False) -> list[dict[str, float]]:
        """Deletes one pod of each; seconds from there to the last Stop, and from the replacement's hello to the last Assign.

        `apart`: the next only once all of one job have stopped.
        """
        gone = {job: self._placed[job, self._chance.randrange(self._workers)] for job in jobs}
        struck, came = dict[str, float](), dict[str, float]()
        for job, placed in gone.items():
            struck[job] = time.monotonic()
            self.api.call("DELETE", f"{PODS}/{placed.name}?gracePeriodSeconds=0")
            self.lines.leave(job, placed.index)
            self._epochs[job] += 1
            if apart:
                self._heard("stops", [job], self._workers - 1)
        self._heard("stops", jobs, self._workers - 1)
        for job in jobs:
            came[job] = self._replaced(gone[job])
        self._heard("assigns", jobs, self._workers)
        heard = {job: self.lines.heard(job, self._epochs[job]) for job in jobs}
        return [
            {
                "stopped_seconds": heard[job]["last_stop"] - struck[job],
                "committed_seconds": heard[job]["last_assign"] - came[job],
            }
            for job in jobs
        ]

    def _replaced(self, gone: Placed) -> float:
        """Has the replacement's agent say hello once its pod runs; when that was."""

        def there() -> bool:
            now = self._running(f"surefoot.dev/job-uid={gone.job},surefoot.dev/worker-index={gone.index}")
            placed = now.get((gone.job, gone.index))
            if placed is None or placed.attempt == gone.attempt:
                return False
            self._placed[gone.job, gone.index] = placed
            return True

        assert wait(lambda: answered(there), PLACED_SECONDS), f"{gone.name} is not replaced"
        agent = self._agent(self._placed[gone.job, gone.index], self._addresses.url)
        came = time.monotonic()
        self.lines.join([agent])
        return came

    def _heard(self, what: str, jobs: Iterable[str], count: int) -> None:
        """Until so many of each job have heard it of the job's epoch."""

        def told() -> bool:
            return all(self.lines.heard(job, self._epochs[job])[what] >= count for job in jobs)

        assert wait(told, ORDERS_SECONDS), {job: self.lines.heard(job, self._epochs[job]) for job in jobs}

    def _running(self, selector: str = "surefoot.dev/job-uid") -> dict[tuple[str, int], Placed]:
        """Workers' pods that run, in pages."""
        found, more = dict[tuple[str, int], Placed](), ""
        while True:
            page = self.api.call("GET", f"{PODS}?limit=300&continue={more}&labelSelector={quote(selector)}")
            for pod in page["items"]:
                about, labels = pod["metadata"], pod["metadata"].get("labels", {})
                if pod["status"].get("phase") != "Running" or "deletionTimestamp" in about:
                    continue
                job, index = labels["surefoot.dev/job-uid"], int(labels["surefoot.dev/worker-index"])
                attempt, node = int(labels["surefoot.dev/attempt"]), pod["spec"]["nodeName"]
                found[job, index] = Placed(job, index, attempt, about["name"], about["uid"], node)
            more = page["metadata"].get("continue", "")
            if not more:
                return found

    def _told(self, placed: Placed) -> tuple[str, Path]:
        """Where a worker's agent is told to connect, and a file with the authority it is told to trust."""
        pod = self.api.call("GET", f"{PODS}/{placed.name}")
        told = {one["name"]: one.get("value", "") for c in pod["spec"]["containers"] for one in c.get("env", ())}
        authority = layout.RUNS / "coordinators.pem"
        authority.write_text(told["SUREFOOT_COORDINATOR_CA"])
        # without a fallback the worker's own is the first shard's
        return told.get("SUREFOOT_COORDINATOR_FALLBACK_URL") or told["SUREFOOT_COORDINATOR_URL"], authority

    def _agent(self, placed: Placed, url: str) -> ScriptedWorker:
        """With a token of the API server that is bound to the worker's pod, as the kubelet would ask for."""
        bound = {"kind": "Pod", "apiVersion": "v1", "name": placed.name, "uid": placed.uid}
        spec = {"audiences": ["surefoot"], "boundObjectRef": bound, "expirationSeconds": 7200}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        token = self.api.call("POST", f"{ACCOUNT}/token", body)["status"]["token"]
        source = self._sources.setdefault((placed.job, placed.index), SOURCES[len(self._sources) + 1])
        return ScriptedWorker(placed.job, placed.index, url, placed.attempt, placed.node, token, source=str(source))

    # ---- seeing -----------------------------------------------------------------------------------------------------

    def _figures(self) -> dict[str, dict[str, Any]]:
        """By replica."""
        names = [pod["metadata"]["name"] for pod in self.installed.pods("operator")]
        return {name: figures(metrics_of(self.api, name)) for name in names}

    def _since(self, before: dict[str, dict[str, Any]], began: float) -> dict[str, Any]:
        """What each replica has used since then, in cores."""
        seconds, replicas = time.monotonic() - began, {}
        for name, now in self._figures().items():
            cpu = now.pop("cpu_seconds") - before.get(name, {}).get("cpu_seconds", 0.0)
            replicas[name.rpartition("-")[2]] = {"cpu_seconds": round(cpu, 2), "cores": round(cpu / seconds, 3), **now}
        return {"replicas": replicas}


def _spread(each: list[dict[str, float]]) -> dict[str, list[float]]:
    """Median, least and most of each figure."""
    found = {name: [one[name] for one in each] for name in each[0]}
    return {name: [round(of(values), 3) for of in (statistics.median, min, max)] for name, values in found.items()}


@contextmanager
def addresses() -> Iterator[None]:
    """The host takes what comes for any of SOURCES."""
    run("ip", "route", "replace", "local", str(SOURCES), "dev", "lo")
    try:
        yield
    finally:
        run("ip", "route", "delete", "local", str(SOURCES), "dev", "lo")


def measured(jobs: JobsOnLines, report: Path) -> dict[str, Any]:
    """All rows, one after the other; what was measured is in the report as soon as it is."""
    rows: dict[str, Any] = {}
    parts = {
        "began": jobs.begin,
        "at rest": jobs.at_rest,
        "a worker lost": jobs.losses,
        "one of each job lost": jobs.all_at_once,
        "replica killed": jobs.killed,
    }
    for name, part in parts.items():
        rows[name] = part()
        print(f"{name}: {json.dumps(rows[name])}", flush=True)
        report.parent.mkdir(exist_ok=True)
        report.write_text(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=2) + "\n")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster.scenarios.many_lines", description=__doc__)
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--workers", type=int, default=40, help="of each job")
    parser.add_argument("--shards", type=int, default=1)
    given = parser.parse_args()
    installed = Installed(engines.choose(), SPACE)
    was = installed.is_there()
    nodes = max(math.ceil(1.2 * given.jobs * given.workers / PODS_OF_A_NODE), given.workers + SPARE_NODES)
    with simulated_nodes(installed.facts, nodes), addresses():
        replicas = max(2, given.shards)
        installed.up({"operator": {"shards": given.shards, "replicas": replicas}})
        led = wait(lambda: answered(lambda: all(installed.leaders(given.shards))), JOINED_SECONDS)
        assert led, "not every shard is led"
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}}
        installed.api.create("/api/v1/namespaces", space)
        jobs = JobsOnLines(installed, given.jobs, given.workers, given.shards)
        try:
            measured(jobs, layout.PROJECT / "build" / f"scale-lines-{given.shards}.json")
        finally:
            jobs.close()
            installed.api.call("DELETE", f"/api/v1/namespaces/{SPACE}")
            if not was:
                installed.down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
