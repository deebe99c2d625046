"""Keeps our authority in the webhooks' configuration.

Touches the API server; run by the composition root while it leads. The chart makes the configuration and cannot know the
authority, which the operator makes itself. Without it the API server trusts no answer, and lets everything in.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import random
from collections.abc import Callable, Mapping
from typing import Any

from surefoot_operator.errors import FabricError
from surefoot_operator.platforms.kubernetes.api_client import Api

log = logging.getLogger(__name__)

CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
LOOK_SECONDS = 60.0
"""A release that is upgraded may write the configuration anew, without the authority."""
AGAIN_SECONDS = 2.0


def trusting(configuration: Mapping[str, Any], authority: str) -> list[dict[str, Any]]:
    """Makes the JSON patch that has webhooks trust `authority`.

    Empty: they do. It tests the version: a release that is upgraded meanwhile may number its webhooks otherwise.
    """
    wanted = base64.b64encode(authority.encode()).decode()
    version = configuration.get("metadata", {}).get("resourceVersion")
    bundles = [
        {"op": "add", "path": f"/webhooks/{index}/clientConfig/caBundle", "value": wanted}
        for index, webhook in enumerate(configuration.get("webhooks") or ())
        if webhook["clientConfig"].get("caBundle") != wanted
    ]
    return [{"op": "test", "path": "/metadata/resourceVersion", "value": version}, *bundles] if bundles else []


class WebhookTrust:
    """Keeps one configuration trusting `authority`.

    It is PEM; an empty one is left to whoever brought the certificate.
    """

    def __init__(self, api: Api, name: str, authority: Callable[[], str]) -> None:
        self._api, self._path, self._authority = api, f"{CONFIGURATIONS}/{name}", authority

    async def keep(self) -> None:
        """Looks each minute, until cancelled. A failure is logged and retried."""
        while True:
            pause = LOOK_SECONDS
            try:
                await self.once()
            except FabricError as error:
                log.warning("the admission webhooks do not trust this operator yet: %s", error)
                pause = AGAIN_SECONDS
            await asyncio.sleep(pause * random.uniform(0.75, 1.0))

    async def once(self) -> None:
        """Patches the configuration where it needs that. Raises FabricError."""
        authority = self._authority()
        if not authority:
            return
        operations = trusting(await self._api.get(self._path), authority)
        if operations:
            await self._api.patch(self._path, operations)
            log.info("the admission webhooks %s trust this operator's authority", self._path.rsplit("/", 1)[1])
