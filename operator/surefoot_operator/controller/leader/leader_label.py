"""Moves a shard's leader label to this pod, for agents' Service.

Touches the API server; run by the composition root while it leads. Level-triggered: a label on another pod is removed
at the next round.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

from surefoot_operator.api.spec import GROUP
from surefoot_operator.controller.leader.shards import leader_label
from surefoot_operator.errors import FabricError
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.api_errors import ApiRefused
from surefoot_operator.platforms.kubernetes.api_objects import core_path

log = logging.getLogger(__name__)

LEADER = leader_label(0)
OPERATORS = f"{GROUP}/part=operator"
LOOK_SECONDS = 30.0
AGAIN_SECONDS = 1.0


class LeaderLabel:
    """Keeps the label on this pod; `drop` it when leadership ends."""

    def __init__(self, api: Api, namespace: str, pod_name: str, label: str = LEADER) -> None:
        self._api, self._namespace, self._pod_name, self._label = api, namespace, pod_name, label
        self._pointer = "/metadata/labels/" + label.replace("/", "~1")
        self._said = ""

    async def hold(self) -> None:
        """Keeps the label on this pod until cancelled."""
        while True:
            try:
                await self.once()
                pause = LOOK_SECONDS
            except FabricError as error:
                log.warning("cannot move the leader label: %s", error)
                pause = AGAIN_SECONDS
            await asyncio.sleep(pause * random.uniform(0.75, 1.0))

    async def once(self) -> None:
        """Labels this pod, then removes the label from others.

        For a moment two pods have it; the one that does not lead refers agents to the leader.
        """
        query: dict[str, str | int] = {"labelSelector": OPERATORS, "limit": 100}
        pods = (await self._api.get(core_path(self._namespace, "pods"), query))["items"]
        names = {pod["metadata"]["name"] for pod in pods}
        if self._pod_name not in names and not self._said:
            self._said = f"there is no pod {self._namespace}/{self._pod_name}: agents reach this operator only by its own address"
            log.warning("%s", self._said)
        for pod in sorted(pods, key=lambda found: found["metadata"]["name"] != self._pod_name):
            await self._settle(pod)

    async def drop(self) -> None:
        """Removes the label from this pod. Raises FabricError."""
        try:
            await self._patch(self._pod_name, [{"op": "remove", "path": self._pointer}])
        except ApiRefused as error:
            if error.code not in (404, 422):  # no such pod, no such label
                raise

    async def _settle(self, pod: dict[str, Any]) -> None:
        name, marked = pod["metadata"]["name"], pod["metadata"].get("labels", {}).get(self._label) == "true"
        if name == self._pod_name and not marked:
            await self._patch(name, [{"op": "add", "path": self._pointer, "value": "true"}])
        elif name != self._pod_name and marked:
            try:
                await self._patch(name, [{"op": "remove", "path": self._pointer}])
            except ApiRefused as error:
                if error.code not in (404, 422):
                    raise

    async def _patch(self, name: str, operations: list[dict[str, Any]]) -> None:
        await self._api.patch(core_path(self._namespace, "pods", name), operations)
