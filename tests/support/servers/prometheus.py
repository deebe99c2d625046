"""A real Prometheus, asked by its own HTTP API. From PATH (`make system`)."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.machine_speed import scaled
from surefoot_operator.platforms.local.node_process import find_free_port

WAIT_SECONDS = scaled(30.0)
SCRAPE_MILLISECONDS = 200
"""A recovery lasts half a second: it must not fall between two scrapes."""


class Prometheus:
    """One server that answers. Every expression is evaluated over all that it scraped."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"
        self.began = time.time()

    def now(self) -> float:
        return time.time()

    def series(self, expression: str, step_seconds: float = SCRAPE_MILLISECONDS / 1000) -> list[dict[str, Any]]:
        """What a panel over the whole run would show: each series with its values; it fails on what is no PromQL."""
        span = {"start": self.began, "end": self.now(), "step": step_seconds}
        found: list[dict[str, Any]] = self._get("query_range", {"query": expression, **span})["result"]
        return found

    def latest(self, expression: str) -> list[dict[str, Any]]:
        """What a panel of present values shows; as `series`, each with one value."""
        found = self._get("query", {"query": expression, "time": self.now()})["result"]
        return [{"metric": one["metric"], "values": [one["value"]]} for one in found]

    def targets(self) -> dict[str, str]:
        """Address -> health."""
        active = self._get("targets", {})["activeTargets"]
        return {target["labels"]["instance"]: target["health"] for target in active}

    def version(self) -> str:
        return str(self._get("status/buildinfo", {})["version"])

    def rules(self) -> list[dict[str, Any]]:
        """Every alert, as the server judges it: name, state, health, last error."""
        return [rule for group in self._get("rules", {})["groups"] for rule in group["rules"]]

    def _get(self, path: str, values: Mapping[str, Any]) -> Any:
        url = f"{self._base}/api/v1/{path}?{urllib.parse.urlencode(values)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{values}: {error.read().decode()}") from error


def program(name: str) -> str:
    """`prometheus` or `promtool`; without it the test is skipped, with what to do."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on PATH: `make system` installs it on Debian as root")
    return found


def targets_in(pods: Iterable[Mapping[str, Any]]) -> str:
    """Our parts on a cluster as file_sd, found as the chart's monitors find them: by the names of their ports.

    Debian's Prometheus is built without discovery by the API server.
    """
    found = []
    for pod in pods:
        for container in pod["spec"]["containers"]:
            for port in container.get("ports", ()):
                if port.get("name") in ("metrics", "sf-metrics"):
                    address = f"{pod['status']['podIP']}:{port['containerPort']}"
                    found.append({"targets": [address], "labels": {"node": pod["spec"]["nodeName"]}})
    return json.dumps(found)


@contextmanager
def scraping(folder: Path, targets: Sequence[str], rules: Path) -> Iterator[Prometheus]:
    """The server, over targets in files of these patterns, and the alerts in `rules`."""
    server = program("prometheus")
    found = {"files": list(targets), "refresh_interval": "1s"}
    configuration = {
        "global": {"scrape_interval": f"{SCRAPE_MILLISECONDS}ms", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "surefoot", "honor_labels": True, "file_sd_configs": [found]}],
    }
    path = folder / "prometheus.yaml"
    path.write_text(yaml.safe_dump(configuration), encoding="utf-8")
    port = find_free_port()
    command = [server, f"--config.file={path}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    with ended(process):
        _await_ready(port, process, folder / "prometheus.log")
        yield Prometheus(port)


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends the process with the block."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=2):
                return
        except OSError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, f"Prometheus does not become ready:\n{log.read_text()}"
            time.sleep(0.1)
