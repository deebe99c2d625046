"""The chart is upgraded under a running job: operator and memory tier are replaced, the training feels nothing, and a
worker made afterwards goes by what the upgrade switched on. Each node has two Redis servers from then on.
"""

from __future__ import annotations

import time

import pytest

from cluster.scenarios import faults
from cluster.scenarios.installed import ROUND
from cluster.scenarios.measuring import strike
from cluster.scenarios.shapes import ELASTIC
from cluster.scenarios.stage import Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_an_upgraded_chart_disturbs_no_training(stage: Stage) -> None:
    job = stage.training("kept", ELASTIC)
    struck, wanted = strike(job), str(time.time_ns())
    mark = {"podAnnotations": {ROUND: wanted}}
    tier = {**mark, "localSocket": {"enabled": True}, "servers": 2}
    stage.installed.up({"operator": mark, "memoryTier": tier})
    stage.wait_release(job, {wanted})
    nodes = len(stage.installed.pods("memory-tier"))
    job.wait("every server of each node is a holder", lambda: len(job.status.assigned_servers) == 2 * nodes)
    stage.check_quiet(job, "chart upgraded, memory tier included", struck)
    assert job.condition("CheckpointsFit") == "True", job.said()

    before = {pod["metadata"]["name"] for pod in job.pods()}
    struck = faults.delete_pod(job).wait()
    stage.whole_again(job, struck)
    (new,) = {pod["metadata"]["name"] for pod in job.pods()} - before
    job.wait("the new worker reaches its holder by the socket", lambda: stage.socket_connections(new))
    stage.check(job, struck.row("pod deleted, local socket switched on"))

    node = faults.victim(job, stage.installed)
    struck = strike(job)
    stage.installed.kill_holder(node, "redis-1")
    job.wait("it is seen that a server is gone", lambda: len(job.status.assigned_servers) < 2 * nodes)
    job.wait("another is in its place", lambda: len(job.status.assigned_servers) == 2 * nodes)
    job.wait("every checkpoint is protected", job.is_protected)
    stage.check(job, stage.quiet_row("one of a node's two Redis killed", struck))
