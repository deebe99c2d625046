"""Errors that nobody foresaw cost the work that they came in, and nothing else."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.fakes.fake_agent import until
from support.machine_speed import scaled
from surefoot import metrics
from surefoot.agent import coordinator_requests as chores
from surefoot.ipc import trainer_messages as line
from surefoot.ipc.trainer_messages import add_frame
from surefoot.ipc.trainer_server import TrainerServer
from surefoot.protocol.identities import Checkpoint, MemoryServerInstance, RankSave
from surefoot.protocol.messages import (
    DeletePersistent,
    DeleteReply,
    FromAgent,
    ListPersistent,
    PersistentPage,
    RepairReply,
    RepairSave,
)
from surefoot.settings import JobSettings, PersistentSettings

SECONDS = scaled(30.0)
A, B = MemoryServerInstance("a", "1"), MemoryServerInstance("b", "2")


def counted(what: str) -> float:
    return metrics.fallbacks.labels(what)._value.get()


@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), MemoryError(), RecursionError("deep"), KeyError("k")], ids=repr
)
async def test_a_chore_that_fails_in_any_way_is_answered_and_the_next_is_done(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object, **named: object) -> Any:
        raise error

    monkeypatch.setattr(chores, "open_persistent", fails)
    answers: asyncio.Queue[FromAgent] = asyncio.Queue()
    settings = JobSettings("job", 10, 1, 2, "", "", persistent=PersistentSettings("/nowhere"))
    work = chores.CoordinatorRequests(settings, chores.SaveLocations(fails, lambda: [A]), answers.put_nowait)
    before = counted("chore_failed")
    task = asyncio.create_task(work.run())
    try:
        for number in (1, 2):
            work.queue_request(ListPersistent(number))
            work.queue_request(RepairSave(number, 1, RankSave(1, 10, 0), A, B))
            work.queue_request(DeletePersistent(number, (Checkpoint(1, 10),)))
        told = [await asyncio.wait_for(answers.get(), SECONDS) for _ in range(6)]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await work.close()
    assert [type(one) for one in told] == [PersistentPage, RepairReply, DeleteReply] * 2
    assert all(type(error).__name__ in str(getattr(one, "error", "")) for one in told)
    assert counted("chore_failed") == before + 6
    with_traceback = [r for r in caplog.records if r.levelno == logging.ERROR and r.exc_info]
    assert len(with_traceback) == 3, "each kind of work once"


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = socket.socket()
    lowest = probe.fileno()
    probe.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_a_trainer_is_accepted_once_there_are_descriptors_again(tmp_path: Path) -> None:
    attached = asyncio.Event()

    def admit(_: line.Attach) -> str:
        attached.set()
        return "seen"

    listening = TrainerServer(tmp_path / "line.sock", admit, lambda _, __: None)
    listening.start()
    await asyncio.sleep(0)
    before = counted("accept_failed")
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as trainer:
        trainer.setblocking(False)
        with no_descriptors_left():
            await loop.sock_connect(trainer, str(tmp_path / "line.sock"))
            await until(lambda: counted("accept_failed") >= before + 2, "it was tried again")
        await loop.sock_sendall(trainer, add_frame(line.encode(line.Attach(0, 1, 1))))
        await asyncio.wait_for(attached.wait(), SECONDS)
    await listening.close()
