"""A coordinator that does what a test says: a real WebSocket server that scripts real agents, and their processes."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, TypeVar

from aiohttp import WSMsgType, web

from surefoot.linux_process import identity_of
from surefoot.protocol.memory_server_list import SentServers, list_changes
from surefoot.protocol.messages import (
    Assign,
    FromAgent,
    Heartbeat,
    Hello,
    HelloRejected,
    MemoryServers,
    StoreReady,
    ToAgent,
    Welcome,
)
from surefoot.protocol.wire import decode, encode

T = TypeVar("T")
DEADLINE = 120.0
"""Nothing in a test takes this long unless it hangs."""


@dataclass
class Heard:
    """Everything one agent (by index) said, and its line if it has one."""

    hellos: list[Hello] = field(default_factory=list)
    messages: list[FromAgent] = field(default_factory=list)
    line: web.WebSocketResponse | None = None
    sent_holders: SentServers = ()
    """The list of holders that its present line has."""


class FakeCoordinator:
    """Welcomes every agent (or refuses it, if `refuse` is set) and remembers what it says."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.agents: dict[int, Heard] = {}
        self._tls = tls
        self.refuse: HelloRejected | None = None
        self.term = uuid.uuid4().hex
        self._port = 0
        self._runner: web.AppRunner | None = None
        self._news = asyncio.Condition()

    @property
    def url(self) -> str:
        scheme = "ws" if self._tls is None else "wss"
        return f"{scheme}://127.0.0.1:{self._port}/v1/agents"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/agents", self._agent)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True, ssl_context=self._tls)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """As a coordinator that dies: every line breaks, nobody listens; `start` comes back to the same port."""
        if self._runner is not None:
            for heard in self.agents.values():
                if heard.line is not None:
                    await heard.line.close()
            await self._runner.cleanup()
            self._runner = None
        self.term = uuid.uuid4().hex

    async def say(self, index: int, message: ToAgent) -> None:
        agent = self.agents[index]
        line = agent.line
        assert line is not None, f"agent {index} has no line"
        if isinstance(
            message, Assign | MemoryServers
        ):  # as a coordinator does: the list by its changes, then the message
            changed = list_changes(agent.sent_holders, message.servers)
            if changed is not None:
                await line.send_str(encode(changed))
            agent.sent_holders, message = message.servers, replace(message, servers=())
        await line.send_str(encode(message))

    async def until(self, index: int, kind: type[T], fits: Callable[[T], bool] = lambda _: True) -> T:
        """The first message of this kind that fits, said or still to be said."""
        return await self.when(lambda: next((m for m in self._said(index) if isinstance(m, kind) and fits(m)), None))

    async def when(self, look: Callable[[], T | None], seconds: float = DEADLINE) -> T:
        """Waits until `look` finds something among what was heard."""
        async with asyncio.timeout(seconds), self._news:
            while (found := look()) is None:
                await self._news.wait()
            return found

    def last(self, index: int, kind: type[T]) -> T | None:
        return next((m for m in reversed(self._said(index)) if isinstance(m, kind)), None)

    async def warm(self, *indexes: int) -> None:
        for index in indexes:
            await self.when(lambda index=index: self._is_warm(index) or None)

    async def launch(self, epoch: int, *indexes: int, local_ranks: int = 1) -> tuple[Assign, ...]:
        """Commits an epoch to these agents and passes the store's address on; returns the assignments."""
        assigns = [assignment(epoch, place, len(indexes), local_ranks=local_ranks) for place, _ in enumerate(indexes)]
        for index, assign in zip(indexes, assigns, strict=True):
            await self.say(index, assign)
        ready = await self.until(indexes[0], StoreReady, lambda m: m.generation == epoch)
        whole = tuple(Assign(**{**_fields(a), "store": ready.address}) for a in assigns)
        for index, assign in zip(indexes, whole, strict=True):
            await self.say(index, assign)
        return whole

    async def stepping(self, epoch: int, *indexes: int, beyond: int = 0) -> int:
        """Waits until every agent is past this step of this epoch; the least step."""
        steps = [
            (await self.until(i, Heartbeat, lambda b: b.generation == epoch and b.progress.step > beyond)).progress.step
            for i in indexes
        ]
        return min(steps)

    def _said(self, index: int) -> list[FromAgent]:
        return self.agents[index].messages if index in self.agents else []

    def _is_warm(self, index: int) -> bool:
        heard = self.agents.get(index)
        if heard is None or not heard.hellos:
            return False
        beat = self.last(index, Heartbeat)
        return beat.is_warm if beat is not None else heard.hellos[-1].is_warm

    async def _agent(self, request: web.Request) -> web.StreamResponse:
        line = web.WebSocketResponse()
        await line.prepare(request)
        hello = decode((await line.receive()).data)
        assert isinstance(hello, Hello)
        if self.refuse is not None:
            await line.send_str(encode(self.refuse))
            await line.close()
            return line
        heard = self.agents.setdefault(hello.index, Heard())
        heard.hellos.append(hello)
        heard.line, heard.sent_holders = line, ()
        await line.send_str(encode(Welcome(self.term, 0.1)))
        await self._tell()
        async for frame in line:
            if frame.type is WSMsgType.TEXT:
                heard.messages.append(decode(frame.data))  # type: ignore[arg-type]  # only agents speak here
                await self._tell()
        if heard.line is line:
            heard.line = None
        await self._tell()
        return line

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()


def _fields(assign: Assign) -> dict[str, object]:
    return {name: getattr(assign, name) for name in Assign.__slots__}


def assignment(epoch: int, place: int, size: int, local_ranks: int = 1) -> Assign:
    """A member's assignment with no holders: these worlds save nothing."""
    return Assign(
        generation=epoch,
        world_size=size * local_ranks,
        first_rank=place * local_ranks,
        local_ranks=local_ranks,
        group_rank=place,
        group_size=size,
        restarts=0,
        parent=None,
        lineage=((epoch, None, size),),
        token="t",
        hosts_store=place == 0,
        store=None,
        servers=(),
        targets=(),
        replicas=1,
    )


@dataclass
class AgentProcess:
    """A real agent, started as a fabric starts it."""

    process: asyncio.subprocess.Process
    folder: Path
    index: int

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self, epoch: int, rank: int) -> str:
        path = self.folder / "logs" / f"worker-{self.index}-0" / f"epoch-{epoch}" / f"rank-{rank}.log"
        return path.read_text() if path.exists() else ""

    async def ended(self, seconds: float = DEADLINE) -> int:
        return await asyncio.wait_for(self.process.wait(), seconds)

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
            await self.process.wait()


async def start_agent(
    coordinator: FakeCoordinator, folder: Path, index: int, command: Sequence[str], **environment: str
) -> AgentProcess:
    """`environment` goes on top of what every worker has."""
    values = {
        **{k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"},
        "SUREFOOT_JOB_UID": "job-1",
        "SUREFOOT_WORKER_INDEX": str(index),
        "SUREFOOT_WORKER_ATTEMPT": "0",
        "SUREFOOT_NODE": f"node-{index}",
        "SUREFOOT_COORDINATOR_URL": coordinator.url,
        "SUREFOOT_TOKEN": "secret-token",
        "SUREFOOT_RUN_FOLDER": str(folder),
        "SUREFOOT_TERMINATION_GRACE_SECONDS": "5",
        **environment,
    }
    with _own_log(folder, index) as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "surefoot.agent", "--", *command, env=values, stdout=output, stderr=output
        )
    return AgentProcess(process, folder, index)


def _own_log(folder: Path, index: int) -> BinaryIO:
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / f"agent-{index}.log").open("ab")


def descendants(pid: int) -> set[int]:
    """Every process below this one, by what the kernel says now."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found: set[int] = set()
    growing = True
    while growing:
        more = {child for child, parent in parents.items() if parent in found | {pid}} - found
        growing = bool(more)
        found |= more
    return found


def lives(pid: int) -> bool:
    """Whether the process exists and has a thread that runs."""
    return identity_of(pid) is not None


async def all_gone(pids: set[int], seconds: float = 10.0) -> bool:
    """Waits until none of these processes lives."""
    try:
        async with asyncio.timeout(seconds):
            while any(lives(pid) for pid in pids):  # noqa: ASYNC110  # nobody announces the end of other people's processes
                await asyncio.sleep(0.02)
    except TimeoutError:
        return False
    return True
