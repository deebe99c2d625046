"""Computes whether a job's checkpoints fit into staging memory and holders.

Pure; called by `maintenance_plan`. It warns before a holder is full: agents report the size of their ranks' saves as soon as
trainers ask for staging memory, and placement says which holders get them. docs/memory-tier.md has the formula. Nothing
is stopped: what fits is still saved, and training continues.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from surefoot.protocol.checkpoints.completeness import effective_replicas
from surefoot.protocol.checkpoints.placement import RankTargets, Topology, assign_targets, servers_per_node
from surefoot.protocol.identities import MemoryServerEndpoint
from surefoot.protocol.text import format_bytes
from surefoot_operator import reasons
from surefoot_operator.api.spec import CheckpointPolicy, allowed_sizes, checkpoints_in_memory
from surefoot_operator.api.status import Condition, JobStatus, condition_of
from surefoot_operator.job_snapshot import ObservedMemoryServer
from surefoot_operator.policy.core.actions import Event
from surefoot_operator.policy.core.facts import (
    Facts,
    fenced_servers,
    member_sessions,
    topology_of_job,
)

FITS, TIER_TOO_SMALL, STAGING_TOO_SMALL = "Fits", "MemoryTierTooSmall", "StagingMemoryTooSmall"
QUOTA_EXCEEDED = "QuotaExceeded"
"""Some holder takes nothing more of the job: it has more than its part there."""
TOO_LARGE_AFTER_SHRINK = "TooLargeAfterShrink"
"""It would not in the smallest world."""

_OVERHEAD = 256
"""A save takes a 256th more in a holder: digests of its blocks, and what Redis needs for each value."""


@dataclass(frozen=True, slots=True)
class MemoryServerBudget:
    """The bytes one holder must store of this job, and may."""

    node: str
    ranks: int
    """Whose copies lie there."""
    save_bytes: int
    """Of one checkpoint, all those ranks together."""
    checkpoints: int
    limit_bytes: int | None
    """Of the server; None: not known."""
    others_bytes: int
    """What other jobs have there, at least."""
    job_limit_bytes: int | None
    """Its part of `sizeLimit`."""
    server: int = 0
    servers: int = 1
    """That its node runs: they share the node's limits evenly."""

    @property
    def where(self) -> str:
        """What people call it."""
        return self.node if self.servers == 1 else f"{self.node} (server {self.server})"

    @property
    def needed_bytes(self) -> int:
        return self.save_bytes * self.checkpoints

    @property
    def available_bytes(self) -> int | None:
        """The bytes this job may use there; None: unknown."""
        left = None if self.limit_bytes is None else max(0, self.limit_bytes - self.others_bytes)
        return min((b for b in (left, self.job_limit_bytes) if b is not None), default=None)

    @property
    def left_bytes(self) -> float:
        return float("inf") if self.available_bytes is None else self.available_bytes - self.needed_bytes


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The verdict, and each holder's share."""

    fits_in_memory: bool
    reason: str
    message: str
    shares: tuple[MemoryServerBudget, ...] = ()


def judge_fit(facts: Facts) -> MemoryBudget | None:
    """Decides whether checkpoints fit; None while a rank's need is unknown."""
    sessions = [session for _, session in member_sessions(facts) if session is not None]
    sessions = [s for s in sessions if s.generation == facts.membership.generation]
    closed = next((h for h in facts.holder_list if h.state == "Ready" and h.quota_violation), None)
    refused = next((s for s in sessions if s.progress.no_staging_reason), None)
    saves = {s.index: s.progress.save_bytes for s in sessions if s.progress.save_bytes}
    known = bool(saves) and len(saves) == len(facts.membership.members)
    shares = _shares(facts, saves) if known else ()
    if closed is not None:
        text = f"saves to the holder of {closed.endpoint.server_id} are refused, training continues with fewer copies: {closed.quota_violation}"
        return MemoryBudget(False, QUOTA_EXCEEDED, text, shares)
    if refused is not None:
        text = f"worker {refused.index} on {refused.node} saves nothing, training continues: {refused.progress.no_staging_reason}"
        return MemoryBudget(False, STAGING_TOO_SMALL, text, shares)
    return judge_by_tightest_node(shares, facts.spec.checkpoint, min(allowed_sizes(facts.spec))) if known else None


def judge_by_tightest_node(
    shares: Sequence[MemoryServerBudget], policy: CheckpointPolicy, least_workers: int
) -> MemoryBudget:
    """Decides by the node with the least memory left.

    A holder whose limit is not known has room for anything.
    """
    bounded = [share for share in shares if share.available_bytes is not None]
    if not bounded:
        return MemoryBudget(True, FITS, "every worker has staging memory, and no holder reports a limit", tuple(shares))
    worst = min(bounded, key=lambda share: (share.left_bytes, share.node, share.server))
    if worst.left_bytes < 0:
        text = f"{_describe_share(worst, 'would hold')}; {_remedy(worst, policy)}"
        return MemoryBudget(False, TIER_TOO_SMALL, text, tuple(shares))
    text = f"{_describe_share(worst, 'holds')}; it may use {format_bytes(worst.available_bytes or 0)}"
    later = _at_min_replicas(shares, policy, least_workers)
    room = min((s.available_bytes or 0) * s.servers for s in bounded)
    if later > room:
        workers = f"{least_workers} worker{'s' * (least_workers != 1)}"
        text += (
            f"; with {workers} a node would hold {format_bytes(later)}, more than the {format_bytes(room)} that one has"
        )
        return MemoryBudget(True, TOO_LARGE_AFTER_SHRINK, text, tuple(shares))
    return MemoryBudget(True, FITS, text, tuple(shares))


def _at_min_replicas(shares: Sequence[MemoryServerBudget], policy: CheckpointPolicy, workers: int) -> int:
    """What a node would have to hold there: the same state, spread evenly over fewer."""
    copies = sum(share.save_bytes for share in shares)
    replicas = policy.memory.replicas
    one = copies // max(1, min(replicas, len({share.node for share in shares})))
    return max((share.checkpoints for share in shares), default=0) * -(-one * min(replicas, workers) // workers)


def with_condition(status: JobStatus, budget: MemoryBudget | None, now: float) -> JobStatus:
    """Sets the verdict as a condition; None keeps the former one."""
    old = condition_of(status, reasons.CHECKPOINTS_FIT)
    if budget is None:
        return status
    truth = "True" if budget.fits_in_memory else "False"
    since = old.last_transition_seconds if old is not None and old.status == truth else now
    fresh = Condition(
        reasons.CHECKPOINTS_FIT, "True" if budget.fits_in_memory else "False", budget.reason, budget.message, since
    )
    others = tuple(c for c in status.conditions if c.type != reasons.CHECKPOINTS_FIT)
    return replace(status, conditions=(*others, fresh))


def budget_events(old: JobStatus, budget: MemoryBudget | None) -> tuple[Event, ...]:
    """Reports when checkpoints stop fitting, and when they fit again."""
    was = condition_of(old, reasons.CHECKPOINTS_FIT)
    if budget is None or (was is not None and was.reason == budget.reason):
        return ()
    if budget.fits_in_memory:
        again = was is not None and was.status == "False"
        return (Event(reasons.CHECKPOINTS_FIT, f"checkpoints fit again: {budget.message}"),) if again else ()
    return (Event(reasons.CHECKPOINTS_TOO_LARGE, budget.message, True),)


def _shares(facts: Facts, saves: Mapping[int, int]) -> tuple[MemoryServerBudget, ...]:
    """What every holder that agents know of has to take, as their saves are placed."""
    named = {endpoint.instance for endpoint in facts.status.assigned_servers}
    holders = {
        h.endpoint: h for h in fenced_servers(facts, facts.membership.generation) if h.endpoint.instance in named
    }
    policy, members = facts.spec.checkpoint, facts.membership.members
    replicas = effective_replicas(policy.memory.replicas, len({e.domain for e in holders}))
    local, servers = facts.membership.world_size // len(members), servers_per_node(holders)
    topology = topology_of_job(facts)
    where = _placed(tuple((m.index, m.node) for m in members), tuple(holders), replicas, local, topology)
    ranks: dict[MemoryServerEndpoint, int] = {}
    size: dict[MemoryServerEndpoint, int] = {}
    for index, by_rank in where.items():
        each, save_bytes = local // len(by_rank), saves[index] + saves[index] // _OVERHEAD
        for endpoint in chain(*by_rank):
            ranks[endpoint] = ranks.get(endpoint, 0) + each
            size[endpoint] = size.get(endpoint, 0) + -(-save_bytes * each // local)
    return tuple(
        MemoryServerBudget(
            node=endpoint.instance.node,
            server=endpoint.server_index,
            servers=servers,
            ranks=ranks[endpoint],
            save_bytes=size[endpoint],
            checkpoints=checkpoints_in_memory(facts.spec),
            limit_bytes=holders[endpoint].limit_bytes,
            others_bytes=_others(holders[endpoint], size[endpoint]),
            job_limit_bytes=part_of(policy.memory.size_limit_bytes, servers),
        )
        for endpoint in sorted(size, key=lambda e: e.instance)
    )


def part_of(size_limit_bytes: int | None, servers: int) -> int | None:
    """Splits a node's `sizeLimit` among its servers; None: there is none."""
    return None if size_limit_bytes is None else size_limit_bytes // servers


@functools.lru_cache(maxsize=16)
def _placed(
    nodes: tuple[tuple[int, str], ...],
    servers: tuple[MemoryServerEndpoint, ...],
    replicas: int,
    local_ranks: int,
    topology: Topology,
) -> Mapping[int, RankTargets]:
    return assign_targets(dict(nodes), servers, replicas, local_ranks, topology)


def _others(server: ObservedMemoryServer, save_bytes: int) -> int:
    """At least so much is not this job's: neither what its index names nor a save that may be on its way."""
    own = sum(m.stream_bytes + m.stream_bytes // _OVERHEAD + m.values_bytes for m in server.entries)
    return max(0, (server.used_bytes or 0) - own - save_bytes)


def _describe_share(share: MemoryServerBudget, verb: str) -> str:
    each = format_bytes(share.save_bytes // max(1, share.ranks))
    ranks = f"{share.ranks} rank{'s' * (share.ranks != 1)} at {each}{' each' * (share.ranks != 1)}"
    return f"{share.where} {verb} {share.checkpoints} checkpoints of {ranks} = {format_bytes(share.needed_bytes)}"


def _remedy(share: MemoryServerBudget, policy: CheckpointPolicy) -> str:
    """What is too small, and what to do about it."""
    others = f", of which other jobs use {format_bytes(share.others_bytes)}" if share.others_bytes else ""
    part = "its memory tier" if share.servers == 1 else "its part of the node's memory tier"
    server = f"{part} has {format_bytes(share.limit_bytes)}{others}" if share.limit_bytes is not None else ""
    job = share.job_limit_bytes
    if job is not None and job < share.needed_bytes:
        what = f"sizeLimit allows {format_bytes(job)}"
        raise_it = f"raise checkpoint.memory.sizeLimit to {format_bytes(share.needed_bytes * share.servers)} or more"
    else:
        what, node_bytes = server, (share.needed_bytes + share.others_bytes) * share.servers
        raise_it = f"raise the memory tier's maxMemory to {format_bytes(node_bytes)} or more"
    ways = [
        raise_it,
        *(["keep fewer checkpoints"] if policy.memory.keep > 1 else []),
        *(["use fewer replicas"] if policy.memory.replicas > 1 else []),
        "train with more workers",
    ]
    return f"{what}: {', '.join(ways[:-1])} or {ways[-1]}"
