"""Decides whether a worker's pod may be evicted now.

Asks the API server for the pod's node; called through `admission_webhooks` on the replica that leads. A node that is cordoned
is switched off once its pods are gone. Until what only its holder keeps is elsewhere an eviction is refused as by a
PodDisruptionBudget: `kubectl drain`, autoscalers and upgrades ask again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from surefoot_operator.controller import process_metrics
from surefoot_operator.controller.admission_review import ALLOWED, Review, Verdict, later
from surefoot_operator.errors import FabricError
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.views.nodes import is_left
from surefoot_operator.platforms.kubernetes.views.observations import node_of

log = logging.getLogger(__name__)

NODE_SECONDS = 1.0
"""How long the API server may take to tell a node: the eviction waits for it."""
Key = tuple[str, str]


class EvictionReviews:
    """Answers for the jobs that this replica leads.

    Of others it knows nothing, and lets them pass. `departure` says what is lost with a node; `pods` and `nodes` by namespace and name, as cached now.
    """

    def __init__(
        self, api: Api, pods: Mapping[Key, Any], nodes: Mapping[Key, Any], departure: Callable[[str], str]
    ) -> None:
        self._api, self._pods, self._nodes, self._departure = api, pods, nodes, departure

    async def verdict(self, review: Review) -> Verdict:
        """Decides on one eviction."""
        pod = self._pods.get((review.namespace, review.name))
        if pod is None or api_objects.controller_of(pod) is None or pod["metadata"].get("deletionTimestamp"):
            return ALLOWED
        node = node_of(pod)
        if node is None or not await self._is_left(node):
            return ALLOWED
        why = self._departure(node)
        if not why:
            return ALLOWED
        process_metrics.evictions_refused.inc()
        log.info("the eviction of %s/%s from node %s waits: %s", review.namespace, review.name, node, why)
        return later(
            f"node {node} may not be left yet: {why}; the eviction succeeds once that is over "
            f"(kubectl delete pod {review.name} does not wait, and may lose it)"
        )

    async def _is_left(self, node: str) -> bool:
        """Asks the server itself: a drain evicts in the moment in which it cordons, before any watch has told."""
        try:
            async with asyncio.timeout(NODE_SECONDS):
                found: dict[str, Any] = await self._api.get(f"/api/v1/nodes/{node}")
        except (FabricError, TimeoutError) as error:
            log.warning("cannot read node %s for an eviction, going by what is cached: %s", node, error or "time-out")
            found = self._nodes.get(("", node), {"metadata": {}, "spec": {}})
        return is_left(found)
