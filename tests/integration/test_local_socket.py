"""`surefoot local`: workers reach the Redis of their own node by its socket and that of other nodes by TCP."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from support.local_run import SECONDS, Holder, Job, assert_whole, running

FULL = 10


@pytest.mark.timeout(SECONDS)
def test_each_worker_reaches_its_own_node_by_the_socket(tmp_path: Path) -> None:
    with running(tmp_path, Job(steps=20, gates=(FULL,))) as run:
        run.wait_for_step(FULL)
        for holder in run.holders():
            run.wait(f"both workers' lines to {holder.node}", partial(reached_both_ways, holder))
        assert len(run.holders()) == 2
        told = [_environment(pid)["SUREFOOT_MEMORY_SOCKET"].replace("{server}", "0") for pid in run.trainers()]
        assert sorted(told) == [str(path) for path in run.run_folder.list_sockets() if path.name.startswith("node-")]
        run.open_gate(FULL)
        done = run.finish()
    assert_whole(done.report, 20)
    assert run.run_folder.list_sockets() == [], "nothing of the run is left"


def reached_both_ways(holder: Holder) -> bool:
    """Whether lines of the job's account come by its socket, and others by TCP."""
    lines = [dict(word.split("=", 1) for word in line.split()) for line in _clients(holder)]
    return {"U" in line["flags"] for line in lines if line["user"] != "default"} == {True, False}


def _environment(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def _clients(holder: Holder) -> list[str]:
    found: bytes = holder.call("CLIENT", "LIST")
    return found.decode().splitlines()
