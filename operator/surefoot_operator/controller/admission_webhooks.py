"""Assembles the admission side of one replica.

Made by the composition root where the chart enables it. Every replica answers for jobs; for evictions the one that leads
their shard, which the Service in front of it selects: the API server asks each shard's, and any of them may refuse.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from surefoot_operator.controller.admission_server import AdmissionServer
from surefoot_operator.controller.cluster_settings import ClusterSettings
from surefoot_operator.controller.credentials.coordinator_tls import CoordinatorTls
from surefoot_operator.controller.eviction_review import EvictionReviews
from surefoot_operator.controller.job_review import JobReviews
from surefoot_operator.controller.job_runner import Shared
from surefoot_operator.controller.webhook_trust import WebhookTrust
from surefoot_operator.platforms.kubernetes.api_client import Api

log = logging.getLogger(__name__)

JOBS_PATH, EVICTIONS_PATH = "/v1/admission/trainingjobs", "/v1/admission/evictions"


class Webhooks:
    """Serves both webhooks; `keep_trusted` runs while this replica leads shard 0."""

    def __init__(
        self,
        api: Api,
        shared: Shared,
        departure: Callable[[str], str],
        tls: CoordinatorTls | None,
        settings: ClusterSettings,
    ) -> None:
        jobs = JobReviews(api, shared.pods)
        evictions = EvictionReviews(api, shared.cache.workers.items, shared.cache.nodes.items, departure)
        paths = {JOBS_PATH: jobs.verdict, EVICTIONS_PATH: evictions.verdict}
        self._server = AdmissionServer(settings.admission_port, tls.context if tls is not None else None, paths)
        authority = (lambda: tls.authority) if tls is not None else (lambda: "")
        self._trust = WebhookTrust(api, settings.admission_webhooks, authority)

    @property
    def port(self) -> int:
        return self._server.port

    async def start(self) -> None:
        """Listens. Raises OSError if the port is taken."""
        await self._server.start()
        log.info("admission webhooks on port %d", self.port)

    async def keep_trusted(self) -> None:
        """Keeps our authority in the webhooks' configuration, until cancelled."""
        await self._trust.keep()

    async def close(self) -> None:
        await self._server.close()
