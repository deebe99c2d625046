"""Two processes that have imported the frameworks, and ranks forked from them by the product's own client.

Used by `gloo_world`. Each rank's own import of PyTorch was a sixth of what the integration tier computed. Two, because each
has a hash seed of its own: what walks a set on all ranks is not to meet in one order by chance.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

from surefoot.launcher.child_process import Child
from surefoot.launcher.job_program import LaunchProgram
from surefoot.launcher.starter import ForkRequest, ForkServerClient

LIMIT_SECONDS = 240.0
HASH_SEEDS = ("1", "2")


@dataclass
class Rank:
    """One process; `output` is what it printed and complained of."""

    warm: WarmPair
    child: Child
    output: IO[str]

    @property
    def code(self) -> int | None:
        """None while it runs."""
        self.warm.look()
        return self.child.exited.result() if self.child.exited.done() else None

    def ended(self) -> int:
        """Waits for its exit code."""
        return self.warm.wait(self.child)

    def said(self) -> str:
        self.output.seek(0)
        return self.output.read()


class WarmPair:
    """Two warm processes; their loop turns while somebody asks."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._clients: list[ForkServerClient] = []
        self._runner.run(self._warm())

    async def _warm(self) -> None:
        changed = asyncio.Event()
        self._clients = [ForkServerClient(changed.set) for _ in HASH_SEEDS]
        for client, seed in zip(self._clients, HASH_SEEDS, strict=True):
            environment = {**self._environment, "PYTHONHASHSEED": seed, "PYTHONWARNINGS": "ignore"}
            client.start(None, environment, sys.__stderr__.fileno() if sys.__stderr__ else 2)
        async with asyncio.timeout(LIMIT_SECONDS):
            while not all(client.warm for client in self._clients):
                assert not any(client.dead for client in self._clients), "a warm process ended"
                await changed.wait()
                changed.clear()

    def fork(self, rank: int, program: LaunchProgram, environment: Mapping[str, str]) -> Rank:
        output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  as long as its rank
        request = ForkRequest(program, environment, os.getcwd(), output.fileno())
        return Rank(self, self._runner.run(self._clients[rank % len(self._clients)].fork_trainer(request)), output)

    def look(self) -> None:
        self._runner.run(asyncio.sleep(0))

    def wait(self, child: Child) -> int:
        async def code() -> int:
            return await asyncio.wait_for(asyncio.shield(child.exited), LIMIT_SECONDS)

        return self._runner.run(code())

    def close(self) -> None:
        """Ends both, and what was forked from them."""
        for client in self._clients:
            self._runner.run(client.close())
        self._runner.close()
