"""A process whose first thread has ended lives, with its memory and its ports, until its last one has."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from cluster import processes
from surefoot.linux_process import group_of, identity_of, is_alive, state_of

HALF_ENDED = textwrap.dedent(
    """
    import ctypes, sys, threading, time

    threading.Thread(target=sys.stdin.read).start()
    ctypes.CDLL(None).pthread_exit(None)  # its first thread alone, as in the midst of a SIGKILL
    """
)


@pytest.fixture
def half_ended() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", HALF_ENDED], stdin=subprocess.PIPE, start_new_session=True)
    try:
        assert processes.wait(lambda: state_of(process.pid) == "Z", 30.0)
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_process_is_alive_until_its_last_thread_has_ended(half_ended: subprocess.Popen[bytes]) -> None:
    identity = identity_of(half_ended.pid)
    assert identity is not None
    assert is_alive(identity)
    assert group_of(half_ended.pid) == half_ended.pid
    half_ended.kill()
    assert processes.wait(lambda: not is_alive(identity), 30.0)


def test_a_killed_daemon_has_ended_when_its_port_is_free(half_ended: subprocess.Popen[bytes]) -> None:
    started = processes.start_time(half_ended.pid)
    assert started is not None
    daemon = processes.Recorded(half_ended.pid, started)
    assert processes.is_alive(daemon)
    half_ended.kill()
    assert processes.wait(lambda: not processes.is_alive(daemon), 30.0)
