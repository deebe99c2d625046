"""A memory tier of some real servers, as one job's part of the operator sees it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import xxhash

from support.fakes.fake_agent import until
from support.servers.redis_server import ADMIN_PASSWORD, program, running
from surefoot.memory_server import Credentials, MemoryServerClient
from surefoot.memory_server.server_process import RunningServer
from surefoot.protocol.checkpoints.records import Layout, Piece, RankManifest, TensorLayout
from surefoot.protocol.identities import MemoryServerEndpoint, RankSave
from surefoot_operator.api.status import JobStatus, Membership
from surefoot_operator.job_snapshot import ObservedMemoryServer
from surefoot_operator.memory import JobMemoryServers, MemoryServerAddress, MemoryServerPool
from surefoot_operator.settings import MemorySettings

ACCOUNT = Credentials("job-1", "the job's password")
SETTINGS = MemorySettings(probe_interval_seconds=0.05, read_interval_seconds=0.1)
LAYOUT = Layout((TensorLayout("w", "float32", (4,), (Piece((0,), (4,), (4,), 0),)),), (0,), 16)
DIGEST = xxhash.xxh3_64_hexdigest(LAYOUT.to_json().encode())


def world(epoch: int, state: str = "Committed") -> Membership:
    return Membership(generation=epoch, state=state)  # type: ignore[arg-type]  # one of the two


def place(server: RunningServer, node: str = "node-1", alive: bool = True) -> MemoryServerAddress:
    where = server.settings
    pid = str(server.process.pid)
    return MemoryServerAddress(node, node, where.host, where.port, pid, alive, "default", ADMIN_PASSWORD)


class Stand:
    """A memory tier over some servers."""

    def __init__(self, stack: ExitStack, folder: Path, redis: str) -> None:
        self.stack, self.folder, self.redis = stack, folder, redis
        self.changes = 0
        self.places: list[MemoryServerAddress] = []
        self.servers: list[RunningServer] = []
        self.status = JobStatus(membership=world(1))
        self.pool = MemoryServerPool(SETTINGS)
        self.tier = JobMemoryServers("uid-1", ACCOUNT, self.pool, time.time, self._changed)

    def _changed(self, urgent: bool) -> None:
        self.changes += 1

    def start(self, node: str = "node-1") -> RunningServer:
        folder = self.folder / f"{node}-{len(self.servers)}"
        started: AbstractContextManager[RunningServer] = running(folder, self.redis)
        server = self.stack.enter_context(started)
        self.servers.append(server)
        self.places = [p for p in self.places if p.node != node] + [place(server, node)]
        return server

    def follow(self, **status: object) -> None:
        self.status = replace(self.status, **status)  # type: ignore[arg-type]  # tests name real fields
        self.tier.update(self.places, self.status)

    def seen(self, node: str = "node-1") -> ObservedMemoryServer:
        return next(h for h in self.tier.observed_servers() if h.endpoint.instance.node == node)

    async def comes(self, condition: Callable[[], bool], what: str) -> None:
        def holds() -> bool:
            try:
                return condition()
            except StopIteration:
                return False

        await until(holds, what)

    async def ready(self, node: str = "node-1") -> MemoryServerEndpoint:
        await self.comes(lambda: self.seen(node).state == "Ready", f"{node} is Ready")
        return self.seen(node).endpoint

    def client(self, where: MemoryServerEndpoint) -> MemoryServerClient:
        return MemoryServerClient(where, "uid-1", ACCOUNT)


@asynccontextmanager
async def standing(folder: Path, redis: str) -> AsyncIterator[Stand]:
    """The stand, and its end; `redis` names the program."""
    with ExitStack() as stack:
        made = Stand(stack, folder, program(redis))
        try:
            yield made
        finally:
            for server in made.servers:
                if server.process.poll() is None:
                    os.kill(server.process.pid, signal.SIGCONT)
            await made.tier.close()
            await made.pool.close()


def saved(client: MemoryServerClient, epoch: int, step: int, rank: int = 0, world_size: int = 1) -> RankManifest:
    """One whole small rank save, as an agent writes it."""
    save = RankSave(epoch, step, rank)
    digests, values = b"d" * 8, b"{}"
    manifest = RankManifest(save, world_size, "i", DIGEST, 16, 1, "dd", 8, "vv", 2, 0.0)
    client.put_layout(DIGEST, LAYOUT.to_json())
    client.put_chunk(save, 0, b"x" * 16)
    client.put_digests(save, digests)
    client.put_values(save, values)
    client.commit(manifest, epoch, (16,))
    return manifest
