"""A docker of our own beside whatever else the machine does."""

from __future__ import annotations

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
