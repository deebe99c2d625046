"""Rolls out holder revisions and removes data of jobs that are gone.

Runs beside the jobs while this replica leads shard 0. An error is counted, logged once and retried; nothing waits for it.
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
    plan_rollout,
    ready_servers,
    why_unsafe,
)

log = logging.getLogger(__name__)


# ---- tier pods -------------------------------------------------------------------------------------------------------
# Reads the memory tier's pods and their newest revision.


@dataclass(frozen=True, slots=True)
class MemoryTierPods:
    """The memory tier's pods; `wanted` of them should be of `revision`."""

    pods: tuple[MemoryServerPod, ...]
    desired_count: int
    revision: str


async def tier_pods(cache: ClusterCache, namespace: str, daemon_set: str) -> MemoryTierPods | None:
    """Returns the tier's pods; None: there is no such DaemonSet. Raises FabricError."""
    cache.check_fresh()
    newest = await memory_tier_pods.newest_revision(cache.api, namespace, daemon_set)
    if newest is None:
        return None
    around = cache.nodes.items.values()
    pods = memory_tier_pods.observe_server_pods(
        cache.servers.items.values(), newest.uid, around, cache.kubelet_liveness()
    )
    return MemoryTierPods(pods, newest.wanted, newest.revision)


# ---- memory tier maintenance -----------------------------------------------------------------------------------------

ROUND_SECONDS = 5.0
ORPHANS_SECONDS = 60.0
_PAGE = 500

RolloutVeto = Callable[[str], str]
"""Why no holder may be restarted, given the digest of those that are ready; empty: one may be."""


class MemoryMaintenance:
    """Maintains the memory tier until cancelled.

    `safeties`: what each job of this shard says about restarting a holder; `veto`: what the others' leaders say.
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
        account = shared.telling.secrets.memory_account
        self._orphans = OrphanSweep(lambda job: account(job).user, shared.settings.memory.call_seconds)
        self._swept = float("-inf")
        self._logged = ""

    async def run(self) -> None:
        try:
            while True:
                await self._once("rollout", self._roll_out)
                if time.monotonic() - self._swept >= ORPHANS_SECONDS:
                    self._swept = time.monotonic()
                    await self._once("orphans", self._sweep)
                await asyncio.sleep(ROUND_SECONDS)
        finally:
            await self._orphans.close()

    async def _once(self, what: str, work: Callable[[], Any]) -> None:
        try:
            await work()
        except PlatformError as error:
            metrics.reconcile_failures.labels(what).inc()
            self._log_if_new(f"the memory tier's {what} waits: {error}")

    async def _roll_out(self) -> None:
        """Restarts what may be restarted now."""
        tier = await tier_pods(self._cache, self._namespace, self._daemon_set)
        if tier is None:
            metrics.outdated_servers.set(0)
            return
        decided = plan_rollout(tier.pods, tier.desired_count, tier.revision, self._safeties(), self._shared.clock())
        why_not = self._veto(ready_servers(tier.pods)) if decided.delete else ""
        if why_not:
            decided = replace(decided, delete=(), reason=why_not)
        metrics.outdated_servers.set(decided.outdated)
        self._log_rollout(decided)
        for pod in decided.delete:
            await memory_tier_pods.restart_pod(self._cache.api, self._namespace, pod)
            log.info("restarting holder %s on %s for revision %s", pod.name, pod.node, tier.revision)

    async def _sweep(self) -> None:
        """Holders are held against a list of all jobs that a quorum of the API's store confirms."""
        live = await self._every_job()
        domains: dict[str, str] = {}
        places = memory_tier_pods.server_addresses(
            self._cache.servers.items.values(), self._cache.gone_servers.values(), domains, self._shared.access
        )
        await self._orphans.observe(live, places, self._shared.clock())

    async def _every_job(self) -> frozenset[str]:
        found: set[str] = set()
        query: dict[str, str | int] = {"limit": _PAGE}
        while True:
            # without a resourceVersion: never from a server's cache that is behind
            listed = await self._cache.api.get(f"{api_objects.JOBS}/trainingjobs", query)
            found |= {job["metadata"]["uid"] for job in listed["items"]}
            more = listed["metadata"].get("continue")
            if not more:
                return frozenset(found)
            query = {"limit": _PAGE, "continue": more}

    def _log_rollout(self, decided: Rollout) -> None:
        if decided.outdated:
            self._log_if_new(f"the memory tier's rollout: {decided.reason}")
        elif self._logged:
            self._log_if_new("")
            log.info("the memory tier's rollout is done: %s", decided.reason)

    def _log_if_new(self, text: str) -> None:
        if text and text != self._logged:
            log.info("%s", text)
        self._logged = text


# ---- consent of all jobs to a restart --------------------------------------------------------------------------------
# Notes on a shard's lease whether its jobs can spare a holder. Run while a replica leads a shard other than 0. Whoever
# rolls out the memory tier leads shard 0 and knows its own jobs alone; without this it would restart the holder that
# another shard's job cannot lose. Only names of the pods that were judged are noted, so that no assent outlives them.

ROLLOUT_APPROVED = f"{GROUP}/rollout-approved"
"""Digest of the holders of which the shard's jobs can spare any."""
ROLLOUT_BLOCKED = f"{GROUP}/rollout-blocked"
"""Why they cannot."""
ASSENT_ROUND_SECONDS = 3.0
APPROVAL_VALID_SECONDS = 10.0
"""What was noted so long ago is noted no more."""
_MAX_REASON_CHARACTERS = 200


class RolloutApproval:
    """Judges the memory tier for the jobs of one shard, until cancelled."""

    def __init__(
        self, shared: SharedResources, namespace: str, daemon_set: str, safeties: Callable[[], tuple[JobSafety, ...]]
    ) -> None:
        self._shared, self._namespace, self._daemon_set = shared, namespace, daemon_set
        self._safeties = safeties
        self._noted: tuple[float, dict[str, str]] = (float("-inf"), {})

    def annotations(self) -> Mapping[str, str]:
        """The last judgement, while it counts."""
        at, notes = self._noted
        return notes if time.monotonic() - at < APPROVAL_VALID_SECONDS else {}

    async def run(self) -> None:
        while True:
            try:
                await self.judge_once()
            except PlatformError as error:
                metrics.reconcile_failures.labels("rollout").inc()
                log.info("cannot judge whether jobs can spare a holder: %s", error)
            await asyncio.sleep(ASSENT_ROUND_SECONDS)

    async def judge_once(self) -> None:
        """Judges the holders that are there now. Raises FabricError."""
        jobs = self._safeties()
        tier = await tier_pods(self._shared.cache, self._namespace, self._daemon_set)
        if tier is None:
            self._noted = (time.monotonic(), {})
            return
        why = why_unsafe(tier.pods, jobs, self._shared.clock())
        notes = {ROLLOUT_BLOCKED: why[:_MAX_REASON_CHARACTERS]} if why else {ROLLOUT_APPROVED: ready_servers(tier.pods)}
        self._noted = (time.monotonic(), notes)


def rollout_blocker(shard: int, holder: str, notes: Mapping[str, str], ready: str) -> str:
    """Says why a shard's leader lets no holder be restarted.

    Empty: it lets one be. `ready`: digest of the holders that are there now.
    """
    if not holder:
        return f"nobody leads shard {shard}, whose jobs may need every holder"
    if ROLLOUT_BLOCKED in notes:
        return notes[ROLLOUT_BLOCKED]
    if notes.get(ROLLOUT_APPROVED) != ready:
        return f"{holder} has not said yet whether the jobs of shard {shard} can spare a holder"
    return ""
