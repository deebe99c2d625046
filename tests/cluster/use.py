"""Who uses the machine's one cluster: test runs that hurt it take it alone, single tests share it, nobody takes it from under another.

The lock lies beside the build cache, outside the cluster's own folder, which `down` removes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cluster import binaries, engines, layout, state
from cluster.engine import Engine
from cluster.errors import ClusterError
from cluster.kind import KindCluster

HELD = "SUREFOOT_CLUSTER_HELD"
"""In the environment of what runs under the lock, here or in a child: it takes none of its own."""


@contextmanager
def held(alone: bool, lock: Path = layout.USE_LOCK) -> Iterator[None]:
    """Waits, and says so, while others use the cluster."""
    if os.environ.get(HELD):
        yield
        return
    lock.parent.mkdir(parents=True, exist_ok=True)
    kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    with lock.open("w") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another test run uses the cluster; waiting for its end", file=sys.stderr, flush=True)
            fcntl.flock(file, kind)
        os.environ[HELD] = "1"
        try:
            yield
        finally:
            os.environ.pop(HELD, None)


@contextmanager
def standing(nodes: int) -> Iterator[Engine]:
    """The cluster that stands, repaired where it is hurt; else one that is taken down at the end. Under the lock."""
    engine = engines.choose()
    found = state.load()
    if found is not None and found.node_count != nodes and found.is_complete:
        raise ClusterError(f"a cluster of {found.node_count} nodes stands, {nodes} are wanted; take it `down` first")
    try:
        engine.up(nodes)
        yield engine
    finally:
        if found is None:
            engine.down()


def stands() -> bool:
    """Whether there is a cluster, or what is left of one."""
    return state.load() is not None


def why_none() -> str:
    """Why no cluster can be had on this machine; empty if one can."""
    chosen = engines.choose()
    if os.geteuid() != 0 and not isinstance(chosen, KindCluster):
        return "network namespaces need root, and no docker daemon answers"
    if shutil.which("go") is None and binaries.unbuilt():
        return f"there is no Go toolchain to build {', '.join(binaries.unbuilt())}"
    return ""


def run(command: Sequence[str], nodes: int) -> int:
    """The command's exit code. `nodes` 0: it brings up what it needs by itself."""
    with held(alone=True):
        if nodes == 0 or why_none():  # tests skip themselves, and say why
            return _child(command)
        with standing(nodes):
            return _child(command)


def _child(command: Sequence[str]) -> int:
    return subprocess.run(command, check=False).returncode
