"""Defines the identities of checkpoints, rank saves, workers and memory servers."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple


@dataclass(frozen=True, slots=True, order=True)
class Checkpoint:
    """The saves of all ranks of one generation after `step` finished optimizer steps.

    Ordering is by (generation, step); along one lineage the step alone decides, see `completeness.newest_checkpoint`.
    A job's own generations begin at 1. A negative generation is a negated one of the source job, and marks the initial
    checkpoint that this job only started from.
    """

    generation: int
    """Generation that saved it; negative: of the source job, negated."""
    step: int
    """Number of finished optimizer steps."""

    @property
    def is_imported(self) -> bool:
        """Whether the source job saved it: it is in that job's folder, read-only."""
        return self.generation < 0

    def with_negated_generation(self) -> Checkpoint:
        """The same checkpoint with its generation negated: as the source job writes it, or back."""
        return Checkpoint(-self.generation, self.step)

    def __str__(self) -> str:
        if self.is_imported:
            return f"step {self.step} of generation {-self.generation} of the source job"
        return f"step {self.step} of generation {self.generation}"


@dataclass(frozen=True, slots=True)
class SourceJob:
    """Names the job whose checkpoint this job starts from. Its folder, `{uri}/{uid}`, is only read."""

    uri: str
    """URI of the persistent tier that contains its folder."""
    uid: str
    """The job's uid."""

    def __str__(self) -> str:
        return f"job {self.uid} in {self.uri}"


@dataclass(frozen=True, slots=True, order=True)
class RankSave:
    """Identifies the save of one rank at one step of one generation."""

    generation: int
    """Generation that saved it."""
    step: int
    """Number of finished optimizer steps."""
    rank: int
    """Global rank in that generation."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that this save is a part of."""
        return Checkpoint(self.generation, self.step)

    def __str__(self) -> str:
        return f"rank {self.rank} at step {self.step} of generation {self.generation}"


@dataclass(frozen=True, slots=True, order=True)
class WorkerId:
    """Identifies one worker among those that replaced each other."""

    index: int
    """Its position in the job, from 0; a replacement keeps it."""
    attempt: int
    """How often the worker of this index was replaced, from 0."""

    def __str__(self) -> str:
        return f"worker {self.index} (attempt {self.attempt})"


@dataclass(frozen=True, slots=True, order=True)
class MemoryServerInstance:
    """Identifies one run of a memory server. A restarted server is empty, and therefore another instance."""

    node: str
    """Name of the node that it runs on."""
    run_id: str
    """Redis' own random `run_id`, new at each start."""

    def __str__(self) -> str:
        return f"memory server {self.node}/{self.run_id[:8]}"


INSTANCE_ORDER = attrgetter("node", "run_id")
"""Sort key of instances. Comparing the dataclasses themselves would double the time of a reconcile with 2,000 servers."""


class MemoryServerId(NamedTuple):
    """Identifies a memory server of a node through its restarts: its instances follow each other."""

    node: str
    """Name of the node."""
    server_index: int
    """Which of the node's servers it is, from 0."""

    def __str__(self) -> str:
        return f"{self.node} (server {self.server_index})" if self.server_index else self.node


@dataclass(frozen=True, slots=True)
class MemoryServerEndpoint:
    """Where an instance of a memory server can be reached."""

    instance: MemoryServerInstance
    """The run of the server that this endpoint is for."""
    host: str
    """Its IP address or host name."""
    port: int
    """Its TCP port."""
    domain: str
    """Its failure domain, a value of the topology; its node's name where no topology is known."""
    tls: bool = False
    """Whether it accepts TLS connections only; else it accepts none."""
    server_index: int = 0
    """Which of its node's servers it is, from 0."""

    @property
    def server_id(self) -> MemoryServerId:
        """The server whose instance this is."""
        return MemoryServerId(self.instance.node, self.server_index)


ENDPOINT_ORDER = attrgetter("instance.node", "instance.run_id")
"""Sort key of endpoints: by their instances, as with `INSTANCE_ORDER`."""


@dataclass(frozen=True, slots=True)
class LocalMemoryServers:
    """The memory servers of this process' node and their Unix sockets, which cost less than TCP."""

    node: str
    """Name of the node that this process runs on."""
    socket: str
    """Path of the socket. `{server}` in it is replaced by the server's index; without it only server 0 has a socket."""

    def socket_path_of(self, server: MemoryServerId) -> str:
        """Returns the path of that server's socket; empty if it has none on this node."""
        if server.node != self.node:
            return ""
        if "{server}" in self.socket:
            return self.socket.replace("{server}", str(server.server_index))
        return self.socket if server.server_index == 0 else ""
