"""Decides from the lease and the local clock who leads.

Pure; called by `lease`. Times in a lease are other machines' and are never compared with ours: a lease has expired once
we ourselves have seen it unchanged for its duration. All seconds are of one monotonic clock that includes suspend. The
algorithm is that of Kubernetes' client-go.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class LeaseTimings:
    lease_seconds: float = 15.0
    """Others wait so long after the last change that they saw."""
    renew_seconds: float = 10.0
    """A leader that could not renew for so long stops leading: earlier than anybody else can take over."""
    retry_seconds: float = 2.0
    """Between two renewals, and between two looks of somebody who waits."""


@dataclass(frozen=True, slots=True)
class LeaseSeen:
    """The lease as read from the API server."""

    holder: str
    """Empty: it was given back."""
    version: str
    """Another value after each write."""
    lease_seconds: float = 15.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica and what it knows of the lease."""

    identity: str
    lease: LeaseSeen | None = None
    """None: there is no lease, or it was not looked at yet."""
    looked: bool = False
    changed_at: float = 0.0
    """When we first saw the lease as it is."""
    leads_until: float | None = None
    """None: we do not lead."""


@dataclass(frozen=True, slots=True)
class Step:
    """The candidate's next call.

    `acquire` and `renew` are writes that test what was read; `lost` is final for this process.
    """

    verb: Literal["look", "acquire", "renew", "wait", "lost"]
    reason: str
    after_seconds: float = 0.0
    """With `wait`: when to ask again at the latest."""


def seen(candidate: Candidate, lease: LeaseSeen | None, now: float) -> Candidate:
    """Records a read; a lease that changed since is still held."""
    changed = lease is None or candidate.lease is None or lease.version != candidate.lease.version
    at = now if changed or not candidate.looked else candidate.changed_at
    return replace(candidate, lease=lease, looked=True, changed_at=at)


def written(candidate: Candidate, lease: LeaseSeen, asked_at: float, timings: LeaseTimings) -> Candidate:
    """Records an accepted write; it counts from the request, not the answer."""
    return replace(
        candidate, lease=lease, looked=True, changed_at=asked_at, leads_until=asked_at + timings.renew_seconds
    )


def leads(candidate: Candidate, now: float) -> bool:
    """Decides whether this candidate may act now; asked before every write.

    A process that was frozen does not know for how long.
    """
    return candidate.leads_until is not None and now < candidate.leads_until


def decide(candidate: Candidate, now: float, timings: LeaseTimings) -> Step:
    """Decides the candidate's next call."""
    lease = candidate.lease
    if candidate.leads_until is not None:
        return _leading(candidate, candidate.leads_until, now, timings)
    if not candidate.looked:
        return Step("look", "the lease was not read yet")
    if lease is None:
        return Step("acquire", "there is no lease: nobody leads")
    if not lease.holder:
        return Step("acquire", "the last leader released the lease")
    if lease.holder == candidate.identity:
        return Step("acquire", "a former process of this replica held the lease, and has ended")
    unchanged = now - candidate.changed_at
    if unchanged >= lease.lease_seconds:
        return Step("acquire", f"{lease.holder} has not renewed its lease for {unchanged:.1f} s")
    left = lease.lease_seconds - unchanged
    return Step("wait", f"{lease.holder} leads", min(left, timings.retry_seconds))


def _leading(candidate: Candidate, until: float, now: float, timings: LeaseTimings) -> Step:
    lease = candidate.lease
    if lease is None:
        return Step("lost", "the lease was deleted")
    if lease.holder != candidate.identity:
        return Step("lost", f"the lease is held by {lease.holder or 'nobody'}")
    if now >= until:
        late = now - until + timings.renew_seconds
        return Step("lost", f"the lease could not be renewed for {late:.1f} s")
    due = until - timings.renew_seconds + timings.retry_seconds
    if now >= due:
        return Step("renew", "the lease is renewed")
    return Step("wait", "the lease was just renewed", min(due, until) - now)
