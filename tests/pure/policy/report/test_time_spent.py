"""Every second of a job is in one category, and the categories add up to its age."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.builders import BEGAN, job, running, with_session
from support.fakes.fake_world import FakeWorld
from surefoot_operator.api.status import Incident, JobStatus, TimeSpent
from surefoot_operator.api.status_json import status_from_json, status_to_json
from surefoot_operator.api.time_spent import goodput, seconds_spent
from surefoot_operator.policy.planning.plan import plan

TRAINING = TimeSpent("training", BEGAN, starting_seconds=5.0)


def begun(least: int | None = 1, total_steps: int = 10_000) -> FakeWorld:
    world = FakeWorld(job(3, least), total_steps=total_steps)
    world.settle()
    world.run(4.0)
    return world


def spent(world: FakeWorld) -> dict[str, float]:
    """As of now; FakeWorld holds at every write that it adds up to the job's age."""
    return seconds_spent(world.status.time_spent, world.now)


def test_an_undisturbed_job_starts_trains_and_ends() -> None:
    world = begun(total_steps=25)
    world.run(2.0)
    assert world.status.phase == "Complete"
    found = world.status.time_spent
    assert found.category == ""
    assert found.training_seconds > 1
    named = {name for name, seconds in seconds_spent(found, world.now + 1e6).items() if seconds}
    assert named <= {"waiting", "starting", "training", "finishing"}


def test_a_failure_costs_detection_recovery_and_what_is_run_again() -> None:
    world = begun()
    world.kill_node("n1")
    world.run(30.0)
    assert world.status.phase == "Running"
    found, incident = spent(world), world.status.incidents[-1]
    assert found["recovering"] > 0
    assert incident.steps_lost is not None
    assert (found["recomputed"] > 0) == (incident.steps_lost > 0)
    assert found["training"] > 20
    share = goodput(found)
    assert share is not None
    assert 0.5 < share < 1


def test_whoever_comes_as_a_new_leader_goes_on_with_the_account() -> None:
    world = begun()
    before = spent(world)
    world.restart_operator()
    world.run(3.0)
    found = spent(world)
    assert found["training"] >= before["training"] + 2.5
    assert found["starting"] == before["starting"], "no step was heard of yet, and it trained all the same"


@pytest.mark.gate_only
def test_suspension_is_nobodys_loss() -> None:
    world = begun()
    world.job = replace(world.job, spec=replace(world.job.spec, suspend=True))
    world.run(60.0)
    assert world.status.phase == "Suspended"
    before = goodput(spent(world))
    world.run(600.0)
    assert spent(world)["suspended"] > 600
    assert goodput(spent(world)) == pytest.approx(before)


def test_a_world_that_waits_for_workers_waits() -> None:
    world = begun(least=None)
    world.kill_node("n1")
    world.run(60.0)
    assert world.status.phase == "Recovering"
    found = spent(world)
    assert found["waiting"] > 40
    assert found["recovering"] < 15


def test_silence_before_a_loss_is_told_was_no_training() -> None:
    seen = running(now=BEGAN + 100)
    for index in range(3):
        seen = with_session(seen, index, step_at_seconds=BEGAN + 60, step_seconds=0.5)
    seen = with_session(seen, 1, connected=False, last_message_seconds=BEGAN + 60)
    lost = tuple(replace(n, ready=n.name != "n1") for n in seen.nodes)
    seen = replace(seen, nodes=lost, status=replace(seen.status, time_spent=TRAINING))
    found = plan(seen).status.time_spent
    assert found.category == "recovering"
    assert found.detecting_seconds == pytest.approx(39.5)
    assert found.training_seconds == pytest.approx(60.5)


def test_a_job_that_began_before_anybody_counted_says_so() -> None:
    seen = running(now=BEGAN + 100)
    found = plan(seen).status.time_spent
    assert found == TimeSpent("training", BEGAN + 100, unknown_seconds=100.0)
    assert sum(seconds_spent(found, BEGAN + 130).values()) == pytest.approx(130)


def test_nothing_changes_while_nothing_happens() -> None:
    seen = running()
    seen = replace(seen, status=replace(seen.status, time_spent=TRAINING))
    assert plan(seen).status.time_spent == TRAINING, "a status that grew each round would be written each round"


def test_steps_that_a_failure_took_back_leave_training() -> None:
    seen = running(now=BEGAN + 100)
    world = seen.status.membership
    assert world is not None
    incident = Incident("node-lost", "a test", 1, "n1", 1, BEGAN + 90, BEGAN + 90, last_step=50, world_size_before=3)
    status = replace(
        seen.status,
        incidents=(incident,),
        membership=replace(world, generation=2, state="Claimed", changed_seconds=BEGAN + 90),
        time_spent=TimeSpent("recovering", BEGAN + 90, training_seconds=90.0),
    )
    stopped = tuple(replace(s, stopped=2) for s in seen.sessions)
    read = tuple(replace(h, fence=2, read_generation=2) for h in seen.servers)
    made = plan(replace(seen, status=status, sessions=stopped, servers=read)).status
    assert made.incidents[-1].steps_lost == 10
    assert made.time_spent == TimeSpent(
        "recovering", BEGAN + 100, training_seconds=72.0, recomputed_seconds=18.0, recovering_seconds=10.0
    )


def test_it_is_stored_and_read() -> None:
    status = JobStatus(phase="Running", start_seconds=BEGAN, time_spent=replace(TRAINING, recomputed_seconds=0.25))
    stored = status_to_json(status)
    assert stored["timeSpent"]["category"] == "training"
    assert stored["timeSpent"]["sinceTime"].endswith("Z")
    assert "waitingSeconds" not in stored["timeSpent"]
    assert status_from_json(stored) == status
