"""Decides which installation of the operator looks after which jobs of a cluster.

Pure; called by `cluster_claim`. Every installation has an entry in one object, with the namespace whose jobs it looks after
(empty: every one). Two whose jobs may be the same never stand there together. An entry counts until it was seen unchanged
for `EXPIRY_SECONDS` by somebody who looked all the while: clocks of others are never compared with ours, and whoever could
not look (an API server that was away) cannot say that others did not renew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

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


def renew(seen: ClaimsSeen, installation: str, claim: Claim, now: float) -> dict[str, Claim]:
    """The entries to write: ours, and those of others that have not expired."""
    others = {
        n: c for n, c in seen.claims.items() if n != installation and now - seen.unchanged_since[n] < EXPIRY_SECONDS
    }
    return {**others, installation: claim}


def _counts(seen: ClaimsSeen, name: str, installation: str, namespace: str, now: float) -> bool:
    alive = now - seen.unchanged_since[name] < EXPIRY_SECONDS
    return name != installation and alive and seen.claims[name].overlaps(namespace)
