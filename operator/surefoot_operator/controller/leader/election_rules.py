"""Decides from the lease and the local clock who leads.

Pure; called by `leader_election`. Times in a lease are other machines' and are never compared with ours: a lease has expired once
we ourselves have seen it unchanged for its duration. All seconds are of one monotonic clock that includes suspend. The
algorithm is that of Kubernetes' client-go, but for a leader whose server is away: it may not act, and waits in place. A
renewal that tests what it wrote last is accepted only where nobody wrote since, so that nobody else has led meanwhile.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

from surefoot_operator.api.spec import GROUP


@dataclass(frozen=True, slots=True)
class LeaseTimings:
    lease_seconds: float = 3.0
    """Others wait so long after the last change that they saw."""
    renew_seconds: float = 2.0
    """A leader that could not renew for so long may not act: earlier than anybody else can take over."""
    retry_seconds: float = 0.5
    """Between two renewals, and between two looks of somebody who waits."""
    stand_down_seconds: float = 10.0
    """A leader that could not renew for so long lets its agents go: another may lead, which it cannot see."""
    call_seconds: float = 1.5
    """How long an answer is waited for at first; doubled with each that did not come."""
    max_call_seconds: float = 4.0


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """The lease as read from the API server."""

    server: str
    """Empty: it was given back."""
    version: str
    """Another value after each write of whoever holds it, or gives it back."""
    lease_seconds: float = 3.0
    notes: Mapping[str, str] = field(default_factory=dict)
    """Its annotations."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica and what it knows of the lease."""

    identity: str
    lease: ObservedLease | None = None
    """None: there is no lease, or it was not looked at yet."""
    last_read_seconds: bool = False
    changed_at: float = 0.0
    """When we first saw the lease as it is."""
    leads_until: float | None = None
    """When we may not act any more, unless renewed; None: we do not lead."""


@dataclass(frozen=True, slots=True)
class LeaseAction:
    """The candidate's next call.

    `acquire` and `renew` are writes that test what was read; `stand-down` ends the term, `lost` the process.
    """

    verb: Literal["look", "acquire", "renew", "wait", "stand-down", "lost"]
    reason: str
    after_seconds: float = 0.0
    """With `wait`: when to ask again at the latest."""


def seen(candidate: Candidate, lease: ObservedLease | None, now: float) -> Candidate:
    """Records a read; a lease that changed since is still held."""
    before = candidate.lease
    changed = (lease.version if lease is not None else "") != (before.version if before is not None else "")
    at = now if changed or not candidate.last_read_seconds else candidate.changed_at
    return replace(candidate, lease=lease, last_read_seconds=True, changed_at=at)


def written(candidate: Candidate, lease: ObservedLease, asked_at: float, timings: LeaseTimings) -> Candidate:
    """Records an accepted write; it counts from the request, not the answer."""
    return replace(
        candidate,
        lease=lease,
        last_read_seconds=True,
        changed_at=asked_at,
        leads_until=asked_at + timings.renew_seconds,
    )


def stood_down(candidate: Candidate) -> Candidate:
    """Ends the term; what was last known of the lease stays."""
    return replace(candidate, leads_until=None)


def call_limit(candidate: Candidate, timeouts: int, now: float, timings: LeaseTimings) -> float:
    """Returns how many seconds the next call may take.

    A server that is slow is given time, one that hangs costs little. No call outlasts the term.

    Args:
        timeouts: How many calls in a row were not answered in time.
    """
    limit = min(timings.max_call_seconds, timings.call_seconds * 2.0 ** min(timeouts, 8))
    if candidate.leads_until is None:
        return limit
    term_ends = candidate.leads_until - timings.renew_seconds + timings.stand_down_seconds
    return max(timings.retry_seconds, min(limit, term_ends - now))


def leads(candidate: Candidate, now: float) -> bool:
    """Decides whether this candidate may act now; asked before every write.

    A process that was frozen does not know for how long.
    """
    return candidate.leads_until is not None and now < candidate.leads_until


def holder(candidate: Candidate, now: float) -> str:
    """Returns who leads, as far as this candidate sees; empty: nobody."""
    lease = candidate.lease
    if leads(candidate, now):
        return candidate.identity
    if lease is None or now - candidate.changed_at >= lease.lease_seconds or lease.server == candidate.identity:
        return ""
    return lease.server


def decide(candidate: Candidate, now: float, timings: LeaseTimings, patience_seconds: float = 0.0) -> LeaseAction:
    """Decides the candidate's next call.

    `patience_seconds`: how long a lease that is free is left to others.
    """
    lease = candidate.lease
    if candidate.leads_until is not None:
        return _leading(candidate, candidate.leads_until, now, timings)
    if not candidate.last_read_seconds:
        return LeaseAction("look", "the lease was not read yet")
    unchanged = now - candidate.changed_at
    if lease is None:
        return _free(unchanged - patience_seconds, "there is no lease: nobody leads", timings)
    if not lease.server:
        return _free(unchanged - patience_seconds, "the last leader released the lease", timings)
    if lease.server == candidate.identity and patience_seconds < math.inf:
        return LeaseAction("acquire", "this replica held the lease, and nobody has since")
    if unchanged >= lease.lease_seconds:
        why = f"{lease.server} has not renewed its lease for {unchanged:.1f} s"
        return _free(unchanged - lease.lease_seconds - patience_seconds, why, timings)
    left = lease.lease_seconds - unchanged
    return LeaseAction("wait", f"{lease.server} leads", min(left, timings.retry_seconds))


def _free(over_seconds: float, why: str, timings: LeaseTimings) -> LeaseAction:
    """Takes a lease that was left to others for long enough; else waits."""
    if over_seconds >= 0.0:
        return LeaseAction("acquire", why)
    return LeaseAction(
        "wait", "the lease is free and left to others for a moment", min(-over_seconds, timings.retry_seconds)
    )


def _leading(candidate: Candidate, until: float, now: float, timings: LeaseTimings) -> LeaseAction:
    lease = candidate.lease
    if lease is None:
        return LeaseAction("lost", "the lease was deleted")
    if lease.server != candidate.identity:
        return LeaseAction("lost", f"the lease is held by {lease.server or 'nobody'}")
    renewed_at = until - timings.renew_seconds
    late = now - renewed_at
    if late >= timings.stand_down_seconds:
        return LeaseAction("stand-down", f"the lease could not be renewed for {late:.1f} s")
    if late >= timings.retry_seconds:
        return LeaseAction("renew", "the lease is renewed")
    return LeaseAction("wait", "the lease was just renewed", timings.retry_seconds - late)


# ---- fair share ------------------------------------------------------------------------------------------------------
# Decides which replica takes, asks for and gives up which shard. What replicas know of each other are the leases alone:
# who holds which, and who has asked for it. A replica asks only while it runs, so nothing is given up to one that is
# dead; and only where the other leads two more than itself, so that each hand-over brings both nearer and none is ever
# taken back.

STEP_SECONDS = 0.6
"""A free lease is left so long for each shard that one leads: longer than between two looks of somebody who leads none."""
LONGEST_SECONDS = 1.2
"""And never longer: so much later than a lease's expiry a shard is led at the latest, whoever takes it."""


@dataclass(frozen=True, slots=True)
class ObservedShard:
    """A shard's lease as one replica sees it."""

    server: str = ""
    """Who leads it; empty: nobody, as far as this replica sees."""
    requested_by: str = ""
    """Who has asked its holder to hand it over; empty: nobody."""


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """How many shards there are, and shall be.

    `wanted`: by whoever leads shard 0.
    """

    shards: int = 1
    desired_count: int = 1

    @property
    def is_changing(self) -> bool:
        """Whether who leads shard 0 gathers all shards."""
        return self.desired_count != self.shards


def patience_seconds(me: str, shard: int, seen: Mapping[int, ObservedShard], layout: ShardLayout) -> float:
    """Returns how long `me` leaves a lease alone once it is free.

    Infinite: another is to have it, as the layout changes.
    """
    if layout.is_changing and shard != 0:
        return 0.0 if seen[0].server == me else math.inf
    if seen[shard].requested_by == me:
        return 0.0
    held = sum(one.server == me for one in seen.values())
    if seen[shard].requested_by:
        return LONGEST_SECONDS  # it was given up for somebody
    return min(held * STEP_SECONDS, LONGEST_SECONDS)


def shard_to_request(me: str, seen: Mapping[int, ObservedShard], layout: ShardLayout) -> int | None:
    """Chooses the shard that `me` asks for; None: none.

    The last one of whoever leads most, so that shard 0 stays where it is if it can.
    """
    if layout.is_changing:
        return None
    held = Counter(one.server for one in seen.values() if one.server)
    others = sorted((-count, holder) for holder, count in held.items() if holder != me)
    if not others or -others[0][0] < held[me] + 2:
        return None
    most = others[0][1]
    return max(shard for shard, one in seen.items() if one.server == most)


def handover_reason(me: str, shard: int, seen: Mapping[int, ObservedShard], layout: ShardLayout) -> str:
    """Says why `me` hands this shard over now; empty: it keeps it."""
    if layout.is_changing and shard != 0 and seen[0].server not in ("", me):
        return f"{seen[0].server} gathers the shards, of which there will be {layout.desired_count}"
    asker = seen[shard].requested_by
    held = Counter(one.server for one in seen.values())
    if asker and asker != me and held[me] >= held[asker] + 2:
        return f"{asker} leads {held[asker]} shards and asked for it, this replica leads {held[me]}"
    return ""


# ---- names of shards -------------------------------------------------------------------------------------------------
# Names a job's shard, and a shard's lease, label and address. Pure; called by the composition root and
# `shard_election`. With one shard every name is that of an operator without shards, so that an upgrade renames nothing.

HIGHEST = 8
"""Shards of one release at most: each costs every replica two calls a second. The chart's role names as many leases."""


def shard_of(uid: str, shards: int) -> int:
    """Returns the shard of the job with this uid."""
    return int.from_bytes(hashlib.sha256(uid.encode()).digest()[:8]) % shards


def lease_name(base: str, shard: int) -> str:
    """Names the Lease of a shard."""
    return base if shard == 0 else f"{base}-shard-{shard}"


def leader_label(shard: int) -> str:
    """Names the label by which a shard's Service finds its leader."""
    return f"{GROUP}/leader" if shard == 0 else f"{GROUP}/leads-shard-{shard}"


def shard_url(url: str, shard: int) -> str:
    """Returns where agents of a shard connect.

    Those of shard 0 connect to `url`. The Service's name gets the shard's number. A plain address has no Service behind it, and stays.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if shard == 0 or _is_address(host):
        return url
    first, dot, rest = host.partition(".")
    port = f":{parts.port}" if parts.port is not None else ""
    return urlunsplit(parts._replace(netloc=f"{first}-{shard}{dot}{rest}{port}"))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
