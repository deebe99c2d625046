"""A job of fixed size with a spare loses a node: the spare takes that rank at once, and a new one comes behind it."""

from __future__ import annotations

import pytest

from cluster.engine import Engine
from cluster.scenarios import faults
from cluster.scenarios.shapes import FIXED
from cluster.scenarios.stage import Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_spare_takes_the_rank_of_a_crashed_node_and_the_node_brings_the_next_one(
    stage: Stage, engine_of: Engine
) -> None:
    job = stage.training("spared", FIXED, spec={"spares": 1})
    job.wait("the spare is warm", lambda: job.condition("SparesReady") == "True", 120.0)
    world = job.status.membership
    assert world is not None
    node = faults.victim(job, stage.installed)
    kept = {member.node: member for member in world.members if member.node != node}
    struck = faults.on_node(job, lambda name: engine_of.crash(name, silently=True), node).wait()
    job.wait_training(FIXED.workers, 20)
    row = struck.row("node crashed, a spare takes its rank")
    row.whole_again_seconds = stage.whole_again(job, struck)
    after = job.status.membership
    assert after is not None
    assert row.worlds[:2] == [FIXED.workers, FIXED.workers], "it waited for nobody"
    assert {member.node: member for member in after.members if member.node in kept} == kept, "the others stay"
    engine_of.return_node(node)
    job.wait("the next spare is warm", lambda: job.condition("SparesReady") == "True", 120.0)
    stage.check(job, row)
