"""Computes whether a job's checkpoints fit into staging memory and memory servers.

Pure; called by `maintenance_plan`. It warns before a memory server is full: agents report the size of their ranks' saves as
soon as trainers request staging memory, and placement determines which servers get them. docs/sizing.md has the formula.
Nothing is stopped: saves that fit are still made, and training continues.
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
"""Reasons of the condition about memory."""
QUOTA_EXCEEDED = "QuotaExceeded"
"""Reason: a memory server rejects further saves, because the job uses more than its share there."""
TOO_LARGE_AFTER_SHRINK = "TooLargeAfterShrink"
"""Reason: checkpoints fit now, but would not with the minimum number of workers."""

_OVERHEAD_DIVISOR = 256
"""A save takes 1/256 more in a memory server: digests of its blocks, and overhead of Redis for each value."""


@dataclass(frozen=True, slots=True)
class MemoryServerBudget:
    """The bytes of this job that one memory server must store, and the bytes it may."""

    node: str
    ranks: int
    """Number of ranks with a copy on the server."""
    save_bytes: int
    """Size of one checkpoint's saves on the server, all these ranks together."""
    checkpoints: int
    """Number of checkpoints kept in memory at once."""
    limit_bytes: int | None
    """Memory limit of the server; None: unknown."""
    others_bytes: int
    """Memory used by other jobs on the server, at least."""
    job_limit_bytes: int | None
    """The server's part of the job's `sizeLimit`; None: there is no limit."""
    server: int = 0
    """Index of the server on its node."""
    servers: int = 1
    """Number of servers on the node; they share the node's limits evenly."""

    @property
    def server_name(self) -> str:
        """The server's name in messages."""
        return self.node if self.servers == 1 else f"{self.node} (server {self.server})"

    @property
    def needed_bytes(self) -> int:
        return self.save_bytes * self.checkpoints

    @property
    def available_bytes(self) -> int | None:
        """The bytes this job may use on the server; None: unknown."""
        free_bytes = None if self.limit_bytes is None else max(0, self.limit_bytes - self.others_bytes)
        return min((b for b in (free_bytes, self.job_limit_bytes) if b is not None), default=None)

    @property
    def spare_bytes(self) -> float:
        return float("inf") if self.available_bytes is None else self.available_bytes - self.needed_bytes


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Whether checkpoints fit, with the reason and each memory server's budget."""

    fits_in_memory: bool
    reason: str
    message: str
    shares: tuple[MemoryServerBudget, ...] = ()


def judge_memory_budget(facts: Facts) -> MemoryBudget | None:
    """Decides whether checkpoints fit; None while the size of a rank's saves is unknown."""
    sessions = [session for _, session in member_sessions(facts) if session is not None]
    sessions = [s for s in sessions if s.generation == facts.membership.generation]
    full_server = next((h for h in facts.server_list if h.state == "Ready" and h.quota_violation), None)
    without_staging = next((s for s in sessions if s.progress.no_staging_reason), None)
    saves = {s.index: s.progress.save_bytes for s in sessions if s.progress.save_bytes}
    all_known = bool(saves) and len(saves) == len(facts.membership.members)
    shares = _compute_budgets(facts, saves) if all_known else ()
    # A server that rejects saves, or a worker without staging memory, is reported before any estimate.
    if full_server is not None:
        text = f"the memory server {full_server.endpoint.server_id} rejects saves, training continues with fewer copies: {full_server.quota_violation}"
        return MemoryBudget(False, QUOTA_EXCEEDED, text, shares)
    if without_staging is not None:
        text = f"worker {without_staging.index} on {without_staging.node} makes no saves, training continues: {without_staging.progress.no_staging_reason}"
        return MemoryBudget(False, STAGING_TOO_SMALL, text, shares)
    return judge_by_tightest_node(shares, facts.spec.checkpoint, min(allowed_sizes(facts.spec))) if all_known else None


def judge_by_tightest_node(
    shares: Sequence[MemoryServerBudget], policy: CheckpointPolicy, min_workers: int
) -> MemoryBudget:
    """Decides by the memory server with the least memory left; a server without a known limit fits anything."""
    limited_shares = [share for share in shares if share.available_bytes is not None]
    if not limited_shares:
        return MemoryBudget(
            True, FITS, "every worker has staging memory, and no memory server reports a limit", tuple(shares)
        )
    tightest = min(limited_shares, key=lambda share: (share.spare_bytes, share.node, share.server))
    if tightest.spare_bytes < 0:
        text = f"{_describe_share(tightest, 'would have to store')}; {_describe_remedy(tightest, policy)}"
        return MemoryBudget(False, TIER_TOO_SMALL, text, tuple(shares))
    text = f"{_describe_share(tightest, 'stores up to')}; it may use {format_bytes(tightest.available_bytes or 0)}"
    # It fits now; warn if it would not after shrinking to the minimum.
    bytes_after_shrink = _node_bytes_after_shrink(shares, policy, min_workers)
    available = min((s.available_bytes or 0) * s.servers for s in limited_shares)
    if bytes_after_shrink > available:
        workers = f"{min_workers} worker{'s' * (min_workers != 1)}"
        text += f"; with {workers} a node would have to store {format_bytes(bytes_after_shrink)}, more than the {format_bytes(available)} that one has"
        return MemoryBudget(True, TOO_LARGE_AFTER_SHRINK, text, tuple(shares))
    return MemoryBudget(True, FITS, text, tuple(shares))


def _node_bytes_after_shrink(shares: Sequence[MemoryServerBudget], policy: CheckpointPolicy, workers: int) -> int:
    """Returns the bytes that a node would store with the minimum number of workers: the same state over fewer nodes."""
    stored_bytes = sum(share.save_bytes for share in shares)
    replicas = policy.memory.replicas
    checkpoint_bytes = stored_bytes // max(1, min(replicas, len({share.node for share in shares})))
    return max((share.checkpoints for share in shares), default=0) * -(
        -checkpoint_bytes * min(replicas, workers) // workers
    )


def with_memory_condition(status: JobStatus, budget: MemoryBudget | None, now_seconds: float) -> JobStatus:
    """Returns the status with the budget as a condition; None keeps the former condition."""
    previous = condition_of(status, reasons.CHECKPOINTS_FIT)
    if budget is None:
        return status
    condition_status = "True" if budget.fits_in_memory else "False"
    since_seconds = (
        previous.last_transition_seconds
        if previous is not None and previous.status == condition_status
        else now_seconds
    )
    condition = Condition(
        reasons.CHECKPOINTS_FIT,
        "True" if budget.fits_in_memory else "False",
        budget.reason,
        budget.message,
        since_seconds,
    )
    others = tuple(c for c in status.conditions if c.type != reasons.CHECKPOINTS_FIT)
    return replace(status, conditions=(*others, condition))


def budget_events(old: JobStatus, budget: MemoryBudget | None) -> tuple[Event, ...]:
    """Returns an event when checkpoints stop fitting, and when they fit again."""
    previous = condition_of(old, reasons.CHECKPOINTS_FIT)
    if budget is None or (previous is not None and previous.reason == budget.reason):
        return ()
    if budget.fits_in_memory:
        was_too_large = previous is not None and previous.status == "False"
        return (Event(reasons.CHECKPOINTS_FIT, f"checkpoints fit again: {budget.message}"),) if was_too_large else ()
    return (Event("CheckpointsTooLarge", budget.message, True),)


def _compute_budgets(facts: Facts, saves: Mapping[int, int]) -> tuple[MemoryServerBudget, ...]:
    """Computes the budget of every memory server that agents know, from the placement of their saves."""
    assigned = {endpoint.instance for endpoint in facts.status.assigned_servers}
    states_by_endpoint = {
        h.endpoint: h for h in fenced_servers(facts, facts.membership.generation) if h.endpoint.instance in assigned
    }
    policy, members = facts.spec.checkpoint, facts.membership.members
    replicas = effective_replicas(policy.memory.replicas, len({e.domain for e in states_by_endpoint}))
    local_ranks, servers = facts.membership.world_size // len(members), servers_per_node(states_by_endpoint)
    topology = topology_of_job(facts)
    targets_by_worker = _assign_targets_cached(
        tuple((m.index, m.node) for m in members), tuple(states_by_endpoint), replicas, local_ranks, topology
    )
    ranks_by_endpoint: dict[MemoryServerEndpoint, int] = {}
    bytes_by_endpoint: dict[MemoryServerEndpoint, int] = {}
    for index, targets in targets_by_worker.items():
        rank_count, save_bytes = local_ranks // len(targets), saves[index] + saves[index] // _OVERHEAD_DIVISOR
        for endpoint in chain(*targets):
            ranks_by_endpoint[endpoint] = ranks_by_endpoint.get(endpoint, 0) + rank_count
            bytes_by_endpoint[endpoint] = bytes_by_endpoint.get(endpoint, 0) + -(
                -save_bytes * rank_count // local_ranks
            )
    return tuple(
        MemoryServerBudget(
            node=endpoint.instance.node,
            server=endpoint.server_index,
            servers=servers,
            ranks=ranks_by_endpoint[endpoint],
            save_bytes=bytes_by_endpoint[endpoint],
            checkpoints=checkpoints_in_memory(facts.spec),
            limit_bytes=states_by_endpoint[endpoint].limit_bytes,
            others_bytes=_other_jobs_bytes(states_by_endpoint[endpoint], bytes_by_endpoint[endpoint]),
            job_limit_bytes=server_size_limit(policy.memory.size_limit_bytes, servers),
        )
        for endpoint in sorted(bytes_by_endpoint, key=lambda e: e.instance)
    )


def server_size_limit(size_limit_bytes: int | None, servers: int) -> int | None:
    """Returns one server's part of a node's `sizeLimit`; None: there is no limit."""
    return None if size_limit_bytes is None else size_limit_bytes // servers


@functools.lru_cache(maxsize=16)
def _assign_targets_cached(
    nodes: tuple[tuple[int, str], ...],
    servers: tuple[MemoryServerEndpoint, ...],
    replicas: int,
    local_ranks: int,
    topology: Topology,
) -> Mapping[int, RankTargets]:
    """Caches the placement, which is costly and seldom changes."""
    return assign_targets(dict(nodes), servers, replicas, local_ranks, topology)


def _other_jobs_bytes(server: ObservedMemoryServer, save_bytes: int) -> int:
    """Returns the least memory that other jobs use: all but this job's saves and one that may be under way."""
    own_bytes = sum(m.stream_bytes + m.stream_bytes // _OVERHEAD_DIVISOR + m.values_bytes for m in server.entries)
    return max(0, (server.used_bytes or 0) - own_bytes - save_bytes)


def _describe_share(share: MemoryServerBudget, verb: str) -> str:
    """Describes what one memory server stores for this job."""
    rank_bytes = format_bytes(share.save_bytes // max(1, share.ranks))
    ranks = f"{share.ranks} rank{'s' * (share.ranks != 1)} at {rank_bytes}{' each' * (share.ranks != 1)}"
    return f"{share.server_name} {verb} {share.checkpoints} checkpoints of {ranks} = {format_bytes(share.needed_bytes)}"


def _describe_remedy(share: MemoryServerBudget, policy: CheckpointPolicy) -> str:
    """Describes which limit is too small, and the remedies."""
    others_clause = f", of which other jobs use {format_bytes(share.others_bytes)}" if share.others_bytes else ""
    owner = "its memory tier" if share.servers == 1 else "its part of the node's memory tier"
    server_clause = (
        f"{owner} has {format_bytes(share.limit_bytes)}{others_clause}" if share.limit_bytes is not None else ""
    )
    job_limit = share.job_limit_bytes
    if job_limit is not None and job_limit < share.needed_bytes:
        problem = f"sizeLimit allows {format_bytes(job_limit)}"
        raise_limit = f"raise checkpoint.memory.sizeLimit to {format_bytes(share.needed_bytes * share.servers)} or more"
    else:
        problem, node_bytes = server_clause, (share.needed_bytes + share.others_bytes) * share.servers
        raise_limit = f"raise the memory tier's maxMemory to {format_bytes(node_bytes)} or more"
    remedies = [
        raise_limit,
        *(["keep fewer checkpoints"] if policy.memory.keep > 1 else []),
        *(["use fewer replicas"] if policy.memory.replicas > 1 else []),
        "train with more workers",
    ]
    return f"{problem}: {', '.join(remedies[:-1])} or {remedies[-1]}"
