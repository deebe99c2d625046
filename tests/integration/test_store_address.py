"""The epoch's store answers where other workers look for it, and nowhere else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore


def own_address() -> str | None:
    """An address of this machine that is not loopback; None where it has none. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        found = str(probe.getsockname()[0])
        return None if found.startswith("127.") else found


@contextmanager
def served(host: str, log: Path) -> Iterator[int]:
    """Its port."""
    reading, writing = os.pipe()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "surefoot.launcher.tcp_store", str(writing), str(os.getpid()), host],
            pass_fds=(writing,),
            stderr=output,
        )
    os.close(writing)
    try:
        with os.fdopen(reading) as pipe:
            yield int(pipe.readline())
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_store_of_one_machine_is_reached_by_loopback_alone(tmp_path: Path) -> None:
    with served("127.0.0.1", tmp_path / "log") as port:
        client = TCPStore("127.0.0.1", port)
        client.set("key", "value")
        assert client.get("key") == b"value"
        assert not answers("127.0.0.2", port)
        other = own_address()
        assert other is None or not answers(other, port)


def test_a_store_of_a_pod_is_reached_by_the_pods_address_alone(tmp_path: Path) -> None:
    address = own_address()
    if address is None:
        pytest.skip("this machine has no address but loopback")
    with served(address, tmp_path / "log") as port:
        assert answers(address, port)
        assert not answers("127.0.0.1", port)


def test_an_address_that_is_not_here_is_said_and_the_world_begins_all_the_same(tmp_path: Path) -> None:
    with served("192.0.2.1", tmp_path / "log") as port:
        assert answers("127.0.0.1", port)
    assert "cannot listen on 192.0.2.1" in (tmp_path / "log").read_text()
