"""The chart goes back to what it was under a running job: operator and memory tier are replaced once more, the training feels nothing."""

from __future__ import annotations

import time

import pytest

from chart import helm
from cluster.scenarios.installed import ROUND
from cluster.scenarios.measuring import strike
from cluster.scenarios.shapes import ELASTIC
from cluster.scenarios.stage import Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.nightly
def test_upgraded_and_rolled_back_a_chart_disturbs_no_training(stage: Stage) -> None:
    """An upgrade alone is shorter, and `make test` has it."""
    job = stage.training("kept", ELASTIC, pace=0.3)  # it is to outlast both releases on a busy machine too
    struck, before, wanted = strike(job), stage.installed.rounds(), str(time.time_ns())
    mark = {"podAnnotations": {ROUND: wanted}}
    stage.installed.up({"operator": mark, "memoryTier": mark})
    stage.wait_release(job, {wanted})
    stage.installed.helm("rollback", helm.RELEASE)
    stage.wait_release(job, before)
    stage.check_quiet(job, "chart upgraded and rolled back, memory tier included", struck)
