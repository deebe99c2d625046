"""Two real holders, and a fresh job on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from support.servers import redis_server
from surefoot.memory_server.client import MemoryServerClient
from surefoot.memory_server.connection import Credentials
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot.protocol.identities import MemoryServerEndpoint, MemoryServerInstance, RankSave


class HolderPair:
    """A job on two holders."""

    def __init__(self, endpoints: list[MemoryServerEndpoint], job: str) -> None:
        self.job = job
        self.account = Credentials(f"user-{job}", "a password")
        self.endpoints = {e.instance: e for e in endpoints}

    @property
    def holders(self) -> tuple[MemoryServerInstance, ...]:
        return tuple(self.endpoints)

    def open(self, holder: MemoryServerInstance) -> MemoryServerClient:
        return MemoryServerClient(self.endpoints[holder], self.job, self.account)

    def client(self, holder: MemoryServerInstance) -> MemoryServerClient:
        return MemoryServerClient(self.endpoints[holder], self.job, self.account)

    def saves(self, holder: MemoryServerInstance) -> list[RankSave]:
        tier = self.open(holder)
        try:
            return [m.save for m in tier.manifests()]
        finally:
            tier.close()


@contextmanager
def endpoints(folder: Path) -> Iterator[list[MemoryServerEndpoint]]:
    """Starts the two servers."""
    for name in ("one", "two"):
        (folder / name).mkdir()
    with redis_server.running(folder / "one") as one, redis_server.running(folder / "two") as two:
        yield [redis_server.endpoint(one, "node-1"), redis_server.endpoint(two, "node-2")]


def provisioned(servers: list[MemoryServerEndpoint]) -> HolderPair:
    """Gives a job of its own an account on each."""
    made = HolderPair(servers, str(uuid4()))
    for endpoint in servers:
        MemoryServerAdmin(endpoint.host, endpoint.port, redis_server.ADMIN_PASSWORD).provision(
            made.job, made.account, 1
        )
    return made
