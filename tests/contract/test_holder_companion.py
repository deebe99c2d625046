"""The companion beside real servers of both versions: what it touches, when it says ready, and whom it leaves alone."""

import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.servers import redis_server
from surefoot.errors import ConfigurationError, TierUnavailable
from surefoot.memory_server import Credentials, MemoryServerClient, scripts, server_process
from surefoot.memory_server.connection import RespConnection
from surefoot.memory_server.provisioning import VALUE_BYTES, MemoryServerAdmin
from surefoot.memory_server.server_process import RunningServer
from surefoot.memory_server.sidecar.server_monitor import ServerMonitor, render_metrics
from surefoot.memory_server.sidecar.sidecar_settings import SidecarSettings, read_sidecar_settings
from surefoot.protocol.identities import RankSave

SIZE = 96 << 20
DEADLINE = 60.0
ACCOUNT = Credentials("job-1", "secret")


@pytest.fixture(params=redis_server.PROGRAMS)
def running(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningServer]:
    with redis_server.running(tmp_path / "redis", redis_server.program(request.param), SIZE) as started:
        yield started


@pytest.fixture
def admin(running: RunningServer) -> Iterator[MemoryServerAdmin]:
    opened = MemoryServerAdmin("127.0.0.1", running.settings.port, redis_server.ADMIN_PASSWORD)
    yield opened
    opened.close()


def beside(running: RunningServer, folder: Path, share: float = 0.75) -> SidecarSettings:
    password = folder / "password"
    password.write_text(f"{redis_server.ADMIN_PASSWORD}\n")
    return SidecarSettings(
        port=0,
        redis_port=running.settings.port,
        password_file=str(password),
        prefault_ratio=share,
        poll_seconds=0.02,
    )


@contextmanager
def watching(settings: SidecarSettings) -> Iterator[ServerMonitor]:
    watch = ServerMonitor(settings)
    thread = threading.Thread(target=watch.run)
    thread.start()
    try:
        yield watch
    finally:
        watch.stop_requested.set()
        thread.join(DEADLINE)


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # what a thread sees is announced by nobody


def resident(admin: MemoryServerAdmin) -> int:
    return int(admin._connection.info("memory")["used_memory_rss"])


def test_a_new_server_s_memory_is_touched_and_free_again(
    running: RunningServer, admin: MemoryServerAdmin, tmp_path: Path
) -> None:
    before, untouched = admin.measure_memory().used_bytes, resident(admin)
    with watching(beside(running, tmp_path)) as watch:
        until(lambda: watch.state.is_ready)
        assert SIZE // 2 < watch.state.prefaulted_bytes <= SIZE * 0.75
    until(lambda: admin.measure_memory().used_bytes < before + VALUE_BYTES)
    # else pages that were given back would be paid for again
    until(lambda: resident(admin) - untouched > SIZE // 2)
    assert not admin.is_prefaulting()


def test_what_a_killed_companion_left_is_removed(
    running: RunningServer, admin: MemoryServerAdmin, tmp_path: Path
) -> None:
    wire = RespConnection("127.0.0.1", running.settings.port, Credentials("", redis_server.ADMIN_PASSWORD), 5.0)
    for number in range(40):
        wire.call("SET", f"{scripts.PREFAULT_PREFIX}{number}", b"left")
    with watching(beside(running, tmp_path)) as watch:
        until(lambda: watch.state.is_ready)
        assert watch.state.prefaulted_bytes > SIZE // 2, "its own leftovers are no job's"
    assert wire.call("DBSIZE") == 0
    wire.close()


def test_a_server_with_a_job_is_left_alone(running: RunningServer, admin: MemoryServerAdmin, tmp_path: Path) -> None:
    admin.provision("uid-1", ACCOUNT, 1)
    with watching(beside(running, tmp_path)) as watch:
        until(lambda: watch.state.is_ready)
        assert watch.state.prefaulted_bytes == 0
    assert not admin.is_prefaulting()


def test_a_job_that_comes_ends_the_filling(running: RunningServer, admin: MemoryServerAdmin, tmp_path: Path) -> None:
    watch = ServerMonitor(beside(running, tmp_path, share=1.0))
    came: list[int] = []

    def alone(wire: RespConnection, written: int) -> bool:
        if written and not came:
            came.append(written)
            admin.provision("uid-1", ACCOUNT, 1)
        return ServerMonitor._may_prefault(watch, wire, written)

    watch._may_prefault = alone  # type: ignore[method-assign]  # the only moment at which a job can come for sure
    watch.poll()
    assert watch.state.prefaulted_bytes == came[0] * VALUE_BYTES
    assert watch.state.is_ready
    client = MemoryServerClient(redis_server.endpoint(running), "uid-1", ACCOUNT)
    client.put_values(RankSave(1, 1, 0), b"x")
    client.close()


def test_the_operator_s_visit_waits_for_a_server_that_is_being_filled(
    running: RunningServer, admin: MemoryServerAdmin, tmp_path: Path
) -> None:
    signs: list[bool] = []
    watch = ServerMonitor(beside(running, tmp_path))

    def alone(wire: RespConnection, written: int) -> bool:
        signs.append(admin.is_prefaulting())
        return ServerMonitor._may_prefault(watch, wire, written)

    watch._may_prefault = alone  # type: ignore[method-assign]  # looked at from inside
    watch.poll()
    assert signs
    assert all(signs)
    assert not admin.is_prefaulting()


def test_another_instance_is_filled_before_it_is_ready(tmp_path: Path) -> None:
    with redis_server.running(tmp_path / "first", memory_bytes=SIZE) as first:
        settings = beside(first, tmp_path)
        with watching(settings) as watch:
            until(lambda: watch.state.is_ready)
            once = watch.state.info["run_id"]
            first.kill()
            until(lambda: not watch.state.is_up)
            assert not watch.state.is_ready
            assert "does not answer" in watch.state.reason
            again = server_process.start_server(first.settings, server_process.find_server_program())
            try:
                until(lambda: watch.state.is_ready)
                assert watch.state.info["run_id"] != once
                assert watch.state.prefaulted_bytes > SIZE // 2
            finally:
                again.kill()


def test_figures_are_the_server_s_own(running: RunningServer, admin: MemoryServerAdmin, tmp_path: Path) -> None:
    watch = ServerMonitor(beside(running, tmp_path, share=0.0))
    assert dict(figures(watch)) == {"surefoot_memory_server_up": 0.0, "surefoot_memory_server_ready": 0.0}
    admin.provision("uid-1", ACCOUNT, 1)
    watch.poll()
    found = figures(watch)
    assert found["surefoot_memory_server_up"] == found["surefoot_memory_server_ready"] == 1.0
    assert found["surefoot_memory_server_max_bytes"] == SIZE
    assert 0 < found["surefoot_memory_server_used_bytes"] < SIZE
    assert found["surefoot_memory_server_evicted_keys_total"] == 0.0
    assert found["surefoot_memory_server_keys"] == 2.0
    assert found["surefoot_memory_server_network_receive_bytes_total"] > 0
    with pytest.raises(TierUnavailable):
        ServerMonitor(SidecarSettings(redis_port=1)).poll()


def figures(watch: ServerMonitor) -> dict[str, float]:
    families = text_string_to_metric_families(render_metrics([watch.state]).decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_the_program_answers_probes_and_ends_when_asked(running: RunningServer, tmp_path: Path) -> None:
    settings = beside(running, tmp_path)
    environment = {
        "SUREFOOT_SIDECAR_PORT": "0",
        "SUREFOOT_SIDECAR_REDIS_PORT": str(settings.redis_port),
        "SUREFOOT_MEMORY_PASSWORD_FILE": settings.password_file,
    }
    command = [sys.executable, "-m", "surefoot.memory_server.sidecar"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline().decode()
            port = int(line.rpartition("metrics at port ")[2])
            until(lambda: answer(port, "/readyz")[0] == 200)
            assert answer(port, "/healthz")[0] == 200
            assert b'surefoot_memory_server_up{server="0"} 1.0' in answer(port, "/metrics")[1]
            assert answer(port, "/other")[0] == 404
            running.kill()
            until(lambda: answer(port, "/readyz")[0] == 503)
            process.terminate()
            assert process.wait(DEADLINE) == 0
        finally:
            process.kill()


def answer(port: int, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as found:
            return found.status, found.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SUREFOOT_SIDECAR_PORT", "http"),
        ("SUREFOOT_SIDECAR_REDIS_PORT", "70000"),
        ("SUREFOOT_SIDECAR_SERVERS", "0"),
        ("SUREFOOT_SIDECAR_SERVERS", "9"),
        ("SUREFOOT_SIDECAR_SERVERS", "two"),
        ("SUREFOOT_SIDECAR_PREFAULT_RATIO", "90"),
        ("SUREFOOT_SIDECAR_POLL_SECONDS", "0"),
        ("SUREFOOT_SIDECAR_PREFAULT_TIMEOUT_SECONDS", "nan"),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        read_sidecar_settings({name: value})


def test_servers_beyond_the_last_port_are_refused() -> None:
    beside_it = {"SUREFOOT_SIDECAR_REDIS_PORT": "65534", "SUREFOOT_SIDECAR_SERVERS": "3"}
    with pytest.raises(ConfigurationError, match="SUREFOOT_SIDECAR_SERVERS is 3: from port 65534 on"):
        read_sidecar_settings(beside_it)
    assert read_sidecar_settings({**beside_it, "SUREFOOT_SIDECAR_SERVERS": "2"}).servers == 2


def test_settings_have_their_defaults() -> None:
    assert read_sidecar_settings({}) == SidecarSettings()
