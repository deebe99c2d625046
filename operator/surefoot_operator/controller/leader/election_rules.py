"""Decides from the lease and the local clock which replica leads.

Pure; called by `leader_election`. The algorithm is that of Kubernetes' client-go, with one difference: a leader that
cannot reach the API server must not act, but it waits where it is instead of exiting.

- Times in a lease come from other machines and are never compared with ours. A lease has expired once we have seen it
  unchanged for its duration.
- All seconds are of one monotonic clock that includes suspend.
- A renewal tests the version that was written last. So it is accepted only if no other replica wrote since, and hence
  none has led in between.
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
    """Durations of the election; `stand_down_seconds` must be longer than `renew_seconds`."""

    lease_seconds: float = 3.0
    """Others may take the lease once they have seen it unchanged for this long."""
    renew_seconds: float = 2.0
    """A leader may act for this long after its last renewal, which is shorter than any takeover takes."""
    retry_seconds: float = 0.5
    """Time between two renewals, and between two reads of a replica on standby."""
    stand_down_seconds: float = 10.0
    """A leader without a renewal for this long disconnects its agents: another replica may lead, unseen by it."""
    call_seconds: float = 1.5
    """First timeout of a call; doubled after each call that got no answer."""
    max_call_seconds: float = 4.0
    """Maximum timeout of a call."""


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """The lease as read from the API server."""

    leader: str
    """Identity of the replica that has it; empty: it was released."""
    version: str
    """Changes with each write of the replica that has the lease or releases it."""
    lease_seconds: float = 3.0
    """Duration after which it expires unless it is renewed."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """The lease's annotations."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica and its view of the lease."""

    identity: str
    """Identity that the replica writes into the lease."""
    lease: ObservedLease | None = None
    """The lease as last read; None: it does not exist, or was not read yet."""
    has_read: bool = False
    """Whether the lease was read or written at least once."""
    changed_seconds: float = 0.0
    """When we first saw the lease in its current version."""
    leads_until_seconds: float | None = None
    """Until when we may act unless we renew; None: we do not lead."""


@dataclass(frozen=True, slots=True)
class LeaseAction:
    """The candidate's next call.

    `acquire` and `renew` write the lease if it is still in the version that was read. `stand-down` ends the term, and
    `lost` the process.
    """

    verb: Literal["look", "acquire", "renew", "wait", "stand-down", "lost"]
    """The call to make, if any."""
    reason: str
    """Why, for the log."""
    after_seconds: float = 0.0
    """With `wait`: when to decide again at the latest, in seconds from now."""


def record_read(candidate: Candidate, lease: ObservedLease | None, now: float) -> Candidate:
    """Records a read; the lease's expiry starts over if its version changed."""
    previous_lease = candidate.lease
    has_changed = (lease.version if lease is not None else "") != (
        previous_lease.version if previous_lease is not None else ""
    )
    changed_at = now if has_changed or not candidate.has_read else candidate.changed_seconds
    return replace(candidate, lease=lease, has_read=True, changed_seconds=changed_at)


def record_write(candidate: Candidate, lease: ObservedLease, asked_at: float, timings: LeaseTimings) -> Candidate:
    """Records an accepted write; the lease counts from the request, not from the answer."""
    return replace(
        candidate,
        lease=lease,
        has_read=True,
        changed_seconds=asked_at,
        leads_until_seconds=asked_at + timings.renew_seconds,
    )


def stand_down(candidate: Candidate) -> Candidate:
    """Ends the term; the lease as last known stays."""
    return replace(candidate, leads_until_seconds=None)


def call_timeout_seconds(candidate: Candidate, timeouts: int, now: float, timings: LeaseTimings) -> float:
    """Returns the time limit of the next call in seconds.

    A slow server gets more time after each timeout, a hanging one costs little. No call outlasts the term.

    Args:
        candidate: This replica.
        timeouts: Number of calls in a row that got no answer in time.
        now: Seconds of the boot clock.
        timings: Durations of the election.
    """
    limit = min(timings.max_call_seconds, timings.call_seconds * 2.0 ** min(timeouts, 8))
    if candidate.leads_until_seconds is None:
        return limit
    term_ends = candidate.leads_until_seconds - timings.renew_seconds + timings.stand_down_seconds
    return max(timings.retry_seconds, min(limit, term_ends - now))


def is_leader(candidate: Candidate, now: float) -> bool:
    """Returns whether this candidate may act now.

    Check it before every write: a process that was frozen does not know for how long.
    """
    return candidate.leads_until_seconds is not None and now < candidate.leads_until_seconds


def leader_identity(candidate: Candidate, now: float) -> str:
    """Returns the leader's identity as far as this candidate knows; empty: there is none."""
    lease = candidate.lease
    if is_leader(candidate, now):
        return candidate.identity
    if lease is None or now - candidate.changed_seconds >= lease.lease_seconds or lease.leader == candidate.identity:
        return ""
    return lease.leader


def next_action(candidate: Candidate, now: float, timings: LeaseTimings, patience_seconds: float = 0.0) -> LeaseAction:
    """Decides the candidate's next call.

    Args:
        candidate: This replica.
        now: Seconds of the boot clock.
        timings: Durations of the election.
        patience_seconds: How long a free lease is left to other replicas; infinite: for good.
    """
    lease = candidate.lease
    if candidate.leads_until_seconds is not None:
        return _next_action_of_leader(candidate, candidate.leads_until_seconds, now, timings)
    if not candidate.has_read:
        return LeaseAction("look", "the lease was not read yet")
    unchanged_seconds = now - candidate.changed_seconds
    if lease is None:
        return _take_or_wait(
            unchanged_seconds - patience_seconds, "the lease does not exist, so no replica leads", timings
        )
    if not lease.leader:
        return _take_or_wait(unchanged_seconds - patience_seconds, "the last leader released the lease", timings)
    if lease.leader == candidate.identity and patience_seconds < math.inf:
        return LeaseAction("acquire", "this replica had the lease before it restarted, and no other has taken it")
    if unchanged_seconds >= lease.lease_seconds:
        reason = f"{lease.leader} has not renewed its lease for {unchanged_seconds:.1f} s"
        return _take_or_wait(unchanged_seconds - lease.lease_seconds - patience_seconds, reason, timings)
    remaining_seconds = lease.lease_seconds - unchanged_seconds
    return LeaseAction("wait", f"{lease.leader} leads", min(remaining_seconds, timings.retry_seconds))


def _take_or_wait(over_seconds: float, reason: str, timings: LeaseTimings) -> LeaseAction:
    """Takes a lease that was left to others for long enough, else waits."""
    if over_seconds >= 0.0:
        return LeaseAction("acquire", reason)
    return LeaseAction(
        "wait", "the lease is free, other replicas may take it first", min(-over_seconds, timings.retry_seconds)
    )


def _next_action_of_leader(candidate: Candidate, leads_until: float, now: float, timings: LeaseTimings) -> LeaseAction:
    lease = candidate.lease
    if lease is None:
        return LeaseAction("lost", "the lease was deleted")
    if lease.leader != candidate.identity:
        return LeaseAction("lost", f"the lease belongs to {lease.leader or 'no replica'} now")
    renewed_seconds = leads_until - timings.renew_seconds
    overdue_seconds = now - renewed_seconds
    if overdue_seconds >= timings.stand_down_seconds:
        return LeaseAction("stand-down", f"the lease could not be renewed for {overdue_seconds:.1f} s")
    if overdue_seconds >= timings.retry_seconds:
        return LeaseAction("renew", "the lease is renewed")
    return LeaseAction("wait", "the lease was just renewed", timings.retry_seconds - overdue_seconds)


# ---- fair share ------------------------------------------------------------------------------------------------------
# Decides which replica takes, requests and hands over which shard. Replicas know of each other only by the leases: who
# has which, and who requested it. A replica requests only while it runs, so no shard is handed over to a dead one. It
# requests only from a leader with at least two shards more, so that each handover evens the load and none is reversed.

DELAY_PER_SHARD_SECONDS = 0.6
"""How long a free lease is left to others for each shard already led; longer than the time between two reads."""
MAX_DELAY_SECONDS = 1.2
"""Upper limit of that delay: a shard gets a leader at most this long after its lease expired."""


@dataclass(frozen=True, slots=True)
class ObservedShard:
    """The lease of a shard as one replica sees it."""

    leader: str = ""
    """Identity of the shard's leader; empty: none, as far as this replica knows."""
    requested_by: str = ""
    """Identity of the replica that requested the shard from its leader; empty: none."""


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The number of shards, and a planned change of it."""

    count: int = 1
    """Current number of shards."""
    desired_count: int = 1
    """Number that the leader of shard 0 wants."""

    @property
    def is_changing(self) -> bool:
        """Returns whether the leader of shard 0 must gather all shards, to change their number."""
        return self.desired_count != self.count


def patience_seconds(me: str, shard: int, shards: Mapping[int, ObservedShard], layout: ShardLayout) -> float:
    """Returns how long `me` leaves the lease of a shard to other replicas once it is free.

    Infinite: another replica must have it, because the number of shards changes.
    """
    if layout.is_changing and shard != 0:
        return 0.0 if shards[0].leader == me else math.inf
    if shards[shard].requested_by == me:
        return 0.0
    led_count = sum(other_shard.leader == me for other_shard in shards.values())
    if shards[shard].requested_by:
        return MAX_DELAY_SECONDS  # it was released for another replica
    return min(led_count * DELAY_PER_SHARD_SECONDS, MAX_DELAY_SECONDS)


def shard_to_request(me: str, shards: Mapping[int, ObservedShard], layout: ShardLayout) -> int | None:
    """Selects the shard that `me` requests from another leader; None: none.

    It is the last shard of the leader with most shards, so that shard 0 moves as seldom as possible.
    """
    if layout.is_changing:
        return None
    shard_counts = Counter(observed.leader for observed in shards.values() if observed.leader)
    other_leaders = sorted((-count, leader) for leader, count in shard_counts.items() if leader != me)
    if not other_leaders or -other_leaders[0][0] < shard_counts[me] + 2:
        return None
    busiest_leader = other_leaders[0][1]
    return max(shard for shard, observed in shards.items() if observed.leader == busiest_leader)


def handover_reason(me: str, shard: int, shards: Mapping[int, ObservedShard], layout: ShardLayout) -> str:
    """Returns why `me` hands this shard over now; empty: it keeps it."""
    if layout.is_changing and shard != 0 and shards[0].leader not in ("", me):
        return f"{shards[0].leader} gathers all shards, to change their number to {layout.desired_count}"
    requester = shards[shard].requested_by
    shard_counts = Counter(observed.leader for observed in shards.values())
    if requester and requester != me and shard_counts[me] >= shard_counts[requester] + 2:
        return f"{requester} leads {shard_counts[requester]} shards and requested it, this replica leads {shard_counts[me]}"
    return ""


# ---- names of shards -------------------------------------------------------------------------------------------------
# Maps jobs to shards, and names a shard's lease, label and address. Pure; called by the composition root and
# `shard_election`. With one shard all names equal those of an operator without shards, so that an upgrade renames
# nothing.

MAX_SHARDS = 8
"""Maximum number of shards: each costs every replica two calls a second, and the chart's role lists their leases."""


def shard_of(uid: str, shards: int) -> int:
    """Returns the shard of the job with this uid."""
    return int.from_bytes(hashlib.sha256(uid.encode()).digest()[:8]) % shards


def lease_name(base: str, shard: int) -> str:
    """Returns the name of a shard's Lease."""
    return base if shard == 0 else f"{base}-shard-{shard}"


def leader_label(shard: int) -> str:
    """Returns the label by which a shard's Service finds its leader."""
    return f"{GROUP}/leader" if shard == 0 else f"{GROUP}/leads-shard-{shard}"


def shard_url(url: str, shard: int) -> str:
    """Returns the address that agents of a shard connect to.

    Shard 0 has `url` itself. For others the Service's name gets the shard's number. A plain IP address stays, because
    no Service belongs to it.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if shard == 0 or _is_address(host):
        return url
    service_name, dot, domain = host.partition(".")
    port = f":{parts.port}" if parts.port is not None else ""
    return urlunsplit(parts._replace(netloc=f"{service_name}-{shard}{dot}{domain}{port}"))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
