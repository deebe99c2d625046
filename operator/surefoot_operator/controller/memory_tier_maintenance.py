"""Rolls out holder revisions and removes data of jobs that are gone.

Runs beside the jobs while this replica leads shard 0. An error is counted, logged once and retried; nothing waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from surefoot_operator import metrics
from surefoot_operator.controller.job_runner import Shared
from surefoot_operator.controller.tier_pods import tier_pods
from surefoot_operator.errors import FabricError
from surefoot_operator.memory.orphaned_jobs import OrphanSweep
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.views import memory_tier_pods
from surefoot_operator.policy.maintenance.memory_tier_rollout import JobSafety, Rollout, ready_holders, rollout

log = logging.getLogger(__name__)

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
        shared: Shared,
        namespace: str,
        daemon_set: str,
        safeties: Callable[[], tuple[JobSafety, ...]],
        veto: RolloutVeto = lambda ready: "",
    ) -> None:
        self._shared, self._cache = shared, shared.cache
        self._namespace, self._daemon_set = namespace, daemon_set
        self._safeties, self._veto = safeties, veto
        account = shared.telling.secrets.holder_account
        self._orphans = OrphanSweep(lambda job: account(job).user, shared.settings.memory.call_seconds)
        self._swept = float("-inf")
        self._said = ""

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
        except FabricError as error:
            metrics.reconcile_failures.labels(what).inc()
            self._say(f"the memory tier's {what} waits: {error}")

    async def _roll_out(self) -> None:
        """Restarts what may be restarted now."""
        tier = await tier_pods(self._cache, self._namespace, self._daemon_set)
        if tier is None:
            metrics.outdated_holders.set(0)
            return
        decided = rollout(tier.pods, tier.wanted, tier.revision, self._safeties(), self._shared.clock())
        why_not = self._veto(ready_holders(tier.pods)) if decided.delete else ""
        if why_not:
            decided = replace(decided, delete=(), reason=why_not)
        metrics.outdated_holders.set(decided.outdated)
        self._tell(decided)
        for pod in decided.delete:
            await memory_tier_pods.restart(self._cache.api, self._namespace, pod)
            log.info("restarting holder %s on %s for revision %s", pod.name, pod.node, tier.revision)

    async def _sweep(self) -> None:
        """Holders are held against a list of all jobs that a quorum of the API's store confirms."""
        live = await self._every_job()
        domains: dict[str, str] = {}
        places = memory_tier_pods.places(
            self._cache.holders.items.values(), self._cache.gone_holders.values(), domains, self._shared.access
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

    def _tell(self, decided: Rollout) -> None:
        if decided.outdated:
            self._say(f"the memory tier's rollout: {decided.reason}")
        elif self._said:
            self._say("")
            log.info("the memory tier's rollout is done: %s", decided.reason)

    def _say(self, text: str) -> None:
        if text and text != self._said:
            log.info("%s", text)
        self._said = text
