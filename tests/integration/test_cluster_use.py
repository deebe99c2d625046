"""The lock on the machine's one cluster: runs that hurt it wait for each other, single tests share it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster import use

TESTS = Path(__file__).resolve().parents[1]
HOLD = """
import sys
from pathlib import Path
from cluster import use
with use.held(alone=sys.argv[2] == "alone", lock=Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another(lock: Path, how: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that has the cluster, or waits for it, until the block ends."""
    environment = {name: value for name, value in os.environ.items() if name != use.HELD} | {"PYTHONPATH": str(TESTS)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()  # the kernel gives its lock back
        process.wait(20)
        process.stdin.close()
        process.stdout.close()


def is_held(process: subprocess.Popen[bytes]) -> bool:
    assert process.stdout is not None
    return process.stdout.readline() == b"held\n"


@pytest.fixture(autouse=True)
def nothing_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """This test itself may run under the lock."""
    monkeypatch.delenv(use.HELD, raising=False)


def test_a_run_that_hurts_the_cluster_waits_for_another(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    entered = threading.Event()

    def enter() -> None:
        with use.held(alone=True, lock=lock):
            entered.set()

    with another(lock, "alone") as other:
        assert is_held(other)
        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.3)
    assert entered.wait(20)
    thread.join()


def test_single_tests_share_the_cluster_and_hold_off_who_would_hurt_it(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with use.held(alone=False, lock=lock), another(lock, "shared") as neighbour, another(lock, "alone") as waiting:
        assert is_held(neighbour)
        assert waiting.poll() is None


def test_what_runs_under_the_lock_takes_none_of_its_own(tmp_path: Path) -> None:
    with use.held(alone=True, lock=tmp_path / "lock"), use.held(alone=True, lock=tmp_path / "lock"):
        assert os.environ[use.HELD]
    assert use.HELD not in os.environ
