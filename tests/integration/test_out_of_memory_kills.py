"""Real kills by the kernel, in groups of their own: whose limit it was is read from the counters."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.agent.staging_memory import read_headroom
from surefoot.agent.trainers.exit_cause import (
    RankExit,
    consume_injected_kill,
    exceeded_limit_of,
    find_oom_kill,
    read_oom_counts,
)
from surefoot.linux_process import identity_of
from surefoot_operator.platforms.local.local_nodes import OomInjector

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
    before = read_oom_counts(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", ALLOCATES], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    (container / "cgroup.procs").write_text(str(child.pid))
    child.communicate(b"go\n", timeout=60)
    left = read_headroom(tmp_path / "fs/cgroup")
    kill = find_oom_kill(before, read_oom_counts(tmp_path), left)
    assert kill is not None, "the kernel's counters say nothing of it"
    assert child.returncode == -signal.SIGKILL
    expected = "limit" if limited == "container" else "node"
    assert kill.limit == exceeded_limit_of(RankExit(0, child.returncode, None), kill) == expected
    assert ("raise resources.limits.memory" in kill.text) == (limited == "container")


STEPS = """
import sys, time
print(flush=True)
while True:
    time.sleep(0.01)
    held = bytearray(1 << 20)
"""


def test_a_process_is_ended_by_the_kernel_in_a_group_of_its_own(groups: tuple[Path, Path], tmp_path: Path) -> None:
    word = tmp_path / "oom-n1"
    child = subprocess.Popen([sys.executable, "-c", STEPS], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()  # what it prints once Python has begun
    life = identity_of(child.pid)
    assert life is not None
    kills = OomInjector()
    kills.start_kill(life, word)
    group = Path(json.loads(word.read_text())["group"])
    assert child.wait(20) == -signal.SIGKILL
    kill = consume_injected_kill(word)
    assert kill is not None, "the kernel did not count it"
    assert "SIGKILL stands in" not in kill.text
    deadline = time.monotonic() + 10
    while group.exists() and time.monotonic() < deadline:
        kills.poll()
    assert not group.exists(), "a group is left behind"
    child.communicate()
