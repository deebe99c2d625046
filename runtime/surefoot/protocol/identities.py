"""Defines identities: checkpoints, rank saves, workers, holders."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple


@dataclass(frozen=True, slots=True, order=True)
class Checkpoint:
    """All that one world saved after `step` finished optimizer steps.

    Ordering is by (epoch, step); along one lineage, steps alone decide, see `completeness.newest`. A job's own epochs begin
    at 1: an epoch below 0 is an older job's, negated, and marks a checkpoint that this job only began from.
    """

    generation: int
    step: int

    @property
    def imported(self) -> bool:
        """Whether an older job saved it: read-only, in that job's folder."""
        return self.generation < 0

    def negated(self) -> Checkpoint:
        """The same checkpoint as the other job names it."""
        return Checkpoint(-self.generation, self.step)

    def __str__(self) -> str:
        if self.imported:
            return f"step {self.step} of epoch {-self.generation} of an older job"
        return f"step {self.step} of epoch {self.generation}"


@dataclass(frozen=True, slots=True)
class SourceJob:
    """Names another job to warm-start from: folder `{uri}/{job}`, read-only."""

    uri: str
    uid: str

    def __str__(self) -> str:
        return f"job {self.uid} in {self.uri}"


@dataclass(frozen=True, slots=True, order=True)
class RankSave:
    """Identifies what one rank saved at one step of one epoch."""

    generation: int
    step: int
    rank: int

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(self.generation, self.step)

    def __str__(self) -> str:
        return f"rank {self.rank} at step {self.step} of epoch {self.generation}"


@dataclass(frozen=True, slots=True, order=True)
class WorkerId:
    """A worker's place (`index`) and which of its replacements this is (`attempt`)."""

    index: int
    attempt: int

    def __str__(self) -> str:
        return f"worker {self.index} (attempt {self.attempt})"


@dataclass(frozen=True, slots=True, order=True)
class MemoryServerInstance:
    """Identifies one Redis of the memory tier by node and run.

    One that restarted is empty, and another holder.
    """

    node: str
    run_id: str

    def __str__(self) -> str:
        return f"holder {self.node}/{self.run_id[:8]}"


INSTANCE_ORDER = attrgetter("node", "run_id")
"""The order of holders, as a key: compared one with another, two thousand take as long as the rest of a round."""


class MemoryServerId(NamedTuple):
    """Names one server of a node: its instances follow each other."""

    node: str
    server_index: int

    def __str__(self) -> str:
        return f"{self.node} (server {self.server_index})" if self.server_index else self.node


@dataclass(frozen=True, slots=True)
class MemoryServerEndpoint:
    """Locates a holder; `domain` is its failure domain, a topology value."""

    instance: MemoryServerInstance
    host: str
    port: int
    domain: str
    tls: bool = False
    """Whether it speaks TLS, and nothing else."""
    server_index: int = 0
    """Which of its node's servers it is, from 0."""

    @property
    def server_id(self) -> MemoryServerId:
        """The place where this instance runs."""
        return MemoryServerId(self.instance.node, self.server_index)


ENDPOINT_ORDER = attrgetter("instance.node", "instance.run_id")
"""`HOLDER_ORDER` of endpoints."""


@dataclass(frozen=True, slots=True)
class LocalMemoryServers:
    """Names this node's holders and their Unix sockets, cheaper than TCP."""

    node: str
    socket: str
    """Path of the socket; `{server}` in it stands for the server's number, without it only server 0 has one."""

    def socket_of(self, server: MemoryServerId) -> str:
        """The path of that server's socket; empty: it has none here."""
        if server.node != self.node:
            return ""
        if "{server}" in self.socket:
            return self.socket.replace("{server}", str(server.server_index))
        return self.socket if server.server_index == 0 else ""
