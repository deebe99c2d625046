"""Every kind of fault that a soak draws from: each is done at once, and says at what and how it is mended."""

from __future__ import annotations

import random
from collections.abc import Callable

from cluster.engine import Engine
from cluster.scenarios import faults
from cluster.scenarios.job import JOB_LABEL, Job
from cluster.scenarios.stage import Stage

Mend = Callable[[], object]
Done = tuple[str, Mend | None]
"""What was struck, and how it is mended; None: nothing is to be mended."""
Fault = Callable[[Stage, Job, random.Random], Done]


def _member(job: Job, rng: random.Random) -> int:
    """A worker that trains."""
    world = job.status.membership
    assert world is not None
    return int(rng.choice(world.members).index)


def _node(job: Job, rng: random.Random) -> str:
    """A node that trains, the leader's or not."""
    world = job.status.membership
    assert world is not None
    return str(rng.choice(world.members).node)


def _trainer_dies(stage: Stage, job: Job, rng: random.Random) -> Done:
    index = _member(job, rng)
    faults.kill_trainer(job, stage.installed, index)
    return f"worker {index}", None


def _trainer_stops(stage: Stage, job: Job, rng: random.Random) -> Done:
    index = _member(job, rng)
    faults.stop_trainer(job, stage.installed, index)
    return f"worker {index}", None


def _agent_dies(stage: Stage, job: Job, rng: random.Random) -> Done:
    pod = str(job.pod_of(_member(job, rng))["metadata"]["name"])
    stage.engine.kill_container(job.space.name, pod, "trainer")
    return pod, None


def _pod_is_deleted(stage: Stage, job: Job, rng: random.Random) -> Done:
    index = _member(job, rng)
    faults.delete_pod(job, index)
    return f"worker {index}", None


def _node_is_drained(stage: Stage, job: Job, rng: random.Random) -> Done:
    node = _node(job, rng)
    stage.kubectl(
        "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=20s",
        f"--pod-selector={JOB_LABEL}={job.uid}",
    )  # fmt: skip
    return node, lambda: stage.kubectl("uncordon", node)


def _return(engine: Engine, node: str) -> None:
    engine.return_node(node)


def _on_node(hurt: Callable[[Engine, str], None], mend: Callable[[Engine, str], None]) -> Fault:
    def struck(stage: Stage, job: Job, rng: random.Random) -> Done:
        node = _node(job, rng)
        hurt(stage.engine, node)
        return node, lambda: mend(stage.engine, node)

    return struck


def _holder_dies(stage: Stage, job: Job, rng: random.Random) -> Done:
    node = _node(job, rng)
    stage.installed.wait_ready()  # a Redis that is not back yet cannot be killed
    stage.installed.kill_holder(node)
    return node, None


def _leader_dies(stage: Stage, job: Job, rng: random.Random) -> Done:
    stage.installed.leading_node()  # waits while nobody leads
    return stage.installed.kill_leader(), None


def _daemon_is_away(name: str) -> Fault:
    def away(stage: Stage, job: Job, rng: random.Random) -> Done:
        stage.engine.kill_daemon(name)
        return name, lambda: stage.engine.start_daemon(name)

    return away


def _job_is_scaled(stage: Stage, job: Job, rng: random.Random) -> Done:
    job.change({"replicas": 2})
    return "to 2 workers", lambda: job.change({"replicas": 3})


def _job_is_suspended(stage: Stage, job: Job, rng: random.Random) -> Done:
    job.change({"suspend": True})
    return "", lambda: job.change({"suspend": False})


FAULTS: dict[str, Fault] = {
    "trainer dies": _trainer_dies,
    "trainer stops": _trainer_stops,
    "agent dies": _agent_dies,
    "pod is deleted": _pod_is_deleted,
    "node is drained": _node_is_drained,
    "node loses power": _on_node(lambda engine, node: engine.crash(node, silently=True), _return),
    "node dies": _on_node(lambda engine, node: engine.crash(node), _return),
    "node is cut off": _on_node(lambda engine, node: engine.partition(node), lambda engine, node: engine.heal(node)),
    "node freezes": _on_node(lambda engine, node: engine.freeze(node), lambda engine, node: engine.thaw(node)),
    "kubelet stops": _on_node(lambda engine, node: engine.stop_kubelet(node), _return),
    "holder dies": _holder_dies,
    "leader dies": _leader_dies,
    "API server is away": _daemon_is_away("kube-apiserver"),
    "store is away": _daemon_is_away("s3"),
    "job is scaled": _job_is_scaled,
    "job is suspended": _job_is_suspended,
}
