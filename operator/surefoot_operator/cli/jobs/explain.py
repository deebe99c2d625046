"""Implements `surefoot explain`: what the operator would do, and why.

Called by `main`. `explanation_lines` is pure.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from surefoot.protocol.progress import Progress
from surefoot.protocol.text import listed
from surefoot_operator import reasons
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.api.status import JobStatus, Member, World
from surefoot_operator.cli.command_base import EXIT_OK
from surefoot_operator.cli.jobs.read_jobs import JobView, add_job, pace_of, step_at, view_of
from surefoot_operator.cli.tables import UNKNOWN, add_output, age, emit, indented, number
from surefoot_operator.job_snapshot import ExitSeen, Observed, SessionSeen
from surefoot_operator.policy.failure.spare_workers import largest_size
from surefoot_operator.policy.planning.plan import plan

# ---- snapshot assumed for a fault ------------------------------------------------------------------------------------
# Builds the operator's snapshot from what a person can see. Pure. Pods, nodes and status are as read. What agents and
# holders tell the operator alone is assumed: that each agent of the world is heard, at the step of the status. Only
# then can the operator's own `plan` be asked from outside; what it answers is right as far as this assumption is.

ASSUMED = "assumed here"


def assumed_snapshot(view: JobView, job: TrainingJob, status: JobStatus, step_seconds: float | None) -> Observed:
    """Builds the snapshot of a new leader that hears every agent."""
    present = {(one.index, one.attempt) for one in view.workers if one.phase == "Running"}
    world = status.world
    members = () if world is None or world.state != "Committed" else world.members
    sessions = tuple(
        _session(one, world, status.step, step_seconds, view.now)
        for one in members
        if world is not None and (one.index, one.attempt) in present
    )
    return Observed(
        now=view.now,
        term_seconds=view.now,
        job=job,
        status=status,
        workers=view.workers,
        nodes=view.nodes or (),
        sessions=sessions,
        free_nodes=view.free_nodes,
    )


def _session(member: Member, world: World, step: int, step_seconds: float | None, now: float) -> SessionSeen:
    return SessionSeen(
        member.index,
        member.attempt,
        member.incarnation,
        member.node,
        connected=True,
        since_seconds=world.changed_seconds,
        heard_seconds=now,
        epoch=world.epoch,
        stopped=world.epoch,
        warm=True,
        progress=Progress(step=step, restored=True, step_seconds=step_seconds),
        step_at_seconds=now,
    )


def with_failed_trainer(seen: Observed, member: Member) -> Observed:
    """The same moment, the first trainer of `member` failed."""
    epoch = seen.status.world.epoch if seen.status.world is not None else 0
    told = ExitSeen(epoch, 0, 1, f"an error, {ASSUMED}", secondary=False, at_seconds=seen.now)
    return replace(seen, sessions=tuple(_where(s, member, replace(s, exit=told)) for s in seen.sessions))


def with_lost_node(seen: Observed, member: Member) -> Observed:
    """The same moment, the node of `member` and all on it gone."""
    return replace(
        seen,
        nodes=tuple(
            replace(n, ready=False, reason=f"lost, {ASSUMED}") if n.name == member.node else n for n in seen.nodes
        ),
        workers=tuple(
            replace(w, phase="Failed", message=f"its node is lost, {ASSUMED}") if w.node == member.node else w
            for w in seen.workers
        ),
        sessions=tuple(
            replace(s, connected=False, since_seconds=seen.now) if s.node == member.node else s for s in seen.sessions
        ),
    )


def with_drained_node(seen: Observed, member: Member) -> Observed:
    """The same moment, the node of `member` being drained."""
    evicted = f"evicted, {ASSUMED}"
    return replace(
        seen,
        nodes=tuple(replace(n, schedulable=False) if n.name == member.node else n for n in seen.nodes),
        workers=tuple(
            replace(w, deleting=True, disrupted=True, message=evicted) if w.node == member.node else w
            for w in seen.workers
        ),
    )


def _where(session: SessionSeen, member: Member, changed: SessionSeen) -> SessionSeen:
    return changed if (session.index, session.attempt) == (member.index, member.attempt) else session


# ---- fault costs -----------------------------------------------------------------------------------------------------
# Judges what the operator would do, and what faults would cost. Pure. Each answer is the operator's own `plan` on the
# present snapshot, or on the same one with one fault in it.

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


# ---- explain ---------------------------------------------------------------------------------------------------------


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    add_output(parser, ("json", "yaml"))


def run_explain(given: argparse.Namespace) -> int:
    found = explain(view_of(given))
    emit(found, given.output, lambda wide: explanation_lines(found))
    return EXIT_OK


def explanation_lines(found: Explanation) -> list[str]:
    """Renders an explanation: now, the next fault, the budgets, the doubts."""
    wake = "" if found.wake_after_seconds is None else f" (looks again in {found.wake_after_seconds:.1f} s)"
    lines = [
        f"{found.job}",
        f"  the operator said:       {found.told or UNKNOWN}",
        f"  from here it would say:  {found.decision}{wake}",
        *(f"  and would:               {one}" for one in found.actions),
    ]
    for fault in found.faults:
        lines += ["", f"if {fault.fault} now:", *indented(_fault_lines(fault))]
    lines += ["", "budgets:", *indented(found.budgets)] if found.budgets else []
    return [*lines, "", "not certain:", *indented(found.doubts)]


def _fault_lines(fault: FaultCost) -> list[str]:
    if fault.ends_job:
        return [f"THE JOB WOULD FAIL: {fault.decision}"]
    seconds = "" if fault.steps_lost_seconds is None else f", about {age(fault.steps_lost_seconds)} of training"
    took = "not known: nothing of this kind has happened to this job yet"
    if fault.recovery_seconds is not None:
        took = f"about {fault.recovery_seconds:.1f} s, the median of this job's own"
    after = f"{fault.workers_after} workers go on" if fault.workers_after else "nobody until a replacement has started"
    return [
        f"the operator: {fault.decision}",
        f"run again:    {number(fault.steps_lost)} steps{seconds}",
        f"restored:     {fault.restored}",
        f"back after:   {took}",
        f"world:        {after}",
    ]
