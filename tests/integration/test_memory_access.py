"""A password or an authority of the memory tier that is changed under a running operator is taken up by it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.fakes.fake_agent import until
from support.servers import redis_server
from support.servers.certificates import authority
from support.servers.redis_server import ADMIN_PASSWORD
from surefoot.memory_server import Credentials
from surefoot.memory_server.server_process import RunningServer
from surefoot_operator.api.status import JobStatus, Membership
from surefoot_operator.job_snapshot import ObservedMemoryServer
from surefoot_operator.memory import JobMemoryServers, MemoryServerAddress, MemoryServerPool
from surefoot_operator.settings import MemorySettings

STATUS = JobStatus(membership=Membership(1, "Committed"))


class Stand:
    """One server, and a job's view of it."""

    def __init__(self, server: RunningServer) -> None:
        where, pid = server.settings, str(server.process.pid)
        tls = where.tls.read_authority() if where.tls is not None else None
        self.server = server
        self.place = MemoryServerAddress("n", "n", where.host, where.port, pid, True, "default", ADMIN_PASSWORD, tls)
        settings = MemorySettings(probe_interval_seconds=0.05, read_interval_seconds=0.1)
        self.pool = MemoryServerPool(settings)
        self.tier = JobMemoryServers(
            "uid-1", Credentials("job-1", "its password"), self.pool, time.time, lambda urgent: None
        )

    def follow(self, **changes: object) -> None:
        self.place = replace(self.place, **changes)  # type: ignore[arg-type]  # tests name real fields
        self.tier.update([self.place], STATUS)

    async def comes(self, state: str, refusing: bool = False) -> ObservedMemoryServer:
        def holds() -> bool:
            return [(h.state, h.rejects_operator) for h in self.tier.observed_servers()] == [(state, refusing)]

        await until(holds, f"the holder is {state}{', refusing' if refusing else ''}")
        return self.tier.observed_servers()[0]

    def change(self, *command: str) -> None:
        """By the administrator's account; all connections of others end."""
        wire = redis_server.wire_of(self.server, redis_server.account("", ADMIN_PASSWORD))
        try:
            wire.call(*command)
            wire.call("CLIENT", "KILL", "USER", "default", "SKIPME", "yes")
        finally:
            wire.close()


@pytest.fixture
async def stand(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stand]:
    with redis_server.of_kind(request.param, tmp_path) as server:
        made = Stand(server)
        try:
            made.follow()
            yield made
        finally:
            await made.tier.close()
            await made.pool.close()


@pytest.mark.parametrize("stand", ["redis on PATH", redis_server.OVER_TLS], indirect=True)
async def test_a_changed_password(stand: Stand) -> None:
    before = await stand.comes("Ready")
    stand.change("ACL", "SETUSER", "default", "resetpass", ">another one")
    refused = await stand.comes("Unreachable", refusing=True)
    assert "rejects this account" in refused.last_error
    stand.follow(admin_password="another one")
    after = await stand.comes("Ready")
    assert after.endpoint == before.endpoint, "the same instance, with all that it has"
    assert after.last_error == ""


@pytest.mark.parametrize("stand", [redis_server.OVER_TLS], indirect=True)
async def test_a_changed_authority(stand: Stand, tmp_path: Path) -> None:
    await stand.comes("Ready")
    other = authority("another authority")
    folder = tmp_path / "renewed"
    folder.mkdir()
    certificate, key = other.sign(redis_server.TLS_SERVER_NAME).files(folder)
    stand.change("CONFIG", "SET", "tls-cert-file", str(certificate), "tls-key-file", str(key))
    refused = await stand.comes("Unreachable", refusing=True)
    assert "another authority" in refused.last_error
    stand.follow(tls_ca=other.pem)
    await stand.comes("Ready")
