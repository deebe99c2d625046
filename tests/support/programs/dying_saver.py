"""Saves through a real drain in a process that kills itself at a chosen stage, over and over; then looks what is left.

A program of its own, started by test_kill9: `python -m support.programs.dying_saver ARGUMENTS.json`. It forks a child a run
(every thread of the run before has ended by then), and reads what each left with the real restore. Prints one JSON
line a run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import numpy as np

from support.saves import Saver, arrays
from surefoot.flush.engine import FlushOptions
from surefoot.flush.uploader import Uploader, UploadOutcome
from surefoot.geometry import Box
from surefoot.memory_server.client import MemoryServerClient
from surefoot.memory_server.connection import Credentials
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import MemoryServerEndpoint, MemoryServerInstance, RankSave
from surefoot.restore import (
    CheckpointReader,
    Destination,
    ReadOptions,
    persistent_source,
    read_catalogue,
    server_sources,
)
from surefoot.settings import PersistentSettings
from surefoot.tiers import ObjectStoreTier, Tier, open_persistent

SHAPES: dict[str, tuple[int, ...]] = {"weight": (300, 70), "bias": (70,), "count": ()}
FIRST, SECOND = 10, 20

STAGES: Mapping[str, tuple[str, int]] = {
    "staged": ("staged", 1),
    "one chunk written": ("chunk", 1),
    "half drained": ("chunk", 4),
    "one replica written": ("written", 1),
    "both replicas written": ("written", 2),
    "manifest on one holder": ("committed", 1),
    "manifest on both holders": ("committed", 2),
    "slot freed": ("freed", 1),
    "half promoted": ("persistent part", 2),
    "promoted but for its manifest": ("persistent commit", 1),
    "promoted": ("promoted", 1),
}
"""Name → the probe's stage, and the how-manieth time it is reached in the second save."""

AT_LEAST_SECOND = {
    "manifest on one holder",
    "manifest on both holders",
    "slot freed",
    "half promoted",
    "promoted but for its manifest",
    "promoted",
}


class Fuse:
    """Kills this process when a stage is reached for the n-th time since it was armed."""

    def __init__(self, stage: str, count: int) -> None:
        self._stage, self._left = stage, count
        self._armed = False
        self._lock = threading.Lock()

    def arm(self) -> None:
        self._armed = True

    def probe(self, stage: str) -> None:
        with self._lock:
            if not self._armed or stage != self._stage:
                return
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class ProbedTier(ObjectStoreTier):
    """A tier that tells a fuse of parts and commits before it does them."""

    def __init__(self, opened: ObjectStoreTier, probe: Callable[[str], None]) -> None:
        super().__init__(opened._store, opened._job)
        self._probe = probe

    def put_part(self, save: RankSave, part: int, chunks: Sequence[memoryview]) -> None:
        self._probe("persistent part")
        super().put_part(save, part, chunks)

    def commit(self, manifest: RankManifest, writer_epoch: int, chunk_lengths: tuple[int, ...]) -> None:
        self._probe("persistent commit")
        super().commit(manifest, writer_epoch, chunk_lengths)


@dataclass(frozen=True)
class Place:
    """Two holders and a folder, for one job."""

    job: str
    endpoints: tuple[MemoryServerEndpoint, ...]
    password: str
    folder: Path

    @property
    def account(self) -> Credentials:
        return Credentials(f"user-{self.job}", "a password")

    @property
    def persistent(self) -> PersistentSettings:
        return PersistentSettings(uri=self.folder.as_uri())

    def open(self, holder: MemoryServerInstance) -> Tier:
        return MemoryServerClient(next(e for e in self.endpoints if e.instance == holder), self.job, self.account)


def save_and_die(place: Place, stage: str) -> None:
    """The child: one whole save, promoted too, then one that ends with the process."""
    fuse = Fuse(*STAGES[stage])
    holders = tuple(e.instance for e in place.endpoints)
    saver = Saver(place.open, holders, options=FlushOptions(stage_hook=fuse.probe), chunk_blocks=1)
    done = threading.Semaphore(0)

    def on_done(promoted: UploadOutcome) -> None:
        fuse.probe("promoted")
        done.release()

    promoter = Uploader(
        lambda _: [place.open(h) for h in holders],
        lambda: ProbedTier(open_persistent(place.persistent, place.job, create_root=True), fuse.probe),
        on_done,
    )
    for step in (FIRST, SECOND):
        save = RankSave(1, step, 0)
        if step == SECOND:
            fuse.arm()
        saver.save(save, arrays(step, SHAPES), values=b'{"step": %d}' % step)
        promoter.queue_upload(1, [save])
        done.acquire(timeout=20)
    os._exit(3)  # the fuse should have burnt


def what_is_left(place: Place) -> int:
    """The newest complete checkpoint's step, its bytes compared."""
    sources = [*server_sources(place.endpoints, place.job, place.account, None)]
    catalogue = read_catalogue([*sources, persistent_source(place.persistent, place.job)])
    newest = max(catalogue.complete_checkpoints(), key=lambda checkpoint: checkpoint.step)
    into = {name: np.zeros(shape, "float32") for name, shape in SHAPES.items()}
    goals = [
        Destination(n, "float32", SHAPES[n], Box.whole(SHAPES[n]), memoryview(a.reshape(-1).view(np.uint8)))
        for n, a in into.items()
    ]
    step = newest.step
    with CheckpointReader(newest, catalogue, ReadOptions(max_threads=1, patience_seconds=5)) as reader:
        reader.read(goals)
        assert reader.read_values(0) == b'{"step": %d}' % step
        assert reader.heal(1) == []
    for name, array in into.items():
        assert np.array_equal(array, arrays(step, SHAPES)[name]), (name, step)
    return step


def run(place: Place, stage: str) -> dict[str, object]:
    admins = [MemoryServerAdmin(e.host, e.port, place.password) for e in place.endpoints]
    for admin in admins:
        admin.provision(place.job, place.account, 1)
    child = os.fork()
    if child == 0:
        try:
            save_and_die(place, stage)
        finally:
            os._exit(4)
    _, status = os.waitpid(child, 0)
    result = {"stage": stage, "killed": os.WIFSIGNALED(status), "step": what_is_left(place)}
    for admin in admins:
        admin.remove_job(place.job, place.account.user)
        admin.close()
    return result


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    endpoints = tuple(
        MemoryServerEndpoint(MemoryServerInstance(e["node"], e["instance"]), e["host"], e["port"], e["node"])
        for e in given["holders"]
    )
    for number in range(given["rounds"]):
        for stage in STAGES:
            place = Place(str(uuid4()), endpoints, given["password"], Path(given["folder"]) / f"{number}")
            sys.stdout.write(json.dumps(run(place, stage)) + "\n")


if __name__ == "__main__":
    main()
