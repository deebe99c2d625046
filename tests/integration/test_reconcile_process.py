"""The local operator as a process: killed and started again, ended politely, and silent about its secrets."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.fakes.fake_agent import until
from support.fakes.fake_node import Town, document
from surefoot_operator.platforms.local.node_process import find_free_port


@contextmanager
def operator(town: Town, port: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "surefoot_operator.controller.local_operator"]
    command += ["--run-folder", str(town.folder.root), "--port", str(port)]
    with (town.folder.root / "operator.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def least_step(town: Town) -> int:
    return min((t.step for t in town.trainees if t.running), default=0)


async def ends(process: subprocess.Popen[bytes]) -> int:
    await until(lambda: process.poll() is not None, "the operator ends")
    return process.wait()


async def test_an_operator_that_is_killed_and_started_again_disturbs_nobody(tmp_path: Path) -> None:
    port = find_free_port()
    async with Town(tmp_path / "run", document(replicas=2)) as town:
        town.start("node-0")
        town.start("node-1")
        with operator(town, port) as first:
            await until(lambda: least_step(town) > 15, "both train")
            before = [(t.incarnation, tuple(t.epochs)) for t in town.trainees]
            first.send_signal(signal.SIGKILL)
            first.wait()
        reached = least_step(town)
        await until(lambda: least_step(town) > reached + 10, "they train on without an operator")
        with operator(town, port) as second:
            await until(lambda: all(t._line is not None for t in town.trainees), "they found the new one")
            reached = least_step(town)
            await until(lambda: least_step(town) > reached + 20, "they train on with it")
            assert [(t.incarnation, tuple(t.epochs)) for t in town.trainees] == before
            assert town.status.membership is not None
            assert (town.status.membership.generation, town.status.restarts) == (1, 0)
            second.send_signal(signal.SIGTERM)
            assert await ends(second) == 0


async def test_a_node_that_died_while_no_operator_was_there_is_noticed_by_the_next(tmp_path: Path) -> None:
    port = find_free_port()
    async with Town(tmp_path / "run", document(replicas=2)) as town:
        town.start("node-0")
        town.start("node-1")
        with operator(town, port):
            await until(lambda: least_step(town) > 15 and town.status.had_checkpoint, "both train")
        await town.kill("node-1")
        with operator(town, port):
            await until(
                lambda: town.status.membership is not None and town.status.membership.world_size == 1,
                "one goes on alone",
            )
            assert town.status.membership is not None
            assert town.status.membership.parent is not None


async def test_no_secret_stands_on_a_command_line_or_in_the_log(tmp_path: Path) -> None:
    async with Town(tmp_path / "run", document(replicas=1, least=None)) as town:
        town.start("node-0")
        with operator(town, find_free_port()) as process:
            await until(lambda: least_step(town) > 5, "it trains")
            path = town.folder.root / "operator.json"
            assert path.stat().st_mode & 0o077 == 0
            environment = town.trainees[0].environment
            secrets = [
                json.loads(path.read_text())["root"],
                environment["SUREFOOT_TOKEN"],
                environment["SUREFOOT_MEMORY_PASSWORD"],
            ]
            told = " ".join(str(part) for part in process.args)  # type: ignore[union-attr]  # a list
            told += (town.folder.root / "operator.log").read_text()
            told += (town.folder.root / "events.jsonl").read_text() + (town.folder.root / "status.json").read_text()
            assert not [secret for secret in secrets if secret in told]


async def test_without_a_job_it_says_so_and_ends(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "surefoot_operator.controller.local_operator",
        "--run-folder",
        str(tmp_path),
        "--port",
        "0",
    ]
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
    _, errors = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    assert b"has no job yet" in errors
