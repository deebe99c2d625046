"""A node that others want left: the job moves to a spare one in order, and loses nothing."""

from __future__ import annotations

import pytest

from cluster.scenarios import faults
from cluster.scenarios.measuring import strike
from cluster.scenarios.rows import Row
from cluster.scenarios.shapes import FIXED
from cluster.scenarios.stage import Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SIGNAL = "cloud.google.com/active-node-maintenance"


def test_a_node_under_maintenance_is_left_without_a_lost_step(stage: Stage) -> None:
    job = stage.training("fixed", FIXED)
    node = faults.victim(job, stage.installed)
    struck = strike(job)
    path = f"/api/v1/nodes/{node}"
    job.api.merge(path, {"metadata": {"labels": {SIGNAL: "ONGOING"}}})
    try:
        job.wait("the node is left", lambda: job.trains(2) and job.worker_on(node) is None)
    finally:
        job.api.merge(path, {"metadata": {"labels": {SIGNAL: None}}})
    job.wait_training(2, 10)
    planned = [i for i in job.incidents() if i.generation >= struck.epoch]
    assert [i.kind for i in planned] == ["planned"], planned
    assert f"is moved off node {node} (it has the label {SIGNAL}=ONGOING)" in planned[0].reason
    row = Row("node to be left", worlds=[2, 2], whole_again_seconds=stage.whole_again(job, struck))
    row.steps_lost = planned[0].steps_lost
    assert row.steps_lost == 0, planned
    stage.check(job, row)
