"""When a process should be restarted, when a job is at rest, and which jobs are ours."""

from __future__ import annotations

from typing import Any

import pytest

from support.builders import job, worker
from surefoot_operator.api.status import JobStatus, Member, Membership
from surefoot_operator.controller.health_endpoints import LivenessLimits, LivenessSigns, liveness_failures
from surefoot_operator.controller.shard_leadership import select_managed_jobs
from surefoot_operator.policy.membership.lifecycle import is_idle


@pytest.mark.parametrize(
    ("vitals", "said"),
    [
        (LivenessSigns({"pods": 30.0}, {"a/b": 2.0}, 0.1, 1.0), ()),
        (
            LivenessSigns({"pods": 121.0}, {}, 0.0, 1.0),
            ("the watch of pods has received no answer for 121 s, although the API server answers other requests",),
        ),
        # the server is away: a restart would help nobody
        (LivenessSigns({"pods": 1000.0}, {}, 0.0, 1000.0), ()),
        (LivenessSigns({}, {"a/b": 181.0}, 0.0, 1.0), ("the reconcile of job a/b has been running for 181 s",)),
        (LivenessSigns({}, {}, 5.1, 1.0), ("the event loop ran 5.1 s late",)),
    ],
)
def test_only_what_a_restart_helps_against_is_a_complaint(vitals: LivenessSigns, said: tuple[str, ...]) -> None:
    assert liveness_failures(vitals, LivenessLimits()) == said


MEMBERS = (Member(0, 1, "i", "n"),)
COMMITTED = JobStatus(phase="Running", membership=Membership(3, "Committed", members=MEMBERS, world_size=1))
EMPTIED = JobStatus(phase="Suspended", membership=Membership(4, "Committed"))


@pytest.mark.parametrize(
    ("suspend", "status", "workers", "rests"),
    [
        (True, JobStatus(), 0, True),
        (True, EMPTIED, 0, True),
        (True, EMPTIED, 1, False),
        (True, COMMITTED, 0, False),
        (True, JobStatus(membership=Membership(4, "Claimed")), 0, False),
        (False, JobStatus(), 0, False),
        (False, EMPTIED, 0, False),
        (
            False,
            JobStatus(phase="Complete", membership=Membership(3, "Committed", members=MEMBERS), memory_cleared=True),
            0,
            True,
        ),
        (False, JobStatus(phase="Failed", membership=Membership(3, "Claimed"), memory_cleared=True), 1, True),
        (False, JobStatus(phase="Failed"), 0, False),
    ],
)
def test_who_asks_for_nothing_rests(suspend: bool, status: JobStatus, workers: int, rests: bool) -> None:
    there = [worker(index) for index in range(workers)]
    assert is_idle(job(suspend=suspend), status, there) is rests


def stored(name: str, namespace: str = "team", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": namespace, "uid": f"uid-{name}"}, "spec": spec}


def test_jobs_of_another_manager_or_namespace_are_left_alone() -> None:
    jobs = [
        stored("plain"),
        stored("named", managedBy="surefoot.dev/operator"),
        stored("queued", managedBy="kueue.x-k8s.io/multikueue"),
        stored("elsewhere", "other"),
        {"metadata": {"name": "bare", "namespace": "team", "uid": "u"}},
    ]
    assert {key.name for key in select_managed_jobs(jobs)} == {"plain", "named", "elsewhere", "bare"}
    assert {key.name for key in select_managed_jobs(jobs, "team")} == {"plain", "named", "bare"}
