"""`python -m cluster.scenarios.demo`: a job on a real cluster loses a node and gets it back, told as it happens.

The same scenario as in the tests, with a clock beside every line.
"""

from __future__ import annotations

import sys
import time

from cluster import engines
from cluster.scenarios import faults
from cluster.scenarios.job import Job
from cluster.scenarios.shapes import ELASTIC
from cluster.scenarios.stage import Stage

STEPS = 40


class Told:
    """Lines with the seconds since the demo began."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:7.1f} s  {text}", flush=True)


def main() -> int:
    tell = Told()
    engine = engines.choose()
    tell(f"the cluster: {', '.join(engine.facts().node_names)}")
    stage = Stage(engine)
    tell("helm upgrade --install surefoot charts/surefoot")
    stage.open()
    try:
        tell(f"an operator leads on {stage.installed.leading_node()}; every node has a Redis")
        tell("kubectl apply: a job of 3 workers, elastic from 2 to 3, for comparison; nobody will hurt it")
        straight = stage.undisturbed(ELASTIC)
        tell(f"it is complete after step {straight.status.step}")
        tell("kubectl apply: the same job again")
        job = stage.training("demo", ELASTIC)
        tell(f"it trains on {_nodes(job)}, step {job.step}")
        _hurt(stage, job, tell)
        found = stage.finish(job)
        tell(f"the job is complete: {found.steps} steps")
        tell(f"samples lost {found.samples_lost}, repeated {found.samples_repeated}")
        tell(f"largest loss difference to the undisturbed job {found.max_loss_difference:.1e}")
        tell(f"largest parameter difference {found.max_parameter_difference:.1e}")
    finally:
        stage.make_well()
        stage.close()
    return 0


def _hurt(stage: Stage, job: Job, tell: Told) -> None:
    job.wait_steps(STEPS)
    node = faults.victim(job, stage.installed)
    tell(f"step {job.step}: {node} loses power")
    struck = faults.on_node(job, lambda name: stage.engine.crash(name, silently=True), node).wait()
    row = struck.row("demo")
    for seconds, what in (
        (row.detected_seconds, "noticed"),
        (row.decided_seconds, "new generation claimed"),
        (row.pods_asked_seconds, "a replacement asked for"),
        (row.committed_seconds, f"new world of {row.worlds[1]} committed"),
        (row.first_step_seconds, f"its first step; {row.steps_lost} steps lost, restored from {row.restored_from}"),
    ):
        if seconds is not None:
            tell(f"  {seconds:6.2f} s after it: {what}")
    job.wait_steps(STEPS)
    tell(f"step {job.step}: it trains on {_nodes(job)}; {node} returns")
    stage.engine.return_node(node)
    stage.whole_again(job, struck)
    tell(f"step {job.step}: the world has 3 ranks again, on {_nodes(job)}")
    job.wait_steps(STEPS)


def _nodes(job: Job) -> str:
    world = job.status.membership
    return ", ".join(member.node for member in world.members) if world is not None else "nothing"


if __name__ == "__main__":
    sys.exit(main())
