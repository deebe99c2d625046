"""What several Redis servers of a node gain and cost: `python -m bench.node_servers [OUT]`.

In this process, as in an agent's: eight ranks that drain beside each other, each to one server of each of two nodes as
`placement` deals them. One, two and four servers a node take turns. More servers are faster only where cores are left
for them; CPU a GB must not grow anywhere.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.agent_ranks import Rank, drop, saved
from bench.holders import ACCOUNT, JOB, NODES, PASSWORD
from surefoot.flush.engine import FlushOptions
from surefoot.memory_server import server_process
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot.memory_server.server_process import RunningServer, ServerSettings
from surefoot.protocol.checkpoints.placement import assign_targets
from surefoot.protocol.identities import MemoryServerEndpoint, MemoryServerInstance
from surefoot_operator.platforms.local.node_process import find_free_port

RANKS, RANK_BYTES, TURNS = 8, 64 << 20, 9
SERVERS = (1, 2, 4)
ROOM = 3.3


@contextmanager
def nodes() -> Iterator[tuple[list[RunningServer], list[MemoryServerEndpoint]]]:
    """Two nodes' servers, their pages filled; everything ends with the block."""
    program, started, found = server_process.find_server_program(), list[RunningServer](), list[MemoryServerEndpoint]()
    room = int(ROOM * RANKS * RANK_BYTES)
    with tempfile.TemporaryDirectory(prefix="surefoot-bench-") as name:
        try:
            for number in range(len(NODES) * max(SERVERS)):
                node, server = NODES[number // max(SERVERS)], number % max(SERVERS)
                folder, port = Path(name) / str(number), find_free_port()
                # each as large as the node: with one server it takes everything
                settings = ServerSettings(port, room, folder, password=PASSWORD, prefault_bytes=room * 9 // 10)
                started.append(server_process.start_server(settings, program))
                MemoryServerAdmin("127.0.0.1", port, PASSWORD).provision(JOB, ACCOUNT, 1)
                holder = MemoryServerInstance(node, started[-1].instance)
                found.append(MemoryServerEndpoint(holder, "127.0.0.1", port, node, server_index=server))
            yield started, found
        finally:
            for one in started:
                one.kill()


def measured(turns: int = TURNS) -> dict[str, Any]:
    """Per number of servers: seconds until all is acknowledged, and CPU seconds of agent and holders, of each turn."""
    made: dict[str, Any] = {
        str(n): {"seconds": [], "agent_cpu_seconds": [], "holders_cpu_seconds": []} for n in SERVERS
    }
    with nodes() as (started, endpoints):
        pids, step = [one.process.pid for one in started], 0
        for _ in range(turns):
            for servers in SERVERS:
                there = [e for e in endpoints if e.server_index < servers]
                dealt = assign_targets({0: NODES[0]}, there, len(NODES), RANKS)[0]
                options = FlushOptions()
                ranks = [Rank(n, RANKS, RANK_BYTES, dealt[n % len(dealt)], options) for n in range(RANKS)]
                for warm in (True, False):
                    step += 1
                    took = saved(ranks, pids, step)
                    if not warm:
                        for name, seconds in took.items():
                            made[str(servers)][name].append(seconds)
                    drop(there, ranks)
                for rank in ranks:
                    rank.close()
    return made


def main() -> None:
    found, state_gb = measured(), RANKS * RANK_BYTES / 1e9
    print(f"{RANKS} ranks of {RANK_BYTES >> 20} MiB, two copies; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("| servers of a node | GB/s | CPU s a GB: agent | holders |")
    print("|---|---|---|---|")
    for servers, of in found.items():
        rates = sorted(state_gb / seconds for seconds in of["seconds"])
        cpu = [statistics.median(of[name]) / state_gb for name in ("agent_cpu_seconds", "holders_cpu_seconds")]
        spread = f"{statistics.median(rates):.2f} ({rates[0]:.2f}–{rates[-1]:.2f})"
        print(f"| {servers} | {spread} | {cpu[0]:.2f} | {cpu[1]:.2f} |")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
