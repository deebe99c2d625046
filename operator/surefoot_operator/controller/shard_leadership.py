"""Runs the work of each shard that this replica leads.

Created by the composition root; `leader.shard_election` starts and stops the terms. Work that exists once in a cluster
(rollout of the memory tier, sweep of orphans, conditions of nodes) belongs to the leader of shard 0.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from surefoot.task_set import TaskSet, log_failure_to, repeat_until_cancelled
from surefoot_operator import metrics
from surefoot_operator.api.spec import MANAGER
from surefoot_operator.controller import process_metrics
from surefoot_operator.controller.cluster_settings import ClusterSettings
from surefoot_operator.controller.job_runner import JobKey, JobRunner, SharedResources
from surefoot_operator.controller.leader.election_rules import leader_label, shard_of, shard_url
from surefoot_operator.controller.leader.leader_election import LeaderLabel
from surefoot_operator.controller.memory_tier_maintenance import MemoryMaintenance, RolloutApproval, RolloutVeto
from surefoot_operator.controller.process_setup import TermClock
from surefoot_operator.errors import PlatformError
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.api_objects import ApiError
from surefoot_operator.platforms.kubernetes.node_conditions import NodePatches, build_node_patches, collect_reports
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache
from surefoot_operator.policy.maintenance.memory_tier_rollout import JobSafety

log = logging.getLogger(__name__)


# ---- job runners -----------------------------------------------------------------------------------------------------
# Runs one runner for each job in the cache. Level-triggered; called by the composition root.

Object = Mapping[str, Any]
RESYNC_SECONDS = 30.0
"""Interval for comparing runners with the cache, in case events were missed."""


def accept_any_job(uid: str) -> bool:
    """Selects any job, because there is one shard."""
    return True


def select_managed_jobs(
    jobs: Iterable[Object], watch_namespace: str = "", in_shard: Callable[[str], bool] = accept_any_job
) -> frozenset[JobKey]:
    """Selects the jobs of a shard that this operator manages.

    Args:
        jobs: Cached TrainingJobs; those with another `managedBy` are left out.
        watch_namespace: Namespace whose jobs are managed; empty: all.
        in_shard: Returns whether a job belongs to the shard, by its uid.
    """
    our_jobs = (job for job in jobs if job.get("spec", {}).get("managedBy", MANAGER) == MANAGER)
    keys = (key for key in map(_job_key, our_jobs) if watch_namespace in ("", key.namespace))
    return frozenset(key for key in keys if in_shard(key.uid))


def _job_key(job: Object) -> JobKey:
    metadata = job["metadata"]
    return JobKey(metadata["namespace"], metadata["name"], metadata["uid"])


class JobRunners:
    """Runs a shard's jobs while this replica leads it; `wake` may be called at any time, in one event loop."""

    def __init__(
        self, shared: SharedResources, watch_namespace: str = "", in_shard: Callable[[str], bool] = accept_any_job
    ) -> None:
        self._shared, self._watch_namespace, self._in_shard = shared, watch_namespace, in_shard
        self._runners: dict[JobKey, JobRunner] = {}
        self._stop_tasks = TaskSet(log_failure_to(log))
        self._leading = False

    @property
    def running_jobs(self) -> frozenset[JobKey]:
        """The jobs with a runner."""
        return frozenset(self._runners)

    def reconcile_seconds_by_job(self) -> dict[str, float]:
        """Returns how long each job's current reconcile has been running; 0 between two."""
        return {str(key): runner.current_reconcile_seconds for key, runner in self._runners.items()}

    def rollout_safety(self) -> tuple[JobSafety, ...]:
        """Returns whether each job can lose a memory server."""
        return tuple(runner.rollout_safety for runner in self._runners.values())

    def data_lost_with_node(self, node: str) -> str:
        """Describes the data that some job would lose with a node; empty: none."""
        losses = ((key, runner.data_lost_with_node(node)) for key, runner in self._runners.items())
        return next((f"job {key}: {loss}" for key, loss in losses if loss), "")

    def start(self) -> None:
        """Starts to lead: creates a runner for every cached job."""
        self._leading = True
        self._shared.cache.add_listener("trainingjobs", self._on_job_change)
        self.sync_runners()

    def sync_runners(self) -> None:
        """Starts missing runners, and stops those whose job no longer exists."""
        if not self._leading:
            return
        job_keys = select_managed_jobs(self._shared.cache.jobs.items.values(), self._watch_namespace, self._in_shard)
        for key in self._runners.keys() - job_keys:
            self._stop_runner(self._runners.pop(key))
        for key in sorted(job_keys - self._runners.keys(), key=str):
            self._start_runner(key)

    async def resync(self) -> None:
        """Calls `wake` every half minute until cancelled, in case events were missed."""

        async def wake() -> float:
            self.sync_runners()
            return RESYNC_SECONDS

        await repeat_until_cancelled(wake, RESYNC_SECONDS)

    async def close(self) -> None:
        """Stops every runner; the jobs continue."""
        if self._leading:
            self._shared.cache.remove_listener("trainingjobs", self._on_job_change)
        self._leading = False
        await asyncio.gather(
            *(runner.stop(is_removed=False) for runner in self._runners.values()), return_exceptions=True
        )
        self._runners.clear()
        await self._stop_tasks.join()

    def _on_job_change(self, old: Object | None, new: Object | None) -> None:
        if old is None or new is None or old["metadata"]["uid"] != new["metadata"]["uid"]:
            self.sync_runners()

    def _start_runner(self, key: JobKey) -> None:
        try:
            runner = JobRunner(key, self._shared)
        except Exception:
            # One job must not keep the others from running; the next wake tries it again.
            metrics.reconcile_failures.labels("begin").inc()
            log.exception("cannot start the runner of job %s, retrying", key)
            return
        self._runners[key] = runner
        runner.start()

    def _stop_runner(self, runner: JobRunner) -> None:
        self._stop_tasks.start(runner.stop(is_removed=True), f"end {runner.key}")


# ---- node reporter ---------------------------------------------------------------------------------------------------
# Writes conditions on nodes that jobs found unhealthy. Run by the composition root while it leads. Level-triggered: the
# writes follow from the jobs' statuses and the nodes. A rejection by the API server is logged once and retried rarely,
# because jobs avoid such nodes anyway.

NODE_REPORT_INTERVAL_SECONDS = 5.0
"""Interval between two writes of conditions."""
NODE_REPORT_DENIED_SECONDS = 600.0
"""Wait after the API server denied access to nodes."""


class NodeReporter:
    """Sets the conditions of nodes as jobs' statuses require.

    Args:
        api: Writes only while this replica leads.
        cache: Cached jobs and nodes.
        taint_effect: Effect of the taint that accompanies the condition; empty: no taint.
        clock: Returns Unix seconds.
    """

    def __init__(
        self, api: Api, cache: ClusterCache, taint_effect: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._api, self._cache, self._taint_effect, self._clock = api, cache, taint_effect, clock
        self._logged: set[str] = set()

    async def run(self) -> None:
        """Sets the conditions every 5 s until cancelled. A failure is logged and retried."""
        await repeat_until_cancelled(self._try_once)

    async def _try_once(self) -> float:
        try:
            await self.reconcile_once()
        except ApiError as error:
            self._log_once(f"cannot set conditions of unhealthy nodes: {error}; jobs avoid these nodes nevertheless")
            return NODE_REPORT_DENIED_SECONDS if error.code == 403 else NODE_REPORT_INTERVAL_SECONDS
        except PlatformError as error:
            self._log_once(f"cannot set conditions of unhealthy nodes, retrying: {error}")
        return NODE_REPORT_INTERVAL_SECONDS

    async def reconcile_once(self) -> None:
        """Writes the conditions and taints that differ. Raises PlatformError."""
        now = self._clock()
        nodes = {node_object["metadata"]["name"]: node_object for node_object in self._cache.nodes.items.values()}
        reports, unreported = collect_reports(self._cache.jobs.items.values(), nodes, now)
        process_metrics.node_unhealthy.clear()
        for name, report in reports.items():
            process_metrics.node_unhealthy.labels(name, report.reason).set(1)
        if unreported:
            self._log_once(
                f"too many unhealthy nodes to set a condition on each: {', '.join(unreported[:10])} are left out"
            )
        for name, node in nodes.items():
            await self._write_node(name, build_node_patches(node, reports.get(name), self._taint_effect, now))

    async def _write_node(self, name: str, writes: NodePatches) -> None:
        try:
            # First, because it tests the version of the node, which the other write changes.
            if writes.taint is not None:
                await self._api.merge(f"/api/v1/nodes/{name}", writes.taint)
            if writes.status is not None:
                log.info("node %s: %s", name, writes.status["status"]["conditions"][0])
                await self._api.merge(f"/api/v1/nodes/{name}/status", writes.status)
        except ApiError as error:
            # The node was deleted or changed in between: the next round has its new version.
            if error.code not in (404, 409):
                raise

    def _log_once(self, text: str) -> None:
        if text not in self._logged and len(self._logged) < 32:
            self._logged.add(text)
            process_metrics.node_condition_failures.inc()
            log.warning("%s", text)


# ---- shard leadership ------------------------------------------------------------------------------------------------

STOP_TIMEOUT_SECONDS = 5.0
"""Maximum time for stopping the jobs of a shard."""


@dataclass(frozen=True, slots=True)
class _ShardTerm:
    """The parts of one term of leading a shard."""

    runners: JobRunners
    """Runs the jobs of the shard."""
    tasks: TaskSet
    """Background tasks that end with the term."""
    label: LeaderLabel
    """Moves the shard's leader label to this pod."""
    approval: RolloutApproval
    """Notes on the shard's lease; its task runs only for shards other than 0."""


class ShardTerms:
    """Runs the terms of one replica, one for each shard that it leads.

    Args:
        api: The API server.
        settings: Settings of this process.
        shared: Resources that all jobs share.
        failed: Called with the name and error of a task that failed, which ends the process.
        veto: Returns why leaders of other shards let no memory server be restarted; empty: one may be.
        may_operate: Raises NotLeader while another installation may manage the same jobs.
    """

    def __init__(
        self,
        api: Api,
        settings: ClusterSettings,
        shared: SharedResources,
        failed: Callable[[str, BaseException], None],
        veto: RolloutVeto,
        may_operate: Callable[[], None],
    ) -> None:
        self._api, self._settings, self._shared, self._failed, self._veto = api, settings, shared, failed, veto
        self._may_operate = may_operate
        self._terms: dict[int, _ShardTerm] = {}
        self._shard_0_tasks: list[Callable[[], Coroutine[Any, Any, None]]] = []

    @property
    def job_count(self) -> int:
        """Number of jobs that this replica manages."""
        return sum(len(term.runners.running_jobs) for term in self._terms.values())

    def reconcile_seconds_by_job(self) -> dict[str, float]:
        """Returns how long each job's current reconcile has been running; 0 between two."""
        return {
            key: age for term in self._terms.values() for key, age in term.runners.reconcile_seconds_by_job().items()
        }

    def data_lost_with_node(self, node: str) -> str:
        """Describes the data that some job would lose with a node; empty: none."""
        losses = (term.runners.data_lost_with_node(node) for term in self._terms.values())
        return next((loss for loss in losses if loss), "")

    def run_with_shard_0(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `work`, until cancelled, in each later term of shard 0."""
        self._shard_0_tasks.append(work)

    def start_leading(self, shard: int, shards: int, may_act: Callable[[], None]) -> None:
        """Leads a shard from now on, until `stopped_leading`; `may_act` raises NotLeader once its lease is over."""

        def may_write() -> None:
            may_act()
            self._may_operate()

        settings, url = self._settings, self._settings.coordinator_url
        api = self._api.with_write_check(may_write)
        environment_factory = replace(
            self._shared.environment_factory, coordinator_url=shard_url(url, shard), fallback_url=url
        )
        # All writes of a job's reconciler go through this cache, and are rejected once the lease is over.
        cache = self._shared.cache.with_write_check(may_write)
        shared = replace(self._shared, cache=cache, environment_factory=environment_factory, clock=TermClock())
        runners = JobRunners(shared, settings.watch_namespace, lambda uid: shard_of(uid, shards) == shard)
        label = LeaderLabel(api, settings.namespace, settings.pod_name, leader_label(shard))
        approval = RolloutApproval(shared, settings.namespace, settings.memory_daemonset, runners.rollout_safety)
        term = self._terms[shard] = _ShardTerm(runners, TaskSet(self._failed), label, approval)
        # Start the jobs before agents are accepted, so that agents find their channels.
        runners.start()
        shared.server.set_leading(True, shard)
        metrics.leader.labels(str(shard)).set(1)
        # Move the label that directs agents here, and start the background work.
        term.tasks.start(label.run())
        term.tasks.start(runners.resync())
        if shard != 0:
            term.tasks.start(approval.run())
        else:
            memory_maintenance = MemoryMaintenance(
                shared, settings.namespace, settings.memory_daemonset, runners.rollout_safety, self._veto
            )
            term.tasks.start(memory_maintenance.run())
            if settings.node_reports:
                term.tasks.start(NodeReporter(api, cache, settings.node_taint).run())
            for work in self._shard_0_tasks:
                term.tasks.start(work())
        shard_text = f" of shard {shard} (of {shards})" if shards > 1 else ""
        log.info(
            "leading, with %d jobs%s; agents connect to %s",
            len(runners.running_jobs),
            shard_text,
            environment_factory.coordinator_url,
        )

    async def stop_leading(self, shard: int, has_lease: bool) -> None:
        """Ends a term. Agents are disconnected first, because the next leader runs elsewhere.

        Args:
            shard: The shard.
            in_peace: Whether this replica still has the lease, so that it may remove its label.
        """
        self._shared.server.set_leading(False, shard)
        metrics.leader.labels(str(shard)).set(0)
        term = self._terms.pop(shard, None)
        if term is None:
            return
        await stop_within("jobs", term.runners.close())
        if not self._terms:
            await stop_within("servers", self._shared.memory_pool.close())
        await stop_within("the leader's tasks", term.tasks.close())
        if has_lease:
            try:
                await term.label.remove()
            except PlatformError as error:
                log.warning("cannot remove the leader label of shard %d from this pod: %s", shard, error)

    def annotations(self, shard: int) -> Mapping[str, str]:
        """Returns the annotations of the shard's lease: whether its jobs can lose a memory server."""
        term = self._terms.get(shard)
        return term.approval.annotations() if term is not None else {}


async def stop_within(what: str, work: Coroutine[Any, Any, None]) -> None:
    """Waits until `work` has stopped something, for at most 5 s."""
    try:
        async with asyncio.timeout(STOP_TIMEOUT_SECONDS):
            await work
    except TimeoutError:
        log.warning("%s did not stop within %g s, continuing without waiting", what, STOP_TIMEOUT_SECONDS)
