"""The operator is killed, moved, or cut off from its API server: no healthy job feels it, and a recovery is taken up where it was."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from cluster.engine import Engine
from cluster.scenarios import faults
from cluster.scenarios.installed import answered, is_ready
from cluster.scenarios.measuring import strike
from cluster.scenarios.shapes import ELASTIC
from cluster.scenarios.stage import Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LEASE_SECONDS = 10.0
"""Another leads by then."""

AWAY_SECONDS = 60.0
"""Longer than the node controller's patience with a kubelet, 50 s."""


@pytest.mark.nightly
def test_a_killed_leader_disturbs_no_training(stage: Stage) -> None:
    job = stage.training("led", ELASTIC)
    struck = strike(job)
    stage.installed.kill_leader()
    stage.goes_on(job, LEASE_SECONDS)
    stage.wait_led(job)
    row = stage.quiet_row("leading operator killed while all is well", struck)
    stage.check(job, row)


def test_a_leader_killed_amid_a_recovery_leaves_it_to_the_next(stage: Stage) -> None:
    job = stage.training("led", ELASTIC)
    struck = faults.kill_trainer(job, stage.installed)
    job.wait("the new epoch is claimed", lambda: job.is_claimed() or job.epoch > struck.epoch)
    stage.installed.kill_leader()
    claimed = job.is_claimed()
    struck.wait()
    stage.whole_again(job, struck)
    row = struck.row("leading operator killed amid a recovery")
    row.notes["epoch was still claimed, not committed, when it was killed"] = claimed
    stage.wait_led(job)
    stage.check(job, row)


def test_the_leaders_own_node_crashes_and_another_takes_the_job_over(stage: Stage, engine_of: Engine) -> None:
    job = stage.training("led", ELASTIC)
    node = stage.installed.leading_node()
    struck = faults.on_node(job, lambda name: engine_of.crash(name, silently=True), node).wait()
    assert stage.installed.leading_node() != node
    job.wait_training(2, 10)
    engine_of.return_node(node)
    row = struck.row("node of the leading operator crashed")
    row.whole_again_seconds = stage.whole_again(job, struck)
    assert row.worlds[:2] == [3, 2]
    stage.check(job, row)


@pytest.mark.nightly
def test_an_api_server_that_was_away_for_a_minute_costs_no_worker(stage: Stage, engine_of: Engine) -> None:
    """It comes back to a node controller that has heard no kubelet for as long, and takes every node for not ready."""
    job = stage.training("away", ELASTIC)
    pods = sorted(pod["metadata"]["uid"] for pod in job.pods())
    engine_of.kill_daemon("kube-apiserver")
    steps, epoch = job.step, job.epoch
    stage.still(job, AWAY_SECONDS)
    engine_of.start_daemon("kube-apiserver")
    job.wait("no node is ready", lambda: answered(lambda: not any(map(is_ready, stage.installed.nodes()))), 30.0)
    job.wait("the status tells of newer steps", lambda: job.status.step > steps)
    assert job.epoch == epoch, job.said()
    struck = faults.kill_trainer(job, stage.installed)  # whoever is believed to be gone is replaced by the next epoch
    struck.wait()
    whole = stage.whole_again(job, struck)
    assert sorted(pod["metadata"]["uid"] for pod in job.pods()) == pods, job.said()
    row = struck.row("API server away for a minute, a trainer killed when it was back")
    row.whole_again_seconds = whole
    stage.wait_led(job)
    stage.check(job, row)


@pytest.mark.nightly
def test_a_node_that_dies_while_the_api_server_is_away_is_missed_once_it_is_back(
    stage: Stage, engine_of: Engine
) -> None:
    job = stage.training("away", ELASTIC)
    node = faults.victim(job, stage.installed)
    before = strike(job)
    engine_of.kill_daemon("kube-apiserver")
    stage.still(job, AWAY_SECONDS / 2)
    engine_of.crash(node, silently=True)
    time.sleep(AWAY_SECONDS / 2)  # nobody can be asked how it goes
    engine_of.start_daemon("kube-apiserver")
    job.wait("the API server answers", lambda: answered(lambda: bool(stage.installed.nodes())), 60.0)
    struck = replace(before, at=time.time()).wait()  # counted from its return
    job.wait_training(2, 10)
    engine_of.return_node(node)
    row = struck.row("node crashed while the API server was away for a minute, from its return")
    row.whole_again_seconds = stage.whole_again(job, struck)
    assert row.worlds[:2] == [3, 2]
    stage.check(job, row)
