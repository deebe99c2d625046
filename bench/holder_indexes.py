"""What a restoring rank spends on asking a job's holders for one checkpoint, on real Redis servers.

`python -m bench.holder_indexes --holders 256`. Each server stands for many holders, of a job each: connections, commands and
entries are those of as many. Each holder has three checkpoints of its node's ranks and of a neighbour's. Prints one line of
JSON: milliseconds and CPU milliseconds of this process, the median and all turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from support.samples import sample
from support.servers.redis_server import (
    ADMIN_PASSWORD,
    account,
    admin_of,
    endpoint,
    program,
    running,
    tls_files,
    wire_of,
)
from surefoot.memory_server import scripts
from surefoot.memory_server.server_process import RunningServer
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.restore.catalogue import SaveSource, read_catalogue, server_sources

STEPS = (10, 20, 30)
WANTED = Checkpoint(1, STEPS[-1])
CALL_SECONDS = 5.0


def holder(server: RunningServer, number: int, of: int, ranks: int) -> list[SaveSource]:
    """Fills one holder, and names it as a source."""
    job, user = f"job-{number}", account(f"user-{number}", "word")
    admin_of(server).provision(job, user, 1)
    there = [node * ranks + rank for node in (number, (number - 1) % of) for rank in range(ranks)]
    manifest = replace(sample(RankManifest), world_size=of * ranks, objects=())
    saves = [replace(manifest, save=RankSave(WANTED.generation, step, rank)) for step in STEPS for rank in there]
    wire = wire_of(server, account("", ADMIN_PASSWORD))
    wire.call(
        "HSET", scripts.index_key(job), *(text for m in saves for text in (scripts.index_field(m.save), m.to_json()))
    )
    wire.close()
    return server_sources([endpoint(server, f"n{number}")], job, user, None, CALL_SECONDS)


def turn(sources: list[SaveSource], ranks: int) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    found = read_catalogue(sources, WANTED)
    taken = (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3
    assert len(found.copies_by_rank(WANTED)) == ranks, f"{found.unanswered_sources} did not answer"
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.holder_indexes", description=__doc__)
    parser.add_argument("--holders", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=8, help="of a node")
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--tls", action="store_true")
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = [
            stack.enter_context(
                running(
                    folder / str(i), program("redis on PATH"), tls=tls_files(folder / f"tls-{i}") if given.tls else None
                )
            )
            for i in range(given.servers)
        ]
        sources = [
            source
            for number in range(given.holders)
            for source in holder(servers[number % given.servers], number, given.holders, given.ranks)
        ]
        turn(sources, given.holders * given.ranks)
        turns = [turn(sources, given.holders * given.ranks) for _ in range(given.turns)]
    row = {
        "milliseconds": round(statistics.median(wall for wall, _ in turns), 1),
        "cpu_milliseconds": round(statistics.median(cpu for _, cpu in turns), 1),
        "each": [round(wall, 1) for wall, _ in turns],
    }
    print(json.dumps({**vars(given), **row, "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
