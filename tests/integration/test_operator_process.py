"""`surefoot-operator` as a process: what it says and how it ends where there is no cluster to be had."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from support.machine_speed import scaled
from surefoot_operator.controller import __main__ as controller
from surefoot_operator.controller.__main__ import OperatorProcess
from surefoot_operator.controller.cluster_settings import read_cluster_settings
from surefoot_operator.errors import PlatformError

SECONDS = scaled(30.0)


def kubeconfig(folder: Path, port: int) -> Path:
    """Of an API server that nobody runs."""
    body = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"https://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(body), encoding="utf-8")
    return path


class Process:
    """The operator, and its log."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.log = folder / "log"
        with self.log.open("wb") as output:
            command = [sys.executable, "-m", "surefoot_operator.controller", *flags]
            self.running = subprocess.Popen(command, stdout=output, stderr=output)

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def says(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + SECONDS
        while (found := re.search(pattern, self.text())) is None:
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)
        return found


@pytest.fixture
def away(tmp_path: Path) -> Iterator[Process]:
    """One whose API server is away."""
    with socket.socket() as taken:  # bound, and never listened on: every connection is refused
        taken.bind(("127.0.0.1", 0))
        config = kubeconfig(tmp_path, taken.getsockname()[1])
        made = Process(
            tmp_path, "--kubeconfig", str(config), "--metrics-port", "0", "--probe-port", "0", "--coordinator-port", "0"
        )
        yield made
        made.running.kill()
        made.running.wait(SECONDS)


def readiness(port: str) -> tuple[int, bytes]:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=SECONDS)
    with refused.value as error:
        return error.code, error.read()


def test_an_api_server_that_is_away_is_waited_for_and_sigterm_ends_that(away: Process) -> None:
    port = away.says(r"on port (\d+)")[1]
    away.says("the API server did not answer GET .*surefoot-coordinator-tls")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=SECONDS) as answer:
        assert answer.status == 200
    wanted = (503, b"waiting for the operator's secrets\n")
    deadline = time.monotonic() + SECONDS
    while (answer_now := readiness(port)) != wanted:  # what the loop said last, a quarter of a second ago at most
        assert time.monotonic() < deadline, answer_now
        time.sleep(0.05)
    away.running.send_signal(signal.SIGTERM)
    assert away.running.wait(SECONDS) == 0
    assert "Traceback" not in away.text()


@pytest.mark.parametrize(
    ("flags", "code", "sentence"),
    [
        (["--metrics-port", "x"], 2, "SUREFOOT_METRICS_PORT is 'x'; it must be a port from 0 to 65535"),
        (["--kubeconfig", "/nowhere"], 1, "cannot read the API server's address and credentials from /nowhere"),
        ([], 1, "cannot read the API server's address and credentials from this pod's service account"),
    ],
)
def test_what_cannot_run_says_why(tmp_path: Path, flags: list[str], code: int, sentence: str) -> None:
    process = Process(tmp_path, *flags)
    assert process.running.wait(SECONDS) == code
    assert sentence in process.text()
    assert "Traceback" not in process.text()


class Operated:
    """Stands in for the operator that kopf's process has."""

    fault: Exception | None = None
    states: ClassVar[list[str]] = []

    def __init__(self, *_: object) -> None:
        self.states.clear()

    async def run(self, stopping: asyncio.Event) -> None:
        self.states.append("runs")
        if self.fault is not None:
            raise self.fault
        await stopping.wait()
        self.states.append("stopped")


@pytest.fixture
def operated(kmock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OperatorProcess:
    monkeypatch.setattr(controller, "ClusterOperator", Operated)
    monkeypatch.setattr(Operated, "fault", None)
    config = kubeconfig(tmp_path, kmock.url.port)
    config.write_text(config.read_text().replace("https:", "http:"))
    settings = read_cluster_settings({}, ["--kubeconfig", str(config), "--namespace", "system"], "system", "0")
    return OperatorProcess(settings)


async def test_kopf_starts_and_stops_the_operator_and_asks_only_what_is_served(
    kmock: Any, operated: OperatorProcess
) -> None:
    """It lists, watches and writes nothing: jobs are watched once, by the cache."""
    for known in ("v1/namespaces", "v1/events", "apiextensions.k8s.io/v1/customresourcedefinitions"):
        kmock.resources[known] = kmock.ResourceInfo(namespaced=known == "v1/events", verbs={"list", "watch"})
    running = asyncio.create_task(operated.run())
    async with asyncio.timeout(SECONDS):
        while not len(kmock):  # noqa: ASYNC110 -- kopf's doing is waited for
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)  # it would go on asking
        os.kill(os.getpid(), signal.SIGTERM)
        await running
    assert Operated.states == ["runs", "stopped"]
    assert {str(request.method).upper().rsplit(".", 1)[-1] for request in kmock} == {"GET"}
    discovery = {"/api", "/apis", "/api/v1", "/apis/apiextensions.k8s.io/v1"}
    assert {request.url.path for request in kmock} <= discovery


async def test_what_the_operator_ends_by_ends_the_process_although_kopf_gets_no_answer(
    kmock: Any, operated: OperatorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Operated, "fault", PlatformError("somebody else leads"))
    kmock << 503
    with pytest.raises(PlatformError, match="somebody else leads"):
        await asyncio.wait_for(operated.run(), SECONDS)
