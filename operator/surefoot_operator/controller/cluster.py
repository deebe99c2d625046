"""The operator of a whole cluster: its parts, the order in which they begin, and the order in which they end.

Made and run by `__main__`. Everything it knows it can lose: status lies in the API server, the rest is heard again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets as random_secrets
import time

from surefoot_operator.controller.configuration import ClusterSettings
from surefoot_operator.controller.environment import WorkerTelling
from surefoot_operator.controller.kept import kept_secret
from surefoot_operator.controller.reviews import TokenReviews
from surefoot_operator.controller.runner import Shared
from surefoot_operator.controller.runners import JobRunners
from surefoot_operator.controller.secrets import Secrets
from surefoot_operator.coordinator.server import AgentServer
from surefoot_operator.errors import FabricError
from surefoot_operator.fabric.kubernetes.api import Api, connect
from surefoot_operator.fabric.kubernetes.cache import ClusterCache
from surefoot_operator.fabric.kubernetes.pods import PodSettings
from surefoot_operator.settings import CoordinatorSettings, OperatorSettings

log = logging.getLogger(__name__)

_ROOT_BYTES = 32


class ClusterOperator:
    """`run` until it is cancelled."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings

    async def run(self, ended: asyncio.Event) -> None:
        """Leads until `ended`. Raises FabricError if it cannot begin."""
        api = await connect(self._settings.kubeconfig)
        cache = ClusterCache(api)
        server: AgentServer | None = None
        runners: JobRunners | None = None
        try:
            secrets = Secrets(await self._root(api))
            admin = await self._admin(api)
            await cache.start()
            settings = OperatorSettings(coordinator=CoordinatorSettings(host="", port=self._settings.coordinator_port))
            reviews = TokenReviews(api, lambda namespace, name: cache.workers.items.get((namespace, name)), time.time)
            server = AgentServer(settings.coordinator, reviews.authenticate)
            await server.start()
            telling = WorkerTelling(
                self._settings.coordinator_url, settings.memory.call_seconds, secrets, own_token=False
            )
            pods = PodSettings(agent=self._settings.agent_command)
            runners = JobRunners(Shared(cache, server, telling, pods, admin, settings), self._settings.only_namespace)
            runners.start()
            server.lead(True)
            log.info("leading; agents are told %s", self._settings.coordinator_url)
            await ended.wait()
        finally:
            if runners is not None:
                await runners.close()
            if server is not None:
                await server.close()
            await cache.close()
            await api.close()

    async def _root(self, api: Api) -> bytes:
        name = self._settings.keys_secret
        found = await kept_secret(
            api, self._settings.namespace, name, lambda: {"root": random_secrets.token_bytes(_ROOT_BYTES)}
        )
        if len(found.get("root", b"")) < _ROOT_BYTES:
            raise FabricError(
                f"secret {self._settings.namespace}/{name} needs {_ROOT_BYTES} bytes or more under `root`"
            )
        return found["root"]

    async def _admin(self, api: Api) -> tuple[str, str]:
        name = self._settings.memory_admin_secret
        made = random_secrets.token_hex(_ROOT_BYTES).encode()
        found = await kept_secret(api, self._settings.namespace, name, lambda: {"password": made})
        if not found.get("password"):
            raise FabricError(f"secret {self._settings.namespace}/{name} has no `password`")
        return "default", found["password"].decode()
