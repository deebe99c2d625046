"""Updates one job's metrics after each reconcile round.

Called by `reconcile`.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import get_args

from surefoot.protocol.identities import Checkpoint
from surefoot_operator import metrics, reasons
from surefoot_operator.api.spec import CheckpointPolicy, TrainingJob
from surefoot_operator.api.status import Incident, JobStatus, Phase
from surefoot_operator.job_snapshot import Observed
from surefoot_operator.policy.maintenance.maintenance_plan import Maintenance
from surefoot_operator.policy.maintenance.memory_budget import HolderShare
from surefoot_operator.policy.report.time_spent import goodput, seconds_spent

_PHASES = get_args(Phase)
_HOLDER_STATES = ("Ready", "Silent", "Gone")
_KINDS = (
    "node-lost",
    "agent-lost",
    "worker-silent",
    "trainer-failed",
    "checkpoint-lost",
    "unreadable",
    "startup",
    "hang",
    "numerics",
    "planned",
)
_RECOVERY = ("claimed", "stopped", "sealed", "assigned", "first-step")


class JobMetrics:
    """Sets the metrics of one job from its rounds.

    It remembers only since when each tier's newest checkpoint is known, which nodes have figures, and which checkpoints
    were counted as unrecoverable.
    """

    def __init__(self) -> None:
        self._job: tuple[str, str] | None = None
        self._newest: dict[str, Checkpoint] = {}
        self._nodes: set[str] = set()
        self._unrecoverable: frozenset[Checkpoint] = frozenset()
        self._phases: set[str] = set()
        self._counting = False

    def show(self, seen: Observed, status: JobStatus, kept: Maintenance | None) -> None:
        """The gauges, as of this round."""
        where, world = self._begun(seen.job), status.world
        if _may_count(status):
            self._count(where)
        self._phases |= set(_PHASES) if world is not None else {status.phase}
        for phase in self._phases:
            metrics.of(metrics.phase, where, phase).set(status.phase == phase)
        committed = world is not None and world.state == "Committed" and status.phase not in ("Complete", "Failed")
        metrics.of(metrics.world_size, where).set(world.size if world is not None and committed else 0)
        epoch = world.epoch if world is not None else 0
        metrics.of(metrics.job_epoch, where).set(epoch)
        # 0 is what a rank has told that made no step in this world yet: the job is where it was
        steps = [s.progress.step for s in seen.sessions if s.epoch == epoch and s.progress.step]
        metrics.of(metrics.job_step, where).set(max(steps, default=status.step))
        self._show_time(where, status, seen.now)
        if status.phase in ("Complete", "Failed"):
            metrics.ended(*where)
            return
        if status.data is not None:
            metrics.of(metrics.data_passes, where).set(status.data.passes)
            metrics.of(metrics.samples_per_second, where).set(status.data.samples_per_second or math.nan)
        metrics.of(metrics.agents_connected, where).set(sum(s.connected for s in seen.sessions))
        for state in _HOLDER_STATES:
            seen_so = {"Silent", "Proxied"} if state == "Silent" else {state}
            metrics.of(metrics.holders, where, state).set(sum(h.state in seen_so for h in seen.holders))
        safe = next((c.status == "True" for c in status.conditions if c.type == reasons.CHECKPOINT_PROTECTED), False)
        metrics.of(metrics.protected, where).set(safe)
        if kept is not None and committed:
            metrics.of(metrics.copies, where).set(kept.copies)
        if kept is not None and kept.shares:
            self._show_shares(where, kept.shares)
        if kept is not None:
            metrics.of(metrics.promotions_abandoned, where).inc(
                sum(e.reason == reasons.PROMOTION_ABANDONED for e in kept.events)
            )
            unrecoverable = frozenset(h.checkpoint for h in kept.unrecoverable)
            metrics.of(metrics.incomplete, where).inc(len(unrecoverable - self._unrecoverable))
            self._unrecoverable = unrecoverable
        _show_intervals(where, seen.job.spec.checkpoint, status)
        if committed and world is not None and world.members:
            worst = max((one.slowdown_ratio for one in status.stragglers), default=1.0)
            metrics.of(metrics.straggler_slowdown_ratio, where).set(worst)
        if status.last_good is not None:
            metrics.of(metrics.good_step, where).set(status.last_good.step)
        self._complete(where, "memory", status.last_complete, seen.now)
        self._complete(where, "persistent", status.floor, seen.now)

    def written(self, old: JobStatus, new: JobStatus, job: TrainingJob) -> None:
        """Counts what is new in a status that was just written."""
        where = self._begun(job)
        if _may_count(new):
            self._count(where)
        if new.restarts > old.restarts and new.incidents:
            metrics.of(metrics.restarts, where, new.incidents[-1].kind).inc(new.restarts - old.restarts)
        metrics.of(metrics.rollbacks, where).inc(new.rollbacks - old.rollbacks)
        answered = {_name(i) for i in old.incidents if i.assigned_seconds is not None}
        over = {_name(i) for i in old.incidents if i.first_step_seconds is not None}
        for incident in new.incidents:
            # counted once it is answered: until then its kind may still turn out to be another
            if incident.assigned_seconds is not None and _name(incident) not in answered:
                metrics.of(metrics.incidents, where, incident.kind).inc()
                metrics.of(metrics.incident_at, where, incident.kind).set(incident.detected_seconds)
            if incident.first_step_seconds is not None and _name(incident) not in over:
                _recovered(where, incident)

    def forget(self) -> None:
        """The job is not looked after here any more."""
        if self._job is not None:
            metrics.forget(*self._job)
            self._job, self._counting = None, False
            self._phases.clear()

    def _begun(self, job: TrainingJob) -> tuple[str, str]:
        if self._job is None:
            self._job = (job.namespace, job.name)
        return self._job

    def _count(self, where: tuple[str, str]) -> None:
        """Begins the counters of a job that had a world: a thousand that wait for one have nothing to count.

        A rate sees the first of anything only if the series was there before it.
        """
        if self._counting:
            return
        self._counting = True
        metrics.of(metrics.lost_steps, where)
        metrics.of(metrics.promotions_abandoned, where)
        metrics.of(metrics.incomplete, where)
        metrics.of(metrics.rollbacks, where)
        for kind in _KINDS:
            metrics.of(metrics.incidents, where, kind)
            metrics.of(metrics.restarts, where, kind)
        for phase in _RECOVERY:
            metrics.of(metrics.recovery_seconds, where, phase)

    @staticmethod
    def _show_time(where: tuple[str, str], status: JobStatus, now: float) -> None:
        seconds = seconds_spent(status.time_spent, now)
        share = goodput(seconds)
        if share is not None:
            metrics.of(metrics.goodput_ratio, where).set(share)
        for category, spent in seconds.items():
            if spent:
                metrics.of(metrics.time_seconds, where, category).set(spent)

    def _show_shares(self, where: tuple[str, str], shares: tuple[HolderShare, ...]) -> None:
        nodes = {share.node for share in shares}
        for node in self._nodes - nodes:
            metrics.end(metrics.memory_needed, where, node)
            metrics.end(metrics.memory_available, where, node)
        self._nodes = nodes
        needed, available = Counter[str](), Counter[str]()
        for share in shares:
            needed[share.node] += share.needed_bytes
            if share.available_bytes is not None:
                available[share.node] += share.available_bytes
        for node in nodes:
            metrics.of(metrics.memory_needed, where, node).set(needed[node])
            if node in available:
                metrics.of(metrics.memory_available, where, node).set(available[node])

    def _complete(self, where: tuple[str, str], tier: str, checkpoint: Checkpoint | None, now: float) -> None:
        if checkpoint is None or self._newest.get(tier) == checkpoint:
            return
        self._newest[tier] = checkpoint
        metrics.of(metrics.complete_step, where, tier).set(checkpoint.step)
        metrics.of(metrics.complete_at, where, tier).set(now)


def _show_intervals(where: tuple[str, str], spec: CheckpointPolicy, status: JobStatus) -> None:
    """Steps as they are now; what a choice was made from only where the operator chose."""
    fixed = spec.persistent.fixed_steps if spec.persistent is not None else None
    for tier, chosen, steps in (
        ("memory", status.memory_interval, spec.memory.base_steps),
        ("persistent", status.persistent_interval, fixed),
    ):
        now = chosen.steps if chosen is not None else steps
        if now is not None:
            metrics.of(metrics.interval_steps, where, tier).set(now)
        if chosen is None:
            continue
        for name in ("wanted", "step", "cost", "drain", "incident"):
            value = getattr(chosen, f"{name}_seconds")
            if value is not None:
                metrics.of(metrics.interval_input_seconds, where, tier, name).set(value)
        if chosen.memory_loss_odds is not None:
            metrics.of(metrics.memory_loss_odds, where).set(chosen.memory_loss_odds)


def _may_count(status: JobStatus) -> bool:
    """Whether a world of the job runs or ran, or something befell it before."""
    running = status.world is not None and status.world.state == "Committed"
    return running or bool(status.lineage or status.incidents)


def _name(incident: Incident) -> tuple[int, float]:
    return incident.epoch, incident.detected_seconds


def _recovered(where: tuple[str, str], incident: Incident) -> None:
    moments = (
        incident.claimed_seconds,
        incident.stopped_seconds,
        incident.sealed_seconds,
        incident.assigned_seconds,
        incident.first_step_seconds,
    )
    for phase, at_seconds in zip(_RECOVERY, moments, strict=True):
        if at_seconds is not None:
            metrics.of(metrics.recovery_seconds, where, phase).observe(max(0.0, at_seconds - incident.detected_seconds))
    metrics.of(metrics.lost_steps, where).inc(incident.steps_lost or 0)
