"""A coordinator's sessions in the middle of a job: two members and a spare, all pure."""

from __future__ import annotations

from dataclasses import replace

from support.builders import told
from support.fakes.fake_agent import hello
from surefoot.protocol.checkpoints.completeness import LineageEntry
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, MemoryServerInstance, WorkerId
from surefoot.protocol.messages import (
    Heartbeat,
    ToAgent,
)
from surefoot_operator.api.status import JobStatus, Member, Membership
from surefoot_operator.coordinator.desired_messages import derive_desired_state, list_desired_messages
from surefoot_operator.coordinator.sessions import (
    Sessions,
    apply_hello,
    apply_membership,
    create_sessions,
)
from surefoot_operator.policy.failure.memory_server_liveness import UsableMemoryServers

A, B, C = WorkerId(0, 1), WorkerId(1, 1), WorkerId(2, 1)
NODES = [
    MemoryServerEndpoint(MemoryServerInstance(f"node-{n}", f"run{n}"), "127.0.0.1", 7000 + n, f"node-{n}")
    for n in range(3)
]
COMMITTED = Membership(
    generation=2,
    state="Committed",
    parent=Checkpoint(1, 40),
    world_size=4,
    members=(Member(0, 1, "i0-1", "node-0"), Member(1, 1, "i1-1", "node-1")),
)
STATUS = JobStatus(
    membership=COMMITTED,
    lineage=(LineageEntry(1, None, 6), LineageEntry(2, Checkpoint(1, 40), 4)),
    assigned_servers=tuple(NODES),
    restarts=1,
)
CLAIMED = replace(STATUS, membership=replace(COMMITTED, generation=3, state="Claimed", reason="worker 1 lost"))


def talking(*indexes: int, status: JobStatus = STATUS) -> Sessions:
    sessions = apply_membership(create_sessions("job-1", 1000.0), status.membership)
    for index in indexes or (0, 1, 2):
        sessions = apply_hello(sessions, hello(index), 1000.0)
    return sessions


def words(sessions: Sessions, worker: WorkerId, status: JobStatus = STATUS) -> tuple[ToAgent, ...]:
    return list_desired_messages(derive_desired_state(status, UsableMemoryServers(NODES), 2, "t2"), sessions, worker)


def beat(epoch: int, step: int, **other: object) -> Heartbeat:
    return told(Heartbeat(generation=epoch, stopped=epoch, is_warm=True), step=step, **other)
