"""The chart goes back to what it was under a running job: operator and memory tier are replaced once more, the training feels nothing."""

from __future__ import annotations

import time

import pytest

from chart import helm
from cluster.scenarios.installed import answered
from cluster.scenarios.measuring import strike
from cluster.scenarios.shapes import ELASTIC
from cluster.scenarios.stage import Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MARK = "surefoot.test/round"


@pytest.mark.long
def test_upgraded_and_rolled_back_a_chart_disturbs_no_training(stage: Stage) -> None:
    """An upgrade alone is shorter, and `make test` has it."""
    job = stage.training("kept", ELASTIC)
    struck = strike(job)

    def marks() -> set[str | None]:
        found = [*stage.installed.pods("operator"), *stage.installed.pods("memory-tier")]
        return {pod["metadata"].get("annotations", {}).get(MARK) for pod in found}

    before, wanted = marks(), str(time.time_ns())
    mark = {"podAnnotations": {MARK: wanted}}
    stage.installed.up({"operator": mark, "memoryTier": mark})
    job.wait("every pod is of the new release", lambda: answered(lambda: marks() == {wanted}), 180.0)
    stage.installed.wait_ready()
    job.wait("every checkpoint is protected", job.is_protected)
    stage.installed.helm("rollback", helm.RELEASE)
    job.wait("every pod is of the old release again", lambda: answered(lambda: marks() == before), 180.0)
    stage.installed.wait_ready()
    job.wait("every checkpoint is protected", job.is_protected)
    stage.wait_led(job)
    job.wait_steps(10)
    row = stage.quiet_row("chart upgraded and rolled back, memory tier included", struck)
    row.notes["CheckpointProtected"] = stage.protected_since(job, struck.at)
    stage.check(job, row)
