"""Prevents two installations of the operator from managing the same jobs.

Touches the API server; run by the composition root. The replicas of one installation share a claim, which comes before
the leases by which they elect leaders. The claim is in a namespace that every cluster has and that the operator reads
anyway, because the installations' own namespaces differ. A failed read changes nothing: an installation that manages
jobs continues, and one on standby does not start.
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
# Decides which installation of the operator manages which jobs of a cluster. Pure. Every installation has an entry in
# one object, with the namespace whose jobs it manages (empty: all). Two entries that may cover the same job never exist
# together. An entry expires once a replica that read it regularly has found it unchanged for `EXPIRY_SECONDS`. Clocks
# of others are never compared with ours, and a replica that could not read (because the API server was away) must not
# conclude that others did not renew.

EXPIRY_SECONDS = 20.0
"""How long the entry of a removed installation blocks its successor."""
RENEW_SECONDS = 4.0
"""Age at which an entry is renewed."""
MAX_READ_GAP_SECONDS = 12.0
"""A process without a read for this long was frozen, and another installation may manage its jobs by now."""
MAX_INSTALLATIONS = 64
"""Maximum number of entries in a cluster."""
_MAX_CHARACTERS = 64 * 1024


class InvalidClaims(ValueError):
    """The object's content is not a valid set of claims, so another program wrote it."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The entry of one installation."""

    namespace: str
    """Namespace whose jobs it manages; empty: all."""
    heartbeat: str
    """A text that changes with each renewal."""

    def overlaps(self, namespace: str) -> bool:
        """Returns whether a job may belong to both this installation and one for the given namespace."""
        return not self.namespace or not namespace or self.namespace == namespace


@dataclass(frozen=True, slots=True)
class ObservedClaims:
    """The entries as last read, and how long each has been unchanged by our clock."""

    claims: Mapping[str, Claim] = field(default_factory=dict)
    """The entries by installation."""
    unchanged_since_seconds: Mapping[str, float] = field(default_factory=dict)
    """By installation: when we first read the entry as it is. Seconds of the boot clock."""
    read_seconds: float | None = None
    """When the entries were read last; None: not yet. Seconds of the boot clock."""


def parse_claims(text: str) -> dict[str, Claim]:
    """Parses the entries by installation. Raises BadClaims."""
    if len(text) > _MAX_CHARACTERS:
        raise InvalidClaims(f"the claims have {len(text)} characters, more than the maximum of {_MAX_CHARACTERS}")
    try:
        document = json.loads(text or "{}")
    except ValueError as error:
        raise InvalidClaims(f"the claims are not JSON: {error}") from None
    entries = document.items() if isinstance(document, dict) else None
    if entries is None or len(entries) > MAX_INSTALLATIONS:
        raise InvalidClaims(f"the claims must be a mapping of at most {MAX_INSTALLATIONS} installations")
    claims = {}
    for installation, entry in entries:
        values = [entry.get("namespace"), entry.get("beat")] if isinstance(entry, dict) else [None]
        if not all(isinstance(value, str) for value in values):
            raise InvalidClaims(f"the claim of {installation[:200]} has no namespace or no beat")
        claims[installation] = Claim(*values)
    return claims


def claims_text(claims: Mapping[str, Claim]) -> str:
    """Serializes the entries for `parse_claims`.

    Raises BadClaims if they exceed a limit: once written, they would stop every installation.
    """
    text = json.dumps(
        {name: {"namespace": claim.namespace, "beat": claim.heartbeat} for name, claim in sorted(claims.items())}
    )
    parse_claims(text)
    return text


def add_reading(previous: ObservedClaims, claims: Mapping[str, Claim], now: float) -> ObservedClaims:
    """Records a read; after a pause without reads, every entry counts as changed now."""
    was_read_lately = previous.read_seconds is not None and now - previous.read_seconds <= MAX_READ_GAP_SECONDS
    unchanged_since = {
        name: previous.unchanged_since_seconds[name] if was_read_lately and previous.claims.get(name) == claim else now
        for name, claim in claims.items()
    }
    return ObservedClaims(claims, unchanged_since, now)


def find_rival(read_claims: ObservedClaims, installation: str, namespace: str, now: float) -> str:
    """Returns another installation that manages some of the same jobs; empty: there is none, or we have the claim."""
    if installation in read_claims.claims and read_claims.claims[installation].namespace == namespace:
        return ""
    return next(
        (name for name in sorted(read_claims.claims) if _blocks(read_claims, name, installation, namespace, now)), ""
    )


def needs_renewal(read_claims: ObservedClaims, installation: str, namespace: str, now: float) -> bool:
    """Returns whether our entry is missing or due for renewal, by any of our replicas."""
    claim = read_claims.claims.get(installation)
    return (
        claim is None
        or claim.namespace != namespace
        or now - read_claims.unchanged_since_seconds[installation] >= RENEW_SECONDS
    )


def renew_claim(read_claims: ObservedClaims, installation: str, claim: Claim, now: float) -> dict[str, Claim]:
    """Returns the entries to write: ours, and those of others that have not expired."""
    others = {
        n: c
        for n, c in read_claims.claims.items()
        if n != installation and now - read_claims.unchanged_since_seconds[n] < EXPIRY_SECONDS
    }
    return {**others, installation: claim}


def _blocks(read_claims: ObservedClaims, name: str, installation: str, namespace: str, now: float) -> bool:
    is_valid = now - read_claims.unchanged_since_seconds[name] < EXPIRY_SECONDS
    return name != installation and is_valid and read_claims.claims[name].overlaps(namespace)


# ---- cluster claim ---------------------------------------------------------------------------------------------------

CLAIMS_LEASE = LeaseRef("kube-node-lease", "surefoot-operators")
"""The one Lease object with all claims. No node has its name, and kubelets only read the lease of their node."""
CLAIMS_ANNOTATION = f"{GROUP}/installations"
"""Annotation with the claims as JSON."""
CALL_TIMEOUT_SECONDS = 4.0
"""Time limit for reading and writing the claims once."""
_MAX_LOGGED_FAILURES = 3


class ClusterClaim:
    """Maintains one installation's claim from one of its replicas: `acquire`, then `renew_until_lost`.

    Args:
        api: The API server.
        installation: Namespace and lease of the operator, such as `surefoot-system/surefoot-operator`.
        namespace: Namespace whose jobs it manages; empty: all.
        identity: Identity of this replica.
        changed: Called with the reason why this replica is on standby, whenever it changes; empty: it is not.
        interval_seconds: Time between two reads.
        now: The boot clock, in seconds.
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
        self._observed_claims = ObservedClaims()
        self._body: Body | None = None
        self._standby_reason = ""
        self._renewals = self._failures = 0
        self._owned_seconds: float | None = None
        """When the claim was last ours, or a failed read left that open; None: it is not ours. Boot clock."""
        self.last_answer_seconds = now()
        """When the API server last answered about the claim. Boot clock."""

    def require_claim(self) -> None:
        """Raises NotLeader unless the claim is ours by our own clock."""
        if self._owned_seconds is None or self._now() - self._owned_seconds >= MAX_READ_GAP_SECONDS:
            raise NotLeader("this operator has no valid claim on the cluster's jobs, so it decides and writes nothing")

    async def acquire(self) -> None:
        """Waits until no other installation manages the same jobs, and claims them."""
        while True:
            try:
                rival = await self._read_and_renew()
            except (PlatformError, InvalidClaims, TimeoutError) as error:
                self._report_standby(
                    f"standing by: cannot read or write the claim on the cluster's jobs (lease"
                    f" {CLAIMS_LEASE.namespace}/{CLAIMS_LEASE.name}): {_error_text(error)}"
                )
            else:
                if self._owned_seconds is not None:
                    self._report_standby("")
                    return
                if rival:
                    self._report_standby(
                        f"standing by: {rival} operates {_describe_scope(self._observed_claims.claims[rival].namespace)}"
                    )
            await self._sleep_with_jitter()

    async def renew_until_lost(self) -> None:
        """Renews the claim until cancelled. Raises LeaseLost if another installation has it."""
        while True:
            await self._sleep_with_jitter()
            start_seconds = self._now()
            try:
                rival = await self._read_and_renew()
            except (PlatformError, InvalidClaims, TimeoutError) as error:
                self._failures += 1
                if self._failures <= _MAX_LOGGED_FAILURES:
                    log.warning(
                        "cannot renew the claim on the cluster's jobs, retrying; the operator continues: %s",
                        _error_text(error),
                    )
                # After a long call the process may have been frozen. Only the next read shows who has the claim.
                if self._now() - start_seconds < MAX_READ_GAP_SECONDS:
                    self._owned_seconds = self._now()
                continue
            self._failures = 0
            if rival:
                self._owned_seconds = None
                raise LeaseLost(
                    f"{rival} operates {_describe_scope(self._observed_claims.claims[rival].namespace)} now"
                )

    async def _read_and_renew(self) -> str:
        """Reads the claims, and renews or adds ours; returns the installation that prevents that, or an empty text."""
        async with asyncio.timeout(CALL_TIMEOUT_SECONDS):
            await self._read_claims()
            rival = find_rival(self._observed_claims, self._installation, self._namespace, self._now())
            if not rival:
                if needs_renewal(self._observed_claims, self._installation, self._namespace, self._now()):
                    await self._write_claims()
                else:
                    self._owned_seconds = self._now()
            return rival

    async def _read_claims(self) -> None:
        try:
            self._body = await self._api.get(CLAIMS_LEASE.path)
        except ApiError as error:
            if error.code != 404:
                raise
            self._body = None
        self.last_answer_seconds = self._now()
        notes = ((self._body or {}).get("metadata") or {}).get("annotations") or {}
        self._observed_claims = add_reading(
            self._observed_claims, parse_claims(str(notes.get(CLAIMS_ANNOTATION, ""))), self._now()
        )

    async def _write_claims(self) -> None:
        """Writes the claims with ours renewed; after a conflicting write, the next round reads again."""
        sent_seconds, self._renewals = self._now(), self._renewals + 1
        own_claim = Claim(self._namespace, f"{self._identity} {now_text()} {self._renewals}")
        new_claims = renew_claim(self._observed_claims, self._installation, own_claim, sent_seconds)
        metadata = dict(
            (self._body or {}).get("metadata") or {"name": CLAIMS_LEASE.name, "namespace": CLAIMS_LEASE.namespace}
        )
        metadata["annotations"] = {**(metadata.get("annotations") or {}), CLAIMS_ANNOTATION: claims_text(new_claims)}
        spec = {
            "holderIdentity": self._installation,
            "renewTime": now_text(),
            "leaseDurationSeconds": round(EXPIRY_SECONDS),
        }
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        try:
            if self._body is None:
                await self._api.post(CLAIMS_LEASE.collection, body)
            else:
                await self._api.put(CLAIMS_LEASE.path, body)
        except ApiError as error:
            if error.code != 409 and not (error.code == 404 and self._body is not None):
                raise
            return
        self._owned_seconds = sent_seconds

    async def _sleep_with_jitter(self) -> None:
        await asyncio.sleep(self._interval_seconds * random.uniform(0.75, 1.25))

    def _report_standby(self, sentence: str) -> None:
        if sentence == self._standby_reason:
            return
        self._standby_reason = sentence
        log.log(
            logging.WARNING if sentence else logging.INFO,
            sentence or "this installation has the claim on the cluster's jobs",
        )
        self._changed(sentence)


def _describe_scope(namespace: str) -> str:
    return f"the jobs of the namespace {namespace}" if namespace else "this cluster"


def _error_text(error: BaseException) -> str:
    return str(error) or "the API server did not answer in time"
