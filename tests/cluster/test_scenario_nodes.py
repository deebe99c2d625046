"""A node is lost, cut off or stands still; there is no spare one: the world shrinks, and grows when the node returns."""

from __future__ import annotations

import pytest

from cluster.engine import Engine
from cluster.scenarios import faults
from cluster.scenarios.shapes import ELASTIC
from cluster.scenarios.stage import Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

QUIET_SECONDS = 30.0
"""Longer than the operator waits for a kubelet that renews its lease no more."""


def test_a_crashed_node_without_a_spare_shrinks_the_world_until_it_returns(stage: Stage, engine_of: Engine) -> None:
    job = stage.training("hurt", ELASTIC)
    node = faults.victim(job, stage.installed)
    struck = faults.on_node(job, lambda name: engine_of.crash(name, silently=True), node).wait()
    job.wait_training(2, 20)
    assert job.worker_on(node) is None
    engine_of.return_node(node)
    row = struck.row("node crashed, no spare")
    row.whole_again_seconds = stage.whole_again(job, struck)
    row.notes["node returned and grown"] = True
    stage.check(job, row)
    assert row.worlds[:2] == [3, 2]


def test_a_partitioned_node_is_replaced_at_once_and_its_old_world_has_no_effect(
    stage: Stage, engine_of: Engine
) -> None:
    job = stage.training("hurt", ELASTIC)
    node = faults.victim(job, stage.installed)
    old, index = job.epoch, job.worker_on(node)
    struck = faults.on_node(job, engine_of.partition, node).wait()
    job.wait_training(2, 20)
    engine_of.heal(node)
    row = struck.row("node partitioned, its trainers run on")
    row.whole_again_seconds = stage.whole_again(job, struck)
    assert row.worlds[:2] == [3, 2]
    # healed: what ran there has ended, and nobody else made a step in its place
    assert f"{job.asked.name}-worker-{index}" in {p["metadata"]["name"].rpartition("-")[0] for p in job.pods()}
    row.notes["steps of the old world after the new one began"] = stage.late_steps(job, old)
    stage.check(job, row)


def test_a_frozen_node_is_given_up_and_its_thawed_trainers_have_no_effect(stage: Stage, engine_of: Engine) -> None:
    job = stage.training("hurt", ELASTIC)
    node = faults.victim(job, stage.installed)
    old = job.epoch
    struck = faults.on_node(job, engine_of.freeze, node).wait()
    job.wait_training(2, 20)
    engine_of.thaw(node)
    row = struck.row("node frozen and thawed")
    row.whole_again_seconds = stage.whole_again(job, struck)
    assert row.worlds[:2] == [3, 2]
    row.notes["steps of the old world after the new one began"] = stage.late_steps(job, old)
    stage.check(job, row)


def test_a_stopped_kubelet_disturbs_no_training(stage: Stage, engine_of: Engine) -> None:
    job = stage.training("hurt", ELASTIC)
    node = faults.victim(job, stage.installed)
    epoch = job.epoch
    struck = faults.on_node(job, engine_of.stop_kubelet, node)
    stage.goes_on(job, QUIET_SECONDS)
    engine_of.return_node(node)
    job.wait_steps(10)
    assert job.epoch == epoch
    stage.check(job, stage.quiet_row("kubelet stopped", struck))
