"""Reads, takes, renews and releases the leader's Lease.

Touches the API server. The composition root acts between `acquire` and the end of `hold`, and exits when that raises
LeaseLost.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from surefoot.task_set import repeat
from surefoot_operator.api.spec import GROUP
from surefoot_operator.controller.leader import election_rules
from surefoot_operator.controller.leader.election_rules import (
    Candidate,
    LeaseAction,
    LeaseTimings,
    ObservedLease,
    leader_label,
)
from surefoot_operator.errors import NotLeader, OperatorError, PlatformError
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.api_objects import ApiError, ApiUnreachable, core_path

log = logging.getLogger(__name__)


Body = dict[str, Any]
NOTE = f"{GROUP}/"
"""Begins the names of annotations that are the holder's: what others have noted there goes with its next renewal."""
_MAX_LOGGED_FAILURES = 3
"""Of calls in a row that fail, so many are logged: an outage may last for hours."""


class LeaseLost(OperatorError):
    """Another replica may lead; nothing that was begun may be finished."""


def boot_clock() -> float:
    """Seconds including suspend, where the system has such a clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@dataclass(frozen=True, slots=True)
class LeaseRef:
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

    `acquire`, then `hold` until it stands down, and so on until cancelled or lost; then `release`. `may_act` may be
    called at any time. `notes`: annotations that the lease has while this candidate holds it.
    """

    def __init__(
        self,
        api: Api,
        where: LeaseRef,
        identity: str,
        timings: LeaseTimings | None = None,
        now: Callable[[], float] = boot_clock,
        notes: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._api, self._where, self._now, self._notes = api, where, now, notes
        self._timings = timings or LeaseTimings()
        self._candidate = Candidate(identity)
        self._body: Body | None = None
        self._waited_for = ""
        self._failures = self._timeouts = 0
        """Calls in a row that failed, and those that were not answered in time."""
        self.leading = False
        self.last_answer_seconds = now()
        """When the API server last answered about the lease."""

    def require_leadership(self) -> None:
        """Raises NotLeading unless the lease is ours by our own clock."""
        if not election_rules.leads(self._candidate, self._now()):
            raise NotLeader("this operator does not hold the lease: nothing is decided or written")

    @property
    def leader_identity(self) -> str:
        """Who leads, as far as this candidate sees; empty: nobody."""
        return election_rules.holder(self._candidate, self._now())

    @property
    def annotations(self) -> Mapping[str, str] | None:
        """The lease's annotations, as last read; None: there is no lease."""
        return self._candidate.lease.notes if self._candidate.lease is not None else None

    async def read(self) -> None:
        """Reads the lease, however often it has to be tried."""
        read = False
        while not read:
            read = await self._tried(LeaseAction("look", "it is asked for"))
            await asyncio.sleep(0.0 if read else self._timings.retry_seconds * random.uniform(0.5, 1.0))

    async def acquire(self, patience_seconds: Callable[[], float] = float) -> None:
        """Waits until nobody else leads, and takes the lease.

        `patience_seconds`: how long it is left to others once it is free.
        """
        while not self.leading:
            step = election_rules.decide(self._candidate, self._now(), self._timings, patience_seconds())
            if step.verb == "wait":
                self._log_waiting(step)
                await asyncio.sleep(max(0.01, step.after_seconds))
            await self._try(step)

    async def renew_until_lost(self, gives_up: Callable[[], bool] = bool) -> None:
        """Renews the lease; returns once it stands down, or `gives_up` says so.

        Given up it is led still, until `release`. Raises LeaseLost if somebody else took it. Between its own deadline
        and that, it may not act, and goes on where it was if a renewal is accepted.
        """
        while True:
            step = election_rules.decide(self._candidate, self._now(), self._timings)
            if step.verb in ("wait", "renew") and gives_up():
                return
            if step.verb == "wait":
                await asyncio.sleep(max(0.01, step.after_seconds))
                continue
            if step.verb in ("lost", "stand-down"):
                self.leading = False
                self._candidate = election_rules.stood_down(self._candidate)
                if step.verb == "lost":
                    raise LeaseLost(f"{step.reason}: another replica may lead")
                log.warning("%s: standing by until the API server answers", step.reason)
                return
            await self._try(step)

    async def renew(self) -> None:
        """Writes the lease with its notes now. Raises FabricError, NotLeading, TimeoutError."""
        self.require_leadership()
        await self._answered(self._write(LeaseAction("renew", "the notes have changed")))

    async def annotate(self, notes: Mapping[str, str]) -> None:
        """Adds notes to another's lease, which counts as no renewal.

        They stand until its holder renews it. Raises FabricError if it was written meanwhile, or TimeoutError.
        """
        async with asyncio.timeout(self._timings.call_seconds):
            body = await self._api.get(self._where.path)
            metadata = body["metadata"]
            noted = {**(metadata.get("annotations") or {}), **notes}
            await self._api.put(self._where.path, {**body, "metadata": {**metadata, "annotations": noted}})

    async def release(self) -> None:
        """Releases the lease, so that no replica waits for its expiry.

        A failure costs that wait and nothing else.
        """
        if not election_rules.leads(self._candidate, self._now()) or self._body is None:
            return
        given = {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": now_text()}
        body = {**self._body, "spec": {**self._body["spec"], **given}}
        self._candidate, self.leading = election_rules.stood_down(self._candidate), False
        try:
            async with asyncio.timeout(self._timings.renew_seconds):
                await self._api.put(self._where.path, body)
            log.info("released the lease %s", self._where.name)
        except (PlatformError, TimeoutError) as error:
            log.warning("could not release lease %s, other replicas wait until it expires: %s", self._where.name, error)

    async def _try(self, step: LeaseAction) -> None:
        """Does the step's call; pauses if it did not come out as hoped."""
        if not await self._tried(step):
            # jitter: two that wait for one lease must not come at one moment
            await asyncio.sleep(self._timings.retry_seconds / (4 if self.leading else 1) * random.uniform(0.5, 1.0))

    async def _tried(self, step: LeaseAction) -> bool:
        try:
            await self._answered(self._read_lease() if step.verb in ("look", "wait") else self._write(step))
        except ApiError as error:
            self.last_answer_seconds = self._now()
            if error.code not in (404, 409):
                log.warning("the API server refused the lease: %s", error)
                return False
            return await self._reread_lease()
        except (PlatformError, TimeoutError) as error:
            self._log_unreachable(error)
            return False
        self._failures = 0
        return True

    async def _reread_lease(self) -> bool:
        """Somebody else wrote, or deleted: what stands now decides."""
        try:
            await self._answered(self._read_lease())
        except (PlatformError, TimeoutError) as error:
            self._log_unreachable(error)
            return False
        return self.leading

    async def _answered(self, call: Coroutine[Any, Any, None]) -> None:
        """Waits for a call within its limit. Raises FabricError, TimeoutError."""
        limit = election_rules.call_limit(self._candidate, self._timeouts, self._now(), self._timings)
        try:
            async with asyncio.timeout(limit):
                await call
        except TimeoutError:
            self._timeouts += 1
            raise
        except ApiUnreachable:
            self._timeouts = 0
            raise
        self._timeouts = 0

    def _log_unreachable(self, error: BaseException) -> None:
        self._failures += 1
        if self._failures <= _MAX_LOGGED_FAILURES:
            log.warning("cannot reach the lease, retrying: %s", error or "the API server did not answer in time")

    async def _read_lease(self) -> None:
        try:
            self._body = await self._api.get(self._where.path)
        except ApiError as error:
            if error.code != 404:
                raise
            self._body = None
        self.last_answer_seconds = self._now()
        self._candidate = election_rules.seen(self._candidate, _lease(self._body), self._now())

    async def _write(self, step: LeaseAction) -> None:
        """Takes or renews it; the server refuses if anybody wrote since we looked."""
        asked_at = self._now()
        body = self._lease_body(step.verb == "acquire")
        if self._body is None:
            self._body = await self._api.post(self._where.collection, body)
        else:
            self._body = await self._api.put(self._where.path, body)
        self.last_answer_seconds = self._now()
        lease = _lease(self._body)
        assert lease is not None
        self._candidate = election_rules.written(self._candidate, lease, asked_at, self._timings)
        if step.verb == "acquire":
            log.info("this operator (%s) leads: %s (lease %s)", self._candidate.identity, step.reason, self._where.name)
            self.leading = True

    def _lease_body(self, anew: bool) -> Body:
        old = self._body or {}
        spec = dict(old.get("spec") or {})
        spec["renewTime"] = at = now_text()
        if anew:
            spec["acquireTime"] = at
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + (1 if old else 0)
        spec["holderIdentity"] = self._candidate.identity
        spec["leaseDurationSeconds"] = max(1, round(self._timings.lease_seconds))
        metadata = dict(old.get("metadata") or {"name": self._where.name, "namespace": self._where.namespace})
        theirs = {name: text for name, text in (metadata.get("annotations") or {}).items() if not name.startswith(NOTE)}
        metadata["annotations"] = {**theirs, **self._notes()}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}

    def _log_waiting(self, step: LeaseAction) -> None:
        if step.reason != self._waited_for:
            self._waited_for = step.reason
            log.info("standing by: %s (lease %s)", step.reason, self._where.name)


def _lease(body: Body | None) -> ObservedLease | None:
    if body is None:
        return None
    spec = body.get("spec") or {}
    return ObservedLease(
        server=str(spec.get("holderIdentity") or ""),
        # not the resourceVersion: whoever asks for the lease would keep a dead leader's from expiring
        version=f"{spec.get('renewTime')} {spec.get('leaseTransitions')} {spec.get('holderIdentity')}",
        lease_seconds=float(spec.get("leaseDurationSeconds") or 1),
        notes=dict(body["metadata"].get("annotations") or {}),
    )


def now_text() -> str:
    """For people: nobody decides by it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# ---- leader label ----------------------------------------------------------------------------------------------------
# Moves a shard's leader label to this pod, for agents' Service. Touches the API server; run by the composition root
# while it leads. Level-triggered: a label on another pod is removed at the next round.

LEADER = leader_label(0)
OPERATORS = f"{GROUP}/part=operator"
POLL_SECONDS = 30.0
RETRY_SECONDS = 1.0


class LeaderLabel:
    """Keeps the label on this pod; `drop` it when leadership ends."""

    def __init__(self, api: Api, namespace: str, pod_name: str, label: str = LEADER) -> None:
        self._api, self._namespace, self._pod_name, self._label = api, namespace, pod_name, label
        self._pointer = "/metadata/labels/" + label.replace("/", "~1")
        self._logged = ""

    async def run(self) -> None:
        """Keeps the label on this pod until cancelled."""
        await repeat(self._try_once)

    async def _try_once(self) -> float:
        try:
            await self.once()
        except PlatformError as error:
            log.warning("cannot move the leader label: %s", error)
            return RETRY_SECONDS
        return POLL_SECONDS

    async def once(self) -> None:
        """Labels this pod, then removes the label from others.

        For a moment two pods have it; the one that does not lead refers agents to the leader.
        """
        query: dict[str, str | int] = {"labelSelector": OPERATORS, "limit": 100}
        pods = (await self._api.get(core_path(self._namespace, "pods"), query))["items"]
        names = {pod["metadata"]["name"] for pod in pods}
        if self._pod_name not in names and not self._logged:
            self._logged = f"there is no pod {self._namespace}/{self._pod_name}: agents reach this operator only by its own address"
            log.warning("%s", self._logged)
        for pod in sorted(pods, key=lambda found: found["metadata"]["name"] != self._pod_name):
            await self._settle(pod)

    async def remove(self) -> None:
        """Removes the label from this pod. Raises FabricError."""
        try:
            await self._patch(self._pod_name, [{"op": "remove", "path": self._pointer}])
        except ApiError as error:
            if error.code not in (404, 422):  # no such pod, no such label
                raise

    async def _settle(self, pod: dict[str, Any]) -> None:
        name, marked = pod["metadata"]["name"], pod["metadata"].get("labels", {}).get(self._label) == "true"
        if name == self._pod_name and not marked:
            await self._patch(name, [{"op": "add", "path": self._pointer, "value": "true"}])
        elif name != self._pod_name and marked:
            try:
                await self._patch(name, [{"op": "remove", "path": self._pointer}])
            except ApiError as error:
                if error.code not in (404, 422):
                    raise

    async def _patch(self, name: str, operations: list[dict[str, Any]]) -> None:
        await self._api.patch(core_path(self._namespace, "pods", name), operations)
