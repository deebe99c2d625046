"""The companion beside several real servers of one node: each is watched by itself, whatever becomes of the others."""

import os
import re
import signal
import socketserver
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from contract.test_holder_companion import ACCOUNT, DEADLINE, answer, until
from support.servers import redis_server
from surefoot.errors import TierError
from surefoot.memory_server import server_process
from surefoot.memory_server.provisioning import INSTANCE_DIGITS, MemoryServerAdmin
from surefoot.memory_server.server_process import RunningServer, TlsFiles
from surefoot.memory_server.sidecar.server_monitor import NodeServersMonitor, ServerState, render_metrics
from surefoot.memory_server.sidecar.sidecar_settings import SidecarSettings

SIZE = 40 << 20
FILLED = SIZE // 2


@contextmanager
def node_of(count: int, folder: Path, tls: TlsFiles | None = None) -> Iterator[list[RunningServer]]:
    """Servers at ports that follow each other, as in the memory tier's pod."""
    program = redis_server.program(redis_server.OVER_TLS) if tls is not None else server_process.find_server_program()
    for attempt in range(20):
        with ExitStack() as stack:
            first = stack.enter_context(redis_server.running(folder / "0", program, SIZE, tls=tls))
            found = [first]
            try:
                for server in range(1, count):
                    port, own = first.settings.port + server, folder / str(server)
                    beside = server_process.start_server(replace(first.settings, port=port, folder=own), program)
                    found.append(beside)
                    stack.callback(beside.kill)
            except TierError:
                assert attempt < 19, "somebody has each port beside a free one"
                continue
            yield found
            return


def settings_of(servers: list[RunningServer], folder: Path) -> SidecarSettings:
    password = folder / "password"
    password.write_text(redis_server.ADMIN_PASSWORD)
    return SidecarSettings(
        port=0,
        redis_port=servers[0].settings.port,
        servers=len(servers),
        password_file=str(password),
        prefault_ratio=0.75,
        poll_seconds=0.02,
    )


def instance(seen: ServerState) -> str:
    """As jobs name it."""
    return seen.info["run_id"][:INSTANCE_DIGITS]


def sent(server: RunningServer, number: signal.Signals) -> None:
    os.kill(server.process.pid, number)


def test_each_server_is_filled_and_has_figures_of_its_own(tmp_path: Path) -> None:
    with node_of(3, tmp_path) as servers:
        node = NodeServersMonitor(settings_of(servers, tmp_path))
        assert node.not_ready_reason.splitlines() == [f"server {n}: it was not polled yet" for n in range(3)]
        with node.run_monitors():
            until(lambda: not node.not_ready_reason)
            assert all(one.prefaulted_bytes > FILLED for one in node.states)
            assert [instance(one) for one in node.states] == [one.instance for one in servers]
            servers[1].kill()
            until(lambda: not node.states[1].is_up)
            found = figures(node.states)
    assert found["surefoot_memory_server_up"] == found["surefoot_memory_server_ready"] == {"0": 1.0, "1": 0.0, "2": 1.0}
    others = {
        name: labelled
        for name, labelled in found.items()
        if name[len("surefoot_memory_server_") :] not in ("up", "ready")
    }
    assert len(others) > 10
    assert {name for name, labelled in others.items() if labelled.keys() != {"0", "2"}} == set()
    assert found["surefoot_memory_server_max_bytes"] == {"0": SIZE, "2": SIZE}


def figures(seen: tuple[ServerState, ...]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(render_metrics(seen).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[sample.labels["server"]] = sample.value
    return found


def test_a_server_that_hangs_keeps_no_other_one_waiting(tmp_path: Path) -> None:
    with node_of(3, tmp_path) as servers:
        node = NodeServersMonitor(replace(settings_of(servers, tmp_path), call_timeout_seconds=2.0))
        with node.run_monitors():
            until(lambda: not node.not_ready_reason)
            sent(servers[0], signal.SIGSTOP)
            until(lambda: not node.states[0].is_up)
            until(
                lambda: re.fullmatch(r"server 0: .+", node.not_ready_reason)
            )  # one line: the others are as ready as before
            servers[1].kill()
            until(lambda: not node.states[1].is_up)
            again = server_process.start_server(servers[1].settings, server_process.find_server_program())
            try:
                until(lambda: node.states[1].is_ready)
                assert instance(node.states[1]) == again.instance
                assert node.states[1].prefaulted_bytes > FILLED
                until(lambda: re.fullmatch(r"server 0: .+", node.not_ready_reason))
                sent(servers[0], signal.SIGCONT)
                until(lambda: not node.not_ready_reason)
                assert node.states[0].prefaulted_bytes == 0, "it is the server that it was: what it has is a job's"
            finally:
                again.kill()


def test_only_the_server_that_a_job_uses_is_left_alone(tmp_path: Path) -> None:
    with node_of(2, tmp_path) as servers:
        used = servers[1].settings
        admin = MemoryServerAdmin(used.host, used.port, redis_server.ADMIN_PASSWORD)
        admin.provision("uid-1", ACCOUNT, 1)
        node = NodeServersMonitor(settings_of(servers, tmp_path))
        with node.run_monitors():
            until(lambda: not node.not_ready_reason)
            assert node.states[0].prefaulted_bytes > FILLED
            assert node.states[1].prefaulted_bytes == 0
            servers[0].kill()
            until(lambda: not node.states[0].is_up)
            again = server_process.start_server(servers[0].settings, server_process.find_server_program())
            try:
                until(lambda: not node.not_ready_reason)
                assert node.states[0].prefaulted_bytes > FILLED
                assert node.states[1].prefaulted_bytes == 0
            finally:
                again.kill()
        admin.close()


class _OddServer(socketserver.StreamRequestHandler):
    """Answers as a server of Redis' protocol whose INFO lacks what every known one says."""

    def handle(self) -> None:
        while line := self.rfile.readline():
            words = []
            for _ in range(int(line[1:])):
                words.append(self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2])
            match words[0].upper():
                case b"INFO":
                    self.wfile.write(b"$10\r\nrun_id:odd\r\n")
                case b"DBSIZE" | b"DEL" | b"EXISTS":
                    self.wfile.write(b":0\r\n")
                case _:
                    self.wfile.write(b"+OK\r\n")


def test_what_nobody_foresaw_of_one_server_ends_no_watch(tmp_path: Path) -> None:
    """A thread that died would leave its server as it was seen last."""
    with node_of(1, tmp_path) as servers, ExitStack() as stack:
        settings = replace(settings_of(servers, tmp_path), servers=2)
        beside = socketserver.ThreadingTCPServer(("127.0.0.1", settings.redis_port + 1), _OddServer)
        beside.daemon_threads = True
        stack.enter_context(beside)
        answering = threading.Thread(target=beside.serve_forever)
        answering.start()
        stack.callback(answering.join)
        stack.callback(beside.shutdown)
        node = NodeServersMonitor(settings)
        with node.run_monitors():
            until(lambda: "cannot poll" in node.states[1].reason)
            until(lambda: node.states[0].is_ready)
            assert node.not_ready_reason.startswith("server 1: ")
            stack.close()
            until(lambda: "does not answer" in node.states[1].reason)


def test_a_renewed_certificate_is_handed_to_every_server(tmp_path: Path) -> None:
    files = redis_server.tls_files(tmp_path / "tls")
    with node_of(2, tmp_path, files) as servers:
        node = NodeServersMonitor(replace(settings_of(servers, tmp_path), tls_folder=str(tmp_path / "tls")))
        with node.run_monitors():
            until(lambda: not node.not_ready_reason)
            before = shown(servers)
            redis_server.tls_files(tmp_path / "tls")
            renewed = files.certificate.read_text()
            assert before == {one.settings.port: before[servers[0].settings.port] for one in servers}
            assert renewed not in before.values()
            until(lambda: set(shown(servers).values()) == {renewed})


def shown(servers: list[RunningServer]) -> dict[int, str]:
    """By port the certificate that a new connection is shown."""
    places = [(one.settings.host, one.settings.port) for one in servers]
    return {port: ssl.get_server_certificate((host, port)).strip() + "\n" for host, port in places}


@pytest.mark.parametrize("trouble", [signal.SIGKILL, signal.SIGSTOP])
def test_the_program_is_ready_when_all_are_and_names_who_is_not(trouble: signal.Signals, tmp_path: Path) -> None:
    with node_of(2, tmp_path) as servers:
        settings = settings_of(servers, tmp_path)
        environment = {
            "SUREFOOT_SIDECAR_PORT": "0",
            "SUREFOOT_SIDECAR_REDIS_PORT": str(settings.redis_port),
            "SUREFOOT_SIDECAR_SERVERS": "2",
            "SUREFOOT_SIDECAR_CALL_TIMEOUT_SECONDS": "1",
            "SUREFOOT_MEMORY_PASSWORD_FILE": settings.password_file,
        }
        command = [sys.executable, "-m", "surefoot.memory_server.sidecar"]
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
            try:
                assert process.stderr is not None
                port = int(process.stderr.readline().decode().rpartition("metrics at port ")[2])
                until(lambda: answer(port, "/readyz") == (200, b"ready\n"))
                sent(servers[1], trouble)
                until(lambda: answer(port, "/readyz")[0] == 503)
                said = answer(port, "/readyz")[1].decode()
                assert said.startswith(f"server 1: the Redis at 127.0.0.1:{settings.redis_port + 1} ")
                assert said.count("\n") == 1
                assert answer(port, "/healthz")[0] == 200
                process.terminate()
                assert process.wait(DEADLINE) == 0
            finally:
                process.kill()
