"""The chart is upgraded under a running job: operator and memory tier are replaced, the training feels nothing, and a
worker made afterwards goes by what the upgrade switched on.
"""

from __future__ import annotations

import time

import pytest

from cluster.scenarios import faults
from cluster.scenarios.installed import answered
from cluster.scenarios.measuring import strike
from cluster.scenarios.shapes import ELASTIC
from cluster.scenarios.stage import Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MARK = "surefoot.test/round"


def test_an_upgraded_chart_disturbs_no_training(stage: Stage) -> None:
    job = stage.training("kept", ELASTIC)
    struck = strike(job)
    mark = {"podAnnotations": {MARK: str(time.time_ns())}}
    stage.installed.up({"operator": mark, "memoryTier": {**mark, "localSocket": {"enabled": True}}})
    wanted = mark["podAnnotations"][MARK]

    def replaced() -> bool:
        found = [*stage.installed.pods("operator"), *stage.installed.pods("memory-tier")]
        return all(pod["metadata"].get("annotations", {}).get(MARK) == wanted for pod in found)

    job.wait("every pod of operator and memory tier is a new one", lambda: answered(replaced), 180.0)
    stage.installed.wait_ready()
    job.wait("every checkpoint is protected", job.is_protected)
    stage.wait_led(job)
    job.wait_steps(10)
    row = stage.quiet_row("chart upgraded, memory tier included", struck)
    row.notes["CheckpointProtected"] = stage.protected_since(job, struck.at)
    stage.check(job, row)
    assert job.condition("CheckpointsFit") == "True", job.said()

    before = {pod["metadata"]["name"] for pod in job.pods()}
    struck = faults.delete_pod(job).wait()
    stage.whole_again(job, struck)
    (new,) = {pod["metadata"]["name"] for pod in job.pods()} - before
    job.wait("the new worker reaches its holder by the socket", lambda: stage.socket_connections(new))
    stage.check(job, struck.row("pod deleted, local socket switched on"))
