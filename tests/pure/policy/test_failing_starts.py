"""Workers that end before they can train are replaced after growing waits, and not for ever; what cannot be started is waited for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.builders import BEGAN, job, running, with_worker, worker
from surefoot_operator.api.spec import RunPolicy
from surefoot_operator.api.status import Incident, JobStatus, World
from surefoot_operator.job_snapshot import CreateSeen, Observed
from surefoot_operator.policy.core.actions import CreateWorker, DeleteWorker, Plan
from surefoot_operator.policy.membership.workers import UNSTARTED_SECONDS
from surefoot_operator.policy.planning.plan import plan

NOW = BEGAN + 1000


def beginning(failed_starts: int = 0, age: float = 1000.0, workers: int = 1, **dead: object) -> Observed:
    """Epoch 1 is claimed; worker 0 ended with code 1 after it was made `age` seconds ago, and no agent was ever heard."""
    ended = replace(
        worker(0),
        phase="Failed",
        exit_code=1,
        message="Traceback\nModuleNotFoundError: No module named 'surefoot'\n",
        created_seconds=NOW - age,
    )
    return Observed(
        now=NOW,
        term_seconds=BEGAN,
        job=job(workers),
        status=JobStatus(
            world=World(1, "Claimed", changed_seconds=BEGAN),
            next_attempt=2,
            failed_starts=failed_starts,
            failed_starts_counted=failed_starts,
            start_seconds=BEGAN,
        ),
        workers=(replace(ended, **dead), *(worker(i) for i in range(1, workers))),  # type: ignore[arg-type]
        free_nodes=3,
    )


def creates(made: Plan) -> list[CreateWorker]:
    return [a for a in made.actions if isinstance(a, CreateWorker)]


def test_a_worker_that_ended_is_replaced_counted_and_said_with_its_last_words() -> None:
    made = plan(beginning())
    assert [c.index for c in creates(made)] == [0]
    assert any(isinstance(a, DeleteWorker) for a in made.actions)
    assert (made.status.failed_starts, made.status.failed_starts_counted) == (1, 1)
    (said,) = [e.message for e in made.events if e.reason == "WorkerLost"]
    assert "exit code 1" in said
    assert said.endswith("ModuleNotFoundError: No module named 'surefoot'")


def test_each_round_is_waited_after_for_twice_as_long() -> None:
    for rounds, wait in ((0, 5), (1, 10), (3, 40), (5, 160), (9, 160)):
        policy = beginning(rounds, age=wait - 1)
        policy = replace(policy, job=job(1, run_policy=RunPolicy(backoff_limit=20)))
        early = plan(policy)
        assert not creates(early), (rounds, wait)
        assert early.wake_after_seconds is not None
        assert early.wake_after_seconds <= 1.0
        assert creates(plan(replace(policy, now=NOW + 1.5))), (rounds, wait)


def test_beyond_its_limit_the_job_fails_and_says_what_the_program_said() -> None:
    made = plan(beginning(failed_starts=6))
    assert made.status.phase == "Failed"
    assert "No module named 'surefoot'" in made.status.message
    assert "backoffLimit (6)" in made.status.message
    assert plan(beginning(failed_starts=5)).status.phase != "Failed"


def test_what_a_node_or_a_person_ended_counts_for_nothing() -> None:
    for dead in ({"exit_code": None}, {"deleting": True}):
        made = plan(beginning(failed_starts=9, **dead))
        assert made.status.phase != "Failed", dead
        assert made.status.failed_starts == 9, dead


def test_a_member_whose_agent_ended_is_a_loss_and_no_failed_start() -> None:
    seen = with_worker(running(), 1, phase="Failed", exit_code=1)
    claim = plan(seen)
    assert claim.status.world is not None
    assert claim.status.world.state == "Claimed"
    again = plan(replace(seen, status=claim.status, now=seen.now + 10))
    assert again.status.failed_starts == 0
    assert not [e for e in again.events if e.reason == "WorkerLost"]


def test_a_replacement_that_cannot_start_never_ends_a_world_that_trains() -> None:
    seen = running(workers=2, least=1)
    extra = replace(worker(2, 5), phase="Failed", exit_code=1, created_seconds=seen.now - 500)
    seen = replace(seen, job=job(3, least=1), workers=(*seen.workers, replace(extra, node="n0")))
    seen = replace(seen, status=replace(seen.status, failed_starts=50, next_attempt=6), free_nodes=1)
    made = plan(seen)
    assert made.status.phase == "Running"
    assert made.status.world == seen.status.world
    assert made.status.failed_starts == 51


NO_FOLDER = "the agent could not be started: [Errno 2] No such file or directory: '/no/such/folder'"


def unstarted(failed_starts: int = 0, age: float = 1000.0, phase: str = "Failed") -> Observed:
    """No process of worker 0 ever ran: it has no exit code."""
    return beginning(failed_starts, age, phase=phase, exit_code=None, message=NO_FOLDER, unstarted=NO_FOLDER)


def test_a_worker_that_cannot_be_started_is_waited_after_said_and_given_up_like_one_that_ends() -> None:
    early = plan(unstarted(age=4.0))
    assert not creates(early)
    assert "worker 0 could not be started" in early.reason
    assert "/no/such/folder" in early.status.message
    made = plan(unstarted(age=5.0))
    assert [c.index for c in creates(made)] == [0]
    assert made.status.failed_starts == 1
    (said,) = [e.message for e in made.events if e.reason == "WorkerLost"]
    assert said == f"worker 0 could not be started: {NO_FOLDER}"
    assert not creates(plan(unstarted(failed_starts=2, age=19.0)))
    over = plan(unstarted(failed_starts=6))
    assert over.status.phase == "Failed"
    assert "/no/such/folder" in over.status.message
    assert "backoffLimit (6)" in over.status.message


def test_the_last_replacement_has_its_chance() -> None:
    seen = unstarted(failed_starts=6)
    new = worker(0, 2, phase="Pending", created_seconds=NOW)
    seen = replace(seen, workers=(*seen.workers, new), status=replace(seen.status, next_attempt=3))
    assert plan(seen).status.phase != "Failed"


def test_a_pod_that_its_kubelet_cannot_start_has_a_minute_and_is_then_made_anew_without_limit() -> None:
    early = plan(unstarted(age=UNSTARTED_SECONDS - 1, phase="Pending"))
    assert not early.actions
    assert "worker 0 could not be started" in early.reason
    assert early.wake_after_seconds is not None
    assert early.wake_after_seconds <= 1.0
    waiting = plan(unstarted(age=UNSTARTED_SECONDS + 4, phase="Pending"))
    assert not creates(waiting), "and the pause of one that failed"
    made = plan(unstarted(age=UNSTARTED_SECONDS + 5, phase="Pending"))
    assert [c.index for c in creates(made)] == [0]
    assert [a.reason for a in made.actions if isinstance(a, DeleteWorker)] == ["it could not be started"]
    assert (made.status.failed_starts, made.status.failed_starts_counted) == (1, 0)
    worn = plan(unstarted(6, age=UNSTARTED_SECONDS + 160, phase="Pending"))
    assert worn.status.phase == "Pending", "a job of Kubernetes waits for its image as well"
    assert [c.index for c in creates(worn)] == [0]


def test_a_pod_that_cannot_be_started_never_ends_a_world_that_trains() -> None:
    seen = running(workers=2, least=1)
    extra = replace(worker(2, 5), phase="Pending", unstarted="ImagePullBackOff: no", created_seconds=seen.now - 500)
    seen = replace(seen, job=job(3, least=1), workers=(*seen.workers, extra))
    seen = replace(seen, status=replace(seen.status, failed_starts=50, next_attempt=6), free_nodes=1)
    made = plan(seen)
    assert (made.status.phase, made.status.world) == ("Running", seen.status.world)


IMAGE = "ImagePullBackOff: Back-off pulling image registry.example/trainer"
SECRET = 'CreateContainerConfigError: secret "data-keys" not found'
FETCH = "init container fetch ended with exit code 7: cannot reach the data server"


def trained(why: str, phase: str, rounds: int = 99, least: int | None = None, **other: Any) -> Observed:
    """Epoch 2 is claimed; its checkpoint is chosen; worker 1's replacement cannot be started."""
    seen = running(workers=2, now=NOW, least=least)
    assert seen.status.world is not None
    world = World(2, "Claimed", None, 2, seen.status.world.members, "worker 1 was deleted", NOW - 500)
    dead = replace(worker(1, 2), phase=phase, exit_code=None, message=why, unstarted=why, created_seconds=NOW - 400)
    status = replace(seen.status, world=world, failed_starts=rounds, failed_starts_counted=0, next_attempt=3)
    return replace(
        seen,
        status=replace(status, incidents=(Incident("planned", "", 1, "n1", 1, NOW - 500, claimed_seconds=NOW - 500),)),
        sessions=(replace(seen.sessions[0], stopped=2),),
        workers=(seen.workers[0], replace(dead, **other)),
        holders=tuple(replace(h, fence=2, read_epoch=2) for h in seen.holders),
    )


@pytest.mark.parametrize(("why", "phase"), [(IMAGE, "Pending"), (SECRET, "Pending"), (FETCH, "Failed")])
def test_a_job_that_has_trained_waits_for_what_cannot_be_started_and_says_so(why: str, phase: str) -> None:
    made = plan(trained(why, phase))
    assert made.status.phase == "Recovering"
    assert [c.index for c in creates(made)] == [1], "and is tried again"
    assert creates(made)[0].avoid_nodes == ("n1",), "on another node, if there is one"
    assert (made.status.failed_starts, made.status.failed_starts_counted) == (100, 0)
    assert why in made.status.message
    conditions = {c.type: c for c in made.status.conditions}
    assert conditions["Recovering"].status == "True"
    assert why in conditions["Recovering"].message
    assert why in conditions["PodsScheduled"].message
    assert [e.message for e in made.events if e.reason == "WorkerLost" and e.warning] == [
        f"worker 1 could not be started: {why}"
    ]
    assert {e.reason for e in made.events if e.warning} >= {"WorkerNotStarted"}


def test_the_wait_wakes_by_itself_and_lasts_longer_after_each_round() -> None:
    for rounds, wait in ((0, 5), (3, 40), (9, 160)):
        seen = trained(FETCH, "Failed", rounds, created_seconds=NOW - wait + 1)
        early = plan(seen)
        assert not creates(early), (rounds, wait)
        assert early.wake_after_seconds is not None
        assert early.wake_after_seconds <= 1.0
        assert creates(plan(replace(seen, now=NOW + 1.5))), (rounds, wait)


def test_the_waits_begin_anew_once_a_world_was_begun() -> None:
    seen = trained(FETCH, "Failed", least=1)
    made = plan(seen)
    assert made.status.world is not None
    assert (made.status.world.state, made.status.world.size) == ("Committed", 1), "a smaller world trains meanwhile"
    assert (made.status.failed_starts, made.status.failed_starts_counted) == (0, 0)


def test_a_refusal_that_lasts_ends_a_job_that_begins_and_none_that_has_trained() -> None:
    refused = CreateSeen(1, 2, under_way=False, refusal="422 Invalid: spec.x", lasting=True)
    begins = replace(beginning(workers=2), workers=(), creates=(refused,))
    assert plan(begins).status.phase == "Failed"
    seen = replace(trained(IMAGE, "Pending"), sessions=(), workers=(), creates=(refused,))
    made = plan(seen)
    assert made.status.phase == "Recovering"
    assert "422 Invalid" in made.status.message


def test_a_program_that_ends_before_it_trains_uses_up_its_budget_also_later() -> None:
    seen = trained("", "Failed", exit_code=1, message="No module named 'surefoot'", unstarted="")
    counted = plan(seen)
    assert counted.status.failed_starts_counted == 1
    over = plan(replace(seen, status=replace(seen.status, failed_starts_counted=6)))
    assert over.status.phase == "Failed"
    assert "backoffLimit (6)" in over.status.message
