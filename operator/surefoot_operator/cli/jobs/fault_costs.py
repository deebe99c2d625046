"""Judges what the operator would do, and what faults would cost.

Pure; called by `explain`. Each answer is the operator's own `plan` on the present snapshot, or on the same one with one fault in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from surefoot.protocol.plain import listed
from surefoot_operator import reasons
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.api.status import JobStatus, Member
from surefoot_operator.cli.jobs.assumed_snapshot import (
    assumed_snapshot,
    with_drained_node,
    with_failed_trainer,
    with_lost_node,
)
from surefoot_operator.cli.jobs.job_view import JobView
from surefoot_operator.cli.jobs.read_jobs import pace_of, step_at
from surefoot_operator.job_snapshot import Observed
from surefoot_operator.policy.failure.sizing import largest_size
from surefoot_operator.policy.planning.plan import plan

Strike = Callable[[Observed, Member], Observed]


@dataclass(frozen=True, slots=True)
class FaultCost:
    """What one fault would lead to, were it to happen now."""

    fault: str
    decision: str
    """The operator's sentence."""
    ends_job: bool
    steps_lost: int | None
    """Steps to be run again; None: not known."""
    steps_lost_seconds: float | None
    recovery_seconds: float | None
    """From the first sign to the first new step: the median of this job's own incidents."""
    workers_after: int
    """Of the world that goes on; 0: it waits for a replacement."""
    restored: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a job is so, and what would become of it."""

    job: str
    told: str
    """What the operator itself said last."""
    decision: str
    """What its `plan` says from here."""
    actions: tuple[str, ...]
    wake_after_seconds: float | None
    faults: tuple[FaultCost, ...]
    budgets: tuple[str, ...]
    doubts: tuple[str, ...]
    """Why this may differ from what the operator itself decides."""


_ASSUMPTION = (
    "agents and holders speak to the operator alone: assumed here is that every agent of the world is heard, and that"
    " holders have what the status says"
)


def explain(view: JobView) -> Explanation:
    """Explains a job from one look at it."""
    stored = view.stored
    doubts = (*view.unread, *(("nodes are taken for well",) if view.nodes is None else ()))
    if stored.job is None or stored.status is None:
        return Explanation(str(stored), "", "cannot be told", (), None, (), (), (*stored.problems, *doubts))
    rate = pace_of(stored, view.now).steps_per_second
    seen = assumed_snapshot(view, stored.job, stored.status, None if not rate else 1 / rate)
    decided = plan(seen)
    return Explanation(
        job=str(stored),
        told=stored.status.message,
        decision=decided.reason,
        actions=tuple(map(str, decided.actions)),
        wake_after_seconds=decided.wake_after_seconds,
        faults=_faults(seen, view),
        budgets=_budgets(stored.job, stored.status),
        doubts=(_ASSUMPTION, *doubts),
    )


def _faults(seen: Observed, view: JobView) -> tuple[FaultCost, ...]:
    world = seen.status.world
    if world is None or world.state != "Committed" or not world.members or seen.status.phase in ("Complete", "Failed"):
        return ()
    member = world.members[-1]
    left = sum(one.node != member.node for one in world.members)
    everyone = len(world.members)
    strikes: tuple[tuple[str, Strike, int, bool], ...] = (
        (f"a trainer on worker {member.index} fails", with_failed_trainer, everyone, False),
        (f"node {member.node} is lost", with_lost_node, left, False),
        (f"node {member.node} is drained", with_drained_node, left, True),
    )
    return tuple(
        _cost(name, strike(seen, member), remaining, announced, view) for name, strike, remaining, announced in strikes
    )


def _cost(fault: str, struck: Observed, remaining: int, announced: bool, view: JobView) -> FaultCost:
    status, spec = struck.status, struck.job.spec
    decided = plan(struck)
    ends = decided.status.phase == "Failed"
    step, restored = _restore_point(status)
    rate = pace_of(view.stored, view.now).steps_per_second
    lost = 0 if announced else None if step is None else max(0, step_at(status, rate, view.now) - step)
    return FaultCost(
        fault=fault,
        decision=decided.reason,
        ends_job=ends,
        steps_lost=lost,
        steps_lost_seconds=None if lost is None or not rate else lost / rate,
        recovery_seconds=recovery_seconds(status, announced),
        workers_after=0 if ends else largest_size(spec, remaining),
        restored="the step that it halts at" if announced else restored,
    )


def _restore_point(status: JobStatus) -> tuple[int | None, str]:
    """Where a failure now would go back to, as the operator's own condition has it."""
    protected = next((one for one in status.conditions if one.type == reasons.CHECKPOINT_PROTECTED), None)
    newest, floor = status.last_complete, status.floor
    if protected is not None and protected.status == "True" and newest is not None:
        return newest.step, f"{newest}, complete and protected"
    if floor is not None:
        return floor.step, f"{floor}, in the persistent tier"
    if protected is not None and protected.status == "False" and newest is None:
        return 0, "the beginning: nothing is saved"
    return None, "not known: no checkpoint is known to survive it"


def recovery_seconds(status: JobStatus, planned: bool) -> float | None:
    """The median of this job's own incidents; None: it had none."""
    took = [
        one.first_step_seconds - one.detected_seconds
        for one in status.incidents
        if one.first_step_seconds is not None and (one.kind == "planned") == planned
    ]
    return statistics.median(took) if took else None


def _budgets(job: TrainingJob, status: JobStatus) -> tuple[str, ...]:
    run, failure = job.spec.run_policy, job.spec.failure_policy
    window = f" within {failure.eval_period_seconds:g} s" if failure.max_restarts is not None else ""
    limited = "no limit" if failure.max_restarts is None else f"{failure.max_restarts} are allowed{window}"
    avoided = [one.name for one in status.excluded_nodes]
    return (
        f"restarts that the program caused: {status.restarts_counted} of backoffLimit {run.backoff_limit}",
        f"in a row without a new step: {status.no_progress_restarts} of maxNoProgressRestarts"
        f" {failure.max_no_progress_restarts}",
        f"restarts in all: {status.restarts}; {limited}",
        *((f"nodes avoided: {listed(avoided)}",) if avoided else ()),
    )
