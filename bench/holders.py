"""Two real Redis holders and the agent's end of the trainers' line, for the systems that save to the memory tier.

The holders are started as the processes fabric starts them, their pages filled. Keeper and workers are on the first
one's node, and reach it as a job reaches its own node's holder: by its Unix socket. Made by `__main__`, used by workers
through the environment that `environment()` gives.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from surefoot.memory_server import server_process
from surefoot.memory_server.connection import Credentials
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot.memory_server.server_process import ServerSettings
from surefoot_operator.platforms.local.node_process import find_free_port

JOB = "bench"
NODES = ("node-a", "node-b")
HERE = NODES[0]
PASSWORD = "of the benchmark"
ACCOUNT = Credentials("bench-user", "of the benchmark's job")
ROOM = 3.3
"""Checkpoints of room in each holder: two that are kept, one that is written."""


@dataclass(frozen=True, slots=True)
class Tier:
    """What runs; `folder` has the keeper's socket and its diary of acknowledged saves."""

    folder: Path
    pids: tuple[int, ...]
    holders: tuple[int, ...]
    endpoints: tuple[tuple[str, str, str, int], ...] = ()
    """(node, instance, host, port) of each holder."""

    def environment(self) -> dict[str, str]:
        return {
            "SUREFOOT_AGENT_SOCKET": str(self.folder / "agent.sock"),
            "SUREFOOT_JOB_UID": JOB,
            "SUREFOOT_NODE": HERE,
            "SUREFOOT_MEMORY_SOCKET": str(self.folder / f"{HERE}.sock"),
            "SUREFOOT_MEMORY_USER": ACCOUNT.user,
            "SUREFOOT_MEMORY_PASSWORD": ACCOUNT.password,
            "SUREFOOT_MEMORY_CALL_TIMEOUT_SECONDS": "10",
            "RANK": "0",
            "BENCH_DIARY": str(self.folder / "diary.jsonl"),
            "BENCH_ENDPOINTS": json.dumps(self.endpoints),
            "BENCH_COMPANIONS": " ".join(map(str, self.pids)),
        }


@contextmanager
def running(state_bytes: int) -> Iterator[Tier]:
    """The tier, filled and provisioned; everything ends with the block."""
    with tempfile.TemporaryDirectory(prefix="surefoot-bench-") as name:
        folder = Path(name)
        program, room = server_process.find_server_program(), int(ROOM * state_bytes) + (64 << 20)
        started = []
        keeper: subprocess.Popen[bytes] | None = None
        try:
            endpoints: list[tuple[str, str, str, int]] = []
            for node in NODES:
                port = find_free_port()
                settings = ServerSettings(
                    port,
                    room,
                    folder / node,
                    password=PASSWORD,
                    socket_path=folder / f"{node}.sock" if node == HERE else None,
                    prefault_bytes=room * 9 // 10,
                )
                one = server_process.start_server(settings, program)
                started.append(one)
                MemoryServerAdmin("127.0.0.1", port, PASSWORD).provision(JOB, ACCOUNT, 1)
                endpoints.append((node, one.instance, "127.0.0.1", port))
            tier = Tier(folder, (), tuple(one.process.pid for one in started), tuple(endpoints))
            keeper = subprocess.Popen(
                [sys.executable, "-m", "bench.keeper", json.dumps(endpoints)],
                env={**os.environ, **tier.environment()},
                stdout=subprocess.PIPE,
            )
            assert keeper.stdout is not None  # PIPE above
            if keeper.stdout.readline() != b"ready\n":
                raise RuntimeError("the keeper of the staging memory did not start; its error stands above")
            yield replace(tier, pids=(keeper.pid, *tier.holders))
        finally:
            if keeper is not None:
                keeper.kill()
                keeper.wait()
            for one in started:
                one.kill()
