"""A holder that speaks TLS proves that it is one, to whoever knows its authority; nobody else is told a password."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.servers import redis_server
from support.servers.certificates import authority
from surefoot.errors import AccessDenied, ConfigurationError, TierUnavailable
from surefoot.memory_server import Credentials, MemoryServerClient
from surefoot.memory_server.server_process import RunningServer
from surefoot.memory_server.sidecar.server_monitor import ServerMonitor
from surefoot.memory_server.sidecar.sidecar_settings import SidecarSettings
from surefoot.protocol.identities import MemoryServerEndpoint, MemoryServerInstance

JOB = "job-1"
ACCOUNT = redis_server.account("the-job", "its password")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with redis_server.of_kind(redis_server.OVER_TLS, tmp_path) as started:
        yield started


def index_with(endpoint: MemoryServerEndpoint, account: Credentials) -> None:
    client = MemoryServerClient(endpoint, JOB, account)
    try:
        client.read_index()
    finally:
        client.close()


def test_only_the_right_authority_is_believed(server: RunningServer) -> None:
    admin = redis_server.admin_of(server)
    admin.provision(JOB, ACCOUNT, 1)
    admin.close()
    where = redis_server.endpoint(server)
    index_with(where, ACCOUNT)
    with pytest.raises(AccessDenied, match="certificate verify failed"):
        index_with(where, replace(ACCOUNT, tls_ca=authority("somebody else").pem))
    with pytest.raises(TierUnavailable, match="SUREFOOT_MEMORY_TLS_CA"):
        index_with(where, replace(ACCOUNT, tls_ca=""))
    with pytest.raises(ConfigurationError, match="PEM"):
        index_with(where, replace(ACCOUNT, tls_ca="nonsense"))


def test_nobody_speaks_to_it_in_clear(server: RunningServer) -> None:
    with pytest.raises(TierUnavailable):
        index_with(replace(redis_server.endpoint(server), tls=False), ACCOUNT)


def test_a_certificate_of_something_else_is_no_holder_s(tmp_path: Path) -> None:
    known = authority("surefoot test")
    context = known.sign("surefoot-coordinator").server(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            taken, _ = listener.accept()
            with taken, contextlib.suppress(OSError):
                context.wrap_socket(taken, server_side=True).close()

        answering = threading.Thread(target=answer)
        answering.start()
        where = MemoryServerEndpoint(
            MemoryServerInstance("n", "i"), "127.0.0.1", listener.getsockname()[1], "n", tls=True
        )
        with pytest.raises(TierUnavailable, match="not valid for 'surefoot-memory'"):
            index_with(where, replace(ACCOUNT, tls_ca=known.pem))
        answering.join()


def test_the_companion_watches_over_tls_and_hands_a_renewed_certificate_in(
    server: RunningServer, tmp_path: Path
) -> None:
    files = server.settings.tls
    assert files is not None
    password = tmp_path / "password"
    password.write_text(redis_server.ADMIN_PASSWORD)
    settings = SidecarSettings(
        redis_port=server.settings.port, password_file=str(password), tls_folder=str(files.authority.parent)
    )
    watch = ServerMonitor(settings)
    watch.poll()
    assert watch.state.is_ready
    assert watch.state.prefaulted_bytes > 0
    before = files.certificate.read_text()
    redis_server.tls_files(files.authority.parent)
    assert files.certificate.read_text() != before
    watch.poll()
    assert shown(server) == files.certificate.read_text()


def shown(server: RunningServer) -> str:
    """The certificate that a new connection is shown."""
    return ssl.get_server_certificate((server.settings.host, server.settings.port)).strip() + "\n"
