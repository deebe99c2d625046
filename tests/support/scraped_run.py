"""A `surefoot local` run whose second node is killed and returns, scraped by a real Prometheus.

The real operator and the real agents export on ports of their own. Two things exist on a cluster only, and stand beside
it here: the companion of a memory-tier pod (the real one, beside the Redis of one of the run's nodes), and the
operator's watches (its real cache, over a stand-in API server).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from support import expressions, local_run
from support.machine_speed import scaled
from support.servers.prometheus import Prometheus, ended, scraping
from surefoot_operator.platforms.local.run_folder import NodeRecord, parse_record, read_json

SUPPORT = Path(__file__).parent
SECONDS = scaled(180.0)
"""A limit for what never comes: a loaded machine takes most of a minute to import torch for three workers at once."""


@dataclass
class ScrapedRun:
    """The job has recovered, and goes on to its gate at step 150."""

    run: local_run.LocalRun
    prometheus: Prometheus


@contextlib.contextmanager
def scraped_run(folder: Path) -> Iterator[ScrapedRun]:
    """The run from its recovery on, in an empty folder."""
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
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(
            local_run.running(folder, job, "--metrics", *local_run.faults("node:1@step=30,for=2"))
        )
        files = [str(run.run_folder.metrics_folder / "*.json"), str(targets / "*.json")]
        prometheus = stack.enter_context(scraping(folder, files, expressions.ALERTS))
        stack.enter_context(_process("watched_cluster.py", folder, targets / "cluster.json"))
        run.wait_for_step(20)
        stack.enter_context(_companion(run, folder, targets / "companion.json"))
        # a first count of each is there before the failure, as in a job of hours
        _until(run, lambda: len(prometheus.series("surefoot_step == 20")) == 3)
        run.open_gate(20)
        _until(run, lambda: any("restored" in text for text in run.told("Restored")))
        yield ScrapedRun(run, prometheus)


@contextlib.contextmanager
def _process(script: str, folder: Path, told: Path) -> Iterator[None]:
    """A script of `support`, until the end of the run."""
    command = [sys.executable, str(SUPPORT / "programs" / script), str(told)]
    with (folder / f"{script}.log").open("wb") as log, ended(subprocess.Popen(command, stdout=log, stderr=log)):
        yield


@contextlib.contextmanager
def _companion(run: local_run.LocalRun, folder: Path, told: Path) -> Iterator[None]:
    """The memory tier's own, beside the first node's Redis; on a cluster its scrape is labelled with the node."""
    body = read_json(run.run_folder.node_file("node-0"))
    (holder,) = parse_record(NodeRecord, body or {}).servers
    password = folder / "password"
    password.write_text(holder.admin_password)
    environment = {
        "SUREFOOT_SIDECAR_PORT": "0",
        "SUREFOOT_SIDECAR_REDIS_HOST": holder.host,
        "SUREFOOT_SIDECAR_REDIS_PORT": str(holder.port),
        "SUREFOOT_MEMORY_PASSWORD_FILE": str(password),
        "SUREFOOT_SIDECAR_PREFAULT_RATIO": "0",
    }
    command = [sys.executable, "-m", "surefoot.memory_server.sidecar"]
    path = folder / "companion.log"
    with path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})
    with ended(process):
        _until(run, lambda: "metrics at port" in path.read_text())
        port = path.read_text().partition("metrics at port ")[2].split()[0]
        told.write_text(json.dumps([{"targets": [f"127.0.0.1:{port}"], "labels": {"node": "node-0"}}]))
        yield


def _until(run: local_run.LocalRun, condition: Callable[[], bool]) -> None:
    run.wait("what the Prometheus is to see", condition, SECONDS)
