"""Makes what a job's workers share: the Secret and the headless Service.

Behind a new leader nobody remembers that they are there, and no right to read Secrets is asked for. A quota that is used
up, or an admission webhook, refuses to make anew even what exists: a lost worker's replacement must not wait for them.
Owned by `kubernetes_fabric`; touches the network through `api_writes`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from surefoot_operator import metrics
from surefoot_operator.errors import FabricError
from surefoot_operator.fabric.kubernetes import api_writes, labels
from surefoot_operator.fabric.kubernetes.api import Api

log = logging.getLogger(__name__)

_PATHS = {"Secret": "secrets", "Service": "services"}


class SharedObjects:
    """Makes one job's shared objects once a term of the leader, each."""

    def __init__(self, api: Api, job: labels.JobIdentity) -> None:
        self._api, self._job = api, job
        self._there: set[tuple[str, str]] = set()
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

    async def repair(self, bodies: Collection[dict[str, Any]]) -> None:
        """Makes anew what somebody removed; a refusal is counted, and told once."""
        await api_writes.side_by_side(*map(self._repair, bodies))

    async def _repair(self, body: dict[str, Any]) -> None:
        try:
            await self._make(body)
        except FabricError as error:
            kind, name = key = _key(body)
            metrics.shared_objects_refused.labels(_PATHS[kind]).inc()
            if key not in self._refused:
                self._refused.add(key)
                log.warning(
                    "%s %s of job %s could not be made anew: %s; pods that refer to it wait if it is gone",
                    kind, name, self._job, error,
                )  # fmt: skip

    async def _make(self, body: dict[str, Any]) -> None:
        key = _key(body)
        if key not in self._there:
            await api_writes.create(self._api, _PATHS[body["kind"]], body, self._job)
            self._there.add(key)


def _key(body: dict[str, Any]) -> tuple[str, str]:
    return body["kind"], body["metadata"]["name"]
