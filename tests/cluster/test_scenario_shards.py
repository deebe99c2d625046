"""Jobs are spread over shards while they train, replicas are killed, and the shards are one again: nobody loses a step.

Three trainings at once: part of `make test-nightly`. That shards come, are killed and go is test_controller's in `make test`.
"""

from __future__ import annotations

import time

import pytest

from cluster.scenarios.installed import NAMESPACE, ROUND, answered
from cluster.scenarios.measuring import strike
from cluster.scenarios.shapes import FIXED
from cluster.scenarios.stage import Stage
from surefoot_operator.controller.leader.election_rules import shard_of

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]

SHARDS = 3
MOVED_SECONDS = 30.0
"""A killed container's shards are led again by then, by whomever, and spread evenly some seconds later."""


def spread(stage: Stage, shards: int, mark: str) -> bool:
    """Only pods of this round run, every shard is led, and both lead some."""
    led = stage.installed.leaders(shards)
    rounds = {pod["metadata"].get("annotations", {}).get(ROUND) for pod in stage.installed.pods("operator")}
    return rounds == {mark} and all(led) and len(set(led)) == min(shards, 2)


def test_shards_that_come_are_killed_and_go_disturb_no_training(stage: Stage) -> None:
    jobs = [stage.training(f"shard{n}", FIXED) for n in range(SHARDS)]
    struck, first = [strike(job) for job in jobs], str(time.time_ns())
    pods = {pod["metadata"]["uid"] for job in jobs for pod in job.pods()}
    stage.installed.up({"operator": {"shards": SHARDS, "podAnnotations": {ROUND: first}}})
    jobs[0].wait("every shard is led", lambda: answered(lambda: spread(stage, SHARDS, first)), 120.0)
    for job, at in zip(jobs, struck, strict=True):
        step = job.step
        job.wait("its agents have found the leader of its shard", lambda job=job, step=step: job.status.step > step)
        stage.check_quiet(job, "one shard became three", at)

    led, terms = stage.installed.leaders(SHARDS), stage.installed.terms(SHARDS)
    dead = led[shard_of(jobs[0].uid, SHARDS)]
    others = [shard for shard in range(SHARDS) if led[shard] != dead]
    struck = [strike(job) for job in jobs]
    stage.installed.engine.kill_container(NAMESPACE, dead)
    for job in jobs:
        stage.goes_on(job, MOVED_SECONDS / SHARDS)
    jobs[0].wait("every shard is led", lambda: answered(lambda: spread(stage, SHARDS, first)), 120.0)
    after = stage.installed.terms(SHARDS)
    assert sum(after[shard] != terms[shard] for shard in others) <= 1, "one may be handed to who came back"
    for job, at in zip(jobs, struck, strict=True):
        stage.check_quiet(job, "replica killed that leads one of three shards", at)

    struck, last = [strike(job) for job in jobs], str(time.time_ns())
    stage.installed.up({"operator": {"podAnnotations": {ROUND: last}}})
    jobs[0].wait("one leads again", lambda: answered(lambda: spread(stage, 1, last)), 120.0)
    for job, at in zip(jobs, struck, strict=True):
        stage.check_quiet(job, "three shards became one", at)
    assert {pod["metadata"]["uid"] for job in jobs for pod in job.pods()} == pods
