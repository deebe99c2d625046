"""Chooses which address the coordinator is looked for at.

Pure; called by `coordinator_client`. Jobs move among replicas of the operator when the number of its shards changes,
while an agent keeps the address that its pod was made with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from urllib.parse import urlsplit

PATIENCE = 12
"""Failures in a row at one address, until another one is tried: some seconds, in which a new leader begins there."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the agent looks now, and where it began."""

    own: tuple[str, ...]
    """From its environment, the first one first."""
    now: str
    failures: int = 0
    """In a row at `now`."""


def begun(first: str, fallback: str = "") -> Addresses:
    """Begins at the first address."""
    return Addresses(tuple(dict.fromkeys(url for url in (first, fallback) if url)), first)


def referred(known: Addresses, address: str) -> Addresses:
    """Follows a refusal that names another address.

    One without TLS is not followed from one with it: the token would travel in clear.
    """
    if urlsplit(address).scheme != urlsplit(known.now).scheme or not urlsplit(address).hostname:
        return failed(known)
    return replace(known, now=address, failures=0)


def failed(known: Addresses) -> Addresses:
    """Counts a failure.

    After many in a row the agent's own addresses are tried in turn.
    """
    if known.failures + 1 < PATIENCE:
        return replace(known, failures=known.failures + 1)
    after = known.own.index(known.now) + 1 if known.now in known.own else 0
    return replace(known, now=known.own[after % len(known.own)], failures=0)


def welcomed(known: Addresses) -> Addresses:
    """Stays where it was let in."""
    return replace(known, failures=0)
