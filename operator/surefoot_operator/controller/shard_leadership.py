"""Runs what a replica does for each shard that it leads.

Made by the composition root, begun and ended by `leader.shard_election`. What there is once in a cluster (the memory
tier's rollout, the sweep of orphans, conditions of nodes) is done by who leads shard 0.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from surefoot.task_set import TaskSet, logged, repeat
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
from surefoot_operator.platforms.kubernetes.node_conditions import NodeWrites, node_writes, reports_by_node
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache
from surefoot_operator.policy.maintenance.memory_tier_rollout import JobSafety

log = logging.getLogger(__name__)


# ---- job runners -----------------------------------------------------------------------------------------------------
# Starts and stops a runner for each job in the cache. Level-triggered; called by the composition root.

Object = Mapping[str, Any]
RESYNC_SECONDS = 30.0


def every_job(uid: str) -> bool:
    """Takes any job: there is one shard."""
    return True


def is_managed(
    jobs: Iterable[Object], watch_namespace: str = "", in_shard: Callable[[str], bool] = every_job
) -> frozenset[JobKey]:
    """Selects the jobs of a shard that name no other manager."""
    ours = (job for job in jobs if job.get("spec", {}).get("managedBy", MANAGER) == MANAGER)
    keys = (key for key in map(_key, ours) if watch_namespace in ("", key.namespace))
    return frozenset(key for key in keys if in_shard(key.uid))


def _key(job: Object) -> JobKey:
    metadata = job["metadata"]
    return JobKey(metadata["namespace"], metadata["name"], metadata["uid"])


class JobRunners:
    """The runners of a shard's jobs while this replica leads it.

    `wake` may be called at any time, in one event loop.
    """

    def __init__(
        self, shared: SharedResources, watch_namespace: str = "", in_shard: Callable[[str], bool] = every_job
    ) -> None:
        self._shared, self._only_namespace, self._in_shard = shared, watch_namespace, in_shard
        self._runners: dict[JobKey, JobRunner] = {}
        self._ending = TaskSet(logged(log))
        self._leading = False

    @property
    def running(self) -> frozenset[JobKey]:
        return frozenset(self._runners)

    def round_seconds(self) -> dict[str, float]:
        """Age of each job's reconcile under way; 0 between two."""
        return {str(key): runner.round_seconds for key, runner in self._runners.items()}

    def rollout_safety(self) -> tuple[JobSafety, ...]:
        """What each job says about restarting a holder."""
        return tuple(runner.safety for runner in self._runners.values())

    def data_lost_with_node(self, node: str) -> str:
        """Says what some job loses with a node; empty: nothing."""
        said = ((key, runner.data_lost_with_node(node)) for key, runner in self._runners.items())
        return next((f"job {key}: {why}" for key, why in said if why), "")

    def start(self) -> None:
        """Begins to lead: starts a runner for every cached job."""
        self._leading = True
        self._shared.cache.listen("trainingjobs", self._on_event)
        self.wake()

    def wake(self) -> None:
        """Starts missing runners and stops those whose job is gone."""
        if not self._leading:
            return
        wanted = is_managed(self._shared.cache.jobs.items.values(), self._only_namespace, self._in_shard)
        for key in self._runners.keys() - wanted:
            self._end(self._runners.pop(key))
        for key in sorted(wanted - self._runners.keys(), key=str):
            self._begin(key)

    async def resync(self) -> None:
        """Wakes every half minute until cancelled, in case events were missed."""

        async def wake() -> float:
            self.wake()
            return RESYNC_SECONDS

        await repeat(wake, RESYNC_SECONDS)

    async def close(self) -> None:
        """Stops every runner and leaves the jobs as they are."""
        if self._leading:
            self._shared.cache.remove_listener("trainingjobs", self._on_event)
        self._leading = False
        await asyncio.gather(*(runner.stop(gone=False) for runner in self._runners.values()), return_exceptions=True)
        self._runners.clear()
        await self._ending.join()

    def _on_event(self, old: Object | None, new: Object | None) -> None:
        if old is None or new is None or old["metadata"]["uid"] != new["metadata"]["uid"]:
            self.wake()

    def _begin(self, key: JobKey) -> None:
        try:
            runner = JobRunner(key, self._shared)
        except Exception:
            # one job must not keep the others from being looked after; it is tried again at the next wake
            metrics.reconcile_failures.labels("begin").inc()
            log.exception("could not start the runner of job %s", key)
            return
        self._runners[key] = runner
        runner.start()

    def _end(self, runner: JobRunner) -> None:
        self._ending.start(runner.stop(gone=True), f"end {runner.key}")


# ---- node reporter ---------------------------------------------------------------------------------------------------
# Writes conditions on nodes that jobs found sick. Run by the composition root while it leads. Level-triggered: what is
# to be written follows from the jobs' statuses and the nodes. Where the API server refuses, that is logged once and
# tried again seldom: jobs avoid such nodes all the same.

ROUND_SECONDS = 5.0
REJECTED_SECONDS = 600.0


class NodeReporter:
    """Keeps the conditions of nodes as jobs' statuses want them.

    Args:
        api: Refuses to write where this replica does not lead.
        cache: Jobs and nodes.
        taint_effect: Of the taint that goes with the condition; empty: none.
        clock: Unix seconds.
    """

    def __init__(
        self, api: Api, cache: ClusterCache, taint_effect: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._api, self._cache, self._taint_effect, self._clock = api, cache, taint_effect, clock
        self._logged: set[str] = set()

    async def run(self) -> None:
        await repeat(self._try_once)

    async def _try_once(self) -> float:
        try:
            await self.reconcile_once()
        except ApiError as error:
            self._log_once(f"nodes are not told of what agents found: {error}; jobs avoid them all the same")
            return REJECTED_SECONDS if error.code == 403 else ROUND_SECONDS
        except PlatformError as error:
            self._log_once(f"nodes are not told of what agents found: {error}")
        return ROUND_SECONDS

    async def reconcile_once(self) -> None:
        """Writes what differs. Raises FabricError."""
        now = self._clock()
        nodes = {one["metadata"]["name"]: one for one in self._cache.nodes.items.values()}
        reports, left_out = reports_by_node(self._cache.jobs.items.values(), nodes, now)
        process_metrics.node_unhealthy.clear()
        for name, report in reports.items():
            process_metrics.node_unhealthy.labels(name, report.reason).set(1)
        if left_out:
            self._log_once(
                f"more nodes are found sick than may be told of at once: {', '.join(left_out[:10])} are left out"
            )
        for name, node in nodes.items():
            await self._write(name, node_writes(node, reports.get(name), self._taint_effect, now))

    async def _write(self, name: str, writes: NodeWrites) -> None:
        try:
            if writes.taint is not None:  # first, as it names the version that the other write changes
                await self._api.merge(f"/api/v1/nodes/{name}", writes.taint)
            if writes.status is not None:
                log.info("node %s: %s", name, writes.status["status"]["conditions"][0])
                await self._api.merge(f"/api/v1/nodes/{name}/status", writes.status)
        except ApiError as error:
            if error.code not in (404, 409):  # gone meanwhile, or changed: the next round has its newer version
                raise

    def _log_once(self, text: str) -> None:
        if text not in self._logged and len(self._logged) < 32:
            self._logged.add(text)
            process_metrics.node_reports_failed.inc()
            log.warning("%s", text)


# ---- shard leadership ------------------------------------------------------------------------------------------------

LEAVE_SECONDS = 5.0
"""How long stopping the jobs of a shard may take."""


@dataclass(frozen=True, slots=True)
class _Term:
    runners: JobRunners
    tasks: TaskSet
    label: LeaderLabel
    assent: RolloutApproval


class ShardTerms:
    """The terms of one replica, one for each shard that it leads.

    Args:
        failed: Told of a task that ended by an error, which none may.
        veto: Says why holders may not be restarted by what leaders of other shards note.
        may_operate: Raises NotLeading while another installation may look after the same jobs.
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
        self._terms: dict[int, _Term] = {}
        self._once: list[Callable[[], Coroutine[Any, Any, None]]] = []

    @property
    def jobs(self) -> int:
        """How many jobs are looked after here."""
        return sum(len(term.runners.running) for term in self._terms.values())

    def round_seconds(self) -> dict[str, float]:
        """Age of each job's reconcile under way; 0 between two."""
        return {key: age for term in self._terms.values() for key, age in term.runners.round_seconds().items()}

    def data_lost_with_node(self, node: str) -> str:
        """Says what some job loses with a node; empty: nothing."""
        said = (term.runners.data_lost_with_node(node) for term in self._terms.values())
        return next((why for why in said if why), "")

    def run_once_in_a_cluster(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Has `work` run, until cancelled, in each later term of shard 0."""
        self._once.append(work)

    def started_leading(self, shard: int, shards: int, may_act: Callable[[], None]) -> None:
        """Leads a shard from now on, until `end`."""

        def may_write() -> None:
            may_act()
            self._may_operate()

        given, url = self._settings, self._settings.coordinator_url
        api = self._api.with_write_check(may_write)
        telling = replace(self._shared.telling, coordinator_url=shard_url(url, shard), fallback_url=url)
        # whatever a job's reconciler writes goes through this one, and stops with the lease
        cache = self._shared.cache.guarded(may_write)
        shared = replace(self._shared, cache=cache, telling=telling, clock=TermClock())
        runners = JobRunners(shared, given.watch_namespace, lambda uid: shard_of(uid, shards) == shard)
        label = LeaderLabel(api, given.namespace, given.pod_name, leader_label(shard))
        assent = RolloutApproval(shared, given.namespace, given.memory_daemonset, runners.rollout_safety)
        term = self._terms[shard] = _Term(runners, TaskSet(self._failed), label, assent)
        runners.start()
        shared.server.set_leading(True, shard)
        metrics.leader.labels(str(shard)).set(1)
        term.tasks.start(label.run())
        term.tasks.start(runners.resync())
        if shard != 0:
            term.tasks.start(assent.run())
        else:
            tier = MemoryMaintenance(
                shared, given.namespace, given.memory_daemonset, runners.rollout_safety, self._veto
            )
            term.tasks.start(tier.run())
            if given.node_reports:
                term.tasks.start(NodeReporter(api, cache, given.node_taint).run())
            for work in self._once:
                term.tasks.start(work())
        of = f" of shard {shard} (of {shards})" if shards > 1 else ""
        log.info("leading, with %d jobs%s; agents connect to %s", len(runners.running), of, telling.coordinator_url)

    async def stopped_leading(self, shard: int, in_peace: bool) -> None:
        """Ends a term, whose agents go first.

        Whoever leads next is elsewhere. The next term here begins with nothing of this one.
        """
        self._shared.server.set_leading(False, shard)
        metrics.leader.labels(str(shard)).set(0)
        term = self._terms.pop(shard, None)
        if term is None:
            return
        await stop_within("jobs", term.runners.close())
        if not self._terms:
            await stop_within("servers", self._shared.pool.close())
        await stop_within("the leader's tasks", term.tasks.close())
        if in_peace:
            try:
                await term.label.remove()
            except PlatformError as error:
                log.warning("could not remove the leader label: %s", error)

    def annotations(self, shard: int) -> Mapping[str, str]:
        """Annotations of the shard's lease: whether its jobs can spare a holder."""
        term = self._terms.get(shard)
        return term.assent.annotations() if term is not None else {}


async def stop_within(what: str, work: Coroutine[Any, Any, None]) -> None:
    """Waits for what stops, within a limit."""
    try:
        async with asyncio.timeout(LEAVE_SECONDS):
            await work
    except TimeoutError:
        log.warning("%s did not stop within %g s: going on anyway", what, LEAVE_SECONDS)
