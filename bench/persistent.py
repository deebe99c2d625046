"""The way to S3: the same saves with Surefoot (two holders, then promoted) and with DCP over Amazon's own connector, turn
by turn in one process, to a versitygw on tmpfs. `python -m bench.persistent TASK OUT`; called by `run`.

The server's access log counts the requests of both. Promotion runs here as it does in an agent, out of the holders.
"""

from __future__ import annotations

import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import torch
import torch.distributed.checkpoint as dcp

from bench.cores import spent_seconds
from bench.holders import JOB
from bench.program import Program
from bench.systems.dcp import join_world_of_one
from bench.systems.surefoot import Surefoot
from surefoot.flush.uploader import Uploader, UploadOutcome
from surefoot.memory_server.client import MemoryServerClient
from surefoot.memory_server.connection import worker_credentials
from surefoot.protocol.identities import RankSave
from surefoot.settings import PersistentSettings, job_settings
from surefoot.tiers import open_persistent

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.servers import s3_server

DCP = "dcp.save to S3"
OURS = "surefoot"
LOGGED_SECONDS = 10.0
OPERATION = re.compile(r" s3_(\w+) ")
WIDTH = 1024


@dataclass(frozen=True, slots=True)
class Server:
    settings: PersistentSettings
    pid: int
    log: Path

    def requests(self) -> Counter[str]:
        """Of each operation so far. A request of our own, told by its path, shows that the log has come that far."""
        mark = f"/mark-{token_hex(8)}"
        try:
            urlopen(f"{self.settings.endpoint}{mark}", timeout=LOGGED_SECONDS).close()
        except HTTPError:
            pass  # nobody may ask so, but it is written down
        deadline = time.monotonic() + LOGGED_SECONDS
        while mark not in (text := self.log.read_text()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.log} of the S3 server does not say what it was asked")
            time.sleep(0.01)
        told = (OPERATION.search(line) for line in text.splitlines() if "/mark-" not in line)
        return Counter(found[1] for found in told if found is not None)


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """versitygw with an empty bucket and an access log; ends with the block."""
    program = s3_server.versitygw()
    if program is None:
        raise RuntimeError("versitygw is not here and cannot be built without Go: the way to S3 is not measured")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*probe.getsockname())
    log = folder / "access.log"
    log.touch()
    plain = s3_server.command(program, folder, address)
    process = subprocess.Popen(
        [plain[0], "--access-log", str(log), *plain[1:]], env=s3_server.environment(folder), stdout=subprocess.DEVNULL
    )
    try:
        s3_server.make_bucket(f"http://{address}", s3_server.START_SECONDS, lambda: process.poll() is None)
        settings = PersistentSettings(
            uri=f"s3://{s3_server.BUCKET}/",
            endpoint=f"http://{address}",
            region="us-east-1",
            access_key=s3_server.ACCESS_KEY,
            secret_key=s3_server.SECRET_KEY,
        )
        yield Server(settings, process.pid, log)
    finally:
        process.kill()
        process.wait()


class Ours:
    """A save is over when it is in S3; the time until two holders have it stands beside."""

    def __init__(self, program: Program, folder: Path, settings: PersistentSettings) -> None:
        self._surefoot = Surefoot(program, folder)
        self._surefoot.prepare()
        self._settings = settings
        self._program = program
        self._done = threading.Semaphore(0)
        self._answers: list[UploadOutcome] = []
        endpoints = self._surefoot._mine._backend.attached.servers
        self._promoter = Uploader(
            lambda _: [
                MemoryServerClient(endpoint, JOB, worker_credentials(job_settings()), 10.0) for endpoint in endpoints
            ],
            lambda: open_persistent(settings, JOB),
            self._answered,
        )
        self.safe: list[float] = []

    def _answered(self, promoted: UploadOutcome) -> None:
        self._answers.append(promoted)
        self._done.release()

    def save(self, step: int) -> None:
        began = time.monotonic()
        self._surefoot.begin(step)
        self._surefoot.finish()
        self.safe.append(time.monotonic() - began)
        self._promoter.queue_upload(1, [RankSave(1, max(self._surefoot._due), 0)])
        self._done.acquire()
        if self._answers[-1].error is not None:
            raise RuntimeError(self._answers[-1].error)

    def check(self) -> None:
        """The newest in S3 is the last that was saved."""
        tier = open_persistent(self._settings, JOB)
        (manifest,) = tier.read_newest_manifests()
        if manifest.save.step != max(self._surefoot._due):
            raise AssertionError(f"S3 has {manifest.save}, not the last save")
        tier.close()

    def close(self) -> None:
        self._promoter.close()
        self._surefoot.close()


class Connector:
    """DCP with the StorageWriter of s3torchconnector (Amazon's CRT below), and as many streams as we have."""

    STREAMS = 4

    def __init__(self, program: Program, settings: PersistentSettings) -> None:
        os.environ |= {
            "AWS_ACCESS_KEY_ID": settings.access_key or "",
            "AWS_SECRET_ACCESS_KEY": settings.secret_key or "",
        }
        self._program, self._settings = program, settings
        join_world_of_one()

    def save(self, step: int) -> None:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client
        from s3torchconnector.dcp import S3StorageWriter
        from s3torchconnector.dcp.s3_file_system import S3FileSystem

        config, region = S3ClientConfig(force_path_style=True), self._settings.region or ""
        writer = S3StorageWriter(region, f"{self._settings.uri}dcp/{step}", config, thread_count=self.STREAMS)
        # its own argument list has no endpoint; its client does
        client = S3Client(region, endpoint=self._settings.endpoint, s3client_config=config)
        writer.fs = S3FileSystem(region, s3_client=client)
        dcp.save(self._program.state(), storage_writer=writer)

    def check(self) -> None: ...

    def close(self) -> None: ...


def measured(task: dict[str, Any], folder: Path) -> dict[str, Any]:
    program = Program(task["width"], task["layers"])
    companions = [int(pid) for pid in os.environ["BENCH_COMPANIONS"].split()]
    found: dict[str, Any] = {"state_bytes": program.size_bytes, "server": f"versitygw {s3_server.VERSION}"}
    with serving(folder) as server:
        ours = Ours(program, folder, server.settings)
        ways: dict[str, Callable[[], Any]] = {OURS: lambda: ours, DCP: lambda: Connector(program, server.settings)}
        for name, make in ways.items():
            try:
                found[name] = _turns(program, make(), task["saves"], server, [os.getpid(), server.pid, *companions])
            except Exception as error:  # noqa: BLE001  # a peer that cannot speak to this server says so, and counts nowhere
                found[name] = {"error": repr(error)}
        if "error" not in found[OURS]:
            found[OURS]["safe_seconds"] = statistics.median(ours.safe[1:])
        ours.close()
    for name in ways:
        found[name] |= _rates(found[name], program.size_bytes)
    return found


def _turns(program: Program, way: Any, saves: int, server: Server, pids: list[int]) -> dict[str, Any]:
    """Seconds and CPU seconds of each save after the first, and the requests of one. A step lies between two."""
    seconds, spent = [], []
    before = server.requests()
    for step in range(saves + 1):
        program.train()
        program.advance()
        cpu, began = spent_seconds(pids), time.monotonic()
        way.save(step + 1)
        seconds.append(time.monotonic() - began)
        spent.append(spent_seconds(pids) - cpu)
        if step == 0:
            way.check()
            before = server.requests()
    asked = server.requests() - before
    way.check()
    return {
        "first_seconds": seconds[0],
        "seconds": seconds[1:],
        "cpu_seconds": spent[1:],
        "requests": {name: count / saves for name, count in sorted(asked.items())},
    }


def _rates(found: dict[str, Any], size: int) -> dict[str, float]:
    if "error" in found:
        return {}
    gigabytes = size / 1e9
    return {
        "gb_per_second": gigabytes / statistics.median(found["seconds"]),
        "cpu_seconds_per_gb": statistics.median(found["cpu_seconds"]) / gigabytes,
        "requests_per_gb": sum(found["requests"].values()) / gigabytes,
    }


def main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=task["folder"]) as folder:
        Path(sys.argv[2]).write_text(json.dumps(measured(task, Path(folder))))


if __name__ == "__main__":
    main()
