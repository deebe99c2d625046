"""Tests of `policy.membership.workers`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.builders import BEGAN, holder, job, manifest, running, with_worker
from support.operations import counted
from surefoot_operator import reasons
from surefoot_operator.api.spec import SchedulingPolicy
from surefoot_operator.api.status import JobStatus
from surefoot_operator.errors import InvariantViolation
from surefoot_operator.job_snapshot import (
    JobSnapshot,
    ObservedNode,
    ObservedPodGroup,
    ObservedPodGroups,
    ObservedWorker,
    PendingCreate,
    PendingGroupCall,
    PodGroup,
)
from surefoot_operator.policy.core import facts
from surefoot_operator.policy.core.actions import (
    Action,
    ApplyPodGroup,
    CreateWorker,
    DeletePodGroup,
    FenceMemoryServer,
    Plan,
)
from surefoot_operator.policy.core.facts import MAX_CACHED_VALUES, build_facts, cached_by_identity
from surefoot_operator.policy.maintenance.maintenance_plan import plan_maintenance
from surefoot_operator.policy.membership.workers import reconcile_workers
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check_plan
from surefoot_operator.reconcile.reconciler import SnapshotReuse

# ---- gang ------------------------------------------------------------------------------------------------------------
# A job's pod group: there before its workers, with the smallest world as its minimum, and gone when nobody wants workers.

NOW = 2000.0
NONE = ObservedPodGroups()


def group(least: int = 1, **other: Any) -> ObservedPodGroup:
    return ObservedPodGroup(PodGroup("Coscheduling", least, **other), "uid-Coscheduling")


def begun(
    groups: ObservedPodGroups | None = NONE, replicas: int = 3, least: int | None = 1, **spec: Any
) -> JobSnapshot:
    """A job whose first world is claimed, before it has any worker."""
    spec.setdefault("scheduling_policy", SchedulingPolicy("Coscheduling"))
    body = job(replicas, least, **spec)
    first = plan(JobSnapshot(now_seconds=NOW, term_seconds=NOW, job=body, status=JobStatus(), pod_groups=groups))
    return JobSnapshot(now_seconds=NOW, term_seconds=NOW, job=body, status=first.status, pod_groups=groups)


def of_groups(made: Plan) -> list[ApplyPodGroup | DeletePodGroup]:
    return [a for a in made.actions if isinstance(a, ApplyPodGroup | DeletePodGroup)]


def creates(made: Plan) -> list[CreateWorker]:
    return [a for a in made.actions if isinstance(a, CreateWorker)]


def scheduled(made: Plan) -> tuple[str, str, str]:
    found = next(c for c in made.status.conditions if c.type == reasons.PODS_SCHEDULED)
    return found.status, found.reason, found.message


def test_the_group_is_asked_for_first_and_workers_once_it_is_seen() -> None:
    seen = begun()
    made = plan(seen)
    assert of_groups(made) == [ApplyPodGroup(PodGroup("Coscheduling", 1))]
    assert creates(made) == []
    assert made.status.next_attempt == seen.status.next_attempt  # nothing is counted that is not asked for
    check_plan(made, seen)
    there = replace(seen, status=made.status, pod_groups=ObservedPodGroups((group(),)))
    made = plan(there)
    assert of_groups(made) == []
    assert [a.index for a in creates(made)] == [0, 1, 2]
    check_plan(made, there)


def test_a_job_without_a_policy_and_a_fabric_without_groups_have_none() -> None:
    assert of_groups(plan(begun(scheduling_policy=None))) == []
    made = plan(begun(groups=None))
    assert of_groups(made) == []
    assert len(creates(made)) == 3


@pytest.mark.parametrize(("replicas", "least", "spares", "minimum"), [(4, 2, 0, 2), (4, None, 0, 4), (4, 2, 3, 2)])
def test_the_minimum_is_the_smallest_world_without_spares(
    replicas: int, least: int | None, spares: int, minimum: int
) -> None:
    made = plan(begun(replicas=replicas, least=least, spares=spares))
    assert of_groups(made) == [ApplyPodGroup(PodGroup("Coscheduling", minimum))]


def test_an_edit_of_the_smallest_world_changes_the_group() -> None:
    seen = replace(
        running(scheduling_policy=SchedulingPolicy("Coscheduling"), least=2), pod_groups=ObservedPodGroups((group(),))
    )
    assert of_groups(plan(seen)) == [ApplyPodGroup(PodGroup("Coscheduling", 2))]
    assert of_groups(plan(replace(seen, pod_groups=ObservedPodGroups((group(least=2),))))) == []


@pytest.mark.parametrize(
    ("asked", "there", "fits"),
    [
        ({}, {"schedule_timeout_seconds": 9}, True),  # what the job leaves to the cluster
        ({"schedule_timeout_seconds": 9}, {"schedule_timeout_seconds": 9}, True),
        ({"schedule_timeout_seconds": 9}, {"schedule_timeout_seconds": 8}, False),
        ({"schedule_timeout_seconds": 9}, {}, False),
    ],
)
def test_what_the_job_says_of_the_group_is_kept_and_the_rest_left(
    asked: dict[str, int], there: dict[str, int], fits: bool
) -> None:
    seen = begun(ObservedPodGroups((group(**there),)), scheduling_policy=SchedulingPolicy("Coscheduling", **asked))
    assert of_groups(plan(seen)) == ([] if fits else [ApplyPodGroup(PodGroup("Coscheduling", 1, **asked))])


def test_a_group_that_was_deleted_by_hand_is_made_again_and_a_replacement_waits_for_it() -> None:
    seen = replace(running(scheduling_policy=SchedulingPolicy("Coscheduling")), pod_groups=NONE, free_nodes=None)
    made = plan(seen)
    assert of_groups(made) == [ApplyPodGroup(PodGroup("Coscheduling", 1))]
    assert made.status.membership == seen.status.membership  # whoever trains goes on
    assert scheduled(made)[0] == "True"
    lost = with_worker(seen, 2, phase="Failed", exit_code=1)
    claimed = plan(lost)
    assert creates(claimed) == []
    after = replace(lost, status=claimed.status)
    assert creates(plan(after)) == []
    assert [a.index for a in creates(plan(replace(after, pod_groups=ObservedPodGroups((group(),)))))] == [2]


def test_a_group_that_is_being_deleted_is_made_again_when_it_is_gone() -> None:
    going = replace(group(), deleting=True)
    made = plan(begun(ObservedPodGroups((going,))))
    assert of_groups(made) == []
    assert creates(made) == []


@pytest.mark.parametrize("phase", ["Complete", "Failed"])
def test_a_job_that_is_over_keeps_its_group_until_its_workers_have_ended(phase: Any) -> None:
    seen = running(scheduling_policy=SchedulingPolicy("Coscheduling"))
    seen = replace(seen, status=replace(seen.status, phase=phase), pod_groups=ObservedPodGroups((group(),)))
    assert of_groups(plan(seen)) == []
    ended = replace(seen, workers=tuple(replace(w, phase="Succeeded", exit_code=0) for w in seen.workers))
    (gone,) = of_groups(plan(ended))
    assert isinstance(gone, DeletePodGroup)
    assert (gone.gang, gone.uid) == ("Coscheduling", "uid-Coscheduling")
    assert of_groups(plan(replace(ended, pod_groups=NONE))) == []


def test_a_suspended_job_gives_its_group_back_with_its_last_worker() -> None:
    suspended = begun(ObservedPodGroups((group(),)), suspend=True)
    (gone,) = of_groups(plan(suspended))
    assert str(gone) == "remove the pod group for Coscheduling: the job is suspended"
    left = replace(suspended, workers=(ObservedWorker(0, 1, "gpt-0", "u", "n", "Running"),))
    assert of_groups(plan(left)) == []


def test_a_policy_that_is_taken_away_takes_its_group_along() -> None:
    without = begun(ObservedPodGroups((group(),)), scheduling_policy=None)
    assert [str(a) for a in of_groups(plan(without))] == [
        "remove the pod group for Coscheduling: schedulingPolicy no longer requires it"
    ]


def test_of_a_deleted_job_nothing_is_done_as_its_group_goes_with_it() -> None:
    seen = begun(ObservedPodGroups((group(),)))
    assert of_groups(plan(replace(seen, job=replace(seen.job, deleted=True)))) == []


def test_an_api_that_is_missing_is_said_once_and_keeps_workers_from_being_made() -> None:
    missing = ObservedPodGroups(
        unavailable={"Coscheduling": "404 page not found; install its CustomResourceDefinition"}
    )
    seen = replace(begun(), pod_groups=missing)
    made = plan(seen)
    assert of_groups(made) == []
    assert creates(made) == []
    truth, reason, message = scheduled(made)
    assert (truth, reason) == ("False", "PodGroupCreationFailed")
    assert "no worker is created without its pod group for Coscheduling: 404 page not found" in message
    assert [e.reason for e in made.events if e.reason == reasons.POD_GROUP_CREATION_FAILED] == [
        reasons.POD_GROUP_CREATION_FAILED
    ]
    again = plan(replace(seen, status=made.status))
    assert [e for e in again.events if e.reason == reasons.POD_GROUP_CREATION_FAILED] == []
    assert again.status == made.status
    served = replace(seen, status=made.status, pod_groups=NONE)
    assert of_groups(plan(served)) == [ApplyPodGroup(PodGroup("Coscheduling", 1))]


@pytest.mark.parametrize(
    ("call", "asked"),
    [
        (PendingGroupCall("Coscheduling", True), False),
        (PendingGroupCall("Coscheduling", False, "denied", NOW + 5), False),
        (PendingGroupCall("Coscheduling", False, "denied", NOW - 1), True),
    ],
)
def test_a_call_is_made_once_at_a_time_and_again_after_its_backoff(call: PendingGroupCall, asked: bool) -> None:
    seen = replace(begun(), group_calls=(call,))
    made = plan(seen)
    assert bool(of_groups(made)) == asked
    if call.rejection:
        assert "which was rejected: denied" in scheduled(made)[2]
        assert made.wake_after_seconds is not None
    if call.until_seconds > NOW:
        assert made.wake_after_seconds is not None
        assert made.wake_after_seconds <= 5


def test_a_plan_that_makes_workers_before_their_group_is_refused() -> None:
    seen = begun(ObservedPodGroups((group(),)))
    made = plan(seen)
    assert creates(made)
    with pytest.raises(InvariantViolation, match="comes before its pod group"):
        check_plan(made, replace(seen, pod_groups=NONE))


def carried_out(seen: JobSnapshot, made: Plan, prefix: int) -> JobSnapshot:
    """What a fabric shows after it has done the first `prefix` of a plan's actions, and the operator was killed."""
    known = {one.group.gang: one for one in (seen.pod_groups or NONE).groups}
    workers = list(seen.workers)
    for action in made.actions[:prefix]:
        if isinstance(action, ApplyPodGroup):
            known[action.group.gang] = ObservedPodGroup(action.group, f"uid-{action.group.gang}")
        elif isinstance(action, DeletePodGroup):
            known.pop(action.gang, None)
        elif isinstance(action, CreateWorker):
            name = f"gpt-{action.index}-{action.attempt}"
            workers.append(
                ObservedWorker(
                    action.index, action.attempt, name, name, None, "Pending", created_seconds=seen.now_seconds
                )
            )
    groups = ObservedPodGroups(tuple(known[gang] for gang in sorted(known)))
    return replace(seen, status=made.status, pod_groups=groups, workers=tuple(workers))


@given(
    st.lists(st.integers(0, 4), max_size=4),
    st.booleans(),
    st.integers(1, 3),
)
def test_killed_after_any_action_the_next_plans_reach_the_same_group_and_then_nothing(
    kills: list[int], is_there: bool, least: int
) -> None:
    seen = begun(ObservedPodGroups((group(least=9),) if is_there else ()), least=least)
    for prefix in (*kills, 99, 99, 99):
        made = plan(seen)
        check_plan(made, seen)
        if creates(made):
            assert (seen.pod_groups or NONE).groups
        seen = carried_out(seen, made, prefix)
    assert seen.pod_groups is not None
    assert [one.group for one in seen.pod_groups.groups] == [PodGroup("Coscheduling", least)]
    assert sorted(w.index for w in seen.workers) == [0, 1, 2]
    last = plan(seen)
    assert last.actions == ()
    assert last.status == seen.status


# ---- refused workers -------------------------------------------------------------------------------------------------
# A worker that the fabric takes its time about, or will not make: nobody who could train waits for it.

NOW_REFUSED_WORKERS = BEGAN + 100
QUOTA = 'pods "gpt-2-7" is forbidden: exceeded quota'


def shrunk(*creates: PendingCreate) -> JobSnapshot:
    """Workers 0 and 1 train; worker 2 is not there, and was asked for as `creates` say."""
    seen = running()
    world = seen.status.membership
    assert world is not None
    small = replace(world, world_size=2, members=world.members[:2])
    status = replace(seen.status, membership=small, next_attempt=8)
    return replace(seen, status=status, workers=seen.workers[:2], sessions=seen.sessions[:2], creates=creates)


def asked(seen: JobSnapshot) -> list[Action]:
    return [a for a in plan(seen).actions if isinstance(a, CreateWorker)]


def condition(seen: JobSnapshot, kind: str) -> tuple[str, str, str]:
    return next((c.status, c.reason, c.message) for c in plan(seen).status.conditions if c.type == kind)


def test_what_is_under_way_is_not_asked_for_again_under_another_attempt() -> None:
    assert asked(shrunk()) == [CreateWorker(2, 8)]
    made = plan(shrunk(PendingCreate(2, 7, in_progress=True)))
    assert [a for a in made.actions if isinstance(a, CreateWorker)] == []
    assert made.status.next_attempt == 8


def test_what_was_refused_is_asked_for_again_under_its_own_attempt_once_that_is_due() -> None:
    early = shrunk(PendingCreate(2, 7, False, QUOTA, until_seconds=NOW_REFUSED_WORKERS + 4))
    made = plan(early)
    assert asked(early) == []
    assert made.wake_after_seconds is not None
    assert made.wake_after_seconds <= 4.0
    due = shrunk(PendingCreate(2, 7, False, QUOTA, until_seconds=NOW_REFUSED_WORKERS))
    assert asked(due) == [CreateWorker(2, 7)]
    assert plan(due).status.next_attempt == 8


def test_the_refusals_own_words_stand_on_the_job_and_are_told_once() -> None:
    seen = shrunk(PendingCreate(2, 7, False, QUOTA, until_seconds=NOW_REFUSED_WORKERS + 4))
    assert condition(seen, "PodsScheduled") == (
        "False",
        "CreationRejected",
        f"2 of 3 workers have a node; worker 2 was rejected: {QUOTA}",
    )
    first = plan(seen)
    assert [e.message for e in first.events if e.reason == "WorkerCreationFailed"] == [
        f"2 of 3 workers have a node; worker 2 was rejected: {QUOTA}; the operator tries again"
    ]
    assert "WorkerCreationFailed" not in {e.reason for e in plan(replace(seen, status=first.status)).events}


def test_a_refusal_that_a_later_worker_overtook_means_nothing_any_more() -> None:
    seen = running()
    assert plan(replace(seen, creates=(PendingCreate(2, 1, False, QUOTA),))).actions == plan(seen).actions


def beginning(refusal: PendingCreate) -> JobSnapshot:
    first = plan(
        JobSnapshot(
            now_seconds=NOW_REFUSED_WORKERS, term_seconds=NOW_REFUSED_WORKERS, job=job(3, 1), status=JobStatus()
        )
    )
    return JobSnapshot(
        now_seconds=NOW_REFUSED_WORKERS,
        term_seconds=NOW_REFUSED_WORKERS,
        job=job(3, 1),
        status=first.status,
        creates=(refusal,),
    )


def test_a_pod_that_can_never_be_made_fails_a_job_that_has_no_other_with_the_servers_sentence() -> None:
    never = "the API server refused to POST pods: 422 Invalid: spec.containers[0].image: Required value"
    made = plan(beginning(PendingCreate(0, 1, False, never, permanent=True)))
    assert made.status.phase == "Failed"
    assert made.status.message == f"worker 0 can never be created from this pod template: {never}"


def test_a_quota_fails_nobody_however_long_it_lasts() -> None:
    late = replace(beginning(PendingCreate(0, 1, False, QUOTA)), now_seconds=NOW_REFUSED_WORKERS + 86_400)
    assert plan(late).status.phase != "Failed"
    never = replace(shrunk(PendingCreate(2, 7, False, QUOTA, permanent=True)), now_seconds=NOW_REFUSED_WORKERS)
    assert plan(never).status.phase == "Running", "others train: they are not failed for the one that cannot be made"


def test_survivors_are_sealed_for_and_assigned_while_the_replacement_is_refused() -> None:
    """The world of two is committed although worker 2 was asked for and refused ever since."""
    saved = [manifest(1, 40, rank, 3) for rank in range(3)]
    seen = shrunk(PendingCreate(2, 7, False, QUOTA, until_seconds=NOW_REFUSED_WORKERS + 9))
    world = seen.status.membership
    assert world is not None
    claimed = replace(
        world, generation=2, state="Claimed", reason="node n2 is gone", changed_seconds=NOW_REFUSED_WORKERS
    )
    status = replace(seen.status, membership=claimed)
    stopped = tuple(replace(s, stopped=2, warm=True) for s in seen.sessions)
    seen = replace(seen, status=status, sessions=stopped)
    sealing = plan(replace(seen, servers=(holder("n0"), holder("n1"))))
    assert {a.server.node for a in sealing.actions if isinstance(a, FenceMemoryServer)} == {"n0", "n1"}
    gone = holder("n2", state="Gone")
    read = plan(replace(seen, servers=(holder("n0", 2, *saved), holder("n1", 2, *saved), gone)))
    assert read.status.membership is not None
    assert (read.status.membership.state, len(read.status.membership.members)) == ("Committed", 2)


def test_a_worker_that_was_asked_to_be_deleted_gets_no_rank() -> None:
    """The call was not answered, and may be carried out late: the world would lose it a moment after its commit."""
    seen = shrunk()
    full = running()
    spare = replace(seen, workers=full.workers, sessions=full.sessions)
    assert not plan(spare).reason.startswith("generation 1 runs"), "it is warm, and the world grows by it"
    asked_to_go = replace(spare, deletion_uids=frozenset({full.workers[2].uid}))
    made = plan(asked_to_go)
    assert made.status.membership == spare.status.membership
    assert [(c.index, c.attempt) for c in made.actions if isinstance(c, CreateWorker)] == [(2, 8)]


def test_a_member_that_was_asked_to_be_deleted_is_left_in_order() -> None:
    full = running()
    made = plan(replace(full, deletion_uids=frozenset({full.workers[2].uid})))
    assert "worker 2 has a pending deletion" in made.reason
    assert "barrier" in made.reason


# ---- round growth ----------------------------------------------------------------------------------------------------
# A round after one more heartbeat costs in proportion to the workers from ten on, and what did not change costs nothing.

FEW, MANY = 10, 400
A_WORKER = 2_250
"""Bytecode instructions of a whole round for each worker, with a tenth of room; 5,600 when each round made its indexes anew."""


def spoken(seen: JobSnapshot) -> JobSnapshot:
    first, *others = seen.sessions
    return replace(seen, sessions=(replace(first, last_message_seconds=first.last_message_seconds), *others))


def a_round(seen: JobSnapshot) -> None:
    decided = plan(seen)
    check_plan(decided, seen)
    plan_maintenance(replace(seen, status=decided.status))


def test_a_round_costs_few_instructions_a_worker_at_any_size() -> None:
    costs = {}
    for workers in (FEW, MANY):
        seen = replace(running(workers=workers), free_nodes=1)
        a_round(seen)  # indexes are made
        costs[workers] = counted(lambda seen=seen: a_round(spoken(seen)))  # type: ignore[misc]
    a_worker = (costs[MANY] - costs[FEW]) / (MANY - FEW)
    assert costs[MANY] / MANY <= costs[FEW] / FEW * 1.2
    assert a_worker <= A_WORKER, f"{a_worker:.0f} instructions"


def test_nodes_in_doubt_cost_a_job_nothing_that_asks_for_no_worker() -> None:
    costs, began = {}, running(workers=3)
    for count in (FEW, MANY):
        doubted = tuple(
            ObservedNode(f"m{n}", f"m{n}", ready=True, unconfirmed_failure="not renewed") for n in range(count)
        )
        facts = build_facts(replace(began, nodes=(*began.nodes, *doubted)))
        reconcile_workers(facts, frozenset(range(3)))  # indexes are made
        again = build_facts(replace(facts.snapshot, now_seconds=facts.now + 1.0))
        costs[count] = counted(lambda facts=again: reconcile_workers(facts, frozenset(range(3))))  # type: ignore[misc]
    assert costs[MANY] <= costs[FEW] * 1.2


def test_where_nodes_stand_is_read_once_for_all_jobs() -> None:
    """More jobs than are kept each read every node in each of their rounds."""
    costs = {}
    for count in (FEW, MANY):
        nodes = tuple(ObservedNode(f"m{n}", f"m{n}", ready=True, path=("zone", f"rack-{n}")) for n in range(count))
        first = facts.topology_of(nodes, "uid-0")
        jobs = [f"uid-{job}" for job in range(1, 3 * MAX_CACHED_VALUES)]
        costs[count] = counted(lambda nodes=nodes, jobs=jobs: [facts.topology_of(nodes, job) for job in jobs])  # type: ignore[misc]
        assert facts.topology_of(nodes, "uid-0").paths is first.paths
    assert costs[MANY] <= costs[FEW] * 1.2


def test_equal_parts_stay_the_same_objects_and_others_do_not() -> None:
    steady, seen = SnapshotReuse(), running(workers=3)
    first = steady.reuse_equal_parts(seen)
    again = steady.reuse_equal_parts(
        replace(seen, workers=(*seen.workers,), nodes=tuple(seen.nodes), servers=(*seen.servers,))
    )
    assert (again.workers, again.nodes, again.servers) == (seen.workers, seen.nodes, seen.servers)
    assert again.workers is first.workers
    assert again.nodes is first.nodes
    assert again.servers is first.servers
    gone = replace(seen, servers=seen.servers[1:])
    assert steady.reuse_equal_parts(gone).servers == seen.servers[1:]


def test_an_index_is_made_once_for_one_tuple_and_anew_for_another() -> None:
    seen = running(workers=3)
    once = facts.servers_by_id(seen.servers)
    assert facts.servers_by_id(seen.servers) is once
    other = tuple(replace(h, state="Unreachable") for h in seen.servers)
    assert {h.state for h in facts.servers_by_id(other).values()} == {"Unreachable"}


def test_what_is_kept_is_bounded_and_told_by_its_arguments() -> None:
    asked: list[int] = []

    @cached_by_identity
    def length(source: tuple[int, ...], more: int) -> int:
        asked.append(more)
        return len(source) + more

    source = (1, 2, 3)
    assert [length(source, 1), length(source, 1), length(source, 2)] == [4, 4, 5]
    assert asked == [1, 2]
    for number in range(MAX_CACHED_VALUES):
        length((number,) * 5, 0)
    assert length(source, 1) == 4
    assert asked.count(1) == 2
