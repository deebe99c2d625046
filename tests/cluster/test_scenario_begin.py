"""The chart is installed, a job applied and complete: what every other scenario is held against."""

from __future__ import annotations

import pytest

from cluster.scenarios.rows import Row
from cluster.scenarios.shapes import ELASTIC
from cluster.scenarios.stage import REFERENCE_PACE, Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_installed_applied_and_complete(stage: Stage) -> None:
    job = stage.job("undisturbed", ELASTIC, pace=REFERENCE_PACE, trace=True)
    job.wait("the first step", lambda: job.step > 0, 120.0)
    job.wait("the job is complete", lambda: job.status.phase == "Complete", 240.0)
    stage.adopt(job)
    first = job.ledger.first_step_at(1, job.lineage()[0].world_size)
    assert first is not None
    row = Row("installed, applied, complete", first_step_seconds=first - job.began)
    row.worlds = [entry.world_size for entry in job.lineage()]
    row.notes["steps"] = job.status.step
    stage.write(job, row)
