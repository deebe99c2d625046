"""Visits every holder once for all jobs, over one connection.

Owned by the composition root, lent to each job's `memory.job_servers`. A visit is one ping, and whatever jobs want read or
sealed then, under way together; so cost follows holders and changes, not jobs times holders.
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
from surefoot.task_set import TaskSet, logged
from surefoot_operator.settings import MemorySettings

log = logging.getLogger(__name__)


# ---- where a server is -----------------------------------------------------------------------------------------------
# Defines where a holder is reached and with which credentials.

ServerProcess = tuple[MemoryServerId, str, int, str, bool]
"""Names one run of one server, at one address."""


@dataclass(slots=True)
class MemoryTierCredentials:
    """The operator's current credentials for every holder.

    Its owner updates it when a Secret changes; every observation reads it.
    """

    user: str = "default"
    password: str = field(default="", repr=False)
    authority: str = field(default="", repr=False)
    """PEM, by which holders that speak TLS are verified."""


@dataclass(frozen=True, slots=True)
class MemoryServerAddress:
    """One holder's address and credentials; its instance is asked for there.

    `process` names one run of the server as the fabric knows it (pid and start time, container id): another value means
    that what was held there before is lost. `running` False means known to be dead; a frozen or unreachable one stays
    True. A place that a fabric leaves out is unknown (silent), not gone. One a server
    of a node.
    """

    node: str
    domain: str
    host: str
    port: int
    process: str
    running: bool = True
    admin_user: str = "default"
    admin_password: str = field(default="", repr=False)
    tls_ca: str | None = field(default=None, repr=False)
    """PEM of the authority of a server that speaks TLS; None: it does not."""
    settling: bool = False
    """Its pod is not Ready: a companion may be about to touch its memory, before any job uses it."""
    server: int = 0
    """Which of its node's servers it is."""
    servers: int = 1
    """That its node runs, whether or not they do at present."""

    @property
    def server_id(self) -> MemoryServerId:
        """Where an instance follows another."""
        return MemoryServerId(self.node, self.server)

    def same_access(self, other: MemoryServerAddress) -> bool:
        """Whether both have the same password and authority."""
        mine = (self.admin_user, self.admin_password, self.tls_ca)
        return mine == (other.admin_user, other.admin_password, other.tls_ca)

    @property
    def server_process(self) -> ServerProcess:
        """One run of the server, which may still have its data."""
        return self.server_id, self.host, self.port, self.process, self.running

    def same_server(self, other: MemoryServerAddress) -> bool:
        """Whether both are the same process, which may still have its data."""
        return self.server_process == other.server_process


# ---- connection pool -------------------------------------------------------------------------------------------------

T = TypeVar("T")


class ServerVisitor(Protocol):
    """One job's interest in one holder."""

    def pause_seconds(self) -> float | None:
        """Longest wait for the next visit; None: it wants none."""

    def is_due(self) -> bool:
        """Whether it wants something of this visit beyond a sign of life."""

    async def visit(self) -> None:
        """Has its calls made; never raises."""

    def failed(self, error: SurefootError) -> None:
        """The holder does not answer."""


class SharedMemoryServer:
    """Visits one server process as often as its most eager job needs."""

    def __init__(self, place: MemoryServerAddress, settings: MemorySettings) -> None:
        self.address = place
        self.calls = AdminCalls(place.host, place.port)
        self.run = ""
        """Of the server, as of the present connection."""
        self.visits = 0
        self.settings = settings
        self._connection = _line_to(place, settings.call_seconds)
        self._visitors: dict[int, ServerVisitor] = {}
        self._wake = asyncio.Event()
        self._under_way = TaskSet(logged(log))
        self._busy: set[int] = set()
        self._memory: tuple[float, ServerMemory] | None = None
        self._measuring = asyncio.Lock()
        self._failing = False
        self._task = asyncio.create_task(self._run(), name=f"holder on {place.server_id}")

    @property
    def commands(self) -> int:
        """Commands sent on the present connection."""
        return self._connection.asked

    @property
    def is_open(self) -> bool:
        """Whether its connection stands."""
        return self._connection.is_open

    @property
    def used(self) -> bool:
        """Whether some job attends to it."""
        return bool(self._visitors)

    def attach(self, visitor: ServerVisitor) -> None:
        """Lets a job take part in visits from now on."""
        self._visitors[id(visitor)] = visitor
        self._wake.set()

    def detach(self, visitor: ServerVisitor) -> None:
        """Ends a job's part in visits; calls under way end by themselves."""
        self._visitors.pop(id(visitor), None)

    def wake(self) -> None:
        """Visits soon."""
        self._wake.set()

    def renew(self, place: MemoryServerAddress) -> None:
        """Uses another password or authority.

        Calls under way end on the old connection.
        """
        old, self.address = self._connection, place
        self._connection = _line_to(place, self.settings.call_seconds)
        asyncio.get_running_loop().call_later(2 * self.settings.call_seconds, old.close)
        self._wake.set()

    async def run_exchange(self, dialogue: Dialogue[T]) -> T:
        """Has one dialogue carried out, beside those of other jobs."""
        return await self._connection.run_exchange(dialogue)

    async def memory(self) -> ServerMemory:
        """Measures the server; jobs that ask within one visit share the figure."""
        async with self._measuring:
            now = asyncio.get_running_loop().time()
            if self._memory is None or now - self._memory[0] > self.settings.probe_seconds / 2:
                self._memory = (now, await self.run_exchange(self.calls.memory()))
            return self._memory[1]

    async def close(self) -> None:
        """Ends visits and the connection."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._connection.close()
        await self._under_way.close()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            if self.address.running:
                await self._once()
            try:
                async with asyncio.timeout(self._pause()):
                    await self._wake.wait()
            except TimeoutError:
                pass  # time for the next visit

    def _pause(self) -> float:
        wanted = (visitor.pause_seconds() for visitor in self._visitors.values())
        return min((p for p in wanted if p is not None), default=self.settings.rest_seconds)

    async def _once(self) -> None:
        self.visits += 1
        try:
            if not self._connection.is_open:
                await self._open()
            due = self._due()
            if not due:
                with translate_redis_errors(self.calls.where, "answering a ping"):
                    await self._connection.exchange(("PING",))
                due = self._due()  # whoever took it for silent
        except SurefootError as error:
            self._failed(error)
            return
        except Exception as error:
            # what nobody foresaw ends no visits: a holder without them would be taken for well for ever
            log.exception("visiting the holder on %s failed", self.address.server_id)
            self._failed(TierUnavailable(f"{self.calls.where}: {error or type(error).__name__}"))
            return
        self._failing = False
        for visitor in due:
            self._busy.add(id(visitor))
            self._under_way.start(self._visit(visitor), f"visiting the holder on {self.address.server_id}")

    def _failed(self, error: SurefootError) -> None:
        self._connection.close()
        if not self._failing:
            log.warning("the holder on %s does not answer: %s", self.address.server_id, error)
        self._failing = True
        for visitor in tuple(self._visitors.values()):
            visitor.failed(error)

    def _due(self) -> list[ServerVisitor]:
        return [v for v in self._visitors.values() if id(v) not in self._busy and v.is_due()]

    async def _visit(self, visitor: ServerVisitor) -> None:
        try:
            await visitor.visit()
        finally:
            self._busy.discard(id(visitor))

    async def _open(self) -> None:
        line = self._connection
        with translate_redis_errors(self.calls.where, "connecting"):
            await line.open()
        self.run = await line.run_exchange(self.calls.instance())


def _line_to(place: MemoryServerAddress, call_seconds: float) -> AsyncServerConnection:
    account = Credentials("", place.admin_password, place.tls_ca or "")
    return AsyncServerConnection(place.host, place.port, account, call_seconds, place.tls_ca is not None)


class MemoryServerPool:
    """Owns the connections to holders, for all jobs of one operator.

    One for each process of a server, not for each place: rounds of jobs overlap, and one that looked before a restart follows
    what it saw behind another that looked after it. Neither may end what the other attends to: a holder that is never
    visited again is Ready for ever, and a claim waits for its index.
    """

    def __init__(self, settings: MemorySettings) -> None:
        self.settings = settings
        self.servers: dict[ServerProcess, SharedMemoryServer] = {}
        self._closing = TaskSet(logged(log))
        self._addresses: tuple[MemoryServerAddress, ...] = ()
        self._there: frozenset[ServerProcess] = frozenset()
        self._has_others = False
        """Whether processes may be attended to that are not in the fabric's places."""

    def set_addresses(self, places: Sequence[MemoryServerAddress]) -> None:
        """Takes the fabric's places.

        What another job has brought already costs a comparison.
        """
        if tuple(places) != self._addresses:
            self._addresses = tuple(places)
            self._there = frozenset(place.server_process for place in places)
            self._has_others = True
            for place in places:
                known = self.servers.get(place.server_process)
                if known is not None and not known.address.same_access(place):
                    known.renew(place)
        if self._has_others:
            others = [process for process in self.servers if process not in self._there]
            unused = [process for process in others if not self.servers[process].used]
            for process in unused:
                self._let_go(process)
            self._has_others = len(others) > len(unused)

    def server_at(self, place: MemoryServerAddress) -> SharedMemoryServer:
        """Returns the holder at this place, begun if it has to be."""
        known = self.servers.get(place.server_process)
        if known is None:
            known = self.servers[place.server_process] = self._shared(place)
        return known

    async def close(self) -> None:
        """Ends every connection; a later `follow` begins anew."""
        self._addresses = ()
        for process in tuple(self.servers):
            self._let_go(process)
        await self._closing.join()

    def _shared(self, place: MemoryServerAddress) -> SharedMemoryServer:
        return SharedMemoryServer(place, self.settings)

    def _let_go(self, process: ServerProcess) -> None:
        shared = self.servers.pop(process)
        self._closing.start(shared.close(), f"leaving the holder on {shared.address.server_id}")
