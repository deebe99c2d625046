"""Visits every memory server once for all jobs, over one connection.

Owned by the composition root, lent to each job's `memory.job_servers`. A visit is one ping, plus the reads and fences
that jobs need at that time, all concurrently. So the cost grows with servers and changes, not with jobs times servers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from surefoot.errors import SurefootError, TierUnavailable
from surefoot.memory_server.async_connection import AsyncServerConnection
from surefoot.memory_server.connection import Credentials, Dialogue, translate_redis_errors
from surefoot.memory_server.provisioning import AdminCalls, ServerMemory
from surefoot.protocol.identities import MemoryServerId
from surefoot.task_set import TaskSet, log_failure_to
from surefoot_operator.settings import MemorySettings

log = logging.getLogger(__name__)


# ---- where a server is -----------------------------------------------------------------------------------------------
# Defines the address of a memory server and the credentials for it.

ServerProcess = tuple[MemoryServerId, str, int, str, bool]
"""Identifies one run of one server at one address, and whether it runs."""


@dataclass(slots=True)
class MemoryTierCredentials:
    """The operator's current credentials for all memory servers.

    Their owner updates them when a Secret changes. Each observation of the platform reads them.
    """

    user: str = "default"
    """Account of the operator on every server."""
    password: str = field(default="", repr=False)
    """Password of that account."""
    authority: str = field(default="", repr=False)
    """CA certificate in PEM that verifies servers with TLS; empty: none."""


@dataclass(frozen=True, slots=True)
class MemoryServerAddress:
    """Address of one memory server of a node, and the credentials for it.

    An address does not identify data. `process` identifies one run of the server as the platform sees it (pid and start
    time, or container id): with another value, the former data is lost. An address that the platform does not list is
    unreachable, not lost.
    """

    node: str
    """Name of the node that runs the server."""
    domain: str
    """Failure domain of the node, which copies are spread over."""
    host: str
    """Host name or IP address of the server."""
    port: int
    process: str
    """Identifies the run of the server; unique on its node."""
    running: bool = True
    """False: the process is known to be dead. A frozen or unreachable one stays True."""
    admin_user: str = "default"
    """Account of the operator on this server."""
    admin_password: str = field(default="", repr=False)
    """Password of that account."""
    tls_ca: str | None = field(default=None, repr=False)
    """CA certificate in PEM for a server with TLS; None: it has no TLS."""
    may_be_prefaulting: bool = False
    """Whether its pod is not Ready, so that a sidecar may prefault its memory before any job uses it."""
    server_index: int = 0
    """Index of the server on its node."""
    servers_on_node: int = 1
    """How many servers the node runs, including those that are down at present."""

    @property
    def server_id(self) -> MemoryServerId:
        """Identifies the server across its restarts."""
        return MemoryServerId(self.node, self.server_index)

    def has_same_access(self, other: MemoryServerAddress) -> bool:
        """Returns whether both have the same password and CA certificate."""
        own_access = (self.admin_user, self.admin_password, self.tls_ca)
        return own_access == (other.admin_user, other.admin_password, other.tls_ca)

    @property
    def server_process(self) -> ServerProcess:
        """Identifies the run of the server; while it is the same, the data may be too."""
        return self.server_id, self.host, self.port, self.process, self.running

    def is_same_process(self, other: MemoryServerAddress) -> bool:
        """Returns whether both are the same process, which may still have its data."""
        return self.server_process == other.server_process


# ---- connection pool -------------------------------------------------------------------------------------------------

T = TypeVar("T")


class ServerVisitor(Protocol):
    """A job's part in the visits to one memory server."""

    def visit_interval_seconds(self) -> float | None:
        """Returns the longest time until the next visit; None: no visit needed."""

    def is_due(self) -> bool:
        """Returns whether this visit must do more than a ping."""

    async def visit(self) -> None:
        """Makes the calls that are due; never raises."""

    def on_unreachable(self, error: SurefootError) -> None:
        """Records that the server does not answer."""


class SharedMemoryServer:
    """Visits one server process as often as the most demanding job needs."""

    def __init__(self, address: MemoryServerAddress, settings: MemorySettings) -> None:
        self.address = address
        self.calls = AdminCalls(address.host, address.port)
        self.run_id = ""
        """Redis' run id of the server, as of the current connection; empty before the first."""
        self.visit_count = 0
        """Number of visits so far."""
        self.settings = settings
        self._connection = _connection_to(address, settings.call_timeout_seconds)
        self._visitors: dict[int, ServerVisitor] = {}
        self._wake = asyncio.Event()
        self._visit_tasks = TaskSet(log_failure_to(log))
        self._busy_visitors: set[int] = set()
        self._memory_usage: tuple[float, ServerMemory] | None = None
        self._measuring = asyncio.Lock()
        self._failing = False
        self._task = asyncio.create_task(self._run(), name=f"memory server on {address.server_id}")

    @property
    def command_count(self) -> int:
        """Number of commands sent on the current connection."""
        return self._connection.sent_commands

    @property
    def is_open(self) -> bool:
        """Whether the connection is open."""
        return self._connection.is_open

    @property
    def has_visitors(self) -> bool:
        """Whether at least one job uses this server."""
        return bool(self._visitors)

    def attach(self, visitor: ServerVisitor) -> None:
        """Lets a job take part in visits from now on."""
        self._visitors[id(visitor)] = visitor
        self._wake.set()

    def detach(self, visitor: ServerVisitor) -> None:
        """Ends a job's part in visits; its calls in progress end by themselves."""
        self._visitors.pop(id(visitor), None)

    def wake(self) -> None:
        """Starts the next visit soon."""
        self._wake.set()

    def reconnect(self, address: MemoryServerAddress) -> None:
        """Reconnects with another password or CA certificate.

        Calls in progress end on the old connection, which is closed later.
        """
        old_connection, self.address = self._connection, address
        self._connection = _connection_to(address, self.settings.call_timeout_seconds)
        asyncio.get_running_loop().call_later(2 * self.settings.call_timeout_seconds, old_connection.close)
        self._wake.set()

    async def run_exchange(self, dialogue: Dialogue[T]) -> T:
        """Runs one exchange of commands, concurrently with those of other jobs."""
        return await self._connection.run_dialogue(dialogue)

    async def read_memory_usage(self) -> ServerMemory:
        """Returns the server's memory usage; jobs that ask within one visit share a measurement."""
        async with self._measuring:
            now = asyncio.get_running_loop().time()
            if self._memory_usage is None or now - self._memory_usage[0] > self.settings.probe_interval_seconds / 2:
                self._memory_usage = (now, await self.run_exchange(self.calls.measure_memory()))
            return self._memory_usage[1]

    async def close(self) -> None:
        """Ends the visits and closes the connection."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._connection.close()
        await self._visit_tasks.close()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            if self.address.running:
                await self._visit_once()
            try:
                async with asyncio.timeout(self._seconds_to_next_visit()):
                    await self._wake.wait()
            except TimeoutError:
                pass  # time for the next visit

    def _seconds_to_next_visit(self) -> float:
        pauses = (visitor.visit_interval_seconds() for visitor in self._visitors.values())
        return min((p for p in pauses if p is not None), default=self.settings.idle_interval_seconds)

    async def _visit_once(self) -> None:
        self.visit_count += 1
        try:
            if not self._connection.is_open:
                await self._connect()
            due_visitors = self._due_visitors()
            if not due_visitors:
                with translate_redis_errors(self.calls.where, "answering a ping"):
                    await self._connection.exchange(("PING",))
                due_visitors = (
                    self._due_visitors()
                )  # the ping may have shown a visitor that the server is reachable again
        except SurefootError as error:
            self._on_failure(error)
            return
        except Exception as error:
            # No error may end the visits: a server without visits would count as healthy forever.
            log.exception("visiting the memory server on %s failed", self.address.server_id)
            self._on_failure(TierUnavailable(f"{self.calls.where}: {error or type(error).__name__}"))
            return
        self._failing = False
        for visitor in due_visitors:
            self._busy_visitors.add(id(visitor))
            self._visit_tasks.start(self._run_visit(visitor), f"visiting the memory server on {self.address.server_id}")

    def _on_failure(self, error: SurefootError) -> None:
        self._connection.close()
        if not self._failing:
            # Log once when it starts to fail, not at each visit.
            log.warning("the memory server on %s does not answer: %s", self.address.server_id, error)
        self._failing = True
        for visitor in tuple(self._visitors.values()):
            visitor.on_unreachable(error)

    def _due_visitors(self) -> list[ServerVisitor]:
        return [v for v in self._visitors.values() if id(v) not in self._busy_visitors and v.is_due()]

    async def _run_visit(self, visitor: ServerVisitor) -> None:
        try:
            await visitor.visit()
        finally:
            self._busy_visitors.discard(id(visitor))

    async def _connect(self) -> None:
        connection = self._connection
        with translate_redis_errors(self.calls.where, "connecting"):
            await connection.open()
        self.run_id = await connection.run_dialogue(self.calls.read_instance())


def _connection_to(address: MemoryServerAddress, call_seconds: float) -> AsyncServerConnection:
    account = Credentials("", address.admin_password, address.tls_ca or "")
    return AsyncServerConnection(address.host, address.port, account, call_seconds, address.tls_ca is not None)


class MemoryServerPool:
    """Owns the connections to memory servers, for all jobs of one operator.

    There is one for each server process, not for each address, because the reconciles of jobs overlap. A job that
    observed the platform before a restart may update its servers after a job that observed it later. Neither may close
    the connection that the other uses: a server that is no longer visited stays Ready forever, and a claim waits for
    its index.
    """

    def __init__(self, settings: MemorySettings) -> None:
        self.settings = settings
        self.servers: dict[ServerProcess, SharedMemoryServer] = {}
        self._closing = TaskSet(log_failure_to(log))
        self._addresses: tuple[MemoryServerAddress, ...] = ()
        self._listed_processes: frozenset[ServerProcess] = frozenset()
        self._has_unlisted = False
        """Whether connections may exist to processes that the platform does not list."""

    def set_addresses(self, addresses: Sequence[MemoryServerAddress]) -> None:
        """Updates the servers that the platform lists, and closes connections that no job uses.

        Cheap if another job has set the same addresses before.
        """
        if tuple(addresses) != self._addresses:
            self._addresses = tuple(addresses)
            self._listed_processes = frozenset(address.server_process for address in addresses)
            self._has_unlisted = True
            for address in addresses:
                server = self.servers.get(address.server_process)
                if server is not None and not server.address.has_same_access(address):
                    server.reconnect(address)
        if self._has_unlisted:
            unlisted = [process for process in self.servers if process not in self._listed_processes]
            unused = [process for process in unlisted if not self.servers[process].has_visitors]
            for process in unused:
                self._start_closing(process)
            self._has_unlisted = len(unlisted) > len(unused)

    def server_at(self, address: MemoryServerAddress) -> SharedMemoryServer:
        """Returns the server at this address, and connects to it if necessary."""
        server = self.servers.get(address.server_process)
        if server is None:
            server = self.servers[address.server_process] = self._new_server(address)
        return server

    async def close(self) -> None:
        """Closes every connection; `server_at` may open new ones later."""
        self._addresses = ()
        for process in tuple(self.servers):
            self._start_closing(process)
        await self._closing.join()

    def _new_server(self, address: MemoryServerAddress) -> SharedMemoryServer:
        return SharedMemoryServer(address, self.settings)

    def _start_closing(self, process: ServerProcess) -> None:
        server = self.servers.pop(process)
        self._closing.start(server.close(), f"disconnecting from the memory server on {server.address.server_id}")
