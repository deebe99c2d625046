"""Agents by script, many in one process, each on a TLS line of its own, speaking the real protocol.

`python -m bench.scripted_agents --authority FILE [--addresses FILE]`; called by `bench.scale_lines` and the cluster's
`many_lines`. They say hello, beat, make a step each 0.4 s while an epoch runs, stop when told, and come back when their line
breaks. Each line of stdin is a word in JSON: `{"join": [worker, …]}` starts some, `{"leave": [job, index]}` ends one's life,
`{"heard": [job, epoch]}` and `{"lines": true}` are answered by one line of JSON. Times are of CLOCK_MONOTONIC, which all
processes of a machine share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import ssl
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.messages import (
    Assign,
    Heartbeat,
    Hello,
    HelloRejected,
    StopTrainers,
    StoreReady,
    TrainersStopped,
    Welcome,
)
from surefoot.protocol.progress import Progress
from surefoot.protocol.wire import decode, encode

STEP_SECONDS = 0.4
JOINING = 32
"""Handshakes at a time, of one process."""
STORE = "127.0.0.1:29500"
"""Where the first member's store is said to answer."""
BEAT = Heartbeat(1, 1, is_warm=True)
PROGRESS = Progress(step_seconds=STEP_SECONDS, restored=True, restored_from="memory", loss=2.5, loss_is_finite=True)


def step_now() -> int:
    """All ranks step together."""
    return 100 + int(time.time() % 86400 / STEP_SECONDS)


@dataclass(frozen=True)
class ScriptedWorker:
    """Whose agent it is, where it connects first, and what runs there when it says hello."""

    job: str
    index: int
    url: str
    attempt: int = 1
    node: str = ""
    token: str = "token"
    epoch: int = 0
    saved_step: int = 0
    """Step whose save its heartbeats name as safe; 0: none."""
    source: str = ""
    """Address that it connects from, as a pod has its own; empty: the process' own."""


@dataclass
class Told:
    """What the agents of this process heard of each job's epochs, and how much in all."""

    stops: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    assigns: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    received_bytes: int = 0
    refusals: int = 0
    joined: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """By job: lines on which the Welcome came, and which are open."""
    joined_at: dict[str, float] = field(default_factory=dict)
    """By job, when the last Welcome came."""
    broken: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """By job, how often a line with a Welcome ended that nobody here ended."""

    def heard(self, job: str, epoch: int) -> dict[str, Any]:
        stops, assigns = self.stops.get((job, epoch), []), self.assigns.get((job, epoch), [])
        return {
            "stops": len(stops),
            "first_stop": min(stops, default=None),
            "last_stop": max(stops, default=None),
            "assigns": len(assigns),
            "last_assign": max(assigns, default=None),
            "received_bytes": self.received_bytes,
            "joined": self.joined.get(job, 0),
            "refusals": self.refusals,
        }

    def lines(self) -> dict[str, Any]:
        """By job: open lines, breaks, and when the last was opened."""
        jobs = {job: [self.joined[job], self.broken.get(job, 0), at] for job, at in self.joined_at.items()}
        return {"jobs": jobs, "refusals": self.refusals, "received_bytes": self.received_bytes}


class Beats:
    """The heartbeat of the moment, as text: encoded once for all agents that stand alike."""

    def __init__(self) -> None:
        self._step = -1
        self._texts: dict[tuple[int, int, int], str] = {}

    def text(self, epoch: int, stopped: int, saved_step: int) -> str:
        step = step_now()
        if step != self._step:
            self._step = step
            self._texts.clear()
        at = (epoch, stopped, saved_step)
        found = self._texts.get(at)
        if found is None:
            progress = replace(PROGRESS, step=step) if epoch and epoch >= stopped else PROGRESS
            saved = Checkpoint(1, saved_step) if saved_step else None
            beat = replace(
                BEAT, generation=epoch, stopped=stopped, progress=progress, saved=saved, copies=2 if saved_step else 0
            )
            found = self._texts[at] = encode(beat)
        return found


class ScriptedAgent:
    """One line. It comes back when that breaks, as an agent does."""

    def __init__(self, worker: ScriptedWorker, told: Told, beats: Beats) -> None:
        self.worker, self._told, self._beats = worker, told, beats
        self._epoch = self._stopped = worker.epoch
        self._seconds, self._after, self._url = 0.5, 0.0, worker.url
        self._store: str | None = None

    async def run(self, session: aiohttp.ClientSession, joining: asyncio.Semaphore) -> None:
        while True:
            try:
                await self._converse(session, joining)
            except (aiohttp.ClientError, OSError, TimeoutError):
                self._told.refusals += 1
                self._url = self.worker.url
            await asyncio.sleep(self._after + random.uniform(0.2, 1.0))
            self._after = 0.0

    async def _converse(self, session: aiohttp.ClientSession, joining: asyncio.Semaphore) -> None:
        mine = self.worker
        async with joining:
            line = await session.ws_connect(self._url, max_msg_size=0)
        async with line:
            name, node = f"inc-{mine.index}-{mine.attempt}", mine.node or f"n{mine.index}"
            hello = Hello(
                mine.job,
                mine.index,
                mine.attempt,
                name,
                node,
                mine.token,
                self._epoch,
                self._stopped,
                True,
                self._store,
            )
            await line.send_str(encode(hello))
            beating: asyncio.Task[None] | None = None
            try:
                async for frame in line:
                    self._told.received_bytes += len(frame.data)
                    message = decode(frame.data)
                    if isinstance(message, Welcome):
                        self._seconds = message.heartbeat_seconds
                        self._told.joined[mine.job] += 1
                        self._told.joined_at[mine.job] = time.monotonic()
                        beating = asyncio.create_task(self._beat(line))
                    elif isinstance(message, HelloRejected):
                        self._told.refusals += 1
                        self._after, self._url = message.after_seconds, message.address or mine.url
                        return
                    elif isinstance(message, StopTrainers):
                        await self._stop(line, message.generation)
                    elif isinstance(message, Assign):
                        await self._start(line, message)
            finally:
                if beating is not None:
                    self._told.joined[mine.job] -= 1
                    self._told.broken[mine.job] += 1
                    beating.cancel()
                    await asyncio.gather(beating, return_exceptions=True)

    async def _stop(self, line: aiohttp.ClientWebSocketResponse, epoch: int) -> None:
        if epoch > self._stopped:
            if self._epoch:  # a newcomer has nothing to stop
                self._told.stops[self.worker.job, epoch].append(time.monotonic())
            self._stopped = epoch
            await line.send_str(encode(TrainersStopped(epoch)))

    async def _start(self, line: aiohttp.ClientWebSocketResponse, said: Assign) -> None:
        if said.generation <= self._epoch:
            return
        self._epoch, self._store = said.generation, STORE if said.hosts_store else None
        self._told.assigns[self.worker.job, said.generation].append(time.monotonic())
        if self._store is not None:
            await line.send_str(encode(StoreReady(said.generation, self._store)))

    async def _beat(self, line: aiohttp.ClientWebSocketResponse) -> None:
        await asyncio.sleep(random.uniform(0.0, self._seconds))
        while True:
            await line.send_str(self._beats.text(self._epoch, self._stopped, self.worker.saved_step))
            await asyncio.sleep(self._seconds)


class FileOfAddresses(AbstractResolver):
    """Names as a file has them at this moment, as a Service's endpoints: whoever leads moves."""

    def __init__(self, file: Path) -> None:
        self._file = file

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        address = json.loads(self._file.read_text()).get(host)
        if not address:
            raise OSError(f"{host} has no endpoint now")
        return [
            ResolveResult(hostname=host, host=address, port=port, family=family, proto=0, flags=socket.AI_NUMERICHOST)
        ]

    async def close(self) -> None: ...


class Crowd:
    """All agents of this process."""

    def __init__(self, trust: ssl.SSLContext, addresses: Path | None) -> None:
        self._trust, self._addresses, self._joining = trust, addresses, asyncio.Semaphore(JOINING)
        self._told, self._beats = Told(), Beats()
        self._lives: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    async def obey(self) -> None:
        """Takes words until stdin ends."""
        words = asyncio.StreamReader(limit=2**24)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(words), sys.stdin)
        while line := await words.readline():
            answer = self._taken(json.loads(line))
            if answer is not None:
                print(json.dumps(answer), flush=True)
        for life in self._lives.values():
            life.cancel()
        await asyncio.gather(*self._lives.values(), return_exceptions=True)
        for session in self._sessions.values():
            await session.close()

    def _taken(self, word: dict[str, Any]) -> dict[str, Any] | None:
        for one in word.get("join", ()):
            agent = ScriptedAgent(ScriptedWorker(**one), self._told, self._beats)
            life = asyncio.create_task(agent.run(self._session(agent.worker.source), self._joining))
            self._lives[agent.worker.job, agent.worker.index] = life
        if "leave" in word:
            job, index = word["leave"]
            self._lives.pop((job, index)).cancel()
        if "heard" in word:
            return self._told.heard(*word["heard"])
        return self._told.lines() if "lines" in word else None

    def _session(self, source: str) -> aiohttp.ClientSession:
        if source not in self._sessions:
            resolver = FileOfAddresses(self._addresses) if self._addresses is not None else None
            connector = aiohttp.TCPConnector(
                limit=0,
                ssl=self._trust,
                resolver=resolver,
                use_dns_cache=False,
                local_addr=(source, 0) if source else None,
            )
            self._sessions[source] = aiohttp.ClientSession(connector=connector)
        return self._sessions[source]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--authority", type=Path, required=True)
    parser.add_argument("--addresses", type=Path, help="JSON of a name's address, read at each connection")
    given = parser.parse_args()
    trust = ssl.create_default_context(cafile=str(given.authority))
    asyncio.run(_obey(trust, given.addresses))


async def _obey(trust: ssl.SSLContext, addresses: Path | None) -> None:
    await Crowd(trust, addresses).obey()


if __name__ == "__main__":
    main()
