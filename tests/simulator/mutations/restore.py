"""Rules by which a world is claimed and its parent chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulator.mutations.mutation import (
    DYING_TRAINERS,
    ENDING,
    PARTED,
    PROMOTING,
    ROUGH,
    SERVED,
    STRAYING,
    TIED,
    UNGIVING,
    Mutation,
    constant,
    planning,
)
from simulator.scopes import Scope
from simulator.world import Decisions
from surefoot.protocol.checkpoints import completeness
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint
from surefoot_operator.coordinator import (
    desired_messages,
    listings,
    pending_requests,
    sessions,
)
from surefoot_operator.job_snapshot import JobSnapshot, ObservedMemoryServer
from surefoot_operator.policy.core import facts
from surefoot_operator.policy.core.actions import Plan
from surefoot_operator.policy.failure import memory_server_liveness
from surefoot_operator.policy.failure.spare_workers import required_indexes
from surefoot_operator.policy.maintenance import maintenance_plan as upkeep
from surefoot_operator.policy.membership import claim, restore_point
from surefoot_operator.policy.planning import plan


def _oldest(found: Any) -> Checkpoint | None:
    return min(found, key=lambda c: c.step, default=None)


def _unread(seen: JobSnapshot) -> JobSnapshot:
    """One holder less than there are: what it has is never read."""
    return replace(seen, servers=tuple(h for h in seen.servers if h.endpoint.instance.node != "n0"))


def _unready(seen: JobSnapshot) -> Plan:
    """A world of every worker that is heard, allowed size or not."""
    made = plan.plan(seen)
    world = made.status.membership
    if world is None or world.state != "Committed" or world == seen.status.membership or len(world.members) < 2:
        return made
    fewer = replace(world, members=world.members[:1])
    return replace(made, status=replace(made.status, membership=fewer))


def _forgotten_status(seen: JobSnapshot) -> Plan:
    """A leader that writes status anew instead of on."""
    made = plan.plan(seen)
    return replace(made, status=replace(made.status, next_attempt=1, restarts=0)) if seen.now_seconds > 3 else made


def _any_ready(holders: tuple[ObservedMemoryServer, ...], epoch: int) -> tuple[ObservedMemoryServer, ...]:
    """Whoever answers counts, sealed or not."""
    return tuple(h for h in holders if h.state == "Ready")


def _ranks_that_are_there(ranks: Any) -> frozenset[str]:
    """A checkpoint counts though a rank's part is nowhere."""
    return frozenset(copies[0].layout for copies in ranks.values())


def _whoever_lives(known: facts.Facts, session: Any) -> bool:
    """Silent or not: whoever ever said hello may be a member."""
    return facts.worker_id(session) in known.workers


def _whoever_spoke(known: facts.Facts) -> list[Any]:
    """One agent per wanted index, whether its line is there or not."""
    newest = {s.index: s for s in sorted(known.sessions.values(), key=lambda s: s.attempt)}
    return [s for s in newest.values() if s.index in required_indexes(known)]


def _named_by_anybody(status: Any, usable: Any, replicas: int, *_: Any) -> desired_messages.DesiredState:
    """Agents hear of every holder that answers, whether status names it or not."""
    return _rule(replace(status, named_holders=usable.endpoints), usable, replicas)


_rule = desired_messages.derive_desired_state


def _asked_before(order: pending_requests.PendingRequests) -> pending_requests.PendingRequests:
    return order


def _another_of_its_node(known: facts.Facts, silent: list[MemoryServerEndpoint]) -> list[MemoryServerEndpoint]:
    """A server that answers tells that a silent one beside it is gone."""
    answering = {h.endpoint.instance.node for h in known.snapshot.servers if h.state == "Ready"}
    return [one for one in silent if one.instance.node not in answering]


_SEALED = tuple((module, "fenced_servers_at", _any_ready) for module in (facts, facts))

RESTORE = (
    Mutation("a world that is tied to a size gets another", patches=((plan, "size_constraint_of", constant(None)),), settings=TIED),
    Mutation("the oldest checkpoint is chosen", patches=((restore_point, "newest_checkpoint", _oldest),)),
    Mutation("a holder is not read", decisions=planning(_unread)),
    Mutation("silent holders are neither awaited nor given up",
             patches=((restore_point, "_wait_for_unreachable_servers", constant(None)), (restore_point, "unreachable_servers", lambda _: []))),
    Mutation("silent holders are not given up", patches=((restore_point, "unreachable_servers", lambda _: []),)),
    Mutation("a world is cut after it was planned", decisions=Decisions(plan=_unready)),
    Mutation("attempts and restarts are forgotten", decisions=Decisions(plan=_forgotten_status)),
    Mutation("a silent named holder is forgotten at once",
             patches=((upkeep, "_is_removed", lambda end, known, sealed, nodes: end.instance not in sealed),), settings=PARTED),
    Mutation("a server that answers stands for a silent one of its node",
             patches=((memory_server_liveness, "_without_restarted", _another_of_its_node),), settings=SERVED),
    Mutation("a silent server is forgotten once another one of its node answers",
             patches=((upkeep, "_is_removed", lambda end, known, sealed, servers: end.instance not in sealed
                       and end.instance.node in {one.node for one in sealed}),), settings=SERVED),
    Mutation("agents hear of holders that status does not name", patches=((desired_messages, "derive_desired_state", _named_by_anybody),),
             settings=replace(PARTED, steps=60, faults=14, fault_span_seconds=16.0, replicas=1,
                              kinds=("operator loses a holder for long", "trainer dies", "holder restarts"))),
    Mutation("readings of an older epoch and unsealed holders count", patches=_SEALED,
             settings=replace(PARTED, steps=60, faults=14, fault_span_seconds=16.0)),
    Mutation("a listing made before the last index counts", patches=((listings, "discard_listing", _asked_before),), settings=PROMOTING,
             scope=Scope("listed before reading", 1, 2, 1, 1, persistent=True, off=frozenset({"list after read"}))),
    Mutation("the floor does not bind the parent", patches=((restore_point, "last_uploaded_bound", constant(None)),),
             settings=UNGIVING),
    Mutation("whatever an epoch saved counts, also beyond where a later one branched off",
             patches=((completeness, "is_on_lineage", constant(True)),), settings=STRAYING,
             scope=Scope("beyond the branch", 1, 3, 1, 1)),
    Mutation("a checkpoint counts though a rank's part is nowhere",
             patches=((completeness, "_agreed_layout_digests", _ranks_that_are_there), (completeness, "_world_size_matches", constant(True)))),
    Mutation("a bad checkpoint is chosen again", patches=((restore_point, "unreadable_checkpoints", constant(frozenset())),),
             settings=replace(ROUGH, kinds=("chunk is damaged", "trainer dies"), faults=16, replicas=1)),
    Mutation("drains of the old epoch are not awaited", patches=((restore_point, "_wait_for_flushes", constant(None)),), settings=DYING_TRAINERS),
    Mutation("facts of an older epoch count in the next", patches=((sessions, "_enter_generation", lambda s, g: replace(
        s, observed=replace(s.observed, generation=max(g, s.observed.generation)))),), settings=ENDING),
    Mutation("whoever ever said hello may be a member", patches=((claim, "is_usable", _whoever_lives), (claim, "newest_responsive_sessions", _whoever_spoke))),
)  # fmt: skip
