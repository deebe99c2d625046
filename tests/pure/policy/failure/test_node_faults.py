"""What a node did to a program is not the program's, and what comes again without a step counts all the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.builders import BEGAN, job, running, with_session, with_worker
from support.fakes.fake_world import FakeWorld
from surefoot_operator.api.spec import RunPolicy, Template
from surefoot_operator.job_snapshot import ExitSeen, Observed
from surefoot_operator.policy.core.facts import gather
from surefoot_operator.policy.failure.failure_detection import Loss, detect_losses
from surefoot_operator.policy.planning.plan import plan

NOW = BEGAN + 100
KILLED = ExitSeen(1, 1, -9, "killed by the kernel's OOM killer: …", False, NOW - 0.1)


def lost(seen: Observed) -> Loss:
    return detect_losses(gather(seen)).losses[0]


@pytest.mark.parametrize(
    ("oom", "application", "unexplained"), [("", True, False), ("limit", True, False), ("node", False, True)]
)
def test_a_kill_counts_against_the_program_only_where_its_own_limit_was_reached(
    oom: str, application: bool, unexplained: bool
) -> None:
    seen = with_session(running(now=NOW), 1, exit=replace(KILLED, oom=oom))
    loss = lost(seen)
    assert (loss.application, loss.unexplained, loss.worker, loss.node) == (application, unexplained, 1, "n1")
    assert plan(seen).status.restarts_counted == int(application)


def test_a_limit_of_the_whole_pod_looks_like_the_node_s_memory_and_blames_no_node() -> None:
    seen = running(now=NOW)
    raw = {"spec": {"resources": {"limits": {"memory": "64Gi"}}}}
    seen = replace(seen, job=replace(seen.job, spec=replace(seen.job.spec, template=Template(("python",), raw=raw))))
    loss = lost(with_session(seen, 1, exit=replace(KILLED, oom="node")))
    assert (loss.application, loss.unexplained, loss.node) == (False, True, None)


def test_a_container_that_is_killed_whole_is_told_as_out_of_memory() -> None:
    """As a kubelet does it on cgroup v2: agent and trainers end together, and nobody is left to say why."""
    seen = with_worker(running(now=NOW), 1, phase="Failed", exit_code=-9, message="OOMKilled", out_of_memory=True)
    loss = lost(seen)
    assert (loss.kind, loss.application, loss.unexplained) == ("agent-lost", False, True)
    assert "OOM killer ended the container of worker 1 (OOMKilled)" in loss.reason
    assert "resources.limits.memory" in loss.reason
    other = lost(with_worker(running(now=NOW), 1, phase="Failed", exit_code=-9, message="Error"))
    assert not other.unexplained


def struck(oom: str, limit: int) -> FakeWorld:
    """Rank 1 is killed at step 35 of each epoch, until the job ends or a tenth restart."""
    world = FakeWorld(job(3, 1, run_policy=RunPolicy(backoff_limit=limit)))
    world.settle()
    for _ in range(1500):
        world.run(0.1)
        here = [w.agent for w in world.workers.values() if w.agent is not None]
        now = world.status.world
        for agent in here:
            at = now is not None and agent.seen.epoch == now.epoch and agent.seen.progress.step >= 35
            if at and agent.seen.index == 1 and agent.seen.exit is None:
                gone = replace(KILLED, epoch=agent.seen.epoch, at_seconds=world.now, oom=oom)
                agent.seen = replace(agent.seen, exit=gone)
        if world.status.phase == "Failed" or world.status.restarts >= 10:
            return world
    raise AssertionError(f"{world.status.restarts} restarts, and no end")


def test_kills_by_the_node_use_up_no_budget_of_the_program_but_end_a_job_that_makes_no_step() -> None:
    world = struck("node", limit=0)
    assert world.status.restarts_counted == 0, "backoffLimit is for what the program does"
    assert world.status.phase == "Failed"
    assert "used up maxNoProgressRestarts" in world.status.message


def test_kills_by_the_program_s_own_limit_use_up_its_budget() -> None:
    assert "used up backoffLimit (0)" in struck("limit", limit=0).status.message
