"""Where a memory group may be made, in trees of both versions, and what stands in where none can be."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.linux_process import identity_of
from surefoot_operator.platforms.local.local_nodes import OomInjector, _cgroup_candidates

V1 = "5:memory:/docker/c1\n1:cpu:/\n0::/\n"
V2 = "0::/user.slice/user-7.slice/session.scope\n"


@pytest.mark.parametrize(
    ("lines", "tree", "expected"),
    [
        (V1, {}, [("memory/docker/c1", "memory.limit_in_bytes"), ("memory", "memory.limit_in_bytes")]),
        (V2, {"cgroup.subtree_control": "cpu memory\n"}, [(".", "memory.max")]),
        (
            V2,
            {"cgroup.subtree_control": "cpu memory\n", "user.slice/cgroup.subtree_control": "memory pids\n"},
            [("user.slice", "memory.max"), (".", "memory.max")],
        ),
        (V2, {"cgroup.subtree_control": "cpu\n"}, []),
    ],
    ids=["v1", "v2", "delegated", "no memory controller"],
)
def test_the_nearest_place_that_allows_it_comes_first(
    lines: str, tree: dict[str, str], expected: list[tuple[str, str]], tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.write_text(lines)
    for name, text in tree.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert list(_cgroup_candidates(tmp_path, own)) == [(tmp_path / place, limit) for place, limit in expected]


def test_where_no_group_can_be_made_sigkill_stands_in_and_says_why(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text(V2)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    life, word = identity_of(child.pid), tmp_path / "oom-n1"
    assert life is not None
    kills = OomInjector(tmp_path, own)
    kills.start_kill(life, word)
    assert child.wait(20) == -signal.SIGKILL
    said = json.loads(word.read_text())
    assert (
        said["stands_in"]
        == "no memory cgroup could be created: this machine has no cgroup memory controller that this user may use"
    )
    kills.poll()
    kills.close()
    child.communicate()
