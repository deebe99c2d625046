"""Makes what a job's workers share: the Secret and the headless Service.

Behind a new leader nobody remembers that they are there, and no right to read Secrets is asked for. A quota that is used
up, or an admission webhook, refuses to make anew even what exists: a lost worker's replacement must not wait for them.
Owned by `platform`; touches the network through `api_writes`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection
from typing import Any

from surefoot_operator import metrics
from surefoot_operator.errors import FabricError
from surefoot_operator.platforms.kubernetes import api_objects, api_writes
from surefoot_operator.platforms.kubernetes.api_client import Api

log = logging.getLogger(__name__)

_PATHS = {"Secret": "secrets", "Service": "services"}


class SharedObjects:
    """Makes one job's shared objects, and asks again for each later worker whether they are there."""

    def __init__(self, api: Api, job: api_objects.JobIdentity) -> None:
        self._api, self._job = api, job
        self._there: dict[tuple[str, str], float] = {}
        """When the last request began that made or found each of them."""
        self._refused: set[tuple[str, str]] = set()

    def knows(self, bodies: Collection[dict[str, Any]]) -> bool:
        """Whether this leader has made or found all of them."""
        return all(_key(body) in self._there for body in bodies)

    async def make(self, bodies: Collection[dict[str, Any]]) -> None:
        """Makes what is not there yet, side by side.

        Raises:
            FabricError: one could not be made, or its name is another's.
        """
        await api_writes.side_by_side(*map(self._make, bodies))

    async def repair(self, bodies: Collection[dict[str, Any]], asked_seconds: float) -> None:
        """Makes anew what somebody removed; a refusal is counted, and told once.

        The server is asked though this leader made them: others may delete them at any time. One request that began
        after `asked_seconds` (monotonic) answers for all workers that waited for it.
        """
        await api_writes.side_by_side(*(self._repair(body, asked_seconds) for body in bodies))

    async def _repair(self, body: dict[str, Any], asked_seconds: float) -> None:
        kind, name = key = _key(body)
        if self._there.get(key, -math.inf) >= asked_seconds:
            return
        try:
            await self._ask(body)
            self._refused.discard(key)
        except FabricError as error:
            metrics.shared_objects_refused.labels(_PATHS[kind]).inc()
            if key not in self._refused:
                self._refused.add(key)
                log.warning(
                    "%s %s of job %s could not be made anew: %s; pods that refer to it wait if it is gone",
                    kind, name, self._job, error,
                )  # fmt: skip

    async def _make(self, body: dict[str, Any]) -> None:
        if _key(body) not in self._there:
            await self._ask(body)

    async def _ask(self, body: dict[str, Any]) -> None:
        began = time.monotonic()
        await api_writes.create(self._api, _PATHS[body["kind"]], body, self._job)
        self._there[_key(body)] = began


def _key(body: dict[str, Any]) -> tuple[str, str]:
    return body["kind"], body["metadata"]["name"]
