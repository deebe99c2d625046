"""Reads, takes, renews and releases the leader's Lease.

Touches the API server. The composition root acts while `leading` is set, and exits when `run` raises LeaseLost.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from surefoot_operator.controller.leader import election
from surefoot_operator.controller.leader.election import Candidate, LeaseSeen, LeaseTimings, Step
from surefoot_operator.errors import FabricError, OperatorError
from surefoot_operator.fabric.kubernetes.api import Api, ApiRefused

log = logging.getLogger(__name__)

Body = dict[str, Any]


class LeaseLost(OperatorError):
    """Another replica may lead; nothing that was begun may be finished."""


class NotLeading(FabricError):
    """A write was attempted without the lease."""


def clock() -> float:
    """Seconds including suspend, where the system has such a clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@dataclass(frozen=True, slots=True)
class LeaseAt:
    namespace: str
    name: str

    @property
    def collection(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases"

    @property
    def path(self) -> str:
        return f"{self.collection}/{self.name}"


class Elector:
    """Competes for the lease as one candidate.

    `run` until cancelled or lost, then `release`; `may_act` may be called at any time.
    """

    def __init__(
        self,
        api: Api,
        where: LeaseAt,
        identity: str,
        timings: LeaseTimings | None = None,
        now: Callable[[], float] = clock,
    ) -> None:
        self._api, self._where, self._now = api, where, now
        self._timings = timings or LeaseTimings()
        self._candidate = Candidate(identity)
        self._body: Body | None = None
        self._waited_for = ""
        self.leading = asyncio.Event()
        self.heard_at = now()
        """When the API server last answered about the lease."""

    def may_act(self) -> None:
        """Raises NotLeading unless the lease is ours by our own clock."""
        if not election.leads(self._candidate, self._now()):
            raise NotLeading("this operator is not the leader: nothing was written")

    async def run(self) -> None:
        """Acquires and renews the lease. Raises LeaseLost once it is lost."""
        while True:
            step = election.decide(self._candidate, self._now(), self._timings)
            if step.verb == "lost":
                raise LeaseLost(f"{step.reason}: another replica may lead")
            if step.verb == "wait":
                self._say(step)
                await asyncio.sleep(max(0.01, step.after_seconds))
                if self.leading.is_set():
                    continue
            if not await self._tried(step):
                # jitter: two that wait for one lease must not come at one moment
                await asyncio.sleep(self._pause() * random.uniform(0.5, 1.0))

    async def release(self) -> None:
        """Releases the lease, so that no replica waits for its expiry.

        A failure costs that wait and nothing else.
        """
        if not election.leads(self._candidate, self._now()) or self._body is None:
            return
        given = {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _now_text()}
        body = {**self._body, "spec": {**self._body["spec"], **given}}
        self._candidate = replace(self._candidate, leads_until=None)
        self.leading.clear()
        try:
            async with asyncio.timeout(self._timings.retry_seconds):
                await self._api.put(self._where.path, body)
            log.info("released the lease")
        except (FabricError, TimeoutError) as error:
            log.warning("could not release the lease, other replicas wait until it expires: %s", error)

    async def _tried(self, step: Step) -> bool:
        """Does the step's call; whether it came out as hoped."""
        leading = self.leading.is_set()
        limit = self._timings.retry_seconds if leading else self._timings.renew_seconds / 2
        try:
            async with asyncio.timeout(limit):
                if step.verb in ("look", "wait"):
                    await self._look()
                else:
                    await self._write(step)
        except ApiRefused as error:
            self.heard_at = self._now()
            if error.code not in (404, 409):
                log.warning("the API server refused the lease: %s", error)
                return False
            return await self._looked_again()
        except (FabricError, TimeoutError) as error:
            log.warning("cannot reach the lease, retrying: %s", error or "the API server did not answer in time")
            return False
        return True

    async def _looked_again(self) -> bool:
        """Somebody else wrote, or deleted: what stands now decides."""
        try:
            async with asyncio.timeout(self._timings.retry_seconds):
                await self._look()
        except (FabricError, TimeoutError) as error:
            log.warning("cannot reach the lease, retrying: %s", error or "the API server did not answer in time")
            return False
        return self.leading.is_set()

    async def _look(self) -> None:
        try:
            self._body = await self._api.get(self._where.path)
        except ApiRefused as error:
            if error.code != 404:
                raise
            self._body = None
        self.heard_at = self._now()
        self._candidate = election.seen(self._candidate, _lease(self._body), self._now())

    async def _write(self, step: Step) -> None:
        """Takes or renews it; the server refuses if anybody wrote since we looked."""
        asked_at = self._now()
        body = self._wanted(step.verb == "acquire")
        if self._body is None:
            self._body = await self._api.post(self._where.collection, body)
        else:
            self._body = await self._api.put(self._where.path, body)
        self.heard_at = self._now()
        lease = _lease(self._body)
        assert lease is not None
        self._candidate = election.written(self._candidate, lease, asked_at, self._timings)
        if step.verb == "acquire":
            log.info("this operator (%s) leads: %s", self._candidate.identity, step.reason)
            self.leading.set()

    def _wanted(self, anew: bool) -> Body:
        old = self._body or {}
        spec = dict(old.get("spec") or {})
        spec["renewTime"] = at = _now_text()
        if anew:
            spec["acquireTime"] = at
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + (1 if old else 0)
        spec["holderIdentity"] = self._candidate.identity
        spec["leaseDurationSeconds"] = max(1, round(self._timings.lease_seconds))
        metadata = old.get("metadata") or {"name": self._where.name, "namespace": self._where.namespace}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}

    def _pause(self) -> float:
        return self._timings.retry_seconds / (4 if self.leading.is_set() else 1)

    def _say(self, step: Step) -> None:
        if not self.leading.is_set() and step.reason != self._waited_for:
            self._waited_for = step.reason
            log.info("standing by: %s", step.reason)


def _lease(body: Body | None) -> LeaseSeen | None:
    if body is None:
        return None
    spec = body.get("spec") or {}
    return LeaseSeen(
        holder=str(spec.get("holderIdentity") or ""),
        version=str(body["metadata"]["resourceVersion"]),
        lease_seconds=float(spec.get("leaseDurationSeconds") or 1),
    )


def _now_text() -> str:
    """For people: nobody decides by it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
