"""Keeps a second installation of the operator from the jobs that another one looks after.

Touches the API server; run by the composition root. Replicas of one installation share a claim, above the leases by which
they choose who leads. It stands in a namespace that every cluster has and that the operator reads anyway: the operator's own
are different ones. What cannot be read changes nothing: who looks after jobs goes on, and who does not does not begin.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from surefoot_operator.api.spec import GROUP
from surefoot_operator.controller.leader.leader_election import Body, LeaseLost, LeaseRef, boot_clock, now_text
from surefoot_operator.errors import NotLeader, PlatformError
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.api_objects import ApiError

log = logging.getLogger(__name__)


# ---- claims ----------------------------------------------------------------------------------------------------------
# Decides which installation of the operator looks after which jobs of a cluster. Pure. Every installation has an entry
# in one object, with the namespace whose jobs it looks after (empty: every one). Two whose jobs may be the same never
# stand there together. An entry counts until it was seen unchanged for `EXPIRY_SECONDS` by somebody who looked all the
# while: clocks of others are never compared with ours, and whoever could not look (an API server that was away) cannot
# say that others did not renew.

EXPIRY_SECONDS = 20.0
"""An installation that was removed holds up its successor for so long."""
RENEW_SECONDS = 4.0
MAY_ACT_SECONDS = 12.0
"""A process that has not looked for so long was frozen, and another installation may look after its jobs."""
MAX_INSTALLATIONS = 64
_MAX_CHARACTERS = 64 * 1024


class BadClaims(ValueError):
    """What stands in the object was written by something else."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One installation's entry."""

    namespace: str
    """Whose jobs it looks after; empty: those of all."""
    beat: str
    """Another text after each renewal."""

    def overlaps(self, namespace: str) -> bool:
        """Whether a job may be both its own and of an operator of this namespace."""
        return not self.namespace or not namespace or self.namespace == namespace


@dataclass(frozen=True, slots=True)
class ClaimsSeen:
    """The entries as last read, and since when each has been as it is, by our clock."""

    claims: Mapping[str, Claim] = field(default_factory=dict)
    unchanged_since: Mapping[str, float] = field(default_factory=dict)
    read_at: float | None = None


def parse_claims(text: str) -> dict[str, Claim]:
    """Reads the entries by installation. Raises BadClaims."""
    if len(text) > _MAX_CHARACTERS:
        raise BadClaims(f"the claims have {len(text)} characters; {_MAX_CHARACTERS} are allowed")
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise BadClaims(f"the claims are not JSON: {error}") from None
    entries = found.items() if isinstance(found, dict) else None
    if entries is None or len(entries) > MAX_INSTALLATIONS:
        raise BadClaims(f"the claims are not a mapping of at most {MAX_INSTALLATIONS} installations")
    claims = {}
    for installation, entry in entries:
        values = [entry.get("namespace"), entry.get("beat")] if isinstance(entry, dict) else [None]
        if not all(isinstance(value, str) for value in values):
            raise BadClaims(f"the claim of {installation[:200]} lacks its namespace or beat")
        claims[installation] = Claim(*values)
    return claims


def claims_text(claims: Mapping[str, Claim]) -> str:
    """The reverse of `parse_claims`.

    Raises BadClaims for more than that takes: once written, they would keep everybody out.
    """
    text = json.dumps({name: {"namespace": one.namespace, "beat": one.beat} for name, one in sorted(claims.items())})
    parse_claims(text)
    return text


def add_reading(before: ClaimsSeen, claims: Mapping[str, Claim], now: float) -> ClaimsSeen:
    """Records a read. After a time without one, every entry counts as changed now."""
    watched = before.read_at is not None and now - before.read_at <= MAY_ACT_SECONDS
    since = {
        name: before.unchanged_since[name] if watched and before.claims.get(name) == claim else now
        for name, claim in claims.items()
    }
    return ClaimsSeen(claims, since, now)


def find_rival(seen: ClaimsSeen, installation: str, namespace: str, now: float) -> str:
    """Names the installation that looks after some of the same jobs; empty: none does, or it is this one."""
    if installation in seen.claims and seen.claims[installation].namespace == namespace:
        return ""
    return next((name for name in sorted(seen.claims) if _counts(seen, name, installation, namespace, now)), "")


def needs_renewal(seen: ClaimsSeen, installation: str, namespace: str, now: float) -> bool:
    """Whether the entry is missing or as old as to be written again, by whichever replica comes first."""
    claim = seen.claims.get(installation)
    return claim is None or claim.namespace != namespace or now - seen.unchanged_since[installation] >= RENEW_SECONDS


def renew_claim(seen: ClaimsSeen, installation: str, claim: Claim, now: float) -> dict[str, Claim]:
    """The entries to write: ours, and those of others that have not expired."""
    others = {
        n: c for n, c in seen.claims.items() if n != installation and now - seen.unchanged_since[n] < EXPIRY_SECONDS
    }
    return {**others, installation: claim}


def _counts(seen: ClaimsSeen, name: str, installation: str, namespace: str, now: float) -> bool:
    alive = now - seen.unchanged_since[name] < EXPIRY_SECONDS
    return name != installation and alive and seen.claims[name].overlaps(namespace)


# ---- cluster claim ---------------------------------------------------------------------------------------------------

CLAIMS = LeaseRef("kube-node-lease", "surefoot-operators")
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
        interval_seconds: float = RENEW_SECONDS / 2,
        now: Callable[[], float] = boot_clock,
    ) -> None:
        self._api, self._installation, self._namespace, self._identity = api, installation, namespace, identity
        self._changed, self._interval_seconds, self._now = changed, interval_seconds, now
        self._seen = ClaimsSeen()
        self._body: Body | None = None
        self._sentence = ""
        self._renewals = self._failures = 0
        self._owned_at: float | None = None
        """When it was last known, or could not be denied, that the claim is ours; None: it is not."""
        self.last_answer_seconds = now()
        """When the API server last answered about the claim."""

    def may_operate(self) -> None:
        """Raises NotLeading unless the claim is ours by our own clock."""
        if self._owned_at is None or self._now() - self._owned_at >= MAY_ACT_SECONDS:
            raise NotLeader(
                "this operator does not have the claim on the cluster's jobs: it decides and writes nothing"
            )

    async def acquire(self) -> None:
        """Waits until no other installation looks after the same jobs, and claims them."""
        while True:
            try:
                rival = await self._round()
            except (PlatformError, BadClaims, TimeoutError) as error:
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
            except (PlatformError, BadClaims, TimeoutError) as error:
                self._failures += 1
                if self._failures <= _MAX_LOGGED_FAILURES:
                    log.warning(
                        "cannot renew the claim on the cluster's jobs; the operator continues: %s", _words(error)
                    )
                # of a process that was frozen meanwhile nobody knows: its next round tells
                if self._now() - began < MAY_ACT_SECONDS:
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
            rival = find_rival(self._seen, self._installation, self._namespace, self._now())
            if not rival:
                if needs_renewal(self._seen, self._installation, self._namespace, self._now()):
                    await self._write()
                else:
                    self._owned_at = self._now()
            return rival

    async def _read(self) -> None:
        try:
            self._body = await self._api.get(CLAIMS.path)
        except ApiError as error:
            if error.code != 404:
                raise
            self._body = None
        self.last_answer_seconds = self._now()
        notes = ((self._body or {}).get("metadata") or {}).get("annotations") or {}
        self._seen = add_reading(self._seen, parse_claims(str(notes.get(NOTE, ""))), self._now())

    async def _write(self) -> None:
        """Writes what was read with ours renewed; the server refuses if anybody wrote since, and the next round tells."""
        asked_at, self._renewals = self._now(), self._renewals + 1
        ours = Claim(self._namespace, f"{self._identity} {now_text()} {self._renewals}")
        wanted = renew_claim(self._seen, self._installation, ours, asked_at)
        metadata = dict((self._body or {}).get("metadata") or {"name": CLAIMS.name, "namespace": CLAIMS.namespace})
        metadata["annotations"] = {**(metadata.get("annotations") or {}), NOTE: claims_text(wanted)}
        spec = {
            "holderIdentity": self._installation,
            "renewTime": now_text(),
            "leaseDurationSeconds": round(EXPIRY_SECONDS),
        }
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        try:
            if self._body is None:
                await self._api.post(CLAIMS.collection, body)
            else:
                await self._api.put(CLAIMS.path, body)
        except ApiError as error:
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
