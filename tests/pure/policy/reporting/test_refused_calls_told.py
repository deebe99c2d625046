"""What people read on a job whose calls the API server refuses."""

from __future__ import annotations

from dataclasses import replace

from support.builders import running
from surefoot_operator.api.status import condition_of
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.report.blockers import AGAIN_SECONDS, refusal_events, unplanned
from surefoot_operator.rejected_calls import ApiCall, RefusedCall


def refused(number: int = 0, sentence: str = "failed quota") -> RefusedCall:
    return RefusedCall(
        ApiCall("create", "pods", "team", f"p{number}", "u"), "quota", sentence, "403 Forbidden", 0, 20, 5
    )


def test_a_refusal_is_a_condition_that_turns_true_again_and_is_not_there_before() -> None:
    seen = running()
    assert condition_of(plan(seen).status, "ApiAccepted") is None
    told = plan(replace(seen, refused_calls=(refused(),))).status
    found = condition_of(told, "ApiAccepted")
    assert found is not None
    assert (found.status, found.reason) == ("False", "Refused")
    assert found.message == "failed quota (403 Forbidden: create pods team/p0)"
    again = plan(
        replace(seen, status=told, now=seen.now + 1, refused_calls=(replace(refused(), count=6, last_seconds=30),))
    )
    assert condition_of(again.status, "ApiAccepted") == found  # no write for a count
    over = condition_of(plan(replace(seen, status=told)).status, "ApiAccepted")
    assert over is not None
    assert (over.status, over.reason) == ("True", "Accepted")


def test_many_refusals_are_three_and_a_number() -> None:
    told = plan(replace(running(), refused_calls=tuple(refused(n) for n in range(50)))).status
    found = condition_of(told, "ApiAccepted")
    assert found is not None
    assert found.message.endswith("; and 47 more")


def test_an_event_is_recorded_when_a_refusal_begins_and_seldom_after() -> None:
    first = refusal_events((refused(),), {}, 0.0)
    (event,) = first.events
    assert event.warning
    assert event.reason == "ApiRefused"
    assert event.message == "failed quota (403 Forbidden: create pods team/p0); the operator retries this call"
    later = refusal_events((refused(), refused(1)), first.told, 1.0)
    assert [e.message for e in later.events] == [
        "failed quota (403 Forbidden: create pods team/p1); the operator retries this call"
    ]
    assert refusal_events((refused(),), later.told, AGAIN_SECONDS - 1).events == ()
    assert len(refusal_events((refused(),), later.told, AGAIN_SECONDS).events) == 1
    assert refusal_events((), later.told, 2.0).told == {}  # over: its next beginning is news


def test_a_job_without_a_plan_says_why_and_keeps_all_else() -> None:
    status = running().status
    told = unplanned(status, (refused(),), 7.0)
    assert (
        told.message
        == "failed quota (403 Forbidden: create pods team/p0); until the server accepts it, Surefoot plans nothing for this job"
    )
    assert (told.phase, told.world, told.step) == (status.phase, status.world, status.step)
    assert unplanned(told, (refused(),), 9.0) == told
    assert unplanned(status, (), 7.0) == status
    assert unplanned(replace(status, tidied=True), (refused(),), 7.0).message == status.message
