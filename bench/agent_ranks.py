"""What an agent's drains cost in CPU a GB when its node has one rank, or several of the same size.

`python -m bench.agent_ranks TASK OUT`. In this process, as in an agent's: a real Drain a rank, each with two slots, to two
Redis holders. All ranks' slots are sealed at once; the CPU is that of this process until every copy is acknowledged, and
beside it that of the holders. The numbers of ranks take turns; no chunk is equal to the one before.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cores import spent_seconds
from bench.holders import ACCOUNT, JOB
from surefoot.flush.engine import FlushArena, Flusher, FlushListener, FlushOptions
from surefoot.flush.state_machine import StagedSave
from surefoot.format.layouts import Stream, TensorParts, build_layout
from surefoot.geometry import Box
from surefoot.memory_server.client import MemoryServerClient
from surefoot.protocol.identities import MemoryServerEndpoint, MemoryServerInstance, RankSave

TASK: dict[str, Any] = {"rank_bytes": 64 << 20, "ranks": [1, 2, 4, 8], "saves": 7}
"""As `run` measures it: bytes of each rank, and saves of each number of ranks."""
COLUMNS = 1024
VALUES = b"{}"
WAIT_SECONDS = 60.0


class Rank:
    """One rank's staging memory and its drain; `saved` is set once every target has acknowledged."""

    def __init__(
        self, number: int, world: int, size_bytes: int, targets: Sequence[MemoryServerEndpoint], options: FlushOptions
    ) -> None:
        rows = size_bytes // (4 * COLUMNS)
        shape = (rows * world, COLUMNS)
        box = Box((rows * number, 0), (rows, COLUMNS))
        self._stream = Stream(build_layout([TensorParts("w", "float32", shape, (box,))]))
        self._bytes = self._stream.layout.stream_bytes
        self._slot_bytes = -(-(self._bytes + len(VALUES)) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = memoryview(mmap.mmap(-1, 2 * self._slot_bytes))
        for slot in range(2):
            begin = slot * self._slot_bytes
            self._memory[begin : begin + self._bytes] = os.urandom(1 << 16) * (self._bytes >> 16)
            self._memory[begin + self._bytes : begin + self._bytes + len(VALUES)] = VALUES
        self.save = RankSave(1, 0, number)
        self._world, self.chunks = world, len(self._stream.layout.chunk_starts)
        self.saved, self._ok = threading.Event(), False
        by_holder = {e.instance: e for e in targets}
        watcher = FlushListener(self._freed, lambda save, copies: None, lambda reason, text: None)
        arena = FlushArena(self._memory, 2, self._slot_bytes)
        self._drain = Flusher(
            arena, "bench", lambda h: MemoryServerClient(by_holder[h], JOB, ACCOUNT, 10.0), watcher, options
        )
        self._drain.set_targets(tuple(by_holder), frozenset(by_holder), len(by_holder))

    def change(self, step: int) -> None:
        """Gives every chunk of the next slot other bytes."""
        self.save = RankSave(1, step, self.save.rank)
        for start in self._stream.layout.chunk_starts:
            at = step % 2 * self._slot_bytes + start
            self._memory[at : at + 8] = step.to_bytes(8, "little")

    def stage(self) -> None:
        self.saved.clear()
        sealed = StagedSave(self.save, self._world, "bench", self._stream.digest, self._bytes, len(VALUES))
        self._drain.add_staged(self.save.step % 2, sealed, self._stream.text)

    def wait(self) -> None:
        if not self.saved.wait(WAIT_SECONDS) or not self._ok:
            raise RuntimeError(f"{self.save} was not acknowledged by every holder")

    def close(self) -> None:
        self._drain.close()

    def _freed(self, slot: int, step: int, ok: bool) -> None:
        self._ok = ok
        self.saved.set()


def measured(task: dict[str, Any]) -> dict[str, Any]:
    """Per number of ranks: CPU seconds of this process and of the holders, and seconds, of each save."""
    named = json.loads(os.environ["BENCH_ENDPOINTS"])
    endpoints = tuple(
        MemoryServerEndpoint(MemoryServerInstance(node, instance), host, port, node)
        for node, instance, host, port in named
    )
    holders = [int(pid) for pid in os.environ["BENCH_COMPANIONS"].split()]
    found: dict[str, Any] = {"rank_bytes": task["rank_bytes"]}
    step = 0
    for _ in range(task["saves"]):
        for world in task["ranks"]:
            options = FlushOptions()  # one for all drains of an agent
            ranks = [Rank(number, world, task["rank_bytes"], endpoints, options) for number in range(world)]
            here: dict[str, list[float]] = found.setdefault(
                str(world), {"agent_cpu_seconds": [], "holders_cpu_seconds": [], "seconds": []}
            )
            for warm in (True, False):
                step += 1
                took = saved(ranks, holders, step)
                if not warm:
                    for name, seconds in took.items():
                        here[name].append(seconds)
                drop(endpoints, ranks)
            for rank in ranks:
                rank.close()
    return found


def saved(ranks: Sequence[Rank], holders: list[int], step: int) -> dict[str, float]:
    """Saves all ranks at once; seconds until every copy is acknowledged, and CPU seconds of this process and of `holders`."""
    for rank in ranks:
        rank.change(step)
    agent, others, began = time.process_time(), spent_seconds(holders), time.monotonic()
    for rank in ranks:
        rank.stage()
    for rank in ranks:
        rank.wait()
    return {
        "seconds": time.monotonic() - began,
        "agent_cpu_seconds": time.process_time() - agent,
        "holders_cpu_seconds": spent_seconds(holders) - others,
    }


def drop(endpoints: Sequence[MemoryServerEndpoint], ranks: Sequence[Rank]) -> None:
    """Removes the ranks' saves from every holder."""
    for endpoint in endpoints:
        client = MemoryServerClient(endpoint, JOB, ACCOUNT, 10.0)
        for rank in ranks:
            client.delete_save(rank.save, 1, rank.chunks)
        client.close()


def main() -> None:
    Path(sys.argv[2]).write_text(json.dumps(measured(json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
