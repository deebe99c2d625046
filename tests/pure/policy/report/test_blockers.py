"""Tests of `policy.report.blockers`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.builders import BEGAN, job, running
from surefoot_operator.api.status import JobStatus, condition_of
from surefoot_operator.job_snapshot import JobSnapshot, ObservedWorker, PendingCreate
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.views import observations
from surefoot_operator.policy.core.actions import Plan
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.report.blockers import (
    REPEAT_SECONDS,
    UNCONNECTED_SECONDS,
    rejected_call_events,
    status_without_plan,
)
from surefoot_operator.rejected_calls import ApiCall, RejectedCall

# ---- hindrances ------------------------------------------------------------------------------------------------------
# What keeps a pod from running, from real pods' statuses: said on the job in the system's own words, and told once.

NOW = BEGAN + 100
UNPLACED = (
    "0/3 nodes are available: 3 Insufficient cpu. no new claims to deallocate, preemption: 0/3 nodes are available"
)
PULL = 'failed to pull and unpack image "docker.io/my/training:1": failed to resolve reference: dial tcp: lookup failed'
QUOTA = 'pods "gpt-worker-0-{0}" is forbidden: exceeded quota: few, requested: pods=1, used: pods={0}, limited: pods=9'
ACCOUNT = 'pods "gpt-worker-0-1" is forbidden: error looking up service account default/nobody: not found'


def pod(index: int, state: dict[str, Any] | None = None, **status: Any) -> ObservedWorker:
    """As the API server shows it; its container is in `state`."""
    marks = {api_objects.WORKER_INDEX_LABEL: str(index), api_objects.ATTEMPT_LABEL: "1"}
    metadata = {"name": f"gpt-worker-{index}-1", "uid": f"u{index}", "labels": marks}
    containers = [] if state is None else [{"name": api_objects.TRAINER_CONTAINER, "state": state}]
    body = {"phase": "Pending", "containerStatuses": containers, **status}
    spec = {"containers": []} if state is None else {"nodeName": f"n{index}", "containers": []}
    return replace(
        observations.observe_worker({"metadata": metadata, "spec": spec, "status": body}), created_seconds=NOW - 1
    )


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


def unplaced(message: str = UNPLACED, reason: str = "Unschedulable") -> ObservedWorker:
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    return pod(0, conditions=[condition])


def beginning(*workers: ObservedWorker, **known: Any) -> JobSnapshot:
    first = plan(JobSnapshot(now_seconds=NOW, term_seconds=NOW, job=job(2), status=JobStatus()))
    return JobSnapshot(now_seconds=NOW, term_seconds=NOW, job=job(2), status=first.status, workers=workers, **known)


def scheduled(made: Plan) -> tuple[str, str, str]:
    return next((c.status, c.reason, c.message) for c in made.status.conditions if c.type == "PodsScheduled")


def told(made: Plan) -> list[tuple[str, str]]:
    kinds = ("WorkerCreationFailed", "WorkerUnschedulable", "WorkerStartFailed")
    return [(e.reason, e.message) for e in made.events if e.reason in kinds]


CREATING = pod(1, waiting("ContainerCreating"))


@pytest.mark.parametrize(
    ("worker", "truth", "reason", "words", "event"),
    [
        (unplaced(), "False", "Unschedulable", UNPLACED, "WorkerUnschedulable"),
        (pod(0, waiting("ErrImagePull", PULL)), "True", "ImagePullBackOff", PULL, "WorkerStartFailed"),
        (
            pod(0, waiting("ImagePullBackOff", f'Back-off pulling image "my/training:1": ErrImagePull: {PULL}')),
            "True",
            "ImagePullBackOff",
            PULL,
            "WorkerStartFailed",
        ),
        (
            pod(0, waiting("CreateContainerConfigError", 'secret "s3-account" not found')),
            "True",
            "CreateContainerConfigError",
            'secret "s3-account" not found',
            "WorkerStartFailed",
        ),
        (
            pod(0, waiting("CreateContainerConfigError", 'configmap "settings" not found')),
            "True",
            "CreateContainerConfigError",
            'configmap "settings" not found',
            "WorkerStartFailed",
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
            "ExitedEarly",
            "ModuleNotFoundError: no surefoot",
            None,
        ),
    ],
)
def test_the_jobs_own_status_says_what_its_pods_wait_for(
    worker: ObservedWorker, truth: str, reason: str, words: str, event: str | None
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
    made = plan(beginning(creates=(PendingCreate(0, 1, False, words, until_seconds=NOW + 9),)))
    assert scheduled(made) == (
        "False",
        "CreationRejected",
        f"0 of 2 workers have a node; worker 0 was rejected: {words}",
    )
    assert words in made.status.message
    assert told(made) == [("WorkerCreationFailed", f"{scheduled(made)[2]}; the operator tries again")]


def test_one_cause_is_told_once_whatever_its_numbers_and_its_kubelets_turns() -> None:
    first = plan(beginning(creates=(PendingCreate(0, 1, False, QUOTA.format(1)),)))
    again = replace(beginning(creates=(PendingCreate(0, 1, False, QUOTA.format(2)),)), status=first.status)
    assert told(plan(again)) == []
    other = replace(beginning(creates=(PendingCreate(0, 1, False, ACCOUNT),)), status=first.status)
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
    text = "worker 0 was not started on node n0 within 60 s; read the events of pod gpt-worker-0-1 for the cause"
    assert scheduled(made) == ("True", "ContainersNotStarted", f"2 of 2 workers have a node; {text}")
    assert told(made) == [("WorkerStartFailed", f"2 of 2 workers have a node; {text}")]


def test_workers_that_run_are_in_nobodys_way() -> None:
    running = pod(0, {"running": {}}, phase="Running"), pod(1, {"running": {}}, phase="Running")
    made = plan(beginning(*running))
    assert scheduled(made) == ("True", "Scheduled", "2 of 2 workers have a node")
    assert told(made) == []


# ---- unheard ---------------------------------------------------------------------------------------------------------
# A leader that has heard nothing of a world's workers does not say what they do.

TERM = BEGAN + 1000


def taken_over(after: float = 1.0, heard: int = 0) -> JobSnapshot:
    """Another leader has begun so long ago; of three workers that train so many came to it."""
    seen = running()
    status = replace(plan(seen).status, phase="Running", step=668)
    sessions = tuple(
        replace(one, last_message_seconds=TERM + after, step_at_seconds=TERM + after) for one in seen.sessions[:heard]
    )
    return replace(seen, now_seconds=TERM + after, term_seconds=TERM, status=status, sessions=sessions)


def told_unheard(status: JobStatus) -> str:
    found = condition_of(status, "AgentsConnected")
    return "" if found is None else f"{found.status}: {found.message}"


def test_what_is_not_known_is_not_called_starting() -> None:
    made = plan(taken_over())
    assert made.status.phase == "Running"
    assert made.status.message == (
        "workers 0, 1, 2 have not connected to this operator since it began to lead; the last known step is 668"
    )
    assert told_unheard(made.status) == ""
    assert made.wake_after_seconds is not None
    assert made.wake_after_seconds <= UNCONNECTED_SECONDS


def test_a_worker_that_does_not_come_is_an_event_once() -> None:
    made = plan(taken_over(UNCONNECTED_SECONDS, heard=1))
    assert told_unheard(made.status).startswith(
        "False: workers 1, 2 have not connected to this operator since it began to lead"
    )
    (event,) = [e for e in made.events if e.reason == "AgentsNotConnected"]
    assert event.warning
    assert "surefoot doctor --network" in event.message
    assert "delete their pods" in event.message
    again = replace(taken_over(UNCONNECTED_SECONDS + 5, heard=1), status=made.status)
    assert plan(again).status.phase == "Running"
    assert [e for e in plan(again).events if e.reason == "AgentsNotConnected"] == []
    assert told_unheard(plan(again).status) == told_unheard(made.status)
    next_leader = replace(again, term_seconds=again.now_seconds - 1)
    assert told_unheard(plan(next_leader).status) == told_unheard(made.status)  # it waits before it says anything else
    whole = replace(again, sessions=taken_over(UNCONNECTED_SECONDS + 5, heard=3).sessions)
    assert told_unheard(plan(whole).status) == "True: every worker that trains has connected"


def test_nobody_is_missing_where_all_came_or_their_pods_do_not_run() -> None:
    late = taken_over(UNCONNECTED_SECONDS, heard=3)
    assert told_unheard(plan(late).status) == ""
    pending = replace(taken_over(UNCONNECTED_SECONDS), workers=tuple(replace(w, phase="Pending") for w in late.workers))
    assert told_unheard(plan(pending).status) == ""


@pytest.mark.parametrize("phase", ["Complete", "Failed"])
def test_an_ended_jobs_workers_have_left(phase: str) -> None:
    seen = taken_over(UNCONNECTED_SECONDS)
    ended = replace(seen, status=replace(seen.status, phase=phase, completion_seconds=TERM))  # type: ignore[arg-type]
    assert told_unheard(plan(ended).status) == ""


# ---- refused calls told ----------------------------------------------------------------------------------------------
# What people read on a job whose calls the API server refuses.


def refused(number: int = 0, sentence: str = "failed quota") -> RejectedCall:
    return RejectedCall(
        ApiCall("create", "pods", "team", f"p{number}", "u"), "quota", sentence, "403 Forbidden", 0, 20, 5
    )


def test_a_refusal_is_a_condition_that_turns_true_again_and_is_not_there_before() -> None:
    seen = running()
    assert condition_of(plan(seen).status, "ApiAccepted") is None
    told = plan(replace(seen, rejected_calls=(refused(),))).status
    found = condition_of(told, "ApiAccepted")
    assert found is not None
    assert (found.status, found.reason) == ("False", "Rejected")
    assert found.message == "failed quota (403 Forbidden: create pods team/p0)"
    again = plan(
        replace(
            seen,
            status=told,
            now_seconds=seen.now_seconds + 1,
            rejected_calls=(replace(refused(), count=6, last_seconds=30),),
        )
    )
    assert condition_of(again.status, "ApiAccepted") == found  # no write for a count
    over = condition_of(plan(replace(seen, status=told)).status, "ApiAccepted")
    assert over is not None
    assert (over.status, over.reason) == ("True", "Accepted")


def test_many_refusals_are_three_and_a_number() -> None:
    told = plan(replace(running(), rejected_calls=tuple(refused(n) for n in range(50)))).status
    found = condition_of(told, "ApiAccepted")
    assert found is not None
    assert found.message.endswith("; and 47 more")


def test_an_event_is_recorded_when_a_refusal_begins_and_seldom_after() -> None:
    first = rejected_call_events((refused(),), {}, 0.0)
    (event,) = first.events
    assert event.warning
    assert event.reason == "ApiCallRejected"
    assert event.message == "failed quota (403 Forbidden: create pods team/p0); the operator retries this call"
    later = rejected_call_events((refused(), refused(1)), first.reported_seconds, 1.0)
    assert [e.message for e in later.events] == [
        "failed quota (403 Forbidden: create pods team/p1); the operator retries this call"
    ]
    assert rejected_call_events((refused(),), later.reported_seconds, REPEAT_SECONDS - 1).events == ()
    assert len(rejected_call_events((refused(),), later.reported_seconds, REPEAT_SECONDS).events) == 1
    assert (
        rejected_call_events((), later.reported_seconds, 2.0).reported_seconds == {}
    )  # over: its next beginning is news


def test_a_job_without_a_plan_says_why_and_keeps_all_else() -> None:
    status = running().status
    told = status_without_plan(status, (refused(),), 7.0)
    assert (
        told.message
        == "failed quota (403 Forbidden: create pods team/p0); until the API server accepts it, Surefoot plans nothing for this job"
    )
    assert (told.phase, told.membership, told.step) == (status.phase, status.membership, status.step)
    assert status_without_plan(told, (refused(),), 9.0) == told
    assert status_without_plan(status, (), 7.0) == status
    assert status_without_plan(replace(status, memory_cleared=True), (refused(),), 7.0).message == status.message
