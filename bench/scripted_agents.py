"""Agents by script for `bench.scale_lines`: many in one process, each on a TLS line of its own, speaking the real protocol.

`python -m bench.scripted_agents --url wss://… --authority FILE --first 0 --count 500`. They say hello, beat, make a step each
0.4 s while an epoch runs, and stop when told. Each line of stdin is a question: `heard EPOCH` is answered by one line
of JSON: when the first and the last heard its Stop and its Assign, how many did, and what they received in all. Times are
of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import ssl
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.messages import Assign, Heartbeat, Hello, Refused, Stop, Stopped, Welcome
from surefoot.protocol.progress import Progress
from surefoot.protocol.wire import SUBPROTOCOLS, decode, encode, version_of

STEP_SECONDS = 0.4
JOINING = 32
"""Handshakes at a time, of one process."""
BEAT = Heartbeat(1, 1, warm=True, saved=Checkpoint(1, 40), copies=2)
PROGRESS = Progress(step_seconds=STEP_SECONDS, restored=True, restored_from="memory", loss=2.5, loss_is_finite=True)


def step_now() -> int:
    """All ranks step together."""
    return 100 + int(time.time() % 86400 / STEP_SECONDS)


@dataclass
class Told:
    """What the agents of this process heard of each epoch, and how much in all."""

    stops: dict[int, list[float]] = field(default_factory=dict)
    assigns: dict[int, list[float]] = field(default_factory=dict)
    received_bytes: int = 0
    refusals: int = 0
    joined: int = 0
    """Lines on which the Welcome came, and which are open."""

    def said(self, epoch: int) -> dict[str, Any]:
        stops, assigns = self.stops.get(epoch, []), self.assigns.get(epoch, [])
        return {
            "stops": len(stops),
            "first_stop": min(stops, default=None),
            "last_stop": max(stops, default=None),
            "assigns": len(assigns),
            "last_assign": max(assigns, default=None),
            "received_bytes": self.received_bytes,
            "joined": self.joined,
            "refusals": self.refusals,
        }


class Beats:
    """The heartbeat of the moment, as text: encoded once for all agents that stand alike."""

    def __init__(self) -> None:
        self._at: tuple[int, int, int] = (-1, -1, -1)
        self._text = ""

    def text(self, epoch: int, stopped: int, version: int | None) -> str:
        at = (epoch, stopped, step_now())
        if at != self._at:
            progress = replace(PROGRESS, step=at[2]) if epoch >= stopped else PROGRESS
            self._at, self._text = at, encode(replace(BEAT, epoch=epoch, stopped=stopped, progress=progress), version)
        return self._text


class ScriptedAgent:
    """One line. It comes back when that breaks, as an agent does."""

    def __init__(self, index: int, told: Told, beats: Beats) -> None:
        self.index, self._told, self._beats = index, told, beats
        self._epoch, self._stopped, self._seconds = 1, 1, 0.5

    async def run(self, session: aiohttp.ClientSession, url: str, joining: asyncio.Semaphore) -> None:
        while True:
            try:
                await self._converse(session, url, joining)
            except (aiohttp.ClientError, OSError, TimeoutError):
                self._told.refusals += 1
            await asyncio.sleep(random.uniform(0.2, 1.0))

    async def _converse(self, session: aiohttp.ClientSession, url: str, joining: asyncio.Semaphore) -> None:
        async with joining:
            line = await session.ws_connect(url, protocols=SUBPROTOCOLS, max_msg_size=0)
        async with line:
            version = version_of(line.protocol)
            name, node = f"inc-{self.index}-1", f"n{self.index}"
            hello = Hello("job", self.index, 1, name, node, "token", self._epoch, self._stopped, True)
            await line.send_str(encode(hello, version))
            beating: asyncio.Task[None] | None = None
            try:
                async for frame in line:
                    self._told.received_bytes += len(frame.data)
                    message = decode(frame.data)
                    if isinstance(message, Welcome):
                        self._seconds = message.heartbeat_seconds
                        self._told.joined += 1
                        beating = asyncio.create_task(self._beat(line, version))
                    elif isinstance(message, Refused):
                        self._told.refusals += 1
                        return
                    elif isinstance(message, Stop):
                        await self._stop(line, message.epoch, version)
                    elif isinstance(message, Assign) and message.epoch > self._epoch:
                        self._epoch = message.epoch
                        self._told.assigns.setdefault(message.epoch, []).append(time.monotonic())
            finally:
                if beating is not None:
                    self._told.joined -= 1
                    beating.cancel()
                    await asyncio.gather(beating, return_exceptions=True)

    async def _stop(self, line: aiohttp.ClientWebSocketResponse, epoch: int, version: int | None) -> None:
        if epoch > self._stopped:
            self._told.stops.setdefault(epoch, []).append(time.monotonic())
            self._stopped = epoch
            await line.send_str(encode(Stopped(epoch), version))

    async def _beat(self, line: aiohttp.ClientWebSocketResponse, version: int | None) -> None:
        await asyncio.sleep(random.uniform(0.0, self._seconds))
        while True:
            await line.send_str(self._beats.text(self._epoch, self._stopped, version))
            await asyncio.sleep(self._seconds)


async def answer(told: Told) -> None:
    """Answers questions until stdin ends."""
    questions = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(questions), sys.stdin)
    while line := await questions.readline():
        print(json.dumps(told.said(int(line.split()[1]))), flush=True)


async def live(url: str, trust: ssl.SSLContext, indexes: range) -> None:
    told, beats, joining = Told(), Beats(), asyncio.Semaphore(JOINING)
    connector = aiohttp.TCPConnector(limit=0, ssl=trust)
    async with aiohttp.ClientSession(connector=connector) as session:
        agents = [
            asyncio.create_task(ScriptedAgent(index, told, beats).run(session, url, joining)) for index in indexes
        ]
        await answer(told)
        for agent in agents:
            agent.cancel()
        await asyncio.gather(*agents, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--authority", type=Path, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, required=True)
    given = parser.parse_args()
    trust = ssl.create_default_context(cafile=str(given.authority))
    asyncio.run(live(given.url, trust, range(given.first, given.first + given.count)))


if __name__ == "__main__":
    main()
