"""Keeps a second installation of the operator from the jobs that another one looks after.

Touches the API server; run by the composition root. Replicas of one installation share a claim, above the leases by which
they choose who leads. It stands in a namespace that every cluster has and that the operator reads anyway: the operator's own
are different ones. What cannot be read changes nothing: who looks after jobs goes on, and who does not does not begin.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from surefoot_operator.api.spec import GROUP
from surefoot_operator.controller.leader import claims
from surefoot_operator.controller.leader.claims import BadClaims, Claim, ClaimsSeen
from surefoot_operator.controller.leader.leader_election import Body, LeaseAt, LeaseLost, clock, now_text
from surefoot_operator.errors import FabricError, NotLeading
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.api_errors import ApiRefused

log = logging.getLogger(__name__)

CLAIMS = LeaseAt("kube-node-lease", "surefoot-operators")
"""The one object of a cluster; no node has this name, as kubelets' leases have owners and are read by node."""
NOTE = f"{GROUP}/installations"
CALL_SECONDS = 4.0
_MAX_LOGGED_FAILURES = 3


class ClusterClaim:
    """The claim of one installation, as one of its replicas keeps it: `acquire`, then `hold`.

    Args:
        installation: The namespace and the lease of the operator: `surefoot-system/surefoot-operator`.
        namespace: Whose jobs it looks after; empty: those of all.
        identity: Of this replica.
        changed: Called with the sentence that says why this replica stands by, whenever it is another; empty: it does not.
        interval_seconds: Between two reads.
    """

    def __init__(
        self,
        api: Api,
        installation: str,
        namespace: str,
        identity: str,
        changed: Callable[[str], None],
        interval_seconds: float = claims.RENEW_SECONDS / 2,
        now: Callable[[], float] = clock,
    ) -> None:
        self._api, self._installation, self._namespace, self._identity = api, installation, namespace, identity
        self._changed, self._interval_seconds, self._now = changed, interval_seconds, now
        self._seen = ClaimsSeen()
        self._body: Body | None = None
        self._sentence = ""
        self._renewals = self._failures = 0
        self._owned_at: float | None = None
        """When it was last known, or could not be denied, that the claim is ours; None: it is not."""
        self.heard_at = now()
        """When the API server last answered about the claim."""

    def may_operate(self) -> None:
        """Raises NotLeading unless the claim is ours by our own clock."""
        if self._owned_at is None or self._now() - self._owned_at >= claims.MAY_ACT_SECONDS:
            raise NotLeading(
                "this operator does not have the claim on the cluster's jobs: it decides and writes nothing"
            )

    async def acquire(self) -> None:
        """Waits until no other installation looks after the same jobs, and claims them."""
        while True:
            try:
                rival = await self._round()
            except (FabricError, BadClaims, TimeoutError) as error:
                self._say(
                    f"standing by: the claim on the cluster's jobs (lease {CLAIMS.namespace}/{CLAIMS.name}) cannot be read or"
                    f" written: {_words(error)}"
                )
            else:
                if self._owned_at is not None:
                    self._say("")
                    return
                if rival:
                    self._say(f"standing by: {rival} operates {_scope(self._seen.claims[rival].namespace)}")
            await self._pause()

    async def hold(self) -> None:
        """Renews the claim until cancelled. Raises LeaseLost if another installation has it."""
        while True:
            await self._pause()
            began = self._now()
            try:
                rival = await self._round()
            except (FabricError, BadClaims, TimeoutError) as error:
                self._failures += 1
                if self._failures <= _MAX_LOGGED_FAILURES:
                    log.warning(
                        "cannot renew the claim on the cluster's jobs; the operator continues: %s", _words(error)
                    )
                # of a process that was frozen meanwhile nobody knows: its next round tells
                if self._now() - began < claims.MAY_ACT_SECONDS:
                    self._owned_at = self._now()
                continue
            self._failures = 0
            if rival:
                self._owned_at = None
                raise LeaseLost(f"{rival} operates {_scope(self._seen.claims[rival].namespace)} now")

    async def _round(self) -> str:
        """Reads the claims, and renews or adds ours; returns the installation that keeps us from it."""
        async with asyncio.timeout(CALL_SECONDS):
            await self._read()
            rival = claims.find_rival(self._seen, self._installation, self._namespace, self._now())
            if not rival:
                if claims.needs_renewal(self._seen, self._installation, self._namespace, self._now()):
                    await self._write()
                else:
                    self._owned_at = self._now()
            return rival

    async def _read(self) -> None:
        try:
            self._body = await self._api.get(CLAIMS.path)
        except ApiRefused as error:
            if error.code != 404:
                raise
            self._body = None
        self.heard_at = self._now()
        notes = ((self._body or {}).get("metadata") or {}).get("annotations") or {}
        self._seen = claims.add_reading(self._seen, claims.parse_claims(str(notes.get(NOTE, ""))), self._now())

    async def _write(self) -> None:
        """Writes what was read with ours renewed; the server refuses if anybody wrote since, and the next round tells."""
        asked_at, self._renewals = self._now(), self._renewals + 1
        ours = Claim(self._namespace, f"{self._identity} {now_text()} {self._renewals}")
        wanted = claims.renew(self._seen, self._installation, ours, asked_at)
        metadata = dict((self._body or {}).get("metadata") or {"name": CLAIMS.name, "namespace": CLAIMS.namespace})
        metadata["annotations"] = {**(metadata.get("annotations") or {}), NOTE: claims.claims_text(wanted)}
        spec = {
            "holderIdentity": self._installation,
            "renewTime": now_text(),
            "leaseDurationSeconds": round(claims.EXPIRY_SECONDS),
        }
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        try:
            if self._body is None:
                await self._api.post(CLAIMS.collection, body)
            else:
                await self._api.put(CLAIMS.path, body)
        except ApiRefused as error:
            if error.code != 409 and not (error.code == 404 and self._body is not None):
                raise
            return
        self._owned_at = asked_at

    async def _pause(self) -> None:
        await asyncio.sleep(self._interval_seconds * random.uniform(0.75, 1.25))

    def _say(self, sentence: str) -> None:
        if sentence == self._sentence:
            return
        self._sentence = sentence
        log.log(
            logging.WARNING if sentence else logging.INFO,
            sentence or "this installation has the claim on the cluster's jobs",
        )
        self._changed(sentence)


def _scope(namespace: str) -> str:
    return f"the jobs of the namespace {namespace}" if namespace else "this cluster"


def _words(error: BaseException) -> str:
    return str(error) or "the API server did not answer in time"
