"""Nodes and agents for tests of the operator: real run folder, real Redis, real WebSocket lines, no torch.

A `Town` plays the nodes of the processes fabric in this process: each node's life is a sleeping child, each worker a
`Trainee` that counts steps and writes small, real rank saves under the job's own account.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import xxhash

from support.fakes.fake_agent import FakeAgent
from support.servers.redis_server import ADMIN_PASSWORD, start_somewhere
from surefoot.errors import SurefootError
from surefoot.linux_process import ProcessIdentity, identity_of
from surefoot.memory_server import Credentials, MemoryServerClient, server_process
from surefoot.memory_server.server_process import RunningServer, ServerSettings
from surefoot.protocol.checkpoints.records import Layout, Piece, RankManifest, TensorLayout
from surefoot.protocol.checkpoints.save_state import NO_CLOSED_STEPS, ClosedSteps
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.protocol.messages import (
    Assign,
    Barrier,
    BarrierReached,
    BarrierReply,
    Finished,
    Heartbeat,
    Hello,
    MemoryServers,
    Shutdown,
    StopTrainers,
    StoreReady,
    ToAgent,
    TrainersStopped,
)
from surefoot.protocol.progress import Progress
from surefoot_operator.api.parse import parse_job
from surefoot_operator.api.status import JobStatus
from surefoot_operator.platforms.local.platform import RunFolderStore
from surefoot_operator.platforms.local.run_folder import (
    MemoryServerRecord,
    NodeRecord,
    RunFolder,
    WorkerRecord,
    WorkerState,
    parse_record,
    read_json,
    record_to_json,
    write_json,
)

log = logging.getLogger(__name__)

STEP_SECONDS = 0.02


def document(replicas: int = 3, least: int | None = 1, **spec: Any) -> dict[str, Any]:
    """A TrainingJob as a user writes it."""
    elastic = {"elasticPolicy": {"minReplicas": least, "maxReplicas": replicas}} if least is not None else {}
    body = {
        "replicas": replicas,
        "checkpoint": {"memory": {"intervalSteps": 5}},
        "template": {"spec": {"containers": [{"name": "trainer", "command": ["true"]}]}},
        **elastic,
        **spec,
    }
    return {"apiVersion": "surefoot.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "t"}, "spec": body}


class Trainee:
    """One worker's agent and its one trainer."""

    def __init__(
        self, record: WorkerRecord, node: str, last_step: int | None, peers: Callable[[], list[Trainee]]
    ) -> None:
        self.environment: Mapping[str, str] = record.environment
        self.record, self.node, self.last_step, self._peers = record, node, last_step, peers
        self.incarnation = uuid.uuid4().hex
        self.assigned: Assign | None = None
        self.epochs: list[int] = []
        self.running = self.stopped = self.step = 0
        self.halt: Barrier | None = None
        self.retired = asyncio.Event()
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.saved: Checkpoint | None = None
        self.store: str | None = None
        self.unstaged = False
        """It has no memory to stage saves in: it trains, saves nothing, and says so."""
        self._line: FakeAgent | None = None
        self._trainer: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Lives until cancelled or retired; looks for the coordinator again whenever its line breaks."""
        try:
            while not self.retired.is_set():
                with contextlib.suppress(OSError, TimeoutError, RuntimeError, aiohttp.ClientError):
                    await self._talk()
                await asyncio.sleep(0.02)
        except Exception:
            # its worker counts as ended by itself then: without a word the test would fail far from the cause
            log.exception("the trainee of %s died", self.record.name)
            raise
        finally:
            await self._reap()

    async def _talk(self) -> None:
        env = self.environment
        greeting = Hello(
            env["SUREFOOT_JOB_UID"], self.record.index, self.record.attempt, self.incarnation, self.node,
            env["SUREFOOT_TOKEN"], self.running, self.stopped, True, self.store if self.running else None,
        )  # fmt: skip
        async with FakeAgent(env["SUREFOOT_COORDINATOR_URL"], greeting) as line:
            self._line, heard = line, 0
            while not line.closed.is_set() and not self.retired.is_set():
                await self.thawed.wait()
                for message in line.said[heard:]:
                    heard += 1
                    await self._obey(message)
                await self._beat()
                await asyncio.sleep(0.01)
        self._line = None

    async def _obey(self, message: ToAgent) -> None:
        if isinstance(message, StopTrainers) and message.generation > self.stopped:
            if self.running < message.generation:
                await self._reap()
            self.stopped = message.generation
            await self._say(TrainersStopped(message.generation))
        elif isinstance(message, Assign):
            await self._assign(message)
        elif (
            isinstance(message, MemoryServers)
            and self.assigned is not None
            and message.generation == self.assigned.generation
        ):
            known = {n: getattr(self.assigned, n) for n in self.assigned.__dataclass_fields__}
            self.assigned = Assign(**{**known, "servers": message.servers, "targets": message.targets})
        elif isinstance(message, Barrier):
            if message.phase == "proposed":
                accepted = message.step > self.step
                self.halt = message if accepted else None
                await self._say(BarrierReply(message.generation, message.step, accepted))
            else:
                self.halt = message if message.phase == "bound" else None
        elif isinstance(message, Shutdown):
            self.retired.set()

    async def _assign(self, message: Assign) -> None:
        self.assigned = message
        if message.hosts_store and message.store is None:
            self.store = f"127.0.0.1:{message.generation}"
            await self._say(StoreReady(message.generation, self.store))
        if message.store is not None and message.generation not in self.epochs and message.generation >= self.stopped:
            self.epochs.append(message.generation)
            self.running = message.generation
            self.step = message.parent.step if message.parent else 0
            self._trainer = asyncio.create_task(self._train(message.generation))

    async def _train(self, epoch: int) -> None:
        interval = int(self.environment["SUREFOOT_MEMORY_INTERVAL_STEPS"])
        while self.last_step is None or self.step < self.last_step:
            halt = self.halt
            if halt is not None and halt.generation == epoch and self.step >= halt.step:
                await self._save(epoch)
                if halt.phase == "bound":
                    await self._say(BarrierReached(epoch, self.step))
                await asyncio.sleep(0.01)
                continue
            await asyncio.sleep(STEP_SECONDS)
            await self.thawed.wait()
            if any(p.running == epoch and p.step < self.step for p in self._peers()):
                continue  # as in a collective, nobody runs ahead
            self.step += 1
            if self.step % interval == 0:
                await self._save(epoch)
        while self._line is None:  # noqa: ASYNC110  the line comes and goes by itself
            await asyncio.sleep(0.01)
        await self._say(Finished(epoch, 0, self.step))

    async def _save(self, epoch: int) -> None:
        assigned = self.assigned
        assert assigned is not None
        if self.saved == Checkpoint(epoch, self.step) or self.unstaged:
            return
        endpoints = {e.instance: e for e in assigned.servers}
        account = Credentials(self.environment["SUREFOOT_MEMORY_USER"], self.environment["SUREFOOT_MEMORY_PASSWORD"])
        save, world = RankSave(epoch, self.step, assigned.first_rank), assigned.world_size
        for target in assigned.targets:
            client = MemoryServerClient(endpoints[target], self.environment["SUREFOOT_JOB_UID"], account)
            try:
                await asyncio.to_thread(write_save, client, save, world)
            except SurefootError:
                continue  # as a drain does: the save has a copy less
            finally:
                client.close()
        self.saved = save.checkpoint

    async def _beat(self) -> None:
        source = "memory" if self.assigned is not None and self.assigned.parent else None
        beat = Heartbeat(
            self.running, self.stopped, True, saved=self.saved,
            progress=Progress(
                self.step, step_seconds=STEP_SECONDS, restored=self.running > 0, restored_from=source,
                closed_steps=ClosedSteps(self.step - 1) if self.unstaged and self.step else NO_CLOSED_STEPS,
            ),
        )  # fmt: skip
        await self._say(beat)

    async def _say(self, message: Any) -> None:
        if self._line is not None:
            with contextlib.suppress(OSError, RuntimeError):
                await self._line.say(message)

    async def _reap(self) -> None:
        self.running, self.halt = 0, None
        if self._trainer is not None:
            self._trainer.cancel()
            await asyncio.gather(self._trainer, return_exceptions=True)
            self._trainer = None


def write_save(client: MemoryServerClient, save: RankSave, world: int) -> RankManifest:
    """One whole small rank save, as an agent writes it: each rank has a tensor of its own."""
    name = f"w{save.rank}"
    layout = Layout((TensorLayout(name, "float32", (4,), (Piece((0,), (4,), (4,), 0),)),), (0,), 16)
    digest = xxhash.xxh3_64_hexdigest(layout.to_json().encode())
    manifest = RankManifest(save, world, "i", digest, 16, 1, "dd", 8, "vv", 2, 0.0)
    client.put_layout(digest, layout.to_json())
    client.put_chunk(save, 0, b"x" * 16)
    client.put_digests(save, b"d" * 8)
    client.put_values(save, b"{}")
    client.commit(manifest, save.generation, (16,))
    return manifest


@dataclass
class _Node:
    name: str
    leader: subprocess.Popen[bytes]
    redis: RunningServer
    workers: dict[str, tuple[Trainee, asyncio.Task[None]]] = field(default_factory=dict)


class Town:
    """Some nodes over one run folder. `async with` ends everything that was started."""

    def __init__(self, root: Path, job: Mapping[str, Any], last_step: int | None = None) -> None:
        self.folder = RunFolder(root)
        self.folder.create_folders()
        self.store = RunFolderStore(self.folder)
        parse_job(job)
        self.store.write_job(job, "uid-1")
        self.nodes: dict[str, _Node] = {}
        self.last_step = last_step
        self._count = 0
        self._tending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Town:
        self._tending = asyncio.create_task(self._tend())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.gather(self._tending, return_exceptions=True)
        for name in tuple(self.nodes):
            await self.kill(name)

    @property
    def status(self) -> JobStatus:
        return self.store.read_status()

    @property
    def trainees(self) -> list[Trainee]:
        return [trainee for node in self.nodes.values() for trainee, _ in node.workers.values()]

    def start(self, name: str) -> None:
        """Brings a node up, with an empty Redis."""
        self._count += 1
        folder = self.folder.root / f"redis-{self._count}"
        redis = start_somewhere(
            ServerSettings(0, 64 << 20, folder, password=ADMIN_PASSWORD), server_process.find_server_program()
        )
        leader = subprocess.Popen(["sleep", "3600"])
        self.nodes[name] = _Node(name, leader, redis)
        holder = MemoryServerRecord(
            redis.settings.host, redis.settings.port, _life(redis.process.pid), "default", ADMIN_PASSWORD
        )
        record = NodeRecord(name, _life(leader.pid), name, holder)
        write_json(self.folder.node_file(name), record_to_json(record), durable=False)

    def freeze(self, name: str) -> None:
        """All of a node stands still; its lines stay open."""
        node = self.nodes[name]
        os.kill(node.redis.process.pid, signal.SIGSTOP)
        for trainee, _ in node.workers.values():
            trainee.thawed.clear()

    def thaw(self, name: str) -> None:
        node = self.nodes[name]
        os.kill(node.redis.process.pid, signal.SIGCONT)
        for trainee, _ in node.workers.values():
            trainee.thawed.set()

    async def kill(self, name: str) -> None:
        """All of a node at once."""
        node = self.nodes.pop(name)
        node.leader.kill()
        node.redis.kill()
        node.leader.wait()
        for _, task in node.workers.values():
            task.cancel()
        await asyncio.gather(*(task for _, task in node.workers.values()), return_exceptions=True)

    async def _tend(self) -> None:
        """Starts workers bound to our nodes, and ends those that are deleted."""
        while True:
            for path in self.folder.workers_folder.glob("*.json"):
                body = read_json(path)
                record = parse_record(WorkerRecord, body) if body is not None else None
                node = self.nodes.get(record.node or "") if record is not None else None
                if record is not None and node is not None and record.node_life == _life(node.leader.pid):
                    await self._tend_worker(node, record)
            await asyncio.sleep(0.01)

    async def _tend_worker(self, node: _Node, record: WorkerRecord) -> None:
        known = node.workers.get(record.name)
        if known is None:
            trainee = Trainee(record, node.name, self.last_step, lambda: self.trainees)
            node.workers[record.name] = (trainee, asyncio.create_task(trainee.run()))
            self._state(record, "Running")
            return
        _, task = known
        if task.done():
            self._state(record, "Succeeded")
        elif self.folder.worker_deletion_file(record.name).exists():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._state(record, "Succeeded")

    def _state(self, record: WorkerRecord, phase: Any) -> None:
        code = 0 if phase == "Succeeded" else None
        write_json(
            self.folder.worker_state_file(record.name),
            record_to_json(WorkerState(record.uid, phase, None, code)),
            False,
        )


def _life(pid: int) -> str:
    life = identity_of(pid)
    return str(life) if life is not None else str(ProcessIdentity(pid, 0))
