"""A trainer or a pod is lost, its node is well."""

from __future__ import annotations

import pytest

from cluster.scenarios import faults
from cluster.scenarios.shapes import ELASTIC
from cluster.scenarios.stage import Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_killed_trainer_is_restarted_in_place(stage: Stage) -> None:
    job = stage.training("worn", ELASTIC)
    pods = {pod["metadata"]["uid"] for pod in job.pods()}
    struck = faults.kill_trainer(job, stage.installed).wait()
    job.wait_training(3)
    assert {pod["metadata"]["uid"] for pod in job.pods()} == pods
    row = stage.check(job, struck.row("trainer killed"))
    assert (row.kind, row.worlds[:2]) == ("trainer-failed", [3, 3])


def test_a_deleted_pod_is_replaced(stage: Stage) -> None:
    job = stage.training("worn", ELASTIC)
    pods = {pod["metadata"]["uid"] for pod in job.pods()}
    struck = faults.delete_pod(job).wait()
    whole = stage.whole_again(job, struck)
    assert len({pod["metadata"]["uid"] for pod in job.pods()} - pods) == 1
    row = struck.row("pod deleted")
    row.whole_again_seconds = whole
    stage.check(job, row)
