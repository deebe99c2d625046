"""Real kills by the kernel, in groups of their own: whose limit it was is read from the counters."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.agent.memory.headroom import read_headroom
from surefoot.agent.trainers.exit_cause import RankExit
from surefoot.agent.trainers.out_of_memory import limit_of, oom_between, oom_counts

GROUPS = Path("/sys/fs/cgroup/memory")
"""Of version 1, where this machine has it: version 2's files are read in the pure tests."""

ALLOCATES = "import sys; sys.stdin.readline(); held = [bytearray(1 << 20) for _ in range(512)]; print(len(held))"


@pytest.fixture
def groups() -> Iterator[tuple[Path, Path]]:
    """A pod's group and one of its containers."""
    pod = GROUPS / f"surefoot-test-{os.getpid()}"
    try:
        pod.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    container = pod / "container"
    try:
        (pod / "memory.use_hierarchy").write_text("1")
    except OSError:
        pass  # the only way there is in newer kernels
    container.mkdir()
    yield pod, container
    for group in (container, pod):
        deadline = time.monotonic() + 10
        while group.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # the last process may still be going
                group.rmdir()


@pytest.mark.parametrize("limited", ["container", "pod"])
def test_a_real_kill_is_told_with_whose_limit_it_was(groups: tuple[Path, Path], limited: str, tmp_path: Path) -> None:
    pod, container = groups
    (container if limited == "container" else pod).joinpath("memory.limit_in_bytes").write_text(str(64 << 20))
    if limited == "pod":  # a limit of its own, far above: it is not what is reached
        (container / "memory.limit_in_bytes").write_text(str(1 << 30))
    (tmp_path / "fs/cgroup").mkdir(parents=True)
    (tmp_path / "fs/cgroup/memory").symlink_to(container)
    before = oom_counts(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", ALLOCATES], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    (container / "cgroup.procs").write_text(str(child.pid))
    child.communicate(b"go\n", timeout=60)
    left = read_headroom(tmp_path / "fs/cgroup")
    kill = oom_between(before, oom_counts(tmp_path), left)
    assert kill is not None, "the kernel's counters say nothing of it"
    assert child.returncode == -signal.SIGKILL
    expected = "limit" if limited == "container" else "node"
    assert kill.limit == limit_of(RankExit(0, child.returncode, None), kill) == expected
    assert ("raise resources.limits.memory" in kill.text) == (limited == "container")
