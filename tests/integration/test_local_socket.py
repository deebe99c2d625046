"""`surefoot local`: workers reach the Redis of their own node by its socket and that of other nodes by TCP."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.local_run import SECONDS, Holder, Job, assert_whole, running

FULL = 10


@pytest.mark.timeout(SECONDS)
def test_each_agent_saves_to_its_own_node_by_the_socket(tmp_path: Path) -> None:
    with running(tmp_path, Job(steps=20, gates=(FULL,))) as run:
        run.wait_for_step(FULL)
        for holder in run.holders():
            run.wait(f"both workers' lines to {holder.node}", lambda h=holder: {True, False} <= by_socket(h))  # type: ignore[misc]
        assert len(run.holders()) == 2
        run.open_gate(FULL)
        done = run.finish()
    assert_whole(done.report, 20)
    assert run.run_folder.sockets() == [], "nothing of the run is left"


def by_socket(holder: Holder) -> set[bool]:
    """Of each line of a job to it, whether it came by the socket."""
    lines = [dict(word.split("=", 1) for word in line.split()) for line in _clients(holder)]
    return {"U" in line["flags"] for line in lines if line["user"] != "default"}


def _clients(holder: Holder) -> list[str]:
    found: bytes = holder.call("CLIENT", "LIST")
    return found.decode().splitlines()
