"""The tiers fail: a holder, every copy in memory, memory and S3 together. Training goes on, or goes back to what S3 has."""

from __future__ import annotations

import pytest

from cluster.engine import Engine
from cluster.scenarios import faults
from cluster.scenarios.measuring import strike
from cluster.scenarios.shapes import ELASTIC
from cluster.scenarios.stage import Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

AWAY_SECONDS = 10.0


def test_a_killed_redis_disturbs_no_training_and_its_copies_come_back(stage: Stage) -> None:
    job = stage.training("kept", ELASTIC)
    node = faults.victim(job, stage.installed)
    struck = strike(job)
    stage.installed.kill_holder(node)
    job.wait("it is seen that a copy is missing", lambda: "False" in stage.protected_since(job, struck.at))
    job.wait("every checkpoint is protected again", lambda: stage.protected_since(job, struck.at)[-1:] == ["True"])
    row = stage.quiet_row("a Redis killed", struck)
    row.notes["CheckpointProtected"] = stage.protected_since(job, struck.at)
    row.notes["protected again after seconds"] = round(stage.protected_again(job, struck.at), 2)
    stage.check(job, row)


def test_when_every_copy_in_memory_is_lost_s3_has_one(stage: Stage) -> None:
    job = stage.training("kept", ELASTIC)
    job.wait("a checkpoint is in S3", lambda: job.status.last_uploaded is not None)
    stage.installed.wait_ready()  # a Redis that was killed before runs again: one that does not cannot be killed
    struck = faults.kill_all_copies(job, stage.installed).wait()
    row = struck.row("every copy in memory lost")
    row.whole_again_seconds = stage.whole_again(job, struck)
    stage.installed.wait_ready()
    assert row.restored_from == "persistent", row
    stage.check(job, row)


def test_memory_and_s3_away_together_hold_no_training_up(stage: Stage, engine_of: Engine) -> None:
    job = stage.training("kept", ELASTIC)
    struck = strike(job)
    engine_of.kill_daemon("s3")
    stage.installed.take_memory_away()
    try:
        job.wait("nothing is protected any more", lambda: "False" in stage.protected_since(job, struck.at))
        stage.goes_on(job, AWAY_SECONDS)
    finally:
        stage.installed.bring_memory_back()
    engine_of.start_daemon("s3")
    job.wait("every checkpoint is protected again", lambda: stage.protected_since(job, struck.at)[-1:] == ["True"])
    floor = job.status.last_uploaded
    job.wait("checkpoints reach S3 again", lambda: job.status.last_uploaded != floor)
    row = stage.quiet_row("Redis and S3 both away", struck)
    row.notes["CheckpointProtected"] = stage.protected_since(job, struck.at)
    stage.check(job, row)
