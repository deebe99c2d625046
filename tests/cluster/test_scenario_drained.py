"""A node that is drained by the eviction API: whoever has no other place waits for one with its last step saved."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cluster.scenarios import faults
from cluster.scenarios.job import JOB_LABEL, Job
from cluster.scenarios.measuring import Struck, strike
from cluster.scenarios.rows import Row
from cluster.scenarios.shapes import ELASTIC, FIXED
from cluster.scenarios.stage import Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PATIENT = {"terminationGracePeriodSeconds": 30}
"""As pods have it that do not ask for less: a loaded machine needs more than two seconds for its last save."""


@contextmanager
def cordoned(stage: Stage, *nodes: str) -> Iterator[None]:
    """No new pod there until the block ends, drained or not."""
    try:
        for node in nodes:
            stage.kubectl("cordon", node)
        yield
    finally:
        for node in stage.installed.facts.node_names:
            stage.kubectl("uncordon", node)


def drain(stage: Stage, job: Job, node: str) -> Struck:
    """This job's pods; others there are none of this scenario's business."""
    struck = strike(job)
    stage.kubectl(
        "drain",
        node,
        "--ignore-daemonsets",
        "--delete-emptydir-data",
        "--timeout=60s",
        f"--pod-selector={JOB_LABEL}={job.uid}",
    )
    return struck


def waits_for_a_place(job: Job, struck: Struck) -> int:
    """The step at which it stands: the last that any rank made."""
    job.wait("it waits for a place", lambda: job.is_claimed() and "once enough workers run" in job.status.message)
    job.ledger.look()
    stood = max(line.step for line in job.ledger.lines[struck.epoch])
    assert f"training continues from step {stood} once" in job.status.message, job.said()
    return stood


def began_at(job: Job, stood: int, struck: Struck) -> None:
    """Nothing was lost, and no other incident than the planned one was noted."""
    parent = job.lineage()[-1].parent
    assert parent is not None
    assert parent.step == stood, job.said()
    noted = [i for i in job.incidents() if i.generation >= struck.epoch]
    assert {(i.kind, i.steps_lost) for i in noted} == {("planned", 0)}, noted


def test_a_drained_fixed_size_job_waits_for_a_place_and_loses_no_step(stage: Stage) -> None:
    job = stage.training("drained", FIXED, pod=PATIENT)
    node = faults.victim(job, stage.installed)
    spare = [name for name in stage.installed.facts.node_names if job.worker_on(name) is None]
    with cordoned(stage, *spare):
        struck = drain(stage, job, node)
        stood = waits_for_a_place(job, struck)
    row = Row(
        "node drained, fixed size, no place", worlds=[2, 0, 2], whole_again_seconds=stage.whole_again(job, struck)
    )
    began_at(job, stood, struck)
    row.steps_lost = 0
    stage.check(job, row)


@pytest.mark.nightly
def test_an_elastic_job_is_drained_to_its_minimum_and_below_and_loses_no_step(stage: Stage) -> None:
    """The shorter one of a fixed size drains once."""
    job = stage.training("drained", ELASTIC, pod=PATIENT)
    first = strike(job)
    with cordoned(stage):
        drain(stage, job, faults.victim(job, stage.installed))
        job.wait_training(2, 10)
        struck = drain(stage, job, faults.victim(job, stage.installed))
        stood = waits_for_a_place(job, struck)
    job.wait("a world goes on", lambda: job.epoch > struck.epoch)
    began_at(job, stood, struck)
    row = Row(
        "node drained, elastic, at its minimum", worlds=[3, 2, 0, 3], whole_again_seconds=stage.whole_again(job, first)
    )
    row.steps_lost = 0
    stage.check(job, row)


@pytest.mark.nightly
def test_every_node_is_drained_in_turn_and_no_step_is_lost(stage: Stage) -> None:
    """As an upgrade of the cluster does it: the last node's holder is the only one that has not been left yet.

    The shorter one of a fixed size drains one node.
    """
    job = stage.training("drained-in-turn", ELASTIC, pod=PATIENT)
    first = strike(job)
    for node in stage.installed.facts.node_names:
        with cordoned(stage):
            struck = drain(stage, job, node)
            job.wait("the others train on", lambda struck=struck: job.epoch > struck.epoch and job.trains(2))
        stage.whole_again(job, struck)
    noted = [i for i in job.incidents() if i.generation >= first.epoch]
    assert {(i.kind, i.steps_lost) for i in noted} == {("planned", 0)}, noted
    assert len(noted) >= len(stage.installed.facts.node_names)
    row = Row("every node drained in turn", worlds=[3, 2, 3, 2, 3, 2, 3], whole_again_seconds=time.time() - first.at)
    row.steps_lost = 0
    stage.check(job, row)
