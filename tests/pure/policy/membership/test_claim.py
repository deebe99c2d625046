"""Tests of `policy.membership.claim`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.builders import BEGAN, beginning, job, running, session, with_worker, worker
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.messages import Barrier, NodeFinding
from surefoot_operator.api.spec import HealthPolicy, RunPolicy, TrainingJob
from surefoot_operator.api.status import ExcludedNode, Incident, JobStatus, Member, Membership, Scheduling
from surefoot_operator.api.status_json import status_from_json, status_to_json
from surefoot_operator.job_snapshot import JobSnapshot, ObservedNode, ObservedWorker
from surefoot_operator.policy.core.actions import CreateWorker, DeleteWorker, Plan
from surefoot_operator.policy.core.facts import build_facts
from surefoot_operator.policy.failure.unhealthy_nodes import UNHEALTHY_SECONDS
from surefoot_operator.policy.membership.claim import (
    COUNTED_NODES_WAIT_SECONDS,
    REPLACEMENT_WAIT_SECONDS,
    STARTING_WAIT_SECONDS,
    release_backoff_seconds,
    select_members,
)
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check_plan

# ---- joining ---------------------------------------------------------------------------------------------------------
# Who gets a rank where a fresh worker found its own node sick: somebody else, unless no world is possible without it.

NOW = BEGAN + 5
WRONG = NodeFinding("CpuComputeError", "the processor multiplies wrong", "node")
ODD = NodeFinding("CpuComputeError", "the processor multiplies wrong", "unknown")


def fresh(
    workers: int,
    *failing: int,
    least: int | None = None,
    now: float = NOW,
    free: int | None = 1,
    finding: NodeFinding = WRONG,
    **spec: object,
) -> JobSnapshot:
    """A job that begins: all of its workers are warm, and some found their nodes sick."""
    sessions = tuple(
        session(i, now=now, stopped=1, findings=(finding,) if i in failing else (), findings_seconds=BEGAN + 3)
        for i in range(workers)
    )
    return beginning(now, job(workers, least, **spec), sessions, free)


def chosen(seen: JobSnapshot) -> tuple[int, ...]:
    return tuple(member.index for member in select_members(build_facts(seen)).members)


def test_a_world_that_is_possible_without_it_waits_for_another_and_then_begins_without() -> None:
    assert chosen(fresh(3, 1, least=2)) == ()
    assert chosen(fresh(3, 1, least=2, now=BEGAN + STARTING_WAIT_SECONDS + 1)) == (0, 2)


@pytest.mark.parametrize(("free", "waits"), [(0, True), (None, False)], ids=["surefoot local", "a cluster"])
def test_where_nodes_are_counted_a_first_world_waits_for_every_worker_that_lives(free: int | None, waits: bool) -> None:
    """A laptop imports torch for a minute; a fault that strikes a node without a rank shows nothing."""
    seen = fresh(3, least=1, free=free, now=BEGAN + STARTING_WAIT_SECONDS + 1)
    slow = replace(seen.sessions[2], warm=False)
    starting = replace(seen, sessions=(*seen.sessions[:2], slow))
    assert chosen(starting) == (() if waits else (0, 1))
    now = BEGAN + COUNTED_NODES_WAIT_SECONDS + 1
    sessions = tuple(replace(one, last_message_seconds=now) for one in starting.sessions)
    later = replace(starting, now_seconds=now, sessions=sessions)
    assert chosen(later) == (0, 1), "no job is kept from starting"


def test_a_job_of_fixed_size_waits_for_another_node_and_then_takes_what_there_is() -> None:
    found = select_members(build_facts(fresh(3, 1)))
    assert found.members == ()
    assert found.waiting_reason == (
        "the worker on node n1 (CpuComputeError: the processor multiplies wrong) gets no rank; waiting for a replacement"
    )
    assert found.until_seconds == BEGAN + REPLACEMENT_WAIT_SECONDS
    assert chosen(fresh(3, 1, now=BEGAN + REPLACEMENT_WAIT_SECONDS + 1)) == (0, 1, 2), "no job is kept from starting"


@pytest.mark.parametrize(
    "seen",
    [
        fresh(3),
        fresh(3, 0, 1, 2),
        fresh(3, 0, 1),
        fresh(3, 1, finding=ODD),
        fresh(3, 1, free=0),
        fresh(3, 1, health_policy=HealthPolicy(on_unhealthy_node="Warn")),
        fresh(1, 0, free=0),
    ],
    ids=[
        "none fails",
        "all fail",
        "most fail",
        "only told",
        "no other node",
        "findings are shown alone",
        "the only node",
    ],
)
def test_where_no_node_is_worse_than_others_or_no_other_is_there_nobody_waits(seen: JobSnapshot) -> None:
    assert len(chosen(seen)) == len(seen.sessions)


def test_what_most_nodes_find_is_said_once_with_the_world() -> None:
    made = plan(fresh(3, 0, 1, 2))
    (told,) = (event for event in made.events if event.reason == "CommonNodeFault")
    assert "CpuComputeError on n0, n1, n2" in told.message
    assert not [event for event in plan(fresh(3, 1, free=0)).events if event.reason == "CommonNodeFault"]


def test_a_trial_that_fails_wherever_it_is_made_costs_a_small_job_one_node() -> None:
    """One worker, and nobody to compare its node with: the first node is left, and the second one's word explains both."""
    seen = fresh(1, 0, now=BEGAN + 20)
    seen = replace(seen, status=plan(seen).status)
    assert [one.name for one in seen.status.unhealthy_nodes] == ["n0"]
    other = replace(
        session(0, 2, now=seen.now_seconds, stopped=1, findings=(WRONG,), findings_seconds=seen.now_seconds), node="n1"
    )
    nodes = (*seen.nodes, ObservedNode("n1", "n1", True))
    seen = replace(seen, workers=(*seen.workers, worker(0, 2, node="n1")), nodes=nodes)
    moved = replace(seen, sessions=(other,))
    for told in (replace(seen, sessions=(*seen.sessions, other)), moved):
        made = plan(told)
        assert made.status.membership is not None
        assert [member.node for member in made.status.membership.members] == ["n1"]
        assert [
            e.message for e in made.events if e.reason == "CommonNodeFault" and "CpuComputeError on n0, n1" in e.message
        ]
    later = replace(moved, now_seconds=seen.now_seconds + UNHEALTHY_SECONDS / 2)
    assert [one.name for one in plan(later).status.unhealthy_nodes] == ["n0"], "nobody is left for it any more"
    gone = replace(moved, now_seconds=seen.now_seconds + UNHEALTHY_SECONDS + 1)
    assert "n0" not in [one.name for one in plan(gone).status.unhealthy_nodes]


def test_an_agent_that_knows_no_trial_gets_a_rank() -> None:
    seen = fresh(3)
    assert not any(one.findings for one in seen.sessions)
    assert chosen(replace(seen, job=job(3, health_policy=HealthPolicy(pre_join_check="Enforce")))) == (0, 1, 2)


def test_another_worker_is_made_beside_one_whose_node_turned_out_sick() -> None:
    seen = fresh(3, 1, now=BEGAN + 20)
    sick = (ExcludedNode("n1", "CpuComputeError", BEGAN + 18 + UNHEALTHY_SECONDS),)
    seen = replace(seen, status=replace(seen.status, unhealthy_nodes=sick))
    (made,) = (action for action in plan(seen).actions if isinstance(action, CreateWorker))
    assert (made.index, "n1" in made.avoid_nodes) == (1, True)
    nodes = (*seen.nodes, ObservedNode("n3", "n3", True))
    later = replace(seen, nodes=nodes, workers=(*seen.workers, worker(1, 2, node="n3")))
    for room in (1, 0):  # it may have taken the last free node
        later = replace(later, free_nodes=room)
        assert not [action for action in plan(later).actions if isinstance(action, CreateWorker)], "one is enough"
        assert not [action for action in plan(later).actions if isinstance(action, DeleteWorker)], "none ends before"
        assert chosen(later) == (), "it is waited for"
    warm = replace(session(1, 2, now=seen.now_seconds, stopped=1), node="n3")
    assert chosen(replace(later, sessions=(*later.sessions, warm))) == (0, 1, 2)


def test_a_node_that_fails_too_is_no_end_of_looking() -> None:
    sick = tuple(ExcludedNode(name, "CpuComputeError", BEGAN + 18 + UNHEALTHY_SECONDS) for name in ("n1", "n3"))
    seen = fresh(3, 1, now=BEGAN + 20)
    seen = replace(
        seen, status=replace(seen.status, unhealthy_nodes=sick), nodes=(*seen.nodes, ObservedNode("n3", "n3", True))
    )
    second = replace(
        session(1, 2, now=seen.now_seconds, stopped=1, findings=(WRONG,), findings_seconds=BEGAN + 3), node="n3"
    )
    seen = replace(seen, workers=(*seen.workers, worker(1, 2, node="n3")), sessions=(*seen.sessions, second))
    actions = plan(seen).actions
    (made,) = (action for action in actions if isinstance(action, CreateWorker))
    assert {"n1", "n3"} <= set(made.avoid_nodes)
    assert [action.name for action in actions if isinstance(action, DeleteWorker)] == [seen.workers[1].name]


def test_who_leaves_a_sick_node_keeps_no_room_from_whoever_a_claimed_world_waits_for() -> None:
    """Found by the simulator: three nodes, of which one is sick, and a fixed size of three."""
    seen = fresh(3, now=BEGAN + 20)
    members = tuple(Member(i, 1, s.incarnation, s.node) for i, s in enumerate(seen.sessions))
    world = Membership(3, "Claimed", None, 3, members, "n0 died", BEGAN + 10)
    status = replace(
        seen.status, membership=world, unhealthy_nodes=(ExcludedNode("n2", "x", BEGAN + 16 + UNHEALTHY_SECONDS),)
    )
    newer = replace(session(2, 3, now=seen.now_seconds, stopped=3), node="n0")
    sessions = (*(replace(s, stopped=3) for s in seen.sessions if s.index != 1), newer)
    pending = replace(worker(1, 4), node=None, phase="Pending")
    workers = (seen.workers[0], seen.workers[2], worker(2, 3, node="n0"), pending)
    seen = replace(seen, status=status, sessions=sessions, workers=workers, free_nodes=0)

    def ended(told: JobSnapshot) -> list[str]:
        return [action.name for action in plan(told).actions if isinstance(action, DeleteWorker)]

    assert ended(seen) == [seen.workers[1].name]
    assert ended(replace(seen, sessions=(*sessions[:-1], replace(newer, warm=False)))) == [], (
        "not before the other is ready"
    )
    assert ended(replace(seen, workers=workers[:-1])) == [], "nor where nobody waits for a node"
    writing = replace(sessions[1], pending=(Checkpoint(2, 6),))
    assert ended(replace(seen, sessions=(sessions[0], writing, newer))) == [], "nor while its last save is on its way"


def test_who_came_to_a_sick_node_for_want_of_another_stays() -> None:
    sick = (ExcludedNode("n1", "CpuComputeError", BEGAN - 1 + UNHEALTHY_SECONDS),)
    seen = fresh(3, 1, now=BEGAN + 70)
    seen = replace(seen, status=replace(seen.status, unhealthy_nodes=sick))
    assert not [action for action in plan(seen).actions if isinstance(action, CreateWorker)]


@given(st.integers(1, 6), st.sets(st.integers(0, 5)), st.booleans())
def test_every_job_starts(workers: int, failing: set[int], room: bool) -> None:
    seen = fresh(workers, *failing, now=BEGAN + REPLACEMENT_WAIT_SECONDS + 1, free=1 if room else 0)
    assert len(chosen(seen)) == workers


# ---- scheduling deadline ---------------------------------------------------------------------------------------------
# Workers that hold nodes and are too few for a world: given back after a while, asked for again at a time of their own.

NOW_SCHEDULING_DEADLINE = BEGAN + 100
DEADLINE = 600.0


def half(
    placed: int = 2, now: float = NOW_SCHEDULING_DEADLINE, known: Scheduling | None = None, **spec: Any
) -> JobSnapshot:
    """Three workers are wanted, `placed` of them have nodes and are warm; epoch 1 is claimed."""
    nodes = [f"n{i}" if i < placed else None for i in range(3)]
    workers = tuple(
        worker(i) if node else worker(i, node=None, phase="Pending", message="0/2 nodes are available")
        for i, node in enumerate(nodes)
    )
    world = Membership(1, "Claimed", reason="the job starts", changed_seconds=BEGAN)
    return JobSnapshot(
        now_seconds=now,
        term_seconds=BEGAN,
        job=job(3, **spec),
        status=JobStatus(membership=world, next_attempt=2, start_seconds=BEGAN, scheduling=known or Scheduling()),
        workers=workers,
        nodes=tuple(ObservedNode(f"n{i}", f"n{i}", True) for i in range(placed)),
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
    assert first.status.scheduling == Scheduling(NOW_SCHEDULING_DEADLINE)
    assert deleted(first) == 0
    late = half(now=NOW_SCHEDULING_DEADLINE + DEADLINE - 1, known=Scheduling(NOW_SCHEDULING_DEADLINE))
    assert deleted(plan(late)) == 0
    wake = plan(late).wake_after_seconds
    assert wake is not None
    assert wake <= 1.0
    due = half(now=NOW_SCHEDULING_DEADLINE + DEADLINE, known=Scheduling(NOW_SCHEDULING_DEADLINE))
    made = plan(due)
    check_plan(made, due)
    assert (deleted(made), created(made)) == (3, 0)
    assert made.status.scheduling.releases == 1
    assert next(e.message for e in made.events if e.reason == "WorkersReleased").startswith(
        "2 of 3 workers occupied nodes for schedulingDeadlineSeconds (600 s), too few to train"
    )
    assert why(made)[0] == "NodesReleased"
    assert why(made)[1] == made.status.message
    gone = replace(due, workers=(), sessions=(), status=made.status)
    rest = plan(gone)
    assert (rest.actions, rest.status, rest.events) == ((), made.status, ())
    until = made.status.scheduling.until_seconds
    assert until is not None
    assert 30 <= until - due.now_seconds <= 60
    again = plan(replace(gone, now_seconds=until))
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
        running(now=NOW_SCHEDULING_DEADLINE + 10_000),
    ],
)
def test_who_holds_nothing_or_has_enough_is_never_touched(seen: JobSnapshot) -> None:
    made = plan(replace(seen, status=replace(seen.status, scheduling=Scheduling(BEGAN))) if not seen.servers else seen)
    assert made.status.scheduling.since_seconds is None
    assert not [e for e in made.events if e.reason == "WorkersReleased"]


def test_a_commit_forgets_what_was_given_back_before() -> None:
    made = plan(half(placed=3, known=Scheduling(None, 4, NOW_SCHEDULING_DEADLINE - 1)))
    assert made.status.membership is not None
    assert made.status.membership.state == "Committed"
    assert made.status.scheduling == Scheduling()


def test_pauses_double_up_to_the_deadline_and_differ_between_jobs() -> None:
    for releases, longest in ((1, 60), (2, 120), (4, 480), (5, 600), (90, 600)):
        drawn = {release_backoff_seconds(f"uid-{i}", releases, DEADLINE) for i in range(50)}
        assert len(drawn) == 50
        assert all(longest / 2 <= pause <= longest for pause in drawn)
    assert release_backoff_seconds("u", 1, DEADLINE) == release_backoff_seconds("u", 1, DEADLINE)


def test_a_clock_that_went_back_keeps_no_job_from_asking() -> None:
    seen = replace(
        half(),
        workers=(),
        sessions=(),
        status=replace(half().status, scheduling=Scheduling(None, 1, NOW_SCHEDULING_DEADLINE + 9e5)),
    )
    assert created(plan(seen)) == 3
    ahead = half(known=Scheduling(NOW_SCHEDULING_DEADLINE + 3600))
    assert plan(ahead).status.scheduling == Scheduling(NOW_SCHEDULING_DEADLINE)


def test_what_was_given_back_survives_the_operator() -> None:
    status = JobStatus(scheduling=Scheduling(None, 2, 5.0))
    assert status_from_json(status_to_json(status)) == status


class Contender:
    """One job on a cluster that is too small for two: its plan decides, the cluster gives and takes nodes."""

    def __init__(self, uid: str, workers: int) -> None:
        asked = job(workers, run_policy=RunPolicy(scheduling_deadline_seconds=DEADLINE))
        self.job = TrainingJob(uid, "default", uid, 1, asked.spec)
        self.status, self.workers = JobStatus(), list[ObservedWorker]()
        self.began: float | None = None
        self.releases = 0

    @property
    def over(self) -> bool:
        return self.status.phase == "Complete"

    def turn(self, now: float, nodes: tuple[ObservedNode, ...]) -> None:
        """One plan, carried out at once."""
        world = self.status.membership
        epoch = world.generation if world is not None else 0
        there = [w for w in self.workers if w.node is not None]
        sessions = tuple(
            session(w.index, w.attempt, now=now, node=w.node, stopped=epoch, generation=epoch) for w in there
        )
        seen = JobSnapshot(
            now_seconds=now, term_seconds=BEGAN, job=self.job, status=self.status, workers=tuple(self.workers), nodes=nodes,
            sessions=sessions,
        )  # fmt: skip
        made = plan(seen)
        check_plan(made, seen)
        self.status = made.status
        self.releases += sum(e.reason == "WorkersReleased" for e in made.events)
        if made.status.membership is not None and made.status.membership.members:
            self.began = now if self.began is None else self.began
        for action in made.actions:
            if isinstance(action, DeleteWorker):
                self.workers = [w for w in self.workers if w.uid != action.uid]
            elif isinstance(action, CreateWorker):
                name = f"{self.job.uid}-{action.index}-{action.attempt}"
                self.workers.append(
                    ObservedWorker(action.index, action.attempt, name, name, None, "Pending", created_seconds=now)
                )
        if self.began is not None and now > self.began + 300:
            self.status, self.workers = replace(self.status, phase="Complete"), []


@pytest.mark.gate_only
@pytest.mark.parametrize("seed", range(8))
def test_two_jobs_that_each_got_half_of_a_cluster_both_finish(seed: int) -> None:
    nodes = tuple(ObservedNode(f"n{i}", f"n{i}", True) for i in range(4))
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


# ---- size tie --------------------------------------------------------------------------------------------------------
# A world whose state only as many ranks can take up keeps its size, and says why and what to do.

NOW_SIZE_TIE = BEGAN + 100
OWN = (("loader", ""), ("scheduler", "same"))


def decided(seen: JobSnapshot) -> Plan:
    made = plan(seen)
    check_plan(made, seen)
    return made


def saving(seen: JobSnapshot, *objects: tuple[tuple[str, str], ...]) -> JobSnapshot:
    """The same with what each rank's manifests say of its objects; the last stands for all further ranks."""

    def told(rank: int) -> tuple[tuple[str, str], ...]:
        return objects[min(rank, len(objects) - 1)]

    holders = tuple(
        replace(h, entries=tuple(replace(m, objects=told(m.save.rank)) for m in h.entries)) for h in seen.servers
    )
    return replace(seen, servers=holders)


def claimed(seen: JobSnapshot, gone: int | None = None) -> JobSnapshot:
    """Epoch 2 is claimed since long, everybody has stopped but who is gone, and everything was read."""
    world = seen.status.membership
    assert world is not None
    claim = Membership(2, "Claimed", None, world.world_size, world.members, "a test", NOW_SIZE_TIE - 60)
    incident = Incident(
        "node-lost", "a test", 1, "n1", 1, NOW_SIZE_TIE - 60, NOW_SIZE_TIE - 60, last_step=42, world_size_before=3
    )
    made = replace(
        seen,
        status=replace(seen.status, membership=claim, phase="Recovering", incidents=(incident,)),
        sessions=tuple(replace(s, stopped=2) for s in seen.sessions if s.index != gone),
        servers=tuple(replace(h, fence=2, read_generation=2) for h in seen.servers),
    )
    return made if gone is None else with_worker(made, gone, phase="Failed")


def condition(made: Plan, kind: str = "WorldSizeFixed") -> str | None:
    return next((c.message for c in made.status.conditions if c.type == kind), None)


def members(made: Plan) -> int | None:
    world = made.status.membership
    return len(world.members) if world is not None and world.state == "Committed" else None


def test_a_tied_world_that_lost_a_worker_waits_where_another_shrinks() -> None:
    assert members(decided(claimed(running(), gone=2))) == 2
    made = decided(saving(claimed(running(), gone=2), OWN))
    assert members(made) is None
    assert made.reason.startswith(
        "2 of 3 workers are ready, and no other number is possible: loader: each rank has its own state"
    )
    assert "ElasticLoader" in made.reason
    assert "scheduler" not in made.reason


def test_it_goes_on_when_the_replacement_stands_ready() -> None:
    seen = saving(claimed(running(), gone=2), OWN)
    there = replace(
        seen,
        workers=(*seen.workers, worker(2, attempt=2)),
        sessions=(*seen.sessions, session(2, attempt=2, now=NOW_SIZE_TIE, stopped=2)),
    )
    made = decided(there)
    assert members(made) == 3
    assert made.status.membership is not None
    assert made.status.membership.parent == Checkpoint(1, 40)


def test_values_that_differ_tie_as_well() -> None:
    made = decided(saving(claimed(running(), gone=2), (("meter", "a"),), (("meter", "b"),)))
    assert "no other number is possible: meter" in made.reason


def test_without_a_checkpoint_nothing_is_tied() -> None:
    seen = saving(claimed(running(), gone=2), OWN)
    lost = replace(
        seen,
        servers=tuple(replace(h, entries=()) for h in seen.servers),
        status=replace(seen.status, had_checkpoint=False, last_complete=None),
    )
    assert members(decided(lost)) == 2


def two_of_three(joining: bool = True) -> JobSnapshot:
    """Two workers train, a third is warm."""
    seen = replace(running(workers=2), job=job(3, 1))
    if not joining:
        return seen
    return replace(
        seen,
        workers=(*seen.workers, worker(2)),
        nodes=(*seen.nodes, ObservedNode("n2", "n2", True)),
        sessions=(*seen.sessions, session(2, now=NOW_SIZE_TIE, stopped=1)),
    )


def test_a_tied_world_does_not_grow_and_says_so_once() -> None:
    assert any(isinstance(a, Barrier) for a in decided(two_of_three()).actions)
    made = decided(saving(two_of_three(), OWN))
    assert not any(isinstance(a, Barrier) for a in made.actions)
    assert "only 2 ranks can restore" in (condition(made) or "")
    assert [e.reason for e in made.events if e.warning] == ["WorldSizeFixed"]
    again = decided(replace(saving(two_of_three(), OWN), status=made.status))
    assert [e.reason for e in again.events] == []


def test_until_holders_are_read_what_was_known_holds() -> None:
    known = decided(saving(two_of_three(), OWN)).status
    blind = replace(two_of_three(), status=known)
    blind = replace(blind, servers=tuple(replace(h, read_generation=None, entries=()) for h in blind.servers))
    made = decided(blind)
    assert not any(isinstance(a, Barrier) for a in made.actions)
    assert condition(made) == condition(decided(saving(two_of_three(), OWN)))


def test_saves_of_some_ranks_alone_do_not_make_a_tie_vanish() -> None:
    unlike = ((("meter", "a"),), (("meter", "b"),))
    seen = saving(two_of_three(), *unlike)
    newer = tuple(replace(m, save=replace(m.save, step=50)) for m in seen.servers[0].entries if m.save.rank == 0)
    first = replace(seen.servers[0], entries=(*seen.servers[0].entries, *newer[:1]))
    made = decided(replace(seen, servers=(first, *seen.servers[1:])))
    assert "meter" in (condition(made) or "")


def test_a_smaller_scale_that_was_asked_for_is_not_carried_out_into_a_refusal() -> None:
    seen = replace(running(workers=3), job=job(2, 1))
    assert any(isinstance(a, Barrier) for a in decided(seen).actions)
    made = decided(saving(seen, OWN))
    assert not any(isinstance(a, Barrier) for a in made.actions)
    assert condition(made) is not None
    stuck = decided(saving(claimed(seen), OWN))
    assert stuck.reason.startswith(
        "no allowed size fits: the job requests 2 workers of 1 ranks. Request 3 ranks again."
    )


def test_a_fixed_size_that_fits_needs_no_word() -> None:
    made = decided(saving(running(least=None), OWN))
    assert condition(made) is None
    assert members(made) == 3


@pytest.mark.parametrize("joining", [True, False], ids=["a spare is warm", "nobody is"])
def test_a_deleted_worker_of_a_tied_world_halts_it_with_a_spare_and_without(joining: bool) -> None:
    seen = saving(with_worker(two_of_three(joining=joining), 1, deleting=True), OWN)
    assert any(isinstance(a, Barrier) for a in decided(seen).actions)


@pytest.mark.parametrize("objects", [OWN, ()])
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 4))
def test_a_claimed_world_is_committed_with_as_many_ranks_as_its_parent_or_any(
    objects: tuple[tuple[str, str], ...], workers: int, wanted: int, gone: int
) -> None:
    seen = replace(running(workers=workers), job=job(wanted, 1))
    seen = saving(claimed(seen, gone if gone < workers else None), objects)
    there = sum(s.index < wanted for s in seen.sessions)
    size = members(decided(seen))
    if objects:
        assert size == (workers if there >= workers <= wanted else None)
    else:
        assert size == (min(there, wanted) or None)
