"""A job of fixed size: the world waits for a replacement, which a spare node runs."""

from __future__ import annotations

import pytest

from cluster.engine import Engine
from cluster.scenarios import faults
from cluster.scenarios.shapes import FIXED
from cluster.scenarios.stage import Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_crashed_node_of_a_fixed_size_job_is_replaced_by_a_spare_one(stage: Stage, engine_of: Engine) -> None:
    job = stage.training("fixed", FIXED)
    node = faults.victim(job, stage.installed)
    struck = faults.on_node(job, lambda name: engine_of.crash(name, silently=True), node).wait()
    job.wait_training(2, 10)
    assert job.worker_on(node) is None
    row = struck.row("node crashed, fixed size, a spare node")
    engine_of.return_node(node)
    job.wait_steps(10)
    assert row.worlds == [2, 2]
    stage.check(job, row)
