"""A leader that has heard nothing of a world's workers does not say what they do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.builders import BEGAN, running
from surefoot_operator.api.status import JobStatus, condition_of
from surefoot_operator.job_snapshot import Observed
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.report.blockers import UNHEARD_SECONDS

TERM = BEGAN + 1000


def taken_over(after: float = 1.0, heard: int = 0) -> Observed:
    """Another leader has begun so long ago; of three workers that train so many came to it."""
    seen = running()
    status = replace(plan(seen).status, phase="Running", step=668)
    sessions = tuple(
        replace(one, heard_seconds=TERM + after, step_at_seconds=TERM + after) for one in seen.sessions[:heard]
    )
    return replace(seen, now=TERM + after, term_seconds=TERM, status=status, sessions=sessions)


def told(status: JobStatus) -> str:
    found = condition_of(status, "AgentsHeard")
    return "" if found is None else f"{found.status}: {found.message}"


def test_what_is_not_known_is_not_called_starting() -> None:
    made = plan(taken_over())
    assert made.status.phase == "Running"
    assert made.status.message == (
        "workers 0, 1, 2 have not connected to this operator since it began to lead; the last known step is 668"
    )
    assert told(made.status) == ""
    assert made.wake_after_seconds is not None
    assert made.wake_after_seconds <= UNHEARD_SECONDS


def test_a_worker_that_does_not_come_is_an_event_once() -> None:
    made = plan(taken_over(UNHEARD_SECONDS, heard=1))
    assert told(made.status).startswith(
        "False: workers 1, 2 have not connected to this operator since it began to lead"
    )
    (event,) = [e for e in made.events if e.reason == "AgentsUnheard"]
    assert event.warning
    assert "surefoot doctor --network" in event.message
    assert "delete their pods" in event.message
    again = replace(taken_over(UNHEARD_SECONDS + 5, heard=1), status=made.status)
    assert plan(again).status.phase == "Running"
    assert [e for e in plan(again).events if e.reason == "AgentsUnheard"] == []
    assert told(plan(again).status) == told(made.status)
    next_leader = replace(again, term_seconds=again.now - 1)
    assert told(plan(next_leader).status) == told(made.status)  # it waits before it says anything else
    whole = replace(again, sessions=taken_over(UNHEARD_SECONDS + 5, heard=3).sessions)
    assert told(plan(whole).status) == "True: every worker of the world has connected"


def test_nobody_is_missing_where_all_came_or_their_pods_do_not_run() -> None:
    late = taken_over(UNHEARD_SECONDS, heard=3)
    assert told(plan(late).status) == ""
    pending = replace(taken_over(UNHEARD_SECONDS), workers=tuple(replace(w, phase="Pending") for w in late.workers))
    assert told(plan(pending).status) == ""


@pytest.mark.parametrize("phase", ["Complete", "Failed"])
def test_an_ended_jobs_workers_have_left(phase: str) -> None:
    seen = taken_over(UNHEARD_SECONDS)
    ended = replace(seen, status=replace(seen.status, phase=phase, completion_seconds=TERM))  # type: ignore[arg-type]
    assert told(plan(ended).status) == ""
