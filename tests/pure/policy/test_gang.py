"""A job's pod group: there before its workers, with the smallest world as its minimum, and gone when nobody wants workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.builders import job, running, with_worker
from surefoot_operator import reasons
from surefoot_operator.api.spec import SchedulingPolicy
from surefoot_operator.api.status import JobStatus
from surefoot_operator.errors import InvariantBroken
from surefoot_operator.job_snapshot import GroupCallSeen, Observed, PodGroup, PodGroupSeen, PodGroupsSeen, WorkerSeen
from surefoot_operator.policy.core.actions import CreateWorker, KeepGroup, Plan, RemoveGroup
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check

NOW = 2000.0
NONE = PodGroupsSeen()


def group(least: int = 1, **other: Any) -> PodGroupSeen:
    return PodGroupSeen(PodGroup("Coscheduling", least, **other), "uid-Coscheduling")


def begun(groups: PodGroupsSeen | None = NONE, replicas: int = 3, least: int | None = 1, **spec: Any) -> Observed:
    """A job whose first world is claimed, before it has any worker."""
    spec.setdefault("scheduling_policy", SchedulingPolicy("Coscheduling"))
    body = job(replicas, least, **spec)
    first = plan(Observed(now=NOW, term_seconds=NOW, job=body, status=JobStatus(), pod_groups=groups))
    return Observed(now=NOW, term_seconds=NOW, job=body, status=first.status, pod_groups=groups)


def of_groups(made: Plan) -> list[KeepGroup | RemoveGroup]:
    return [a for a in made.actions if isinstance(a, KeepGroup | RemoveGroup)]


def creates(made: Plan) -> list[CreateWorker]:
    return [a for a in made.actions if isinstance(a, CreateWorker)]


def scheduled(made: Plan) -> tuple[str, str, str]:
    found = next(c for c in made.status.conditions if c.type == reasons.PODS_SCHEDULED)
    return found.status, found.reason, found.message


def test_the_group_is_asked_for_first_and_workers_once_it_is_seen() -> None:
    seen = begun()
    made = plan(seen)
    assert of_groups(made) == [KeepGroup(PodGroup("Coscheduling", 1))]
    assert creates(made) == []
    assert made.status.next_attempt == seen.status.next_attempt  # nothing is counted that is not asked for
    check(made, seen)
    there = replace(seen, status=made.status, pod_groups=PodGroupsSeen((group(),)))
    made = plan(there)
    assert of_groups(made) == []
    assert [a.index for a in creates(made)] == [0, 1, 2]
    check(made, there)


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
    assert of_groups(made) == [KeepGroup(PodGroup("Coscheduling", minimum))]


def test_an_edit_of_the_smallest_world_changes_the_group() -> None:
    seen = replace(
        running(scheduling_policy=SchedulingPolicy("Coscheduling"), least=2), pod_groups=PodGroupsSeen((group(),))
    )
    assert of_groups(plan(seen)) == [KeepGroup(PodGroup("Coscheduling", 2))]
    assert of_groups(plan(replace(seen, pod_groups=PodGroupsSeen((group(least=2),))))) == []


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
    seen = begun(PodGroupsSeen((group(**there),)), scheduling_policy=SchedulingPolicy("Coscheduling", **asked))
    assert of_groups(plan(seen)) == ([] if fits else [KeepGroup(PodGroup("Coscheduling", 1, **asked))])


def test_a_group_that_was_deleted_by_hand_is_made_again_and_a_replacement_waits_for_it() -> None:
    seen = replace(running(scheduling_policy=SchedulingPolicy("Coscheduling")), pod_groups=NONE, free_nodes=None)
    made = plan(seen)
    assert of_groups(made) == [KeepGroup(PodGroup("Coscheduling", 1))]
    assert made.status.world == seen.status.world  # whoever trains goes on
    assert scheduled(made)[0] == "True"
    lost = with_worker(seen, 2, phase="Failed", exit_code=1)
    claimed = plan(lost)
    assert creates(claimed) == []
    after = replace(lost, status=claimed.status)
    assert creates(plan(after)) == []
    assert [a.index for a in creates(plan(replace(after, pod_groups=PodGroupsSeen((group(),)))))] == [2]


def test_a_group_that_is_being_deleted_is_made_again_when_it_is_gone() -> None:
    going = replace(group(), deleting=True)
    made = plan(begun(PodGroupsSeen((going,))))
    assert of_groups(made) == []
    assert creates(made) == []


@pytest.mark.parametrize("phase", ["Complete", "Failed"])
def test_a_job_that_is_over_keeps_its_group_until_its_workers_have_ended(phase: Any) -> None:
    seen = running(scheduling_policy=SchedulingPolicy("Coscheduling"))
    seen = replace(seen, status=replace(seen.status, phase=phase), pod_groups=PodGroupsSeen((group(),)))
    assert of_groups(plan(seen)) == []
    ended = replace(seen, workers=tuple(replace(w, phase="Succeeded", exit_code=0) for w in seen.workers))
    (gone,) = of_groups(plan(ended))
    assert isinstance(gone, RemoveGroup)
    assert (gone.gang, gone.uid) == ("Coscheduling", "uid-Coscheduling")
    assert of_groups(plan(replace(ended, pod_groups=NONE))) == []


def test_a_suspended_job_gives_its_group_back_with_its_last_worker() -> None:
    suspended = begun(PodGroupsSeen((group(),)), suspend=True)
    (gone,) = of_groups(plan(suspended))
    assert str(gone) == "remove the pod group for Coscheduling: the job is suspended"
    left = replace(suspended, workers=(WorkerSeen(0, 1, "gpt-0", "u", "n", "Running"),))
    assert of_groups(plan(left)) == []


def test_a_policy_that_is_taken_away_takes_its_group_along() -> None:
    without = begun(PodGroupsSeen((group(),)), scheduling_policy=None)
    assert [str(a) for a in of_groups(plan(without))] == [
        "remove the pod group for Coscheduling: schedulingPolicy does not ask for it any more"
    ]


def test_of_a_deleted_job_nothing_is_done_as_its_group_goes_with_it() -> None:
    seen = begun(PodGroupsSeen((group(),)))
    assert of_groups(plan(replace(seen, job=replace(seen.job, deleted=True)))) == []


def test_an_api_that_is_missing_is_said_once_and_keeps_workers_from_being_made() -> None:
    missing = PodGroupsSeen(unseen={"Coscheduling": "404 page not found; is its CustomResourceDefinition installed?"})
    seen = replace(begun(), pod_groups=missing)
    made = plan(seen)
    assert of_groups(made) == []
    assert creates(made) == []
    truth, reason, message = scheduled(made)
    assert (truth, reason) == ("False", "PodGroupRefused")
    assert "no worker is created without its pod group for Coscheduling: 404 page not found" in message
    assert [e.reason for e in made.events if e.reason == reasons.POD_GROUP_REFUSED] == [reasons.POD_GROUP_REFUSED]
    again = plan(replace(seen, status=made.status))
    assert [e for e in again.events if e.reason == reasons.POD_GROUP_REFUSED] == []
    assert again.status == made.status
    served = replace(seen, status=made.status, pod_groups=NONE)
    assert of_groups(plan(served)) == [KeepGroup(PodGroup("Coscheduling", 1))]


@pytest.mark.parametrize(
    ("call", "asked"),
    [
        (GroupCallSeen("Coscheduling", True), False),
        (GroupCallSeen("Coscheduling", False, "denied", NOW + 5), False),
        (GroupCallSeen("Coscheduling", False, "denied", NOW - 1), True),
    ],
)
def test_a_call_is_made_once_at_a_time_and_again_after_its_backoff(call: GroupCallSeen, asked: bool) -> None:
    seen = replace(begun(), group_calls=(call,))
    made = plan(seen)
    assert bool(of_groups(made)) == asked
    if call.refusal:
        assert "which was refused: denied" in scheduled(made)[2]
        assert made.wake_after_seconds is not None
    if call.until_seconds > NOW:
        assert made.wake_after_seconds is not None
        assert made.wake_after_seconds <= 5


def test_a_plan_that_makes_workers_before_their_group_is_refused() -> None:
    seen = begun(PodGroupsSeen((group(),)))
    made = plan(seen)
    assert creates(made)
    with pytest.raises(InvariantBroken, match="comes before its pod group"):
        check(made, replace(seen, pod_groups=NONE))


def carried_out(seen: Observed, made: Plan, prefix: int) -> Observed:
    """What a fabric shows after it has done the first `prefix` of a plan's actions, and the operator was killed."""
    known = {one.group.gang: one for one in (seen.pod_groups or NONE).groups}
    workers = list(seen.workers)
    for action in made.actions[:prefix]:
        if isinstance(action, KeepGroup):
            known[action.group.gang] = PodGroupSeen(action.group, f"uid-{action.group.gang}")
        elif isinstance(action, RemoveGroup):
            known.pop(action.gang, None)
        elif isinstance(action, CreateWorker):
            name = f"gpt-{action.index}-{action.attempt}"
            workers.append(
                WorkerSeen(action.index, action.attempt, name, name, None, "Pending", created_seconds=seen.now)
            )
    groups = PodGroupsSeen(tuple(known[gang] for gang in sorted(known)))
    return replace(seen, status=made.status, pod_groups=groups, workers=tuple(workers))


@given(
    st.lists(st.integers(0, 4), max_size=4),
    st.booleans(),
    st.integers(1, 3),
)
def test_killed_after_any_action_the_next_plans_reach_the_same_group_and_then_nothing(
    kills: list[int], is_there: bool, least: int
) -> None:
    seen = begun(PodGroupsSeen((group(least=9),) if is_there else ()), least=least)
    for prefix in (*kills, 99, 99, 99):
        made = plan(seen)
        check(made, seen)
        if creates(made):
            assert (seen.pod_groups or NONE).groups
        seen = carried_out(seen, made, prefix)
    assert seen.pod_groups is not None
    assert [one.group for one in seen.pod_groups.groups] == [PodGroup("Coscheduling", least)]
    assert sorted(w.index for w in seen.workers) == [0, 1, 2]
    last = plan(seen)
    assert last.actions == ()
    assert last.status == seen.status
