"""Runs the reconcile loop of one job.

One instance a job, owned by `controller`. Level-triggered: nothing is remembered from one round to the next but the
pin of a promotion, when things were last written, and what was told lately. The loop never ends by itself: an error
is counted, logged and tried again with growing waits.
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
from surefoot_operator.coordinator.desired_messages import DesiredState, desired_state_after, scope_after
from surefoot_operator.errors import (
    InvariantViolation,
    JobRejected,
    NotLeader,
    PlatformError,
    StatusConflict,
    ViewRefused,
)
from surefoot_operator.job_snapshot import JobSnapshot, ObservedMemoryServer, ObservedNode, ObservedWorker
from surefoot_operator.platforms.interface import PlatformSnapshot
from surefoot_operator.policy.core.actions import DropSaves, Event, Plan, SetFinalizer
from surefoot_operator.policy.core.facts import topology_of
from surefoot_operator.policy.maintenance.maintenance_plan import MaintenancePlan, plan_maintenance
from surefoot_operator.policy.maintenance.memory_tier_rollout import JobSafety, judge_job_safety, rejected_safety
from surefoot_operator.policy.membership.lifecycle import is_idle, status_with_rejection, status_without_rejection
from surefoot_operator.policy.membership.planned_change import data_lost_with_node
from surefoot_operator.policy.membership.restore_decisions import Going
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check_plan
from surefoot_operator.policy.report.blockers import refusal_events, unplanned, with_refused_records
from surefoot_operator.policy.report.status_conditions import update_contents
from surefoot_operator.reconcile.apply_plan import apply_maintenance, apply_plan, repairing
from surefoot_operator.reconcile.build_snapshot import Dependencies, build_snapshot, ranks_of, worker_ids
from surefoot_operator.reconcile.event_recorder import EventRecorder, TierFailureEvents
from surefoot_operator.reconcile.job_metrics import JobMetrics
from surefoot_operator.reconcile.worker_calls import WorkerCalls
from surefoot_operator.rejected_calls import ApiCall

log = logging.getLogger(__name__)


# ---- log of a reconcile ----------------------------------------------------------------------------------------------
# Logs what a job's rounds decide, each decision once. A round a second that decides the same would fill the log with
# it.

_MAX_LISTED = 32
"""Actions that a line of the log names."""


class PlanLog:
    """Remembers what was logged last, for one job."""

    def __init__(self) -> None:
        self._logged = self._logged_actions = ""
        self._without: tuple[int, int] | None = None

    def log_changes(self, decided: Plan, kept: MaintenancePlan | None, status: JobStatus) -> None:
        """Logs what differs from the last plan and maintenance."""
        what, world = _join_actions(decided.actions), _describe_membership(status)
        line = f"{decided.reason}{': ' if what else ''}{what}"
        if line != self._logged:
            self._logged = line
            log.info("[%s] %s", world, line)
        actions = _join_actions(kept.actions if kept is not None else ())
        if actions != self._logged_actions:
            self._logged_actions = actions
            # drops come with every few saves; who looks for one asks for them
            routine = kept is None or all(isinstance(e, DropSaves) for e in kept.actions)
            log.log(logging.DEBUG if routine else logging.INFO, "[%s] maintenance: %s", world, actions)

        for one in kept.unrecoverable if kept is not None else ():
            if (one.checkpoint.generation, one.worker) != self._without:  # once, and not with each save that it misses
                self._without = (one.checkpoint.generation, one.worker)
                log.info("[%s] %s: the other ranks' saves of such checkpoints are dropped", world, one.reason)


def _join_actions(actions: Sequence[object]) -> str:
    """The first few: a line that names two thousand is read by nobody, and takes longer than what it is about."""
    more = len(actions) - _MAX_LISTED
    return "; ".join((*map(str, actions[:_MAX_LISTED]), *((f"and {more} more",) if more > 0 else ())))


def _describe_membership(status: JobStatus) -> str:
    world = status.membership
    return "no world" if world is None else f"epoch {world.generation} {world.state.lower()}"


# ---- time between reconciles -----------------------------------------------------------------------------------------
# Paces one job's rounds: what is gathered, how long it sleeps. Pure. Two thousand agents that stop one after another
# would have the job planned for each few of them, and the plans would take the event loop from the very words that they
# wait for. A thousand jobs that wait, looked at every two seconds in case something was missed, took a third of a core
# to find nothing.

GATHERING_SECONDS = 0.005
"""Several messages of one happening come within so long: they are answered by one plan."""
COSTS_GATHERED = 6.0
"""While words keep coming they are gathered for so many times what a decision takes: it leaves the loop to them meanwhile."""
MAX_GATHERING_SECONDS = 0.15
"""And no longer, whatever a decision takes: a busy machine makes it look dear."""
IDLE_POLL_SECONDS = 10.0
"""A job that nobody speaks of is looked at this often: what is older than 15 s says nothing to whoever leaves a node."""
EVENED = 0.4
"""Share of such a sleep that is left to chance: a thousand that began together would be looked at together for all time, and
whoever is spoken of meanwhile would wait behind them."""


class ReconcilePacer:
    """Remembers the last decision's cost and the looks that found nothing."""

    def __init__(self) -> None:
        self._decision_seconds = 0.0
        self._still = 0

    def record_cost(self, seconds: float) -> None:
        """Takes note of how long the newest decision took."""
        self._decision_seconds = seconds

    def record_idle_poll(self, heard: bool, still: bool) -> None:
        """Counts the looks in a row that found nothing.

        Args:
            heard: Somebody had said something since the last.
            still: The look changed nothing and had nothing done.
        """
        self._still = 0 if heard or not still else self._still + 1

    @property
    def gathering_seconds(self) -> float:
        """How long words that keep coming are gathered."""
        return max(GATHERING_SECONDS, min(COSTS_GATHERED * self._decision_seconds, MAX_GATHERING_SECONDS))

    def sleep_seconds(self, longest_seconds: float, chance: float) -> float:
        """Returns how long to sleep if nothing is heard.

        `longest_seconds`, and twice as long after each look that found nothing, up to STILL_SECONDS; the last of it as
        `chance`, between 0 and 1, has it.
        """
        still = min(longest_seconds * 2.0 ** min(self._still, 10), IDLE_POLL_SECONDS)
        return max(longest_seconds, still * (1.0 - EVENED * chance))


# ---- ages of workers -------------------------------------------------------------------------------------------------
# Measures worker ages by this operator's own clock.


class WorkerAges:
    """Of one job's workers, since this operator first saw each."""

    def __init__(self) -> None:
        self._first_observed_seconds: dict[str, tuple[ObservedWorker, ObservedWorker]] | None = None
        """By uid, a worker as it was shown last and with its age by this clock: the same again for the same."""

    def with_local_ages(self, workers: Sequence[ObservedWorker], now: float) -> tuple[ObservedWorker, ...]:
        """Returns the workers with creation times by this operator's clock.

        The workers, made no later than they were seen. Those that came while we looked were made when they came.
        """
        known, self._first_observed_seconds = self._first_observed_seconds, {}
        found = []
        for worker in workers:
            shown, aged = (known or {}).get(worker.uid, (None, None))
            if aged is None:
                created = now if known is not None else min(worker.created_seconds, now)
                aged = replace(worker, created_seconds=created)
            elif shown is not worker:
                aged = replace(worker, created_seconds=aged.created_seconds)
            self._first_observed_seconds[worker.uid] = worker, aged
            found.append(aged)
        return tuple(found)


# ---- parts of a snapshot that did not change -------------------------------------------------------------------------
# Replaces equal parts of a snapshot by those of the last. `core.facts` keeps what it derived from a tuple for as long
# as it gets that tuple: fabrics and monitors build a new one each time they are asked, of the same objects.


class SnapshotReuse:
    """Remembers nodes, workers and holders of one job's last snapshot."""

    def __init__(self) -> None:
        self._workers: tuple[ObservedWorker, ...] = ()
        self._nodes: tuple[ObservedNode, ...] = ()
        self._servers: tuple[ObservedMemoryServer, ...] = ()

    def of(self, seen: JobSnapshot) -> JobSnapshot:
        """Returns the snapshot with equal parts replaced by the last ones."""
        if seen.workers != self._workers:
            self._workers = seen.workers
        if seen.nodes != self._nodes:
            self._nodes = seen.nodes
        if seen.servers != self._servers:
            self._servers = seen.servers
        return replace(seen, workers=self._workers, nodes=self._nodes, servers=self._servers)


# ---- reconciler ------------------------------------------------------------------------------------------------------

_SUSPENDED_SECONDS = 0.25
_NOTICE_CHARACTERS = 900
"""Of what an agent wants people to hear; an event has 1024."""


class Reconciler:
    """Carries one job from spec to end."""

    def __init__(self, dependencies: Dependencies) -> None:
        self._dependencies = dependencies
        self._term_seconds = dependencies.clock()
        self._wake = asyncio.Event()
        self._later: asyncio.TimerHandle | None = None
        self._background = TaskSet(_background_failed)
        self.calls = WorkerCalls(dependencies.clock, self.wake)
        self._tier_failures = TierFailureEvents()
        self._ages = WorkerAges()
        self._steady = SnapshotReuse()
        self.recorder = EventRecorder(dependencies.platform.record, time.monotonic)
        self._job_metrics = JobMetrics()
        self._round_log = PlanLog()
        self._pace = ReconcilePacer()
        self._woken_by_change = True
        """Whether somebody said something before the round under way."""
        self._desired: DesiredState | None = None
        self._pinned: Checkpoint | None = None
        self._pending_deletions: Going = {}
        self._marked: tuple[int, Checkpoint] | None = None
        self._watermark: Checkpoint | None = None
        self._written = self._swept = float("-inf")
        self._progress_writes_from: float | None = None
        self._rejection = ""
        self._refusals_told: Mapping[ApiCall, float] = {}
        self._began: float | None = None
        self.safety: JobSafety | None = None
        """Whether the job could spare a holder, as of the last round."""
        self._shown: PlatformSnapshot | None = None
        """The job as it was observed last."""
        self._last: tuple[JobSnapshot, JobStatus] | None = None
        """What the last round observed, and decided."""
        self._longest = dependencies.settings.max_sleep_seconds

    @property
    def round_seconds(self) -> float:
        """How long the round under way takes already; 0 between two."""
        return 0.0 if self._began is None else time.perf_counter() - self._began

    def data_lost_with_node(self, node: str) -> str:
        """Says what the job loses with a node; empty: nothing."""
        if self._last is None:
            known = self.safety
            return "it was not reconciled yet" if known is None else "" if known.safe else known.reason
        return data_lost_with_node(*self._last, node, self._dependencies.clock())

    def wake(self, urgent: bool = True) -> None:
        """Wakes the loop: at once if urgent, else after a short delay.

        Something changed. What is not urgent waits a little, for whatever else comes till then.
        """
        if urgent:
            self._wake.set()
        elif self._later is None:
            loop = asyncio.get_running_loop()
            self._later = loop.call_later(self._dependencies.settings.notice_seconds, self._wake.set)

    async def run(self) -> None:
        """Goes on until cancelled."""
        watching = asyncio.create_task(self._watch(), name="fabric changes")
        failures = 0
        try:
            while True:
                self._wake.clear()
                if self._later is not None:
                    self._later.cancel()
                    self._later = None
                try:
                    pause = await self._in_turn()
                    failures = 0
                    self._tell_refusals()
                except NotLeader:
                    await asyncio.sleep(_SUSPENDED_SECONDS)  # the lease is renewed soon, or this loop is cancelled
                    continue
                except StatusConflict as moved:
                    log.info("%s", moved)
                    pause = self._backoff(failures := failures + 1)
                except Exception as error:  # noqa: BLE001  whatever it was, the job must go on being looked after
                    failures += 1
                    self._woken_by_change = True
                    self._report(error, failures)
                    self._tell_refusals()
                    await self._stop_by_name(error)
                    pause = self._backoff(failures)
                    await asyncio.sleep(pause)
                    continue
                await self._sleep(pause)
        finally:
            # before anything is waited for: a scrape must not read a job that is not looked after here any more
            self._job_metrics.forget()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            if self._later is not None:
                self._later.cancel()
            await self.recorder.close()
            await self.calls.close()
            await self._background.close()

    async def _in_turn(self) -> float:
        """One round, measured; not while too many other jobs have theirs."""
        async with self._dependencies.turns:
            began = self._began = time.perf_counter()
            try:
                return await self.reconcile()
            finally:
                self._began = None
                metrics.reconcile_seconds.observe(time.perf_counter() - began)

    async def reconcile(self) -> float:
        """Runs one round of observe, plan and apply.

        Returns:
            Seconds until the next is due even if nothing changes.

        Raises:
            WorldMoved: another leader wrote the status since it was observed.
            FabricError: the fabric refused a write or an action; the next round asks again.
            InvariantBroken: the plan breaks an invariant; nothing of it was written or applied.
        """
        dependencies = self._dependencies
        # Observe the job. One whose spec cannot be read gets no plan: its status says so, and an edit wakes the loop.
        try:
            shown, calls = await self.calls.await_with_calls(dependencies.platform.observe())
        except JobRejected as refusal:
            return await self._reject(refusal)
        except ViewRefused as refusal:
            await self._say_unplanned(refusal)
            raise
        self._shown = shown
        shown = replace(shown, workers=self._ages.with_local_ages(shown.workers, dependencies.clock()))
        # Let agents of known workers in, and bring holders and agents up to the stored status: a new leader has to.
        dependencies.channel.set_expected_workers(worker_ids(shown.workers, calls.creates))
        self._follow(shown, shown.status)
        seen = self._steady.of(await build_snapshot(dependencies, shown, self._term_seconds, calls))
        # Plan. Maintenance is planned on the new status, and only while the world stays as it is.
        began = time.thread_time()
        decided = plan(seen)
        check_plan(decided, seen)
        moved = decided.status.membership != seen.status.membership
        kept = None if moved else self._maintenance(seen, decided)
        self._pace.record_cost(time.thread_time() - began)
        status = decided.status if kept is None else kept.status
        events = (*decided.events, *(kept.events if kept is not None else ()))
        # Write the status before anything is applied: the new world is the fence. Agents learn of it only once stored.
        later = await self._write(seen, status, bool(events), seen.status != status_without_rejection(shown.status))
        if not later:
            self._follow(shown, status)
        idle = status == seen.status and not decided.actions and not (kept is not None and kept.actions)
        self._pace.record_idle_poll(self._woken_by_change, still=idle)
        # Publish metrics, the log line and whether this job can spare a holder.
        self._last = seen, status
        self.safety = judge_job_safety(seen, status, kept)
        self._job_metrics.update_gauges(seen, status, kept)
        self._round_log.log_changes(decided, kept, seen.status)
        # Record events first if the finalizer goes: the job may be gone right after, and this loop with it.
        if SetFinalizer(False) in decided.actions:
            self.recorder.record(events)
            await self.recorder.flush()
            events = ()
        # Apply the plan, then maintenance; then record events, agents' notices last.
        after = replace(seen, status=status)
        failed = await apply_plan(dependencies, self.calls, decided.actions, after)
        if kept is not None:
            self._maintain(kept, replace(after, uploads=decided.uploads))
        self.recorder.record(events)
        self.recorder.record(self._notices(), of_agents=True)
        if failed:
            raise failed[0]
        # Sleep until the soonest wake that plan, maintenance or a delayed progress write asked for.
        wakes = [decided.wake_after_seconds, kept.wake_after_seconds if kept is not None else None, later or None]
        return min([w for w in wakes if w is not None], default=math.inf)

    async def _reject(self, refusal: JobRejected) -> float:
        """What cannot be carried is left as it is; people are told once, and an edit wakes us."""
        dependencies, old = self._dependencies, refusal.status
        self._last, self.safety = None, rejected_safety(old, dependencies.clock())
        if refusal.being_deleted:
            # what it would have deleted cannot be known: nobody is stuck with it
            await dependencies.platform.set_finalizer(False)
        if old is not None:
            status = status_with_rejection(old, refusal.reason, refusal.metadata_generation, dependencies.clock())
            if status != old:
                await dependencies.platform.patch_status(status, old)
        if refusal.reason != self._rejection:
            self._rejection = refusal.reason
            self.recorder.record((Event(reasons.JOB_SPEC_REJECTED, refusal.reason, warning=True),))
        return dependencies.settings.rest_seconds

    async def _say_unplanned(self, refusal: ViewRefused) -> None:
        """A job whose surroundings may not be seen looks as if it ran, unless its status says so."""
        dependencies, old = self._dependencies, refusal.status
        if old is not None:
            status = unplanned(old, dependencies.platform.refused_calls(), dependencies.clock())
            if status != old:
                await dependencies.platform.patch_status(status, old)

    def _tell_refusals(self) -> None:
        """Events can mostly be recorded where the status cannot be written."""
        refused = self._dependencies.platform.refused_calls()
        news = refusal_events(refused, self._refusals_told, time.monotonic())
        self._refusals_told = news.told
        self.recorder.record(news.events)

    async def _stop_by_name(self, error: Exception) -> None:
        """Says on the job itself that its records cannot be handled: the operator's log alone would name no culprit.

        Nothing of it is planned until a round succeeds; what trains goes on.
        """
        if not isinstance(error, MemoryError | RecursionError | OutOfBounds) or self._shown is None:
            return
        why = f"Surefoot cannot plan for this job: {type(error).__name__}: {shorten(str(error), _NOTICE_CHARACTERS)}"
        status = self._shown.status
        stopped = with_refused_records(status, (why,), self._dependencies.clock())
        if stopped == status:
            return
        self.recorder.record((Event(reasons.RECORDS_REJECTED, why, warning=True),))
        try:
            await self._dependencies.platform.patch_status(stopped, status)
        except Exception as refusal:  # noqa: BLE001  memory may lack again, and nothing here may end the loop
            log.warning("the status could not be updated with `%s`: %s", why, refusal)

    async def _write(self, seen: JobSnapshot, status: JobStatus, must: bool, ahead: bool) -> float:
        """Writes the status if it changed; returns seconds until it may be written if it can wait, else 0.

        `ahead`: what is stored has moments that a clock ahead of ours wrote; they must not be met again later.
        """
        old = seen.status
        self._settles_at(old, time.monotonic())  # from the first round on
        if status == old and not must and not ahead:
            return 0.0
        if not must and not ahead and _is_progress_only(old, status) == old:
            now = time.monotonic()
            left = max(self._written + self._dependencies.settings.progress_seconds, self._settles_at(old, now)) - now
            if left > 0:
                return left
            if (wait := self._dependencies.pace.wait_seconds(now)) > 0:
                return wait
        if status != old or ahead:
            await self._dependencies.platform.patch_status(update_contents(seen, status), old)
            self._written = time.monotonic()
            self._job_metrics.count_changes(old, status, seen.job)
        return 0.0

    def _settles_at(self, stored: JobStatus, now: float) -> float:
        """When it is known again what a former leader knew, if there was one: its words are not changed for a moment."""
        if self._progress_writes_from is None:
            self._progress_writes_from = now + (
                self._dependencies.settings.progress_write_delay_seconds if stored.serial else 0.0
            )
        return self._progress_writes_from

    def _follow(self, shown: PlatformSnapshot, status: JobStatus) -> None:
        """Brings the holders' monitors and the agents up to the status that is stored now."""
        dependencies, resting = self._dependencies, is_idle(shown.job, status, shown.workers)
        self._longest = dependencies.settings.rest_seconds if resting else dependencies.settings.max_sleep_seconds
        if status.memory_cleared:
            dependencies.memory.pause(status)
        else:
            size_limit_bytes = shown.job.spec.checkpoint.memory.size_limit_bytes
            dependencies.memory.update(shown.servers, status, resting, size_limit_bytes, ranks_of(shown, status))
        dependencies.channel.bound(ranks_of(shown, status))
        epoch = status.membership.generation if status.membership is not None else 0
        replicas = shown.job.spec.checkpoint.memory.replicas
        usable = dependencies.memory.usable_servers(epoch)
        token = dependencies.generation_token(epoch)
        before = self._desired.scope if self._desired is not None else None
        scope = scope_after(before, status, dependencies.memory.observed_servers)
        topology = topology_of(shown.nodes, shown.job.uid)
        self._desired = desired_state_after(self._desired, status, usable, replicas, token, scope, topology)
        dependencies.channel.apply_state(self._desired)

    def _maintenance(self, seen: JobSnapshot, decided: Plan) -> MaintenancePlan:
        return plan_maintenance(
            replace(seen, status=decided.status, uploads=decided.uploads), self._pinned, self._pending_deletions
        )

    def _maintain(self, kept: MaintenancePlan, seen: JobSnapshot) -> None:
        dependencies, world = self._dependencies, seen.status.membership
        self._pinned, self._pending_deletions, self._watermark = kept.pinned, kept.pending_deletions, kept.watermark
        if world is None or (world.state != "Committed" and not seen.uploads):
            return
        apply_maintenance(dependencies, kept.actions, seen, self._background)
        if world.state != "Committed":
            return
        mark = (world.generation, kept.watermark) if kept.watermark is not None else None
        if mark is not None and mark != self._marked:
            epoch, checkpoint = mark
            if self._background.start_once("watermark", lambda: dependencies.memory.set_watermark(checkpoint, epoch)):
                self._marked = mark
        if time.monotonic() - self._swept >= dependencies.settings.memory.gc_interval_seconds:
            self._swept = time.monotonic()
            busy = repairing(dependencies.channel.sessions)
            self._background.start_once(
                "janitor", lambda: dependencies.memory.delete_uncommitted(self._watermark, busy, kept.steady)
            )

    def _notices(self) -> tuple[Event, ...]:
        """What agents want people to hear, and what they could not do."""
        sessions, now = self._dependencies.channel.take_snapshot()
        notices = tuple(
            Event(shorten(n.reason), f"{worker}: {shorten(n.text, _NOTICE_CHARACTERS)}", warning=True)
            for worker, n in sessions.notices
        )
        return (*notices, *self._tier_failures.events(sessions.orders.failures, now))

    async def _watch(self) -> None:
        """The fabric's changes; a watch that breaks is begun anew."""
        failures = 0
        while True:
            try:
                async for _ in self._dependencies.platform.watch_changes():
                    failures = 0
                    self.wake()
                return
            except Exception as error:  # noqa: BLE001  without a watch there still are the timers
                failures += 1
                self._report(error, failures)
                await asyncio.sleep(self._backoff(failures))

    async def _sleep(self, pause: float) -> None:
        longest = self._pace.sleep_seconds(self._longest, random.random())
        try:
            async with asyncio.timeout(min(pause, longest)):
                await self._wake.wait()
        except TimeoutError:
            self._woken_by_change = (
                False  # the plan asked to look again now, or it is looked whether something was missed
            )
            return
        self._woken_by_change = True
        await self._gather()

    async def _gather(self) -> None:
        """Waits for what else is said, until nothing more is or it has taken long enough."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._pace.gathering_seconds
        while self._wake.is_set() and loop.time() < until:
            self._wake.clear()
            await asyncio.sleep(GATHERING_SECONDS)

    def _backoff(self, failures: int) -> float:
        return self._dependencies.settings.backoff.seconds(failures, random.random())

    @staticmethod
    def _report(error: Exception, failures: int) -> None:
        metrics.reconcile_failures.labels(type(error).__name__).inc()
        if isinstance(error, PlatformError):
            log.warning("%s; reconciling failed (%d in a row)", error, failures)
        elif isinstance(error, InvariantViolation):
            log.error("%s; a plan breaks an invariant and is not applied (%d in a row)", error, failures)
        else:
            log.exception("reconciling failed (%d in a row)", failures)


def _background_failed(name: str, error: BaseException) -> None:
    """The next plan asks for it again, if it still matters."""
    metrics.reconcile_failures.labels(type(error).__name__).inc()
    log.error("%s failed: %s", name, error, exc_info=error)


def _is_progress_only(old: JobStatus, new: JobStatus) -> JobStatus:
    """`new` without what only reports progress: that may be written a little later."""
    return replace(
        new,
        step=old.step,
        progress_seconds=old.progress_seconds,
        last_complete=old.last_complete,
        message=old.message,
        conditions=old.conditions,
    )
