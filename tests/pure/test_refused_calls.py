"""Which refusals of the API server last, whose they are, and which of them keep the operator from all its work."""

from __future__ import annotations

import pytest

from surefoot_operator.rejected_calls import (
    FORGOTTEN_SECONDS,
    MAX_CALLS,
    MAX_JOB_CALLS,
    REFUSED_SECONDS,
    ApiCall,
    Cause,
    RejectedCalls,
    count_by_cause,
)

POD = ApiCall("create", "pods", "team", "gpt-worker-0-1", "uid-gpt")
STATUS = ApiCall("patch", "trainingjobs/status", "team", "gpt", "uid-gpt")
OTHERS = ApiCall("patch", "trainingjobs/status", "team", "bert", "uid-bert")
NODES = ApiCall("watch", "nodes")
LEASE = ApiCall("update", "leases", "surefoot-system", "surefoot-operator")


def refused(*calls: ApiCall, times: int = 3, cause: Cause = "forbidden") -> RejectedCalls:
    """From second 0 on, all of it within REFUSED_SECONDS."""
    found = RejectedCalls()
    for number in range(times):
        for call in calls:
            found.record_rejected(
                call, cause, "nobody may", "403 Forbidden", REFUSED_SECONDS * number / max(1, times - 1)
            )
    return found


def calls(found: RejectedCalls, now: float = REFUSED_SECONDS) -> list[ApiCall]:
    return [one.call for one in found.long_rejected(now)]


def test_a_refusal_counts_once_it_came_again_and_lasts() -> None:
    found = refused(POD)
    assert calls(found, REFUSED_SECONDS - 0.1) == []
    assert calls(found) == [POD]
    assert calls(refused(POD, times=1)) == []
    (one,) = found.long_rejected(REFUSED_SECONDS)
    assert str(one) == "nobody may (403 Forbidden: create pods team/gpt-worker-0-1)"
    assert (one.count, one.first_seconds, one.last_seconds) == (3, 0.0, REFUSED_SECONDS)


def test_what_is_accepted_is_refused_no_more_and_begins_anew() -> None:
    found = refused(POD, STATUS)
    found.record_accepted(POD, REFUSED_SECONDS)
    assert calls(found) == [STATUS]
    found.record_rejected(POD, "quota", "full", "403 Forbidden", REFUSED_SECONDS + 1)
    found.record_rejected(POD, "quota", "full", "403 Forbidden", REFUSED_SECONDS + 2)
    assert calls(found, REFUSED_SECONDS + 3) == [STATUS]


def test_a_call_that_nobody_makes_any_more_is_forgotten() -> None:
    found = refused(POD)
    late = REFUSED_SECONDS + FORGOTTEN_SECONDS
    assert calls(found, late) == [POD]
    assert calls(found, late + 0.1) == []
    found = refused(POD)
    found.record_rejected(POD, "quota", "full", "403 Forbidden", late + 1)
    assert calls(found, late + 1) == []  # it begins anew


def test_the_newest_words_are_told() -> None:
    found = refused(POD)
    found.record_rejected(POD, "quota", "exceeded quota: used 2", "403 Forbidden", REFUSED_SECONDS)
    (one,) = found.long_rejected(REFUSED_SECONDS)
    assert (one.cause, one.message) == ("quota", "exceeded quota: used 2")


def test_a_job_hears_of_its_own_calls_and_of_what_every_job_depends_on() -> None:
    reviews = ApiCall("create", "tokenreviews")
    found = refused(POD, OTHERS, NODES, LEASE, reviews)
    assert {one.call for one in found.rejected_for_job("uid-gpt", REFUSED_SECONDS)} == {POD, NODES, reviews}


@pytest.mark.parametrize(("call", "disables"), [(NODES, True), (STATUS, True), (POD, False), (LEASE, False)], ids=str)
def test_one_job_s_refused_pod_makes_no_operator_unready(call: ApiCall, disables: bool) -> None:
    assert bool(refused(call).disabling(REFUSED_SECONDS)) is disables


def test_an_operator_that_writes_another_job_s_status_is_ready() -> None:
    found = refused(STATUS)
    found.record_accepted(OTHERS, 1.0)
    assert found.disabling(REFUSED_SECONDS) == ()
    assert calls(found) == [STATUS]


def test_a_server_that_does_not_answer_leaves_who_stands_by_ready() -> None:
    assert refused(NODES, cause="silent").disabling(REFUSED_SECONDS) == ()


def test_a_start_that_waits_for_a_view_says_so_at_its_second_refusal() -> None:
    found = refused(NODES, times=1)
    assert found.disabling(0.1, at_once=True) == ()
    found.record_rejected(NODES, "forbidden", "nobody may", "403 Forbidden", 0.2)
    assert len(found.disabling(0.2, at_once=True)) == 1


def test_of_more_jobs_than_are_kept_the_first_ones_are_told_of_and_the_operator_is_not_ready() -> None:
    """Each new one put out the one that was to be asked for next: none was ever refused twice, and none told."""
    found = RejectedCalls()
    for second in (0.0, REFUSED_SECONDS):
        for number in range(MAX_CALLS + 10):
            status = ApiCall("patch", STATUS.resource, "n", str(number), f"uid-{number}")
            found.record_rejected(status, "forbidden", "nobody may", "403 Forbidden", second)
    assert {call.name for call in calls(found)} == {str(number) for number in range(MAX_CALLS)}
    assert len(found.disabling(REFUSED_SECONDS)) == MAX_CALLS
    late = REFUSED_SECONDS + FORGOTTEN_SECONDS + 1
    found.record_rejected(OTHERS, "forbidden", "nobody may", "403 Forbidden", late)
    found.record_rejected(OTHERS, "forbidden", "nobody may", "403 Forbidden", late + REFUSED_SECONDS)
    assert calls(found, late + REFUSED_SECONDS) == [OTHERS], "who asks no more makes room"


def test_one_job_s_refused_pods_leave_room_for_what_is_refused_to_others() -> None:
    pods = [ApiCall("create", "pods", "n", str(number), "uid-large") for number in range(2 * MAX_CALLS)]
    found = calls(refused(*pods, POD, STATUS, NODES))
    assert {*found} - {*pods} == {POD, STATUS, NODES}
    assert len(found) == MAX_JOB_CALLS + 3


def test_what_the_rollout_of_the_memory_tier_may_not_list_keeps_no_job_from_being_looked_after() -> None:
    revisions = ApiCall("watch", "controllerrevisions", "surefoot-system")
    found = refused(revisions)
    assert calls(found) == [revisions]
    assert found.disabling(REFUSED_SECONDS) == ()
    assert found.rejected_for_job("uid-gpt", REFUSED_SECONDS) == ()


def test_calls_are_counted_by_what_they_are_and_not_by_object() -> None:
    found = refused(POD, ApiCall("create", "pods", "team", "gpt-worker-1-1", "uid-gpt"), STATUS)
    assert count_by_cause(found.long_rejected(REFUSED_SECONDS)) == {
        ("create", "pods", "forbidden"): 2,
        ("patch", "trainingjobs/status", "forbidden"): 1,
    }
