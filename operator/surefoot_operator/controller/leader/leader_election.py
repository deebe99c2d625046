"""Reads, acquires, renews and releases a Lease for the leader election.

Touches the API server. The composition root leads between `acquire` and the end of `renew_until_lost`, and exits if
that raises LeaseLost.
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

from surefoot.task_set import repeat_until_cancelled
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
ANNOTATION_PREFIX = f"{GROUP}/"
"""Prefix of the annotations that the leader owns: its next renewal removes those that other replicas added."""
_MAX_LOGGED_FAILURES = 3
"""Number of failed calls in a row that are logged, because an outage may last for hours."""


class LeaseLost(OperatorError):
    """Another replica may lead, so nothing that was started may be finished."""


def boot_clock() -> float:
    """Returns seconds of a clock that includes suspend, or of the monotonic clock if the system has no such clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@dataclass(frozen=True, slots=True)
class LeaseRef:
    """Namespace and name of a Lease."""

    namespace: str
    name: str

    @property
    def collection(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases"

    @property
    def path(self) -> str:
        return f"{self.collection}/{self.name}"


class Elector:
    """Competes for a lease as one candidate.

    Call `acquire`, then `renew_until_lost`, and so on until cancelled or lost; then `release`. `require_leadership` may
    be called at any time.

    Args:
        api: The API server.
        where: The Lease.
        identity: Identity of this replica.
        timings: Durations of the election; None: the defaults.
        now: The boot clock, in seconds.
        notes: Returns the annotations that the lease has while this candidate leads.
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
        self._api, self._where, self._now, self._annotations_to_write = api, where, now, notes
        self._timings = timings or LeaseTimings()
        self._candidate = Candidate(identity)
        self._body: Body | None = None
        self._logged_wait_reason = ""
        self._failures = self._timeouts = 0
        """Number of failed calls in a row, and of those that got no answer in time."""
        self.leading = False
        """Whether this candidate's term runs, even while it may not act."""
        self.last_answer_seconds = now()
        """When the API server last answered about the lease. Boot clock."""

    def require_leadership(self) -> None:
        """Raises NotLeader unless the lease is ours by our own clock."""
        if not election_rules.is_leader(self._candidate, self._now()):
            raise NotLeader("this operator has no valid lease, so it decides and writes nothing")

    @property
    def leader_identity(self) -> str:
        """Identity of the leader, as far as this candidate knows; empty: there is none."""
        return election_rules.leader_identity(self._candidate, self._now())

    @property
    def annotations(self) -> Mapping[str, str] | None:
        """The lease's annotations as last read; None: it does not exist."""
        return self._candidate.lease.annotations if self._candidate.lease is not None else None

    async def read(self) -> None:
        """Reads the lease, and repeats that until it succeeds."""
        is_read = False
        while not is_read:
            is_read = await self._make_call(LeaseAction("look", "it is asked for"))
            await asyncio.sleep(0.0 if is_read else self._timings.retry_seconds * random.uniform(0.5, 1.0))

    async def acquire(self, patience_seconds: Callable[[], float] = float) -> None:
        """Waits until no other replica leads, and acquires the lease.

        Args:
            patience_seconds: Returns how long a free lease is left to other replicas.
        """
        while not self.leading:
            step = election_rules.next_action(self._candidate, self._now(), self._timings, patience_seconds())
            if step.verb == "wait":
                self._log_waiting(step)
                await asyncio.sleep(max(0.01, step.after_seconds))
            await self._call_or_pause(step)

    async def renew_until_lost(self, gives_up: Callable[[], bool] = bool) -> None:
        """Renews the lease until the term ends, or until `gives_up` returns True.

        After `gives_up` this replica still leads, until `release`. After a missed renewal it may not act, but continues
        where it was if a later renewal is accepted.

        Raises:
            LeaseLost: Another replica has taken the lease.
        """
        while True:
            step = election_rules.next_action(self._candidate, self._now(), self._timings)
            if step.verb in ("wait", "renew") and gives_up():
                return
            if step.verb == "wait":
                await asyncio.sleep(max(0.01, step.after_seconds))
                continue
            if step.verb in ("lost", "stand-down"):
                self.leading = False
                self._candidate = election_rules.stand_down(self._candidate)
                if step.verb == "lost":
                    raise LeaseLost(f"{step.reason}: another replica may lead")
                log.warning("%s: this replica no longer leads, and waits until the API server answers", step.reason)
                return
            await self._call_or_pause(step)

    async def renew(self) -> None:
        """Writes the lease with its current annotations. Raises PlatformError, NotLeader, TimeoutError."""
        self.require_leadership()
        await self._call_within_timeout(self._write_lease(LeaseAction("renew", "its annotations have changed")))

    async def add_annotations(self, notes: Mapping[str, str]) -> None:
        """Adds annotations to another replica's lease, which does not renew it.

        They stay until its leader renews it.

        Raises:
            PlatformError: The lease was written in between, or the API server rejects the write.
            TimeoutError: The API server did not answer in time.
        """
        async with asyncio.timeout(self._timings.call_seconds):
            body = await self._api.get(self._where.path)
            metadata = body["metadata"]
            annotations = {**(metadata.get("annotations") or {}), **notes}
            await self._api.put(self._where.path, {**body, "metadata": {**metadata, "annotations": annotations}})

    async def release(self) -> None:
        """Releases the lease, so that other replicas need not wait until it expires.

        If that fails, they wait; nothing else is lost.
        """
        if not election_rules.is_leader(self._candidate, self._now()) or self._body is None:
            return
        released_fields = {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": now_text()}
        body = {**self._body, "spec": {**self._body["spec"], **released_fields}}
        self._candidate, self.leading = election_rules.stand_down(self._candidate), False
        try:
            async with asyncio.timeout(self._timings.renew_seconds):
                await self._api.put(self._where.path, body)
            log.info("released the lease %s", self._where.name)
        except (PlatformError, TimeoutError) as error:
            log.warning("could not release lease %s, other replicas wait until it expires: %s", self._where.name, error)

    async def _call_or_pause(self, step: LeaseAction) -> None:
        """Makes the step's call, and pauses if it did not succeed."""
        if not await self._make_call(step):
            # With jitter, so that two replicas that wait for one lease do not write at the same moment.
            await asyncio.sleep(self._timings.retry_seconds / (4 if self.leading else 1) * random.uniform(0.5, 1.0))

    async def _make_call(self, step: LeaseAction) -> bool:
        try:
            await self._call_within_timeout(
                self._read_lease() if step.verb in ("look", "wait") else self._write_lease(step)
            )
        except ApiError as error:
            self.last_answer_seconds = self._now()
            if error.code not in (404, 409):
                log.warning("the API server rejects the call for lease %s, retrying: %s", self._where.name, error)
                return False
            return await self._reread_lease()
        except (PlatformError, TimeoutError) as error:
            self._log_unreachable(error)
            return False
        self._failures = 0
        return True

    async def _reread_lease(self) -> bool:
        """Reads the lease after another replica wrote or deleted it, and decides from its new state."""
        try:
            await self._call_within_timeout(self._read_lease())
        except (PlatformError, TimeoutError) as error:
            self._log_unreachable(error)
            return False
        return self.leading

    async def _call_within_timeout(self, call: Coroutine[Any, Any, None]) -> None:
        """Awaits a call within its time limit. Raises PlatformError, TimeoutError."""
        limit = election_rules.call_timeout_seconds(self._candidate, self._timeouts, self._now(), self._timings)
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
            log.warning(
                "cannot reach lease %s, retrying: %s",
                self._where.name,
                error or "the API server did not answer in time",
            )

    async def _read_lease(self) -> None:
        try:
            self._body = await self._api.get(self._where.path)
        except ApiError as error:
            if error.code != 404:
                raise
            self._body = None
        self.last_answer_seconds = self._now()
        self._candidate = election_rules.record_read(self._candidate, _parse_lease(self._body), self._now())

    async def _write_lease(self, step: LeaseAction) -> None:
        """Acquires or renews the lease; the write is rejected if another replica wrote since the last read."""
        sent_seconds = self._now()
        body = self._lease_body(step.verb == "acquire")
        if self._body is None:
            self._body = await self._api.post(self._where.collection, body)
        else:
            self._body = await self._api.put(self._where.path, body)
        self.last_answer_seconds = self._now()
        lease = _parse_lease(self._body)
        assert lease is not None
        self._candidate = election_rules.record_write(self._candidate, lease, sent_seconds, self._timings)
        if step.verb == "acquire":
            log.info("this operator (%s) leads: %s (lease %s)", self._candidate.identity, step.reason, self._where.name)
            self.leading = True

    def _lease_body(self, is_acquisition: bool) -> Body:
        old_lease = self._body or {}
        spec = dict(old_lease.get("spec") or {})
        spec["renewTime"] = renew_time = now_text()
        if is_acquisition:
            spec["acquireTime"] = renew_time
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + (1 if old_lease else 0)
        spec["holderIdentity"] = self._candidate.identity
        spec["leaseDurationSeconds"] = max(1, round(self._timings.lease_seconds))
        metadata = dict(old_lease.get("metadata") or {"name": self._where.name, "namespace": self._where.namespace})
        others_annotations = {
            name: text
            for name, text in (metadata.get("annotations") or {}).items()
            if not name.startswith(ANNOTATION_PREFIX)
        }
        metadata["annotations"] = {**others_annotations, **self._annotations_to_write()}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}

    def _log_waiting(self, step: LeaseAction) -> None:
        if step.reason != self._logged_wait_reason:
            # Once for each reason, not at each read.
            self._logged_wait_reason = step.reason
            log.info("standing by: %s (lease %s)", step.reason, self._where.name)


def _parse_lease(body: Body | None) -> ObservedLease | None:
    if body is None:
        return None
    spec = body.get("spec") or {}
    return ObservedLease(
        leader=str(spec.get("holderIdentity") or ""),
        # Not the resourceVersion: replicas that request a shard by an annotation would keep a dead leader's lease
        # valid.
        version=f"{spec.get('renewTime')} {spec.get('leaseTransitions')} {spec.get('holderIdentity')}",
        lease_seconds=float(spec.get("leaseDurationSeconds") or 1),
        annotations=dict(body["metadata"].get("annotations") or {}),
    )


def now_text() -> str:
    """Returns the current time for a Lease; it is informative, and no replica decides by it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# ---- leader label ----------------------------------------------------------------------------------------------------
# Moves a shard's leader label to this pod, which the Service for agents selects. Touches the API server; run by the
# composition root while it leads. Level-triggered: a label on another pod is removed in the next round.

LEADER_LABEL = leader_label(0)
OPERATOR_SELECTOR = f"{GROUP}/part=operator"
LABEL_POLL_SECONDS = 30.0
"""Interval between two checks of the labels."""
LABEL_RETRY_SECONDS = 1.0
"""Wait after a failed check."""


class LeaderLabel:
    """Keeps the leader label on this pod; call `remove` when leadership ends."""

    def __init__(self, api: Api, namespace: str, pod_name: str, label: str = LEADER_LABEL) -> None:
        self._api, self._namespace, self._pod_name, self._label = api, namespace, pod_name, label
        self._pointer = "/metadata/labels/" + label.replace("/", "~1")
        self._logged = ""

    async def run(self) -> None:
        """Keeps the label on this pod until cancelled. A failure is logged and retried."""
        await repeat_until_cancelled(self._try_once)

    async def _try_once(self) -> float:
        try:
            await self.update_labels()
        except PlatformError as error:
            log.warning(
                "cannot move the leader label to pod %s, agents may not find it; retrying: %s", self._pod_name, error
            )
            return LABEL_RETRY_SECONDS
        return LABEL_POLL_SECONDS

    async def update_labels(self) -> None:
        """Labels this pod, then removes the label from others. Raises PlatformError.

        For a moment two pods have the label. The one that does not lead refers agents to the leader.
        """
        query: dict[str, str | int] = {"labelSelector": OPERATOR_SELECTOR, "limit": 100}
        pods = (await self._api.get(core_path(self._namespace, "pods"), query))["items"]
        names = {pod["metadata"]["name"] for pod in pods}
        if self._pod_name not in names and not self._logged:
            self._logged = (
                f"there is no pod {self._namespace}/{self._pod_name} to label: agents reach this operator only by its"
                " own address"
            )
            log.warning("%s", self._logged)
        for pod in sorted(pods, key=lambda pod_object: pod_object["metadata"]["name"] != self._pod_name):
            await self._update_pod(pod)

    async def remove(self) -> None:
        """Removes the label from this pod. Raises PlatformError."""
        try:
            await self._patch_pod(self._pod_name, [{"op": "remove", "path": self._pointer}])
        except ApiError as error:
            # 404: the pod does not exist; 422: it has no such label.
            if error.code not in (404, 422):
                raise

    async def _update_pod(self, pod: dict[str, Any]) -> None:
        name, is_labelled = pod["metadata"]["name"], pod["metadata"].get("labels", {}).get(self._label) == "true"
        if name == self._pod_name and not is_labelled:
            await self._patch_pod(name, [{"op": "add", "path": self._pointer, "value": "true"}])
        elif name != self._pod_name and is_labelled:
            try:
                await self._patch_pod(name, [{"op": "remove", "path": self._pointer}])
            except ApiError as error:
                if error.code not in (404, 422):
                    raise

    async def _patch_pod(self, name: str, operations: list[dict[str, Any]]) -> None:
        await self._api.patch(core_path(self._namespace, "pods", name), operations)
