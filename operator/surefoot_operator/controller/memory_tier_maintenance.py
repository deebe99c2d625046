"""Rolls out revisions of the memory tier's pods and removes data of jobs that no longer exist.

Runs next to the jobs while this replica leads shard 0. An error is counted, logged once and retried; no job waits for
it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from surefoot_operator import metrics
from surefoot_operator.api.spec import GROUP
from surefoot_operator.controller.job_runner import SharedResources
from surefoot_operator.errors import PlatformError
from surefoot_operator.memory.orphaned_jobs import OrphanSweep
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.views import memory_tier_pods
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache
from surefoot_operator.policy.maintenance.memory_tier_rollout import (
    JobSafety,
    MemoryServerPod,
    Rollout,
    describe_unsafe_job,
    digest_ready_servers,
    plan_rollout,
)

log = logging.getLogger(__name__)


# ---- tier pods -------------------------------------------------------------------------------------------------------
# Reads the memory tier's pods and their newest revision.


@dataclass(frozen=True, slots=True)
class MemoryTierPods:
    """The memory tier's pods; `desired_count` of them should run `revision`."""

    pods: tuple[MemoryServerPod, ...]
    """The pods that exist now."""
    desired_count: int
    """Number of pods that the DaemonSet wants."""
    revision: str
    """Name of the DaemonSet's newest revision."""


async def observe_tier_pods(cache: ClusterCache, namespace: str, daemon_set: str) -> MemoryTierPods | None:
    """Returns the memory tier's pods; None: there is no such DaemonSet. Raises PlatformError."""
    cache.check_fresh()
    daemon_set_revision = await memory_tier_pods.read_newest_revision(cache.api, namespace, daemon_set)
    if daemon_set_revision is None:
        return None
    nodes = cache.nodes.items.values()
    pods = memory_tier_pods.observe_server_pods(
        cache.servers.items.values(), daemon_set_revision.uid, nodes, cache.kubelet_liveness()
    )
    return MemoryTierPods(pods, daemon_set_revision.desired_count, daemon_set_revision.revision)


# ---- memory tier maintenance -----------------------------------------------------------------------------------------

ROLLOUT_INTERVAL_SECONDS = 5.0
"""Interval between two steps of the rollout."""
ORPHAN_SWEEP_INTERVAL_SECONDS = 60.0
"""Interval between two sweeps for orphaned jobs."""
_PAGE = 500

RolloutVeto = Callable[[str], str]
"""Takes the digest of the ready servers; returns why none may be restarted, empty: one may be."""


class MemoryMaintenance:
    """Maintains the memory tier until cancelled.

    Args:
        shared: Resources of this replica.
        namespace: Namespace of the memory tier.
        daemon_set: Name of its DaemonSet.
        safeties: Returns whether each job of this shard can lose a memory server.
        veto: Returns why leaders of other shards let none be restarted.
    """

    def __init__(
        self,
        shared: SharedResources,
        namespace: str,
        daemon_set: str,
        safeties: Callable[[], tuple[JobSafety, ...]],
        veto: RolloutVeto = lambda ready: "",
    ) -> None:
        self._shared, self._cache = shared, shared.cache
        self._namespace, self._daemon_set = namespace, daemon_set
        self._safeties, self._veto = safeties, veto
        account = shared.environment_factory.secrets.memory_account
        self._orphans = OrphanSweep(lambda job: account(job).user, shared.settings.memory.call_timeout_seconds)
        self._sweep_seconds = float("-inf")
        self._logged = ""

    async def run(self) -> None:
        """Plans the rollout every 5 s and removes orphans every minute, until cancelled."""
        try:
            while True:
                await self._run_once("rollout", self._continue_rollout)
                if time.monotonic() - self._sweep_seconds >= ORPHAN_SWEEP_INTERVAL_SECONDS:
                    self._sweep_seconds = time.monotonic()
                    await self._run_once("orphans", self._remove_orphans)
                await asyncio.sleep(ROLLOUT_INTERVAL_SECONDS)
        finally:
            await self._orphans.close()

    async def _run_once(self, task_name: str, work: Callable[[], Any]) -> None:
        try:
            await work()
        except PlatformError as error:
            metrics.reconcile_failures.labels(task_name).inc()
            self._log_if_new(f"the memory tier's {task_name} failed and is retried: {error}")

    async def _continue_rollout(self) -> None:
        """Restarts the pods that may be restarted now."""
        tier = await observe_tier_pods(self._cache, self._namespace, self._daemon_set)
        if tier is None:
            metrics.outdated_servers.set(0)
            return
        rollout = plan_rollout(tier.pods, tier.desired_count, tier.revision, self._safeties(), self._shared.clock())
        veto_reason = self._veto(digest_ready_servers(tier.pods)) if rollout.to_delete else ""
        # Jobs of other shards may need a server that this shard's jobs can spare.
        if veto_reason:
            rollout = replace(rollout, to_delete=(), reason=veto_reason)
        metrics.outdated_servers.set(rollout.outdated_count)
        self._log_rollout(rollout)
        for pod in rollout.to_delete:
            await memory_tier_pods.restart_pod(self._cache.api, self._namespace, pod)
            log.info("restarting memory server pod %s on %s for revision %s", pod.name, pod.node, tier.revision)

    async def _remove_orphans(self) -> None:
        """Removes orphaned jobs from the servers, by a list of all jobs that etcd confirmed with a quorum."""
        job_uids = await self._list_job_uids()
        domains: dict[str, str] = {}
        addresses = memory_tier_pods.choose_server_addresses(
            self._cache.servers.items.values(),
            self._cache.deleted_server_pods.values(),
            domains,
            self._shared.memory_credentials,
        )
        await self._orphans.remove_orphans(job_uids, addresses, self._shared.clock())

    async def _list_job_uids(self) -> frozenset[str]:
        job_uids: set[str] = set()
        query: dict[str, str | int] = {"limit": _PAGE}
        while True:
            # Without a resourceVersion the list is read from etcd, and never from a stale cache of the API server.
            page = await self._cache.api.get(f"{api_objects.JOBS_API_PATH}/trainingjobs", query)
            job_uids |= {job["metadata"]["uid"] for job in page["items"]}
            continue_token = page["metadata"].get("continue")
            if not continue_token:
                return frozenset(job_uids)
            query = {"limit": _PAGE, "continue": continue_token}

    def _log_rollout(self, rollout: Rollout) -> None:
        if rollout.outdated_count:
            self._log_if_new(f"rollout of the memory tier: {rollout.reason}")
        elif self._logged:
            self._log_if_new("")
            log.info("the rollout of the memory tier is complete: %s", rollout.reason)

    def _log_if_new(self, text: str) -> None:
        if text and text != self._logged:
            log.info("%s", text)
        self._logged = text


# ---- approval of a restart by all jobs -------------------------------------------------------------------------------
# Notes on a shard's lease whether its jobs can lose a memory server. Runs while a replica leads a shard other than 0.
# The leader of shard 0 rolls out the memory tier and knows only its own jobs; without the notes it would restart the
# server that another shard's job cannot lose. A note names the pods it was made for, so that it does not outlive them.

ROLLOUT_APPROVED = f"{GROUP}/rollout-approved"
"""Annotation with the digest of the ready servers; the shard's jobs can lose any one of them."""
ROLLOUT_BLOCKED = f"{GROUP}/rollout-blocked"
"""Annotation with the reason why the shard's jobs cannot lose a server."""
APPROVAL_INTERVAL_SECONDS = 3.0
"""Interval between two judgements."""
APPROVAL_VALID_SECONDS = 10.0
"""Age at which a judgement expires and is no longer noted."""
_MAX_REASON_CHARACTERS = 200


class RolloutApproval:
    """Judges for the jobs of one shard whether a memory server may be restarted, until cancelled."""

    def __init__(
        self, shared: SharedResources, namespace: str, daemon_set: str, safeties: Callable[[], tuple[JobSafety, ...]]
    ) -> None:
        self._shared, self._namespace, self._daemon_set = shared, namespace, daemon_set
        self._safeties = safeties
        self._judgement: tuple[float, dict[str, str]] = (float("-inf"), {})

    def annotations(self) -> Mapping[str, str]:
        """Returns the lease's annotations with the last judgement; empty once it has expired."""
        noted_seconds, notes = self._judgement
        return notes if time.monotonic() - noted_seconds < APPROVAL_VALID_SECONDS else {}

    async def run(self) -> None:
        """Judges every 3 s until cancelled. A failure is logged and retried."""
        while True:
            try:
                await self.judge_once()
            except PlatformError as error:
                metrics.reconcile_failures.labels("rollout").inc()
                log.info("cannot judge whether jobs can lose a memory server, retrying: %s", error)
            await asyncio.sleep(APPROVAL_INTERVAL_SECONDS)

    async def judge_once(self) -> None:
        """Judges the servers that are ready now. Raises PlatformError."""
        jobs = self._safeties()
        tier = await observe_tier_pods(self._shared.cache, self._namespace, self._daemon_set)
        if tier is None:
            self._judgement = (time.monotonic(), {})
            return
        unsafe_reason = describe_unsafe_job(tier.pods, jobs, self._shared.clock())
        notes = (
            {ROLLOUT_BLOCKED: unsafe_reason[:_MAX_REASON_CHARACTERS]}
            if unsafe_reason
            else {ROLLOUT_APPROVED: digest_ready_servers(tier.pods)}
        )
        self._judgement = (time.monotonic(), notes)


def rollout_blocker(shard: int, leader: str, notes: Mapping[str, str], ready: str) -> str:
    """Returns why a shard's leader lets no memory server be restarted; empty: it approves.

    Args:
        shard: The shard.
        leader: Identity of its leader; empty: none.
        notes: Annotations of its lease.
        ready: Digest of the servers that are ready now.
    """
    if not leader:
        return f"shard {shard} has no leader, and its jobs may need every memory server"
    if ROLLOUT_BLOCKED in notes:
        return notes[ROLLOUT_BLOCKED]
    if notes.get(ROLLOUT_APPROVED) != ready:
        return f"{leader} has not reported yet whether the jobs of shard {shard} can lose a memory server"
    return ""
