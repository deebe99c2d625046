"""Writes conditions on nodes that jobs found sick.

Run by the composition root while it leads. Level-triggered: what is to be written follows from the jobs' statuses and
the nodes. Where the API server refuses, that is logged once and tried again seldom: jobs avoid such nodes all the same.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

from surefoot_operator.controller import process_metrics
from surefoot_operator.errors import FabricError
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.api_errors import ApiRefused
from surefoot_operator.platforms.kubernetes.node_conditions import NodeWrites, node_writes, wanted_reports
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache

log = logging.getLogger(__name__)

ROUND_SECONDS = 5.0
REFUSED_SECONDS = 600.0


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
        self._said: set[str] = set()

    async def run(self) -> None:
        while True:
            try:
                await self.once()
                pause = ROUND_SECONDS
            except ApiRefused as error:
                pause = REFUSED_SECONDS if error.code == 403 else ROUND_SECONDS
                self._say(f"nodes are not told of what agents found: {error}; jobs avoid them all the same")
            except FabricError as error:
                pause = ROUND_SECONDS
                self._say(f"nodes are not told of what agents found: {error}")
            await asyncio.sleep(pause * random.uniform(0.75, 1.0))

    async def once(self) -> None:
        """Writes what differs. Raises FabricError."""
        now = self._clock()
        nodes = {one["metadata"]["name"]: one for one in self._cache.nodes.items.values()}
        reports, left_out = wanted_reports(self._cache.jobs.items.values(), nodes, now)
        process_metrics.node_unhealthy.clear()
        for name, report in reports.items():
            process_metrics.node_unhealthy.labels(name, report.reason).set(1)
        if left_out:
            self._say(f"more nodes are found sick than may be told of at once: {', '.join(left_out[:10])} are left out")
        for name, node in nodes.items():
            await self._write(name, node_writes(node, reports.get(name), self._taint_effect, now))

    async def _write(self, name: str, writes: NodeWrites) -> None:
        try:
            if writes.taint is not None:  # first, as it names the version that the other write changes
                await self._api.merge(f"/api/v1/nodes/{name}", writes.taint)
            if writes.status is not None:
                log.info("node %s: %s", name, writes.status["status"]["conditions"][0])
                await self._api.merge(f"/api/v1/nodes/{name}/status", writes.status)
        except ApiRefused as error:
            if error.code not in (404, 409):  # gone meanwhile, or changed: the next round has its newer version
                raise

    def _say(self, text: str) -> None:
        if text not in self._said and len(self._said) < 32:
            self._said.add(text)
            process_metrics.node_reports_failed.inc()
            log.warning("%s", text)
