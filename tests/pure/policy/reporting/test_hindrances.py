"""What keeps a pod from running, from real pods' statuses: said on the job in the system's own words, and told once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.builders import BEGAN, job
from surefoot_operator.api.status import JobStatus
from surefoot_operator.job_snapshot import CreateSeen, Observed, WorkerSeen
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.views import observations
from surefoot_operator.policy.core.actions import Plan
from surefoot_operator.policy.planning.plan import plan

NOW = BEGAN + 100
UNPLACED = (
    "0/3 nodes are available: 3 Insufficient cpu. no new claims to deallocate, preemption: 0/3 nodes are available"
)
PULL = 'failed to pull and unpack image "docker.io/my/training:1": failed to resolve reference: dial tcp: lookup failed'
QUOTA = 'pods "gpt-worker-0-{0}" is forbidden: exceeded quota: few, requested: pods=1, used: pods={0}, limited: pods=9'
ACCOUNT = 'pods "gpt-worker-0-1" is forbidden: error looking up service account default/nobody: not found'


def pod(index: int, state: dict[str, Any] | None = None, **status: Any) -> WorkerSeen:
    """As the API server shows it; its container is in `state`."""
    marks = {api_objects.WORKER_INDEX: str(index), api_objects.ATTEMPT: "1"}
    metadata = {"name": f"gpt-worker-{index}-1", "uid": f"u{index}", "labels": marks}
    containers = [] if state is None else [{"name": api_objects.TRAINER, "state": state}]
    body = {"phase": "Pending", "containerStatuses": containers, **status}
    spec = {"containers": []} if state is None else {"nodeName": f"n{index}", "containers": []}
    return replace(
        observations.observe_worker({"metadata": metadata, "spec": spec, "status": body}), created_seconds=NOW - 1
    )


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


def unplaced(message: str = UNPLACED, reason: str = "Unschedulable") -> WorkerSeen:
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    return pod(0, conditions=[condition])


def beginning(*workers: WorkerSeen, **known: Any) -> Observed:
    first = plan(Observed(now=NOW, term_seconds=NOW, job=job(2), status=JobStatus()))
    return Observed(now=NOW, term_seconds=NOW, job=job(2), status=first.status, workers=workers, **known)


def scheduled(made: Plan) -> tuple[str, str, str]:
    return next((c.status, c.reason, c.message) for c in made.status.conditions if c.type == "PodsScheduled")


def told(made: Plan) -> list[tuple[str, str]]:
    kinds = ("WorkerRefused", "WorkerUnschedulable", "WorkerNotStarted")
    return [(e.reason, e.message) for e in made.events if e.reason in kinds]


CREATING = pod(1, waiting("ContainerCreating"))


@pytest.mark.parametrize(
    ("worker", "truth", "reason", "words", "event"),
    [
        (unplaced(), "False", "Unschedulable", UNPLACED, "WorkerUnschedulable"),
        (pod(0, waiting("ErrImagePull", PULL)), "True", "ImagePullBackOff", PULL, "WorkerNotStarted"),
        (
            pod(0, waiting("ImagePullBackOff", f'Back-off pulling image "my/training:1": ErrImagePull: {PULL}')),
            "True",
            "ImagePullBackOff",
            PULL,
            "WorkerNotStarted",
        ),
        (
            pod(0, waiting("CreateContainerConfigError", 'secret "s3-account" not found')),
            "True",
            "CreateContainerConfigError",
            'secret "s3-account" not found',
            "WorkerNotStarted",
        ),
        (
            pod(0, waiting("CreateContainerConfigError", 'configmap "settings" not found')),
            "True",
            "CreateContainerConfigError",
            'configmap "settings" not found',
            "WorkerNotStarted",
        ),
        (
            pod(0, {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, phase="Failed"),
            "False",
            "OOMKilled",
            "worker 0 ended with exit code -9 before it could train: OOMKilled",
            None,
        ),
        (
            pod(0, {"terminated": {"exitCode": 1, "message": "x\nModuleNotFoundError: no surefoot"}}, phase="Failed"),
            "False",
            "Ended",
            "ModuleNotFoundError: no surefoot",
            None,
        ),
    ],
)
def test_the_jobs_own_status_says_what_its_pods_wait_for(
    worker: WorkerSeen, truth: str, reason: str, words: str, event: str | None
) -> None:
    made = plan(beginning(worker, CREATING))
    found = scheduled(made)
    assert found[:2] == (truth, reason)
    assert words in found[2]
    assert words in made.status.message
    assert told(made) == ([(event, found[2])] if event else [])
    assert told(plan(replace(beginning(worker, CREATING), status=made.status))) == []


@pytest.mark.parametrize("words", [QUOTA.format(1), ACCOUNT])
def test_a_refused_pod_is_said_in_the_servers_words(words: str) -> None:
    made = plan(beginning(creates=(CreateSeen(0, 1, False, words, until_seconds=NOW + 9),)))
    assert scheduled(made) == ("False", "Refused", f"0 of 2 workers have a node; worker 0 was refused: {words}")
    assert words in made.status.message
    assert told(made) == [("WorkerRefused", f"{scheduled(made)[2]}; the operator tries again")]


def test_one_cause_is_told_once_whatever_its_numbers_and_its_kubelets_turns() -> None:
    first = plan(beginning(creates=(CreateSeen(0, 1, False, QUOTA.format(1)),)))
    again = replace(beginning(creates=(CreateSeen(0, 1, False, QUOTA.format(2)),)), status=first.status)
    assert told(plan(again)) == []
    other = replace(beginning(creates=(CreateSeen(0, 1, False, ACCOUNT),)), status=first.status)
    assert len(told(plan(other))) == 1
    pulling = plan(beginning(pod(0, waiting("ErrImagePull", PULL)), CREATING))
    backing_off = beginning(pod(0, waiting("ImagePullBackOff", "Back-off pulling image")), CREATING)
    assert told(plan(replace(backing_off, status=pulling.status))) == []


def test_a_pod_whose_kubelet_says_nothing_is_pointed_at_after_a_while() -> None:
    """A secret or config map that is mounted and not there: the kubelet tells it in the pod's events alone."""
    early = beginning(CREATING, pod(0, waiting("ContainerCreating")))
    assert scheduled(plan(early))[1] == "Scheduled"
    workers = tuple(replace(worker, created_seconds=NOW - 61) for worker in early.workers)
    made = plan(replace(early, workers=workers))
    text = "worker 0 was not started on node n0 within 60 s; the events of pod gpt-worker-0-1 say why"
    assert scheduled(made) == ("True", "NotStarted", f"2 of 2 workers have a node; {text}")
    assert told(made) == [("WorkerNotStarted", f"2 of 2 workers have a node; {text}")]


def test_workers_that_run_are_in_nobodys_way() -> None:
    running = pod(0, {"running": {}}, phase="Running"), pod(1, {"running": {}}, phase="Running")
    made = plan(beginning(*running))
    assert scheduled(made) == ("True", "Scheduled", "2 of 2 workers have a node")
    assert told(made) == []
