"""An agent, as far as saving goes: staging memory and drains of `surefoot.agent`, without trainers of its own.

A worker attaches to it as a trainer would: `SUREFOOT_GENERATION=1` to save; `2` to restore the newest save from holders; `3`
to restore it in place, from the staging memory that it left. Older saves are dropped as the leader would drop them. Each acknowledged copy becomes a line of the diary, with the monotonic
clock that all processes share. Started by `holders`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

from surefoot.agent.staging_memory import StagingMemory, StagingWatcher
from surefoot.ipc import trainer_messages as line
from surefoot.ipc.memfd import SLOTS
from surefoot.ipc.trainer_server import TrainerConnection, TrainerServer
from surefoot.memory_server.client import MemoryServerClient
from surefoot.memory_server.connection import worker_credentials
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, MemoryServerInstance, RankSave
from surefoot.protocol.messages import MemoryServers
from surefoot.settings import JobSettings, job_settings

KEPT = 2
INCARNATION = "bench"
IN_PLACE = 3


class Keeper:
    def __init__(self, endpoints: tuple[MemoryServerEndpoint, ...], job: JobSettings, diary: TextIO) -> None:
        self._endpoints, self._job, self._diary = endpoints, job, diary
        self._staging = StagingMemory(INCARNATION, job, StagingWatcher(self._freed, lambda: None, self._note))
        self._whole: list[RankSave] = []
        self._trainer: TrainerConnection | None = None
        self._line = TrainerServer(Path(os.environ["SUREFOOT_AGENT_SOCKET"]), self._admit, self._hear)
        self._chunks: dict[RankSave, int] = {}
        self._dropping = threading.Lock()

    def start(self) -> None:
        targets = tuple(e.instance for e in self._endpoints)
        self._staging.retarget(MemoryServers(1, self._endpoints, targets, len(targets)))
        self._line.start()

    def _admit(self, attach: line.Attach) -> line.Attached:
        parent = self._whole[-1].checkpoint if attach.generation > 1 and self._whole else None
        lineage: tuple[tuple[int, Checkpoint | None, int], ...] = ((1, None, 1),)
        if attach.generation > 1:
            lineage = (*lineage, (attach.generation, parent, 1))
        return line.Attached(
            job=self._job.job,
            generation=attach.generation,
            world_size=1,
            rank=0,
            incarnation=INCARNATION,
            parent=parent,
            lineage=lineage,
            servers=self._endpoints,
            replicas=len(self._endpoints),
            interval_steps=1,
            persistent_interval_steps=None,
            interval_exponent=0,
        )

    def _hear(self, trainer: TrainerConnection, message: line.FromTrainer) -> None:
        self._trainer = trainer
        match message:
            case line.Staged():
                self._staging.stage(0, RankSave(trainer.generation, message.step, 0), 1, message)
            case line.FindStagedSaves(checkpoint=checkpoint):
                in_place = trainer.generation == IN_PLACE
                for here, fd in (
                    self._staging.reusable_saves(0, checkpoint) if in_place else [(line.StagedSaves(0), None)]
                ):
                    trainer.send(here, fd)
            case line.RequestArena(slot_bytes=slot_bytes):
                self._task = asyncio.create_task(self._give(trainer, slot_bytes))
            case line.TrainerNotice(reason=reason, text=text):
                self._note(reason, text)

    async def _give(self, trainer: TrainerConnection, slot_bytes: int) -> None:
        given = await self._staging.grant_arena(0, slot_bytes)
        self._write({"arena_seconds": given.seconds})
        trainer.send(line.ArenaGranted(SLOTS, given.file.slot_bytes, given.seconds, given.busy), given.file.fd)

    def _freed(self, local: int, slot: int, step: int, ok: bool) -> None:
        copies = max((n for s, n in self._staging.tracker.copies_by_save.items() if s.step == step), default=0)
        self._write({"step": step, "copies": copies, "at": time.monotonic()})
        if self._trainer is not None:
            self._trainer.send(line.SlotFreed(slot, step, ok))
        if copies == len(self._endpoints):
            self._whole.append(next(s for s in self._staging.tracker.copies_by_save if s.step == step))
            old, self._whole = self._whole[:-KEPT], self._whole[-KEPT:]
            if old:
                threading.Thread(target=self._drop, args=(old,), daemon=True).start()

    def _drop(self, saves: list[RankSave]) -> None:
        with self._dropping:
            for endpoint in self._endpoints:
                client = MemoryServerClient(endpoint, self._job.job, worker_credentials(self._job), 10.0)
                for manifest in client.read_index().manifests:
                    if manifest.save in saves:
                        client.delete_save(manifest.save, manifest.save.generation, manifest.chunks)
                client.close()

    def _note(self, reason: str, text: str) -> None:
        self._write({"notice": reason, "text": text})

    def _write(self, entry: dict[str, object]) -> None:
        self._diary.write(json.dumps(entry) + "\n")
        self._diary.flush()


async def main(diary: TextIO) -> None:
    endpoints = tuple(
        MemoryServerEndpoint(MemoryServerInstance(node, instance), host, port, node)
        for node, instance, host, port in json.loads(sys.argv[1])
    )
    Keeper(endpoints, job_settings(), diary).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with open(os.environ["BENCH_DIARY"], "a") as opened:
        asyncio.run(main(opened))
