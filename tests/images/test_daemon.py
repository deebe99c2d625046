"""A docker of our own beside whatever else the machine does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster import cgroups
from images import daemon
from images.conftest import Built
from images.containers import Containers

pytestmark = pytest.mark.timeout(2400)  # the first test waits for the build


def test_its_containers_weigh_more_than_one_process_of_the_host(built: Built, containers: Containers) -> None:
    """All nodes of kind weighed as one: at a load of 40 an agent was silent for three seconds, and its worker taken for lost."""
    if built.docker.host is None:
        pytest.skip("this docker is somebody else's: its cgroups are not ours")
    with containers.running(built.operator, "-c", "input()", options=("--entrypoint", "python", "-i")) as container:
        pid = built.docker.run("inspect", "--format", "{{.State.Pid}}", container.name).strip()
        groups = [line.split(":")[2] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    assert any(group.startswith(f"/{daemon.CGROUP}/") for group in groups), groups
    weights = list(cgroups.MOUNT.glob(f"*/{daemon.CGROUP}/cpu.shares"))
    weights += cgroups.MOUNT.glob(f"{daemon.CGROUP}/cpu.weight")
    assert [int(file.read_text()) in (16 * 1024, 16 * 100) for file in weights] == [True]


def test_its_containers_find_one_another_by_name(built: Built) -> None:
    """Where the machine has no iptables, docker answered no name: kind's workers waited for their control plane in vain."""
    network = f"surefoot-test-{os.getpid()}"
    built.docker.run("network", "create", network)
    try:
        there = Containers(built.docker, network)
        with there.running(built.operator, "-c", "input()", options=("--entrypoint", "python", "-i")) as container:
            ask = f"import socket; print('at', socket.gethostbyname({container.name!r}))"
            said = there.run(built.operator, "-c", ask, options=("--entrypoint", "python"))
        assert said.code == 0, said.text
        assert said.text.startswith("at "), said.text
    finally:
        built.docker.tried("network", "rm", network)
