"""Workers that hold nodes and are too few for a world: given back after a while, asked for again at a time of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.builders import BEGAN, job, running, session, worker
from surefoot_operator.api.spec import RunPolicy, TrainingJob
from surefoot_operator.api.status import JobStatus, Scheduling, World
from surefoot_operator.api.status_json import status_from_json, status_to_json
from surefoot_operator.job_snapshot import NodeSeen, Observed, WorkerSeen
from surefoot_operator.policy.core.actions import CreateWorker, DeleteWorker, Plan
from surefoot_operator.policy.membership.claim import pause_seconds
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check

NOW = BEGAN + 100
DEADLINE = 600.0


def half(placed: int = 2, now: float = NOW, known: Scheduling | None = None, **spec: Any) -> Observed:
    """Three workers are wanted, `placed` of them have nodes and are warm; epoch 1 is claimed."""
    nodes = [f"n{i}" if i < placed else None for i in range(3)]
    workers = tuple(
        worker(i) if node else worker(i, node=None, phase="Pending", message="0/2 nodes are available")
        for i, node in enumerate(nodes)
    )
    world = World(1, "Claimed", reason="the job starts", changed_seconds=BEGAN)
    return Observed(
        now=now,
        term_seconds=BEGAN,
        job=job(3, **spec),
        status=JobStatus(world=world, next_attempt=2, start_seconds=BEGAN, scheduling=known or Scheduling()),
        workers=workers,
        nodes=tuple(NodeSeen(f"n{i}", f"n{i}", True) for i in range(placed)),
        sessions=tuple(session(i, now=now, stopped=1) for i in range(placed)),
    )


def deleted(made: Plan) -> int:
    return sum(isinstance(action, DeleteWorker) for action in made.actions)


def created(made: Plan) -> int:
    return sum(isinstance(action, CreateWorker) for action in made.actions)


def why(made: Plan) -> tuple[str, str]:
    return next((c.reason, c.message) for c in made.status.conditions if c.type == "PodsScheduled")


def test_a_half_started_job_gives_its_nodes_back_after_the_deadline_and_says_so() -> None:
    first = plan(half())
    assert first.status.scheduling == Scheduling(NOW)
    assert deleted(first) == 0
    late = half(now=NOW + DEADLINE - 1, known=Scheduling(NOW))
    assert deleted(plan(late)) == 0
    wake = plan(late).wake_after_seconds
    assert wake is not None
    assert wake <= 1.0
    due = half(now=NOW + DEADLINE, known=Scheduling(NOW))
    made = plan(due)
    check(made, due)
    assert (deleted(made), created(made)) == (3, 0)
    assert made.status.scheduling.releases == 1
    assert next(e.message for e in made.events if e.reason == "WorkersReleased").startswith(
        "2 of 3 workers held nodes for schedulingDeadlineSeconds (600 s), too few for any world"
    )
    assert why(made)[0] == "Released"
    assert why(made)[1] == made.status.message
    gone = replace(due, workers=(), sessions=(), status=made.status)
    rest = plan(gone)
    assert (rest.actions, rest.status, rest.events) == ((), made.status, ())
    until = made.status.scheduling.until_seconds
    assert until is not None
    assert 30 <= until - due.now <= 60
    again = plan(replace(gone, now=until))
    assert created(again) == 3
    assert again.status.scheduling == Scheduling(releases=1)


@pytest.mark.parametrize(
    "seen",
    [
        half(placed=0),
        half(placed=3),
        half(placed=2, least=2),
        half(placed=2, suspend=True),
        replace(half(), workers=half().workers[2:]),
        running(now=NOW + 10_000),
    ],
)
def test_who_holds_nothing_or_has_enough_is_never_touched(seen: Observed) -> None:
    made = plan(replace(seen, status=replace(seen.status, scheduling=Scheduling(BEGAN))) if not seen.holders else seen)
    assert made.status.scheduling.since_seconds is None
    assert not [e for e in made.events if e.reason == "WorkersReleased"]


def test_a_commit_forgets_what_was_given_back_before() -> None:
    made = plan(half(placed=3, known=Scheduling(None, 4, NOW - 1)))
    assert made.status.world is not None
    assert made.status.world.state == "Committed"
    assert made.status.scheduling == Scheduling()


def test_pauses_double_up_to_the_deadline_and_differ_between_jobs() -> None:
    for releases, longest in ((1, 60), (2, 120), (4, 480), (5, 600), (90, 600)):
        drawn = {pause_seconds(f"uid-{i}", releases, DEADLINE) for i in range(50)}
        assert len(drawn) == 50
        assert all(longest / 2 <= pause <= longest for pause in drawn)
    assert pause_seconds("u", 1, DEADLINE) == pause_seconds("u", 1, DEADLINE)


def test_a_clock_that_went_back_keeps_no_job_from_asking() -> None:
    seen = replace(
        half(), workers=(), sessions=(), status=replace(half().status, scheduling=Scheduling(None, 1, NOW + 9e5))
    )
    assert created(plan(seen)) == 3
    ahead = half(known=Scheduling(NOW + 3600))
    assert plan(ahead).status.scheduling == Scheduling(NOW)


def test_what_was_given_back_survives_the_operator() -> None:
    status = JobStatus(scheduling=Scheduling(None, 2, 5.0))
    assert status_from_json(status_to_json(status)) == status


class Contender:
    """One job on a cluster that is too small for two: its plan decides, the cluster gives and takes nodes."""

    def __init__(self, uid: str, workers: int) -> None:
        asked = job(workers, run_policy=RunPolicy(scheduling_deadline_seconds=DEADLINE))
        self.job = TrainingJob(uid, "default", uid, 1, asked.spec)
        self.status, self.workers = JobStatus(), list[WorkerSeen]()
        self.began: float | None = None
        self.releases = 0

    @property
    def over(self) -> bool:
        return self.status.phase == "Complete"

    def turn(self, now: float, nodes: tuple[NodeSeen, ...]) -> None:
        """One plan, carried out at once."""
        world = self.status.world
        epoch = world.epoch if world is not None else 0
        there = [w for w in self.workers if w.node is not None]
        sessions = tuple(session(w.index, w.attempt, now=now, node=w.node, stopped=epoch, epoch=epoch) for w in there)
        seen = Observed(
            now=now, term_seconds=BEGAN, job=self.job, status=self.status, workers=tuple(self.workers), nodes=nodes,
            sessions=sessions,
        )  # fmt: skip
        made = plan(seen)
        check(made, seen)
        self.status = made.status
        self.releases += sum(e.reason == "WorkersReleased" for e in made.events)
        if made.status.world is not None and made.status.world.members:
            self.began = now if self.began is None else self.began
        for action in made.actions:
            if isinstance(action, DeleteWorker):
                self.workers = [w for w in self.workers if w.uid != action.uid]
            elif isinstance(action, CreateWorker):
                name = f"{self.job.uid}-{action.index}-{action.attempt}"
                self.workers.append(
                    WorkerSeen(action.index, action.attempt, name, name, None, "Pending", created_seconds=now)
                )
        if self.began is not None and now > self.began + 300:
            self.status, self.workers = replace(self.status, phase="Complete"), []


@pytest.mark.parametrize("seed", range(8))
def test_two_jobs_that_each_got_half_of_a_cluster_both_finish(seed: int) -> None:
    nodes = tuple(NodeSeen(f"n{i}", f"n{i}", True) for i in range(4))
    jobs = [Contender(f"job-{seed}-{i}", 3) for i in range(2)]
    now = BEGAN
    while not all(one.over for one in jobs):
        now += 5.0
        assert now < BEGAN + 2 * 3600, [(one.status.message, one.releases) for one in jobs]
        for one in jobs if int(now) % 10 else jobs[::-1]:
            if not one.over:
                one.turn(now, nodes)
        taken = {w.node for one in jobs for w in one.workers}
        free = [node.name for node in nodes if node.name not in taken]
        waiting = [[w for w in one.workers if w.node is None] for one in jobs]
        turns = [w for pair in zip(*waiting, strict=False) for w in pair] or [w for ws in waiting for w in ws]
        for found, name in zip(turns, free, strict=False):
            owner = next(one for one in jobs if found in one.workers)
            owner.workers = [replace(w, node=name, phase="Running") if w is found else w for w in owner.workers]
    assert sum(one.releases for one in jobs) >= 1, "each got half at first"
