"""Two jobs side by side: neither reaches the other's checkpoints. Strangers reach neither."""

from __future__ import annotations

import pytest

from cluster.scenarios import strangers, tiers
from cluster.scenarios.rows import Row
from cluster.scenarios.shapes import FIXED
from cluster.scenarios.stage import Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_of_two_jobs_neither_reaches_the_others_checkpoints(stage: Stage) -> None:
    stage.undisturbed(FIXED)
    mine, theirs = stage.job("side", FIXED, pace=0.02), stage.job("side", FIXED, pace=0.02)
    for job in (mine, theirs):
        job.wait("it trains and is protected", lambda j=job: j.trains(2) and j.is_protected(), 120.0)  # type: ignore[misc]
    tried = {
        "own": tiers.tried_as(mine, stage.installed, mine.uid),
        "other": tiers.tried_as(mine, stage.installed, theirs.uid),
    }
    assert set(tried["own"].values()) == {"done"}, tried
    assert all("NOPERM" in said or "permission" in said for said in tried["other"].values()), tried
    refused = {
        "a forged token": strangers.said_by(
            stage.installed, strangers.with_forged_token(strangers.impostor(mine, stage.space.name, "forger"))
        ),
        "another pod's token": strangers.said_by(
            stage.installed, strangers.impostor(mine, stage.space.name, "impostor")
        ),
    }
    row = Row("two jobs side by side, and a stranger", worlds=[2, 2], notes={"tried": tried, "stranger": refused})
    for job in (mine, theirs):
        job.finish()
        assert job.incidents() == [], job.said()
        stage.write(job, row)
