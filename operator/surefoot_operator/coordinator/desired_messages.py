"""Derives the messages each agent must have received, and the unsent rest.

Pure and level-triggered: `desired_messages` gives everything, `outbox_diff` the difference from what a connection was
sent. A new connection was sent nothing, so it receives everything; agents ignore what they have already. Called by
`surefoot_operator.coordinator.agent_channel` after every change, and by the simulator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from surefoot.protocol import messages
from surefoot.protocol.checkpoints.completeness import effective_replicas
from surefoot.protocol.checkpoints.placement import UNKNOWN_TOPOLOGY, RankTargets, Topology, assign_targets
from surefoot.protocol.identities import ENDPOINT_ORDER, MemoryServerEndpoint, MemoryServerInstance, WorkerId
from surefoot.protocol.messages import Assign, IntervalExponent, MemoryServers, StopTrainers, ToAgent
from surefoot_operator.api.status import JobStatus, Membership
from surefoot_operator.coordinator.barrier import desired_barrier
from surefoot_operator.coordinator.conversations import affected_workers, desired_requests
from surefoot_operator.coordinator.sessions import Session, Sessions, store_address
from surefoot_operator.job_snapshot import ObservedMemoryServer
from surefoot_operator.policy.failure.memory_server_liveness import UsableMemoryServers

# ---- which memory servers an agent is sent ---------------------------------------------------------------------------
# Chooses the holders that each agent is told of. Each is told of those that its worker needs: a list of two thousand
# holders for each of two thousand agents takes seconds of the operator, whenever a job begins or another operator
# leads. A worker writes to its targets, and most read after a failure what their own ranks and the first one saved. Who
# needs more asks (`HoldersWanted`); until then what it was not told of is silent to it, and never absent.

SEND_ALL_UP_TO = 32
"""So many are told to everybody: three kilobytes, and nobody waits for an answer in a restore."""

Copies = Mapping[int, tuple[MemoryServerInstance, ...]]
"""Rank → the holders that have its save."""


@dataclass(frozen=True, slots=True)
class ServerListScope:
    """Bounds what the agents of one world are told of."""

    membership: Membership | None = None
    copies: Copies = field(default_factory=dict)
    """Of the restore point, as far as it was read when the world began: a hint, as nobody takes it for all."""
    send_all: int = SEND_ALL_UP_TO


def scope_after(
    before: ServerListScope | None,
    status: JobStatus,
    seen: Callable[[], Sequence[ObservedMemoryServer]],
    few: int | None = None,
) -> ServerListScope:
    """Returns the stored world's scope, the same while it stands.

    Indexes change with every save; what a world restores does not, and no agent is to hear of their changes.
    """
    world, few = status.membership, SEND_ALL_UP_TO if few is None else few
    if before is not None and before.membership == world:
        return before
    if world is None or world.state != "Committed" or world.parent is None or world.parent.imported:
        return ServerListScope(world, send_all=few)
    found: dict[int, list[MemoryServerInstance]] = defaultdict(list)
    for holder in seen():
        if holder.state == "Ready":
            for manifest in holder.entries:
                if (manifest.save.step, manifest.save.generation) == (world.parent.step, world.parent.generation):
                    found[manifest.save.rank].append(holder.endpoint.instance)
    return ServerListScope(world, {rank: tuple(having) for rank, having in found.items()}, few)


def needed_servers(
    status: JobStatus,
    holders: Sequence[MemoryServerEndpoint],
    targets: Mapping[int, RankTargets],
    scope: ServerListScope,
) -> Mapping[int, tuple[MemoryServerEndpoint, ...]] | None:
    """Maps worker index to the holders that it needs; None: all.

    All where there are few.
    """
    world = status.membership
    if world is None or len(holders) <= scope.send_all:
        return None
    endpoints = {endpoint.instance: endpoint for endpoint in holders}
    local = world.world_size // max(1, len(world.members))
    needed: dict[int, tuple[MemoryServerEndpoint, ...]] = {}
    for place, member in enumerate(world.members):
        own = {endpoint.instance: endpoint for endpoint in chain(*targets.get(member.index, ()))}
        for rank in (0, *range(place * local, (place + 1) * local)):
            own |= {one: endpoints[one] for one in scope.copies.get(rank, ()) if one in endpoints}
        needed[member.index] = tuple(sorted(own.values(), key=ENDPOINT_ORDER))
    return needed


def is_gc_owner(place: int) -> bool:
    """Whether this member drops old saves where nobody leads.

    It must know of every holder.
    """
    return place == 0


def wants_all_servers(session: Session) -> bool:
    """Whether this line's agent asked to be told of every holder."""
    return session.wants_servers


# ---- desired messages ------------------------------------------------------------------------------------------------

Delivered = Mapping[str, ToAgent]
"""What one connection was told last, by slot; see `slot_of`."""


@dataclass(frozen=True, slots=True)
class DesiredState:
    """The stored state from which every message to agents is derived."""

    status: JobStatus
    replicas: int
    """R_eff: copies of each save, given the failure domains that live."""
    servers: tuple[MemoryServerEndpoint, ...] = ()
    """Named in status, and provisioned and answering or read by an agent: nobody else's address is ever given away."""
    targets: Mapping[int, RankTargets] = field(default_factory=dict)
    """worker index → where its ranks' saves go."""
    needed: Mapping[int, tuple[MemoryServerEndpoint, ...]] | None = None
    """worker index → those of `holders` that it is told of; None: all of them."""
    scope: ServerListScope = field(default_factory=ServerListScope)
    token: str = field(default="", repr=False)
    """The epoch's secret, which stands nowhere else."""
    member_index: Mapping[tuple[int, int, str], int] = field(default_factory=dict)
    """(index, attempt, incarnation) of each member → its place in the world."""
    servers_unreachable: bool = False
    """The operator reaches none of `holders`: the first member's agent drops old saves from them."""
    inputs: tuple[object, ...] = field(default=(), repr=False)
    """What all of this but the status follows from; see `desired_state_after`."""

    @property
    def sent_parts(self) -> tuple[object, ...]:
        """The parts that agents receive; states equal in these send alike."""
        status = self.status
        level = None if status.memory_interval is None else status.memory_interval.exponent
        shared = (status.membership, status.restarts, status.lineage, status.source_job, status.skipped_data, level)
        return (*shared, self.replicas, self.servers, self.targets, self.needed, self.token, self.servers_unreachable)


def desired_state_after(
    old: DesiredState | None,
    status: JobStatus,
    usable: UsableMemoryServers,
    replicas: int,
    token: str,
    scope: ServerListScope = ServerListScope(),
    topology: Topology = UNKNOWN_TOPOLOGY,
) -> DesiredState:
    """Derives the desired state, reusing what has not changed.

    Most rounds change neither world nor holders, and placing each worker's copies anew would cost most of the round.
    """
    given = (status.membership, status.assigned_servers, usable, replicas, token, scope, topology)
    if old is not None and old.inputs == given:
        return replace(old, status=status)
    made = desired_state(status, usable, replicas, token, scope, topology)
    return replace(made, inputs=given)


def desired_state(
    status: JobStatus,
    usable: UsableMemoryServers,
    replicas: int,
    token: str = "",
    scope: ServerListScope = ServerListScope(),
    topology: Topology = UNKNOWN_TOPOLOGY,
) -> DesiredState:
    """Derives the desired state from status, usable holders, R and the secret.

    A holder must be named in status before an agent hears of it: what is saved there could be the newest, and whoever
    chooses the next restore point must know whom to wait for.
    """
    named = {endpoint.instance for endpoint in status.assigned_servers}
    holders = tuple(sorted((e for e in usable.endpoints if e.instance in named), key=ENDPOINT_ORDER))
    # of a claimed world agents hear its Stop alone: placing copies of thousands would only keep it waiting
    members = (
        status.membership.members if status.membership is not None and status.membership.state == "Committed" else ()
    )
    wanted = effective_replicas(replicas, len({e.domain for e in holders}))
    local = status.membership.world_size // len(members) if status.membership is not None and members else 1
    places = assign_targets({m.index: m.node for m in members}, holders, wanted, local, topology)
    numbers = {(m.index, m.attempt, m.incarnation): n for n, m in enumerate(members)}
    newest = (
        status.membership.parent.step if status.membership is not None and status.membership.parent is not None else 0
    )
    # whoever is to drop old saves is told of none that are bad, and would keep such a one in place of a good one
    unseen = (
        not usable.reachable and bool(holders) and not any(one.step > newest for one in status.unreadable_checkpoints)
    )
    needed = needed_servers(status, holders, places, scope) if members else None
    return DesiredState(status, wanted, holders, places, needed, scope, token, numbers, unseen)


def concerned(before: Sessions, after: Sessions) -> Collection[WorkerId] | None:
    """Workers whose messages a change of sessions may affect; None: all.

    Besides the one that spoke. Most of what an agent reports concerns itself alone; sending it all to everybody would
    cost a world the square of its size.
    """
    if before.membership != after.membership or store_address(before) != store_address(after):
        return None
    old, new = before.orders, after.orders
    if old is new:
        return ()
    return affected_workers(old, new)


def desired_messages(
    rule: DesiredState, sessions: Sessions, worker: WorkerId, whole: bool = False
) -> tuple[ToAgent, ...]:
    """Lists every message that this worker's agent must have received.

    `whole`: it is told of every holder.
    """
    session = sessions.by_worker.get(worker)
    world = rule.status.membership
    if session is None:
        return ()
    words: list[ToAgent] = []
    if world is not None and world.state == "Claimed":
        words.append(StopTrainers(world.generation, world.reason))
    elif world is not None:
        place = _member_index(rule.member_index, session)
        if place is None:
            # A thawed member of an older world must not go on; for a newcomer that waits warm this changes nothing.
            words.append(StopTrainers(world.generation, f"epoch {world.generation} runs without this agent"))
        else:
            words += _to_member(rule, sessions, session, place, _servers_of(rule, session, place, whole))
    words += desired_requests(sessions.orders, worker)
    return tuple(words)


def _member_index(places: Mapping[tuple[int, int, str], int], session: Session) -> int | None:
    return places.get((session.observed.index, session.observed.attempt, session.observed.incarnation))


def _servers_of(rule: DesiredState, session: Session, place: int, whole: bool) -> tuple[MemoryServerEndpoint, ...]:
    if rule.needed is None or whole or wants_all_servers(session) or is_gc_owner(place):
        return rule.servers
    needed = rule.needed.get(session.observed.index, ())
    return needed if len(needed) < len(rule.servers) else rule.servers


def _to_member(
    rule: DesiredState, sessions: Sessions, session: Session, place: int, holders: tuple[MemoryServerEndpoint, ...]
) -> list[ToAgent]:
    world = rule.status.membership
    assert world is not None
    local = world.world_size // len(world.members)
    by_rank = [tuple(e.instance for e in ours) for ours in rule.targets.get(session.observed.index, ((),))]
    words: list[ToAgent] = [
        Assign(
            generation=world.generation,
            world_size=world.world_size,
            first_rank=place * local,
            local_ranks=local,
            group_rank=place,
            group_size=len(world.members),
            restarts=rule.status.restarts,
            parent=world.parent,
            lineage=tuple((e.generation, e.parent, e.world_size) for e in rule.status.lineage),
            token=rule.token,
            hosts_store=place == 0,
            store=store_address(sessions),
            servers=holders,
            is_partial=len(holders) < len(rule.servers),
            targets=by_rank[0],
            rank_targets=tuple(by_rank) if len(by_rank) > 1 else (),
            replicas=rule.replicas,
            source_job=rule.status.source_job if world.parent is not None and world.parent.imported else None,
            skip_steps=sum(one.steps for one in rule.status.skipped_data if one.generation == world.generation),
            servers_unreachable=rule.servers_unreachable and place == 0,
        )
    ]
    barrier = desired_barrier(sessions.orders.barrier, world.generation, session.hello_generation == world.generation)
    if barrier is not None:
        words.append(barrier)
    if rule.status.memory_interval is not None:
        words.append(IntervalExponent(world.generation, rule.status.memory_interval.exponent))
    return words


def slot_of(message: ToAgent) -> str:
    """Names a message's slot: a newer message of one slot replaces it."""
    match message:
        case messages.ListPersistent() | messages.RepairSave() | messages.DeletePersistent():
            return f"request {message.request}"
        case StopTrainers() | Assign() | MemoryServers():
            return "world"
        case _:
            return type(message).__name__


_LISTED = "holders"
"""The slot of the newest assignment, which a halt does not replace: the line's list outlives it."""


def was_sent_all_servers(told: Delivered) -> bool:
    """Whether a line was told of every holder.

    It goes on to be, by changes: taking two thousand back costs as much as telling them.
    """
    newest = told.get(_LISTED)
    return isinstance(newest, Assign) and not newest.is_partial


def outbox_diff(told: Delivered, wanted: Iterable[ToAgent]) -> tuple[tuple[ToAgent, ...], Delivered]:
    """Returns the messages to send, and what will have been delivered."""
    send: list[ToAgent] = []
    now_told: dict[str, ToAgent] = {}
    for message in wanted:
        slot = slot_of(message)
        difference = _difference(told.get(slot), message)
        if difference is not None:
            send.append(difference)
        now_told[slot] = message
        if isinstance(message, Assign):
            now_told[_LISTED] = message
    for slot, message in told.items():
        if slot not in now_told and not slot.startswith("request "):
            now_told[slot] = message
    return tuple(send), now_told


def _difference(told: ToAgent | None, wanted: ToAgent) -> ToAgent | None:
    """None if it was said. An assignment whose holders alone changed is said as Holders."""
    if told == wanted:
        return None
    if isinstance(told, Assign) and isinstance(wanted, Assign) and told.generation == wanted.generation:
        if told.store != wanted.store:
            return wanted
        return None if wanted.tier == told.tier else wanted.tier
    return wanted
