"""A running job whose ranks were looked at: one rank a worker, by its share of work."""

from __future__ import annotations

from typing import Any

from support.builders import running, with_session
from surefoot.protocol.progress import RankActivity
from surefoot_operator.api.status import JobStatus
from surefoot_operator.job_snapshot import MAX_WINDOWS, ActivityHistory, ActivityWindow, JobSnapshot, Timings
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check_plan

LOOKS = 50


def paced(
    *shares: float,
    windows: int = MAX_WINDOWS,
    begun: int = 40,
    lines: tuple[tuple[tuple[int, int, int], ...], ...] = (),
    **spec: Any,
) -> JobSnapshot:
    """Each rank stood at work for its share of every window, and so often in `lines` of its loop."""
    seen = running(**spec)
    for index, share in enumerate(shares):
        told = RankActivity(index, 100, LOOKS, round(share * LOOKS), 64, lines[index] if lines else ())
        found = tuple(ActivityWindow(begun + 10 * at, (told,)) for at in range(windows))
        seen = with_session(seen, index, timings=Timings(steps=(0.1,) * 3, activity=ActivityHistory(windows=found)))
    return seen


def decided(seen: JobSnapshot) -> JobStatus:
    """The status of a plan that holds what plans promise."""
    made = plan(seen)
    check_plan(made, seen)
    return made.status
