"""Derives the messages that each agent must have received, and which of them its connection was not sent yet.

Pure and level-triggered: `desired_messages` lists all of them, `diff_messages` those that differ from the messages sent
on a connection. A new connection has been sent nothing and receives everything; agents ignore repeated messages. Called
by `surefoot_operator.coordinator.agent_channel` after every change, and by the simulator.
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
from surefoot_operator.coordinator.conversations import desired_requests, find_workers_with_changed_requests
from surefoot_operator.coordinator.sessions import Session, Sessions, find_store_address
from surefoot_operator.job_snapshot import ObservedMemoryServer
from surefoot_operator.policy.failure.memory_server_liveness import UsableMemoryServers

# ---- which memory servers an agent is sent ---------------------------------------------------------------------------
# Chooses the memory servers that each agent is sent: those that its worker needs. Sending two thousand servers to each
# of two thousand agents would take the operator seconds whenever a job starts or the leader changes. A worker writes to
# its targets, and after a failure most workers read only the saves of their own ranks and of rank 0. An agent that
# needs more sends `ListAllServers`; until then it treats a server it does not know as unreachable, never as absent.

SEND_ALL_UP_TO_SERVERS = 32
"""Up to this many memory servers are sent to every agent: about 3 kB, and no restore has to ask for more."""

Copies = Mapping[int, tuple[MemoryServerInstance, ...]]
"""Rank → the memory servers that have its save."""


@dataclass(frozen=True, slots=True)
class ServerListScope:
    """Limits which memory servers the agents of one membership are sent."""

    membership: Membership | None = None
    """The membership; None: no generation was claimed yet."""
    instances_by_rank: Copies = field(default_factory=dict)
    """Servers with the restore point's saves, read when the generation was committed; may be incomplete."""
    send_all_up_to: int = SEND_ALL_UP_TO_SERVERS
    """Up to this many servers, every agent is sent all of them."""


def update_scope(
    old_scope: ServerListScope | None,
    status: JobStatus,
    observe_servers: Callable[[], Sequence[ObservedMemoryServer]],
    send_all_up_to: int | None = None,
) -> ServerListScope:
    """Returns the scope of the stored membership; the same object until the membership changes.

    The servers' indexes change with every save. The restore point does not, so agents are sent no update for them.

    Args:
        old_scope: The previous scope; None: there is none.
        status: The stored status.
        observe_servers: Returns the observed memory servers; called only if the scope must be computed.
        send_all_up_to: Up to this many servers, every agent is sent all of them; None: `SEND_ALL_UP_TO_SERVERS`.
    """
    membership, send_all_up_to = status.membership, SEND_ALL_UP_TO_SERVERS if send_all_up_to is None else send_all_up_to
    if old_scope is not None and old_scope.membership == membership:
        return old_scope
    if (
        membership is None
        or membership.state != "Committed"
        or membership.parent is None
        or membership.parent.is_imported
    ):
        return ServerListScope(membership, send_all_up_to=send_all_up_to)
    instances_by_rank: dict[int, list[MemoryServerInstance]] = defaultdict(list)
    for server in observe_servers():
        if server.state == "Ready":
            for manifest in server.entries:
                if (manifest.save.step, manifest.save.generation) == (
                    membership.parent.step,
                    membership.parent.generation,
                ):
                    instances_by_rank[manifest.save.rank].append(server.endpoint.instance)
    return ServerListScope(
        membership, {rank: tuple(instances) for rank, instances in instances_by_rank.items()}, send_all_up_to
    )


def select_needed_servers(
    status: JobStatus,
    servers: Sequence[MemoryServerEndpoint],
    targets: Mapping[int, RankTargets],
    scope: ServerListScope,
) -> Mapping[int, tuple[MemoryServerEndpoint, ...]] | None:
    """Maps each worker's index to the memory servers that it needs; None: every worker is sent all servers.

    Args:
        status: The stored status.
        servers: All usable memory servers.
        targets: Worker index → the servers to which its ranks save.
        scope: The servers that have the restore point's saves, and the limit up to which all are sent.
    """
    membership = status.membership
    if membership is None or len(servers) <= scope.send_all_up_to:
        return None
    endpoints = {endpoint.instance: endpoint for endpoint in servers}
    local_ranks = membership.world_size // max(1, len(membership.members))
    needed: dict[int, tuple[MemoryServerEndpoint, ...]] = {}
    for group_rank, member in enumerate(membership.members):
        server_by_instance = {endpoint.instance: endpoint for endpoint in chain(*targets.get(member.index, ()))}
        for rank in (0, *range(group_rank * local_ranks, (group_rank + 1) * local_ranks)):
            server_by_instance |= {
                instance: endpoints[instance]
                for instance in scope.instances_by_rank.get(rank, ())
                if instance in endpoints
            }
        needed[member.index] = tuple(sorted(server_by_instance.values(), key=ENDPOINT_ORDER))
    return needed


def is_gc_owner(group_rank: int) -> bool:
    """Whether this member deletes old saves while no operator leads; it must know all memory servers."""
    return group_rank == 0


def wants_all_servers(session: Session) -> bool:
    """Whether the agent asked on this connection for the list of all memory servers."""
    return session.wants_all_servers


# ---- desired messages ------------------------------------------------------------------------------------------------

Delivered = Mapping[str, ToAgent]
"""The last message of each slot that one connection was sent; see `slot_of`."""


@dataclass(frozen=True, slots=True)
class DesiredState:
    """The stored state from which every message to agents is derived."""

    status: JobStatus
    """The stored status of the job."""
    replicas: int
    """Copies to keep of each save (R_eff): the configured number, limited by the failure domains with a server."""
    servers: tuple[MemoryServerEndpoint, ...] = ()
    """Usable memory servers that are assigned in the status; agents are never sent the address of another one."""
    targets: Mapping[int, RankTargets] = field(default_factory=dict)
    """Worker index → the servers to which its ranks save."""
    needed_servers: Mapping[int, tuple[MemoryServerEndpoint, ...]] | None = None
    """Worker index → the members of `servers` that it is sent; None: every worker is sent all of them."""
    scope: ServerListScope = field(default_factory=ServerListScope)
    """The limit from which `needed_servers` was computed."""
    token: str = field(default="", repr=False)
    """The generation's secret, with which its members authenticate to each other; not stored in the status."""
    group_rank_by_member: Mapping[tuple[int, int, str], int] = field(default_factory=dict)
    """(index, attempt, incarnation) of each member → its group rank, from 0."""
    servers_unreachable: bool = False
    """Whether the operator reaches none of `servers`, so that the first member's agent must delete old saves there."""
    inputs: tuple[object, ...] = field(default=(), repr=False)
    """The arguments from which everything except the status was derived; see `update_desired_state`."""

    @property
    def sent_parts(self) -> tuple[object, ...]:
        """The values that agents receive; two states with equal parts send equal messages."""
        status = self.status
        interval_exponent = None if status.memory_interval is None else status.memory_interval.exponent
        shared = (
            status.membership,
            status.restarts,
            status.lineage,
            status.source_job,
            status.skipped_data,
            interval_exponent,
        )
        return (
            *shared,
            self.replicas,
            self.servers,
            self.targets,
            self.needed_servers,
            self.token,
            self.servers_unreachable,
        )


def update_desired_state(
    old_state: DesiredState | None,
    status: JobStatus,
    usable: UsableMemoryServers,
    replicas: int,
    token: str,
    scope: ServerListScope = ServerListScope(),
    topology: Topology = UNKNOWN_TOPOLOGY,
) -> DesiredState:
    """Derives the desired state; reuses everything but the status if nothing else changed.

    Most reconciles change neither membership nor servers, and choosing targets again would take most of their time.
    Takes the same arguments as `derive_desired_state`, and the previous state in `old_state`.
    """
    inputs = (status.membership, status.assigned_servers, usable, replicas, token, scope, topology)
    if old_state is not None and old_state.inputs == inputs:
        return replace(old_state, status=status)
    new_state = derive_desired_state(status, usable, replicas, token, scope, topology)
    return replace(new_state, inputs=inputs)


def derive_desired_state(
    status: JobStatus,
    usable: UsableMemoryServers,
    replicas: int,
    token: str = "",
    scope: ServerListScope = ServerListScope(),
    topology: Topology = UNKNOWN_TOPOLOGY,
) -> DesiredState:
    """Derives the desired state from the status and the usable memory servers.

    A server must be assigned in the stored status before an agent is sent its address. The newest save may be there,
    and the operator that chooses the next restore point must know which servers to wait for.

    Args:
        status: The stored status.
        usable: The memory servers that the operator or an agent can reach.
        replicas: The configured number of copies of each save.
        token: The generation's secret.
        scope: Limits which servers each agent is sent.
        topology: The failure domains of the nodes.
    """
    assigned_instances = {endpoint.instance for endpoint in status.assigned_servers}
    servers = tuple(sorted((e for e in usable.endpoints if e.instance in assigned_instances), key=ENDPOINT_ORDER))
    # agents of a claimed generation are sent StopTrainers only; choosing targets for thousands would delay it
    members = (
        status.membership.members if status.membership is not None and status.membership.state == "Committed" else ()
    )
    effective_count = effective_replicas(replicas, len({e.domain for e in servers}))
    local_ranks = status.membership.world_size // len(members) if status.membership is not None and members else 1
    targets = assign_targets({m.index: m.node for m in members}, servers, effective_count, local_ranks, topology)
    group_rank_by_member = {(m.index, m.attempt, m.incarnation): n for n, m in enumerate(members)}
    restored_step = (
        status.membership.parent.step if status.membership is not None and status.membership.parent is not None else 0
    )
    # the agent that deletes old saves does not know which checkpoints are unreadable: while there is one newer than
    # the restore point, it would keep that one in place of a readable one
    servers_unreachable = (
        not usable.are_reachable
        and bool(servers)
        and not any(checkpoint.step > restored_step for checkpoint in status.unreadable_checkpoints)
    )
    needed = select_needed_servers(status, servers, targets, scope) if members else None
    return DesiredState(
        status, effective_count, servers, targets, needed, scope, token, group_rank_by_member, servers_unreachable
    )


def find_affected_workers(before: Sessions, after: Sessions) -> Collection[WorkerId] | None:
    """Returns the workers whose messages a change of the sessions may affect; None: all workers.

    The worker that sent the message is not included. Most reports affect only their sender; comparing all workers'
    messages for each report would cost the square of their number.
    """
    if before.membership != after.membership or find_store_address(before) != find_store_address(after):
        return None
    old_requests, new_requests = before.requests, after.requests
    if old_requests is new_requests:
        return ()
    return find_workers_with_changed_requests(old_requests, new_requests)


def list_desired_messages(
    desired: DesiredState, sessions: Sessions, worker: WorkerId, send_all_servers: bool = False
) -> tuple[ToAgent, ...]:
    """Lists every message that this worker's agent must have received.

    `send_all_servers`: its connection was already sent all memory servers, so its next list has all of them too.
    """
    session = sessions.by_worker.get(worker)
    membership = desired.status.membership
    if session is None:
        return ()
    agent_messages: list[ToAgent] = []
    if membership is not None and membership.state == "Claimed":
        agent_messages.append(StopTrainers(membership.generation, membership.reason))
    elif membership is not None:
        group_rank = _group_rank_of(desired.group_rank_by_member, session)
        if group_rank is None:
            # stops a member of an older generation that was frozen and thaws; a warm spare has nothing to stop
            agent_messages.append(
                StopTrainers(membership.generation, f"generation {membership.generation} runs without this agent")
            )
        else:
            agent_messages += _member_messages(
                desired, sessions, session, group_rank, _servers_sent_to(desired, session, group_rank, send_all_servers)
            )
    agent_messages += desired_requests(sessions.requests, worker)
    return tuple(agent_messages)


def _group_rank_of(group_rank_by_member: Mapping[tuple[int, int, str], int], session: Session) -> int | None:
    return group_rank_by_member.get((session.observed.index, session.observed.attempt, session.observed.incarnation))


def _servers_sent_to(
    desired: DesiredState, session: Session, group_rank: int, send_all_servers: bool
) -> tuple[MemoryServerEndpoint, ...]:
    if desired.needed_servers is None or send_all_servers or wants_all_servers(session) or is_gc_owner(group_rank):
        return desired.servers
    needed = desired.needed_servers.get(session.observed.index, ())
    return needed if len(needed) < len(desired.servers) else desired.servers


def _member_messages(
    desired: DesiredState,
    sessions: Sessions,
    session: Session,
    group_rank: int,
    servers: tuple[MemoryServerEndpoint, ...],
) -> list[ToAgent]:
    membership = desired.status.membership
    assert membership is not None
    local_ranks = membership.world_size // len(membership.members)
    by_rank = [tuple(e.instance for e in endpoints) for endpoints in desired.targets.get(session.observed.index, ((),))]
    member_messages: list[ToAgent] = [
        Assign(
            generation=membership.generation,
            world_size=membership.world_size,
            first_rank=group_rank * local_ranks,
            local_ranks=local_ranks,
            group_rank=group_rank,
            group_size=len(membership.members),
            restarts=desired.status.restarts,
            parent=membership.parent,
            lineage=tuple((e.generation, e.parent, e.world_size) for e in desired.status.lineage),
            token=desired.token,
            hosts_store=group_rank == 0,
            store=find_store_address(sessions),
            servers=servers,
            is_partial=len(servers) < len(desired.servers),
            targets=by_rank[0],
            rank_targets=tuple(by_rank) if len(by_rank) > 1 else (),
            replicas=desired.replicas,
            source_job=desired.status.source_job
            if membership.parent is not None and membership.parent.is_imported
            else None,
            skip_steps=sum(
                skipped.steps for skipped in desired.status.skipped_data if skipped.generation == membership.generation
            ),
            servers_unreachable=desired.servers_unreachable and group_rank == 0,
        )
    ]
    barrier = desired_barrier(
        sessions.requests.barrier, membership.generation, session.hello_generation == membership.generation
    )
    if barrier is not None:
        member_messages.append(barrier)
    if desired.status.memory_interval is not None:
        member_messages.append(IntervalExponent(membership.generation, desired.status.memory_interval.exponent))
    return member_messages


def slot_of(message: ToAgent) -> str:
    """Names a message's slot: a newer message in the same slot replaces an older one."""
    match message:
        case messages.ListPersistent() | messages.RepairSave() | messages.DeletePersistent():
            return f"request {message.request}"
        case StopTrainers() | Assign() | MemoryServers():
            return "world"
        case _:
            return type(message).__name__


_SERVERS_SLOT = "holders"
"""Slot of the newest Assign. StopTrainers does not replace it, because the connection's server list outlives it."""


def was_sent_all_servers(sent: Delivered) -> bool:
    """Whether a connection was sent all memory servers.

    It then receives all later changes too: withdrawing two thousand servers costs as much as sending them.
    """
    newest_assign = sent.get(_SERVERS_SLOT)
    return isinstance(newest_assign, Assign) and not newest_assign.is_partial


def diff_messages(sent: Delivered, desired: Iterable[ToAgent]) -> tuple[tuple[ToAgent, ...], Delivered]:
    """Compares the messages that a connection was sent with those that its agent must have.

    Returns:
        The messages to send, and the messages that will then have been sent.
    """
    to_send: list[ToAgent] = []
    sent_afterwards: dict[str, ToAgent] = {}
    for message in desired:
        slot = slot_of(message)
        difference = _message_to_send(sent.get(slot), message)
        if difference is not None:
            to_send.append(difference)
        sent_afterwards[slot] = message
        if isinstance(message, Assign):
            sent_afterwards[_SERVERS_SLOT] = message
    for slot, message in sent.items():
        # a request that is no longer wanted was answered or dropped; other slots keep their last message
        if slot not in sent_afterwards and not slot.startswith("request "):
            sent_afterwards[slot] = message
    return tuple(to_send), sent_afterwards


def _message_to_send(sent: ToAgent | None, desired: ToAgent) -> ToAgent | None:
    """Returns the message to send; None if it was sent. Sends MemoryServers if only those of an Assign changed."""
    if sent == desired:
        return None
    if isinstance(sent, Assign) and isinstance(desired, Assign) and sent.generation == desired.generation:
        if sent.store != desired.store:
            return desired
        return None if desired.tier == sent.tier else desired.tier
    return desired
