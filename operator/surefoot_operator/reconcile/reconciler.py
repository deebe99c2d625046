"""Runs the reconcile loop of one job.

There is one reconciler per job, owned by `controller`. It is level-triggered: each reconcile observes everything again.
Only the pinned upload, the times of the last writes and the reports already made are kept in between. The loop never
ends by itself: an error is counted, logged and retried with a growing backoff.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from surefoot.errors import OutOfBounds
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.text import shorten
from surefoot.task_set import TaskSet
from surefoot_operator import metrics, reasons
from surefoot_operator.api.status import JobStatus
from surefoot_operator.coordinator.desired_messages import DesiredState, update_desired_state, update_scope
from surefoot_operator.errors import (
    InvariantViolation,
    JobRejected,
    NotLeader,
    PlatformError,
    ReadForbidden,
    StatusConflict,
)
from surefoot_operator.job_snapshot import JobSnapshot, ObservedMemoryServer, ObservedNode, ObservedWorker
from surefoot_operator.platforms.interface import PlatformSnapshot
from surefoot_operator.policy.core.actions import DropSaves, Event, Plan, SetFinalizer
from surefoot_operator.policy.core.facts import topology_of
from surefoot_operator.policy.maintenance.maintenance_plan import MaintenancePlan, plan_maintenance
from surefoot_operator.policy.maintenance.memory_tier_rollout import JobSafety, judge_job_safety, rejected_safety
from surefoot_operator.policy.membership.lifecycle import is_idle, status_with_rejection, status_without_rejection
from surefoot_operator.policy.membership.planned_change import describe_data_lost_with_node
from surefoot_operator.policy.membership.restore_decisions import DropsInProgress
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check_plan
from surefoot_operator.policy.report.blockers import rejected_call_events, status_without_plan, with_rejected_records
from surefoot_operator.policy.report.status_conditions import update_contents
from surefoot_operator.reconcile.apply_plan import apply_maintenance, apply_plan, saves_in_repair
from surefoot_operator.reconcile.build_snapshot import Dependencies, build_snapshot, count_ranks, expected_worker_ids
from surefoot_operator.reconcile.event_recorder import EventRecorder, TierFailureEvents
from surefoot_operator.reconcile.job_metrics import JobMetrics
from surefoot_operator.reconcile.worker_calls import WorkerCalls
from surefoot_operator.rejected_calls import ApiCall

log = logging.getLogger(__name__)


# ---- plan log --------------------------------------------------------------------------------------------------------
# Logs each decision of a job once. A job that decides the same every second would otherwise fill the log.

_MAX_LISTED = 32
"""Actions that one log line lists."""


class PlanLog:
    """Logs the plans of one job, without repeating itself."""

    def __init__(self) -> None:
        self._last_plan_line = self._last_maintenance_text = ""
        self._last_unrecoverable: tuple[int, int] | None = None

    def log_changes(self, new_plan: Plan, maintenance: MaintenancePlan | None, status: JobStatus) -> None:
        """Logs how the plan and its maintenance differ from those logged last."""
        action_text, membership_text = _join_actions(new_plan.actions), _describe_membership(status)
        plan_line = f"{new_plan.reason}{': ' if action_text else ''}{action_text}"
        if plan_line != self._last_plan_line:
            self._last_plan_line = plan_line
            log.info("[%s] %s", membership_text, plan_line)
        maintenance_text = _join_actions(maintenance.actions if maintenance is not None else ())
        if maintenance_text != self._last_maintenance_text:
            self._last_maintenance_text = maintenance_text
            # Every few saves lead to drops: they are logged for debugging only.
            only_drops = maintenance is None or all(isinstance(e, DropSaves) for e in maintenance.actions)
            log.log(
                logging.DEBUG if only_drops else logging.INFO, "[%s] maintenance: %s", membership_text, maintenance_text
            )

        for unrecoverable in maintenance.unrecoverable if maintenance is not None else ():
            # Log it once a generation and worker, not for each checkpoint that the worker failed to save.
            if (unrecoverable.checkpoint.generation, unrecoverable.worker) != self._last_unrecoverable:
                self._last_unrecoverable = (unrecoverable.checkpoint.generation, unrecoverable.worker)
                log.info(
                    "[%s] %s: the other ranks' saves of such checkpoints are dropped",
                    membership_text,
                    unrecoverable.reason,
                )


def _join_actions(actions: Sequence[object]) -> str:
    """Joins the first 32 actions: a line with two thousand is unreadable and slower than the actions themselves."""
    unlisted_count = len(actions) - _MAX_LISTED
    return "; ".join(
        (*map(str, actions[:_MAX_LISTED]), *((f"and {unlisted_count} more",) if unlisted_count > 0 else ()))
    )


def _describe_membership(status: JobStatus) -> str:
    membership = status.membership
    return "no membership" if membership is None else f"generation {membership.generation} {membership.state.lower()}"


# ---- time between reconciles -----------------------------------------------------------------------------------------
# Decides how long to batch changes and how long to sleep between a job's reconciles. Pure. Two thousand agents that
# stop one after another would otherwise have the job planned for every few of them, and the plans would keep the event
# loop from reading the messages they wait for. A thousand idle jobs that were polled every two seconds for missed
# changes used a third of a core for nothing.

MIN_BATCHING_SECONDS = 0.005
"""Messages about one incident arrive within this time, and one plan answers all of them."""
BATCHING_COST_RATIO = 6.0
"""While messages keep arriving they are batched for this many times the duration of a decision: the event loop reads
them."""
MAX_BATCHING_SECONDS = 0.15
"""Upper limit on batching: on a busy machine decisions take long, and recovery must not wait for that."""
IDLE_POLL_SECONDS = 10.0
"""An idle job is polled at least this often, because a safety judgement older than 15 s cannot permit an eviction."""
IDLE_JITTER_RATIO = 0.4
"""Share of an idle sleep that is random: jobs that started together would otherwise be polled together forever, and
delay other jobs that have changes."""


class ReconcilePacer:
    """Remembers the duration of the last decision and the number of polls in a row that found nothing."""

    def __init__(self) -> None:
        self._decision_seconds = 0.0
        self._idle_poll_count = 0

    def record_decision_seconds(self, seconds: float) -> None:
        """Records how long the newest decision took."""
        self._decision_seconds = seconds

    def record_poll(self, woken: bool, still: bool) -> None:
        """Counts the polls in a row that found nothing.

        Args:
            woken: A change woke the loop, so this reconcile was no poll.
            still: The reconcile changed no status and requested no action.
        """
        self._idle_poll_count = 0 if woken or not still else self._idle_poll_count + 1

    @property
    def batching_seconds(self) -> float:
        """How long to batch changes while they keep arriving."""
        return max(MIN_BATCHING_SECONDS, min(BATCHING_COST_RATIO * self._decision_seconds, MAX_BATCHING_SECONDS))

    def sleep_seconds(self, longest_seconds: float, chance: float) -> float:
        """Returns how long to sleep if no change wakes the loop.

        Args:
            longest_seconds: The sleep while something happens; it doubles after each poll that found nothing, up to
                `IDLE_POLL_SECONDS`.
            chance: A random number between 0 and 1 that shortens an idle sleep.
        """
        idle_seconds = min(longest_seconds * 2.0 ** min(self._idle_poll_count, 10), IDLE_POLL_SECONDS)
        return max(longest_seconds, idle_seconds * (1.0 - IDLE_JITTER_RATIO * chance))


# ---- ages of workers -------------------------------------------------------------------------------------------------
# Measures worker ages by this operator's own clock, because node and API server clocks may differ from it.


class WorkerAges:
    """Measures the ages of one job's workers since this operator first observed each."""

    def __init__(self) -> None:
        self._workers_by_uid: dict[str, tuple[ObservedWorker, ObservedWorker]] | None = None
        """By uid: a worker as last observed, and the same with the local creation time. None before the first call.
        An unchanged worker yields the same object again."""

    def with_local_ages(self, workers: Sequence[ObservedWorker], now: float) -> tuple[ObservedWorker, ...]:
        """Returns the workers with creation times by this operator's clock.

        A worker that appears after the first call was created now. Those of the first call keep the platform's time,
        but not a time in the future.
        """
        previous, self._workers_by_uid = self._workers_by_uid, {}
        aged_workers = []
        for worker in workers:
            last_observed, aged = (previous or {}).get(worker.uid, (None, None))
            if aged is None:
                created_seconds = now if previous is not None else min(worker.created_seconds, now)
                aged = replace(worker, created_seconds=created_seconds)
            elif last_observed is not worker:
                aged = replace(worker, created_seconds=aged.created_seconds)
            self._workers_by_uid[worker.uid] = worker, aged
            aged_workers.append(aged)
        return tuple(aged_workers)


# ---- reuse of unchanged parts ----------------------------------------------------------------------------------------
# Replaces parts of a snapshot that equal those of the last one by the last objects. `core.facts` caches results for a
# tuple by identity, but platforms and memory monitors build a new tuple of the same objects each time.


class SnapshotReuse:
    """Reuses the nodes, workers and memory servers of one job's last snapshot."""

    def __init__(self) -> None:
        self._workers: tuple[ObservedWorker, ...] = ()
        self._nodes: tuple[ObservedNode, ...] = ()
        self._servers: tuple[ObservedMemoryServer, ...] = ()

    def reuse_equal_parts(self, snapshot: JobSnapshot) -> JobSnapshot:
        """Returns the snapshot with parts that equal the last ones replaced by these."""
        if snapshot.workers != self._workers:
            self._workers = snapshot.workers
        if snapshot.nodes != self._nodes:
            self._nodes = snapshot.nodes
        if snapshot.servers != self._servers:
            self._servers = snapshot.servers
        return replace(snapshot, workers=self._workers, nodes=self._nodes, servers=self._servers)


# ---- reconciler ------------------------------------------------------------------------------------------------------

_NOT_LEADER_RETRY_SECONDS = 0.25
"""Wait before a replica that lost its lease tries again."""
_MAX_NOTICE_CHARACTERS = 900
"""Longest part of an event that comes from an agent or an error; Kubernetes limits the event's message to 1024."""


class Reconciler:
    """Reconciles one job from its creation to its end."""

    def __init__(self, dependencies: Dependencies) -> None:
        self._dependencies = dependencies
        self._term_seconds = dependencies.clock()
        self._wake = asyncio.Event()
        self._delayed_wake: asyncio.TimerHandle | None = None
        self._background = TaskSet(_on_background_failure)
        self.calls = WorkerCalls(dependencies.clock, self.wake)
        self._tier_failures = TierFailureEvents()
        self._worker_ages = WorkerAges()
        self._snapshot_reuse = SnapshotReuse()
        self.recorder = EventRecorder(dependencies.platform.record_events, time.monotonic)
        self._job_metrics = JobMetrics()
        self._plan_log = PlanLog()
        self._pacer = ReconcilePacer()
        self._woken_by_change = True
        """Whether a change, not a timer, started the current reconcile."""
        self._desired: DesiredState | None = None
        self._pinned_upload: Checkpoint | None = None
        self._pending_deletions: DropsInProgress = {}
        self._written_watermark: tuple[int, Checkpoint] | None = None
        self._watermark: Checkpoint | None = None
        self._status_write_seconds = self._gc_start_seconds = float("-inf")
        self._progress_writes_from: float | None = None
        self._reported_rejection = ""
        self._reported_refusals: Mapping[ApiCall, float] = {}
        self._reconcile_start_seconds: float | None = None
        self.safety: JobSafety | None = None
        """Whether the job could lose a memory server, as of the last reconcile; None before the first."""
        self._last_observed: PlatformSnapshot | None = None
        """The last observation of the platform; None before the first."""
        self._last_reconcile: tuple[JobSnapshot, JobStatus] | None = None
        """Snapshot and resulting status of the last reconcile."""
        self._max_sleep_seconds = dependencies.settings.max_sleep_seconds

    @property
    def current_reconcile_seconds(self) -> float:
        """How long the current reconcile has been running; 0 between two."""
        return 0.0 if self._reconcile_start_seconds is None else time.perf_counter() - self._reconcile_start_seconds

    def data_lost_with_node(self, node: str) -> str:
        """Describes the data that the job would lose with a node; empty: none."""
        if self._last_reconcile is None:
            safety = self.safety
            return "it was not reconciled yet" if safety is None else "" if safety.is_safe else safety.reason
        return describe_data_lost_with_node(*self._last_reconcile, node, self._dependencies.clock())

    def wake(self, urgent: bool = True) -> None:
        """Wakes the loop: at once if urgent, otherwise after a short delay that lets more changes arrive."""
        if urgent:
            self._wake.set()
        elif self._delayed_wake is None:
            loop = asyncio.get_running_loop()
            self._delayed_wake = loop.call_later(self._dependencies.settings.batch_seconds, self._wake.set)

    async def run(self) -> None:
        """Reconciles until cancelled."""
        watch_task = asyncio.create_task(self._watch_platform(), name="platform changes")
        failures = 0
        try:
            while True:
                self._wake.clear()
                if self._delayed_wake is not None:
                    self._delayed_wake.cancel()
                    self._delayed_wake = None
                try:
                    sleep_seconds = await self._reconcile_within_limit()
                    failures = 0
                    self._record_refused_calls()
                except NotLeader:
                    await asyncio.sleep(
                        _NOT_LEADER_RETRY_SECONDS
                    )  # the lease is renewed soon, or this loop is cancelled
                    continue
                except StatusConflict as conflict:
                    log.info("%s", conflict)
                    sleep_seconds = self._backoff_seconds(failures := failures + 1)
                except Exception as error:  # noqa: BLE001  an error of any kind must not end the job's loop
                    failures += 1
                    self._woken_by_change = True
                    self._log_failure(error, failures)
                    self._record_refused_calls()
                    await self._report_unprocessable_job(error)
                    sleep_seconds = self._backoff_seconds(failures)
                    await asyncio.sleep(sleep_seconds)
                    continue
                await self._sleep_until_woken(sleep_seconds)
        finally:
            # Before the first await, so that no scrape reads a job that this replica no longer leads.
            self._job_metrics.stop_export()
            watch_task.cancel()
            await asyncio.gather(watch_task, return_exceptions=True)
            if self._delayed_wake is not None:
                self._delayed_wake.cancel()
            await self.recorder.close()
            await self.calls.close()
            await self._background.close()

    async def _reconcile_within_limit(self) -> float:
        """Reconciles once the limit on concurrent reconciles allows it, and measures the duration."""
        async with self._dependencies.reconcile_limiter:
            start_seconds = self._reconcile_start_seconds = time.perf_counter()
            try:
                return await self.reconcile()
            finally:
                self._reconcile_start_seconds = None
                metrics.reconcile_seconds.observe(time.perf_counter() - start_seconds)

    async def reconcile(self) -> float:
        """Observes, plans and applies once.

        Returns:
            Seconds until the next reconcile is due even if nothing changes.

        Raises:
            StatusConflict: another leader wrote the status since it was observed.
            PlatformError: the platform rejected a write or an action; the next reconcile requests it again.
            InvariantViolation: the plan breaks an invariant; nothing of it was written or applied.
        """
        dependencies = self._dependencies
        # Observe the job. One with an unreadable spec gets no plan: its status shows why, and an edit wakes the loop.
        try:
            observed, calls = await self.calls.observe_with_calls(dependencies.platform.observe())
        except JobRejected as rejection:
            return await self._report_rejected_job(rejection)
        except ReadForbidden as rejection:
            await self._report_unplanned_job(rejection)
            raise
        self._last_observed = observed
        observed = replace(observed, workers=self._worker_ages.with_local_ages(observed.workers, dependencies.clock()))
        # Admit agents of existing workers, and send servers and agents the stored status, as a new leader must.
        dependencies.channel.set_expected_workers(expected_worker_ids(observed.workers, calls.creates))
        self._update_servers_and_agents(observed, observed.status)
        snapshot = self._snapshot_reuse.reuse_equal_parts(
            await build_snapshot(dependencies, observed, self._term_seconds, calls)
        )
        # Plan. Maintenance is planned on the new status, and only if the membership stays the same.
        plan_start_seconds = time.thread_time()
        new_plan = plan(snapshot)
        check_plan(new_plan, snapshot)
        membership_changed = new_plan.status.membership != snapshot.status.membership
        maintenance = None if membership_changed else self._plan_maintenance(snapshot, new_plan)
        self._pacer.record_decision_seconds(time.thread_time() - plan_start_seconds)
        status = new_plan.status if maintenance is None else maintenance.status
        events = (*new_plan.events, *(maintenance.events if maintenance is not None else ()))
        # Write the status before applying anything: the new generation is the fence. Agents get it only once stored.
        progress_wait_seconds = await self._write_status(
            snapshot, status, bool(events), snapshot.status != status_without_rejection(observed.status)
        )
        if not progress_wait_seconds:
            self._update_servers_and_agents(observed, status)
        idle = (
            status == snapshot.status and not new_plan.actions and not (maintenance is not None and maintenance.actions)
        )
        self._pacer.record_poll(self._woken_by_change, still=idle)
        # Publish the metrics, the log line and whether this job can lose a memory server.
        self._last_reconcile = snapshot, status
        self.safety = judge_job_safety(snapshot, status, maintenance)
        self._job_metrics.update_gauges(snapshot, status, maintenance)
        self._plan_log.log_changes(new_plan, maintenance, snapshot.status)
        # Flush events before the finalizer is removed: the job, and this loop with it, may be deleted right after.
        if SetFinalizer(False) in new_plan.actions:
            self.recorder.record(events)
            await self.recorder.flush()
            events = ()
        # Apply the plan, then maintenance. Then record the events, agents' notices last.
        new_snapshot = replace(snapshot, status=status)
        errors = await apply_plan(dependencies, self.calls, new_plan.actions, new_snapshot)
        if maintenance is not None:
            self._apply_maintenance(maintenance, replace(new_snapshot, upload_now=new_plan.uploads))
        self.recorder.record(events)
        self.recorder.record(self._agent_events(), of_agents=True)
        if errors:
            raise errors[0]
        # Sleep until the earliest time that the plan, the maintenance or a delayed progress write needs.
        wakes = [
            new_plan.wake_after_seconds,
            maintenance.wake_after_seconds if maintenance is not None else None,
            progress_wait_seconds or None,
        ]
        return min([w for w in wakes if w is not None], default=math.inf)

    async def _report_rejected_job(self, rejection: JobRejected) -> float:
        """Leaves a job that cannot be run as it is, and reports why once; an edit wakes the loop."""
        dependencies, old_status = self._dependencies, rejection.status
        self._last_reconcile, self.safety = None, rejected_safety(old_status, dependencies.clock())
        if rejection.being_deleted:
            # An unreadable spec does not show which data to delete, and must not block the job's deletion forever.
            await dependencies.platform.set_finalizer(False)
        if old_status is not None:
            status = status_with_rejection(
                old_status, rejection.reason, rejection.metadata_generation, dependencies.clock()
            )
            if status != old_status:
                await dependencies.platform.patch_status(status, old_status)
        if rejection.reason != self._reported_rejection:
            self._reported_rejection = rejection.reason
            self.recorder.record((Event(reasons.JOB_SPEC_REJECTED, rejection.reason, warning=True),))
        return dependencies.settings.max_idle_sleep_seconds

    async def _report_unplanned_job(self, rejection: ReadForbidden) -> None:
        """Reports in the status that the job is not planned; without that, it would appear to run normally."""
        dependencies, old_status = self._dependencies, rejection.status
        if old_status is not None:
            status = status_without_plan(old_status, dependencies.platform.rejected_calls(), dependencies.clock())
            if status != old_status:
                await dependencies.platform.patch_status(status, old_status)

    def _record_refused_calls(self) -> None:
        """Records events about rejected API calls, which usually works even when the status cannot be written."""
        refused_calls = self._dependencies.platform.rejected_calls()
        refusals = rejected_call_events(refused_calls, self._reported_refusals, time.monotonic())
        self._reported_refusals = refusals.reported_seconds
        self.recorder.record(refusals.events)

    async def _report_unprocessable_job(self, error: Exception) -> None:
        """Reports on the job itself that its records cannot be processed; the operator's log alone names no job.

        The job is not planned until a reconcile succeeds. Its training continues.
        """
        if not isinstance(error, MemoryError | RecursionError | OutOfBounds) or self._last_observed is None:
            return
        reason = f"Surefoot cannot plan this job: {type(error).__name__}: {shorten(str(error), _MAX_NOTICE_CHARACTERS)}"
        status = self._last_observed.status
        stopped_status = with_rejected_records(status, (reason,), self._dependencies.clock())
        if stopped_status == status:
            return
        self.recorder.record((Event(reasons.RECORDS_REJECTED, reason, warning=True),))
        try:
            await self._dependencies.platform.patch_status(stopped_status, status)
        except Exception as write_error:  # noqa: BLE001  memory may run out again, and nothing here may end the loop
            log.warning("cannot write `%s` to the job's status: %s", reason, write_error)

    async def _write_status(self, snapshot: JobSnapshot, status: JobStatus, must: bool, ahead: bool) -> float:
        """Writes the status if it changed and the write is due.

        Args:
            snapshot: The snapshot that the status was planned from.
            status: The new status.
            must: Write at once, for example because events follow from it.
            ahead: The stored status has times that a faster clock wrote; they must be replaced.

        Returns:
            0 if the status is stored; otherwise the seconds until this progress may be written.
        """
        stored_status = snapshot.status
        # Fix the time at the first reconcile, even if nothing is written then.
        self._progress_write_start(stored_status, time.monotonic())
        if status == stored_status and not must and not ahead:
            return 0.0
        if not must and not ahead and _with_old_progress(stored_status, status) == stored_status:
            now = time.monotonic()
            delay_seconds = (
                max(
                    self._status_write_seconds + self._dependencies.settings.progress_interval_seconds,
                    self._progress_write_start(stored_status, now),
                )
                - now
            )
            if delay_seconds > 0:
                return delay_seconds
            if (wait_seconds := self._dependencies.status_write_limiter.wait_seconds(now)) > 0:
                return wait_seconds
        if status != stored_status or ahead:
            await self._dependencies.platform.patch_status(update_contents(snapshot, status), stored_status)
            self._status_write_seconds = time.monotonic()
            self._job_metrics.count_changes(stored_status, status, snapshot.job)
        return 0.0

    def _progress_write_start(self, stored_status: JobStatus, now: float) -> float:
        """Returns when progress may be written: a new leader first waits until agents have reported to it again.

        Until then it would overwrite the former leader's progress with less. Seconds of the monotonic clock.
        """
        if self._progress_writes_from is None:
            self._progress_writes_from = now + (
                self._dependencies.settings.progress_write_delay_seconds if stored_status.serial else 0.0
            )
        return self._progress_writes_from

    def _update_servers_and_agents(self, observed: PlatformSnapshot, status: JobStatus) -> None:
        """Updates the memory servers' monitors and the agents to the stored status."""
        dependencies, idle = self._dependencies, is_idle(observed.job, status, observed.workers)
        self._max_sleep_seconds = (
            dependencies.settings.max_idle_sleep_seconds if idle else dependencies.settings.max_sleep_seconds
        )
        if status.memory_cleared:
            dependencies.memory.pause_monitoring(status)
        else:
            size_limit_bytes = observed.job.spec.checkpoint.memory.size_limit_bytes
            dependencies.memory.update(observed.servers, status, idle, size_limit_bytes, count_ranks(observed, status))
        dependencies.channel.limit_listings(count_ranks(observed, status))
        generation = status.membership.generation if status.membership is not None else 0
        replicas = observed.job.spec.checkpoint.memory.replicas
        usable_servers = dependencies.memory.usable_servers(generation)
        token = dependencies.generation_token(generation)
        old_scope = self._desired.scope if self._desired is not None else None
        scope = update_scope(old_scope, status, dependencies.memory.observed_servers)
        topology = topology_of(observed.nodes, observed.job.uid)
        self._desired = update_desired_state(self._desired, status, usable_servers, replicas, token, scope, topology)
        dependencies.channel.apply_desired_state(self._desired)

    def _plan_maintenance(self, snapshot: JobSnapshot, new_plan: Plan) -> MaintenancePlan:
        return plan_maintenance(
            replace(snapshot, status=new_plan.status, upload_now=new_plan.uploads),
            self._pinned_upload,
            self._pending_deletions,
        )

    def _apply_maintenance(self, maintenance: MaintenancePlan, snapshot: JobSnapshot) -> None:
        dependencies, membership = self._dependencies, snapshot.status.membership
        self._pinned_upload, self._pending_deletions, self._watermark = (
            maintenance.pinned,
            maintenance.pending_deletions,
            maintenance.watermark,
        )
        if membership is None or (membership.state != "Committed" and not snapshot.upload_now):
            return
        apply_maintenance(dependencies, maintenance.actions, snapshot, self._background)
        if membership.state != "Committed":
            return
        watermark = (membership.generation, maintenance.watermark) if maintenance.watermark is not None else None
        if watermark is not None and watermark != self._written_watermark:
            generation, checkpoint = watermark
            if self._background.start_once(
                "watermark", lambda: dependencies.memory.set_watermark(checkpoint, generation)
            ):
                self._written_watermark = watermark
        # Garbage-collect in the background what no index entry names, except saves that agents are copying now.
        if time.monotonic() - self._gc_start_seconds >= dependencies.settings.memory.gc_interval_seconds:
            self._gc_start_seconds = time.monotonic()
            busy_saves = saves_in_repair(dependencies.channel.sessions)
            self._background.start_once(
                "janitor",
                lambda: dependencies.memory.delete_uncommitted(self._watermark, busy_saves, maintenance.closed_steps),
            )

    def _agent_events(self) -> tuple[Event, ...]:
        """Returns events for agents' notices and for their tier failures."""
        sessions, now = self._dependencies.channel.take_snapshot()
        notices = tuple(
            Event(shorten(notice.reason), f"{worker}: {shorten(notice.text, _MAX_NOTICE_CHARACTERS)}", warning=True)
            for worker, notice in sessions.notices
        )
        return (*notices, *self._tier_failures.new_events(sessions.requests.failures, now))

    async def _watch_platform(self) -> None:
        """Wakes the loop at each change of the platform, and restarts a watch that breaks."""
        failures = 0
        while True:
            try:
                async for _ in self._dependencies.platform.watch_changes():
                    failures = 0
                    self.wake()
                return
            except Exception as error:  # noqa: BLE001  without a watch the loop still runs on its timers
                failures += 1
                self._log_failure(error, failures)
                await asyncio.sleep(self._backoff_seconds(failures))

    async def _sleep_until_woken(self, max_seconds: float) -> None:
        poll_seconds = self._pacer.sleep_seconds(self._max_sleep_seconds, random.random())
        try:
            async with asyncio.timeout(min(max_seconds, poll_seconds)):
                await self._wake.wait()
        except TimeoutError:
            self._woken_by_change = False  # a timer ended: the plan's, or the poll for missed changes
            return
        self._woken_by_change = True
        await self._batch_wakes()

    async def _batch_wakes(self) -> None:
        """Batches further changes until none arrives, or for the pacer's limit."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._pacer.batching_seconds
        while self._wake.is_set() and loop.time() < deadline:
            self._wake.clear()
            await asyncio.sleep(MIN_BATCHING_SECONDS)

    def _backoff_seconds(self, failures: int) -> float:
        return self._dependencies.settings.backoff.wait_seconds(failures, random.random())

    @staticmethod
    def _log_failure(error: Exception, failures: int) -> None:
        metrics.reconcile_failures.labels(type(error).__name__).inc()
        if isinstance(error, PlatformError):
            log.warning("%s; reconcile failed (%d in a row), it is retried", error, failures)
        elif isinstance(error, InvariantViolation):
            log.error("%s; the plan breaks an invariant and is not applied (%d in a row)", error, failures)
        else:
            log.exception("reconcile failed (%d in a row), it is retried", failures)


def _on_background_failure(name: str, error: BaseException) -> None:
    """Counts and logs the error; the next plan starts the call again if it is still needed."""
    metrics.reconcile_failures.labels(type(error).__name__).inc()
    log.error("background task `%s` failed: %s", name, error, exc_info=error)


def _with_old_progress(old: JobStatus, new: JobStatus) -> JobStatus:
    """Returns `new` with the old progress: equal to `old` if nothing changed that must be written at once."""
    return replace(
        new,
        step=old.step,
        progress_seconds=old.progress_seconds,
        last_complete=old.last_complete,
        message=old.message,
        conditions=old.conditions,
    )
