"""Builds the operator's snapshot from what a person can see.

Pure; called by `fault_costs`. Pods, nodes and status are as read. What agents and holders tell the operator alone is assumed: that each
agent of the world is heard, at the step of the status. Only then can the operator's own `plan` be asked from outside; what it
answers is right as far as this assumption is.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.protocol.progress import Progress
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.api.status import JobStatus, Member, World
from surefoot_operator.cli.jobs.job_view import JobView
from surefoot_operator.job_snapshot import ExitSeen, Observed, SessionSeen

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
