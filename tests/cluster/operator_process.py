"""The operator's process on the host, against the cluster's API server: started, probed, signalled, and read."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from cluster import layout
from cluster.engine import Engine
from cluster.processes import wait

SECONDS = 120.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


@dataclass
class Operator:
    """One process. Every wait shows its log when it fails."""

    name: str
    engine: Engine
    folder: Path
    namespace: str
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    variables: dict[str, str] = field(default_factory=dict)
    """Of its environment, beside this one's."""

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def host(self) -> str:
        """Where pods find this machine: at the address of its API server."""
        body = yaml.safe_load(self.engine.facts().kubeconfig.read_text())
        return str(urlsplit(body["clusters"][0]["cluster"]["server"]).hostname)

    def start(self, *flags: str) -> Operator:
        url = f"wss://{self.host}:{self.port}/v1/agents"
        told = ["--namespace", self.namespace, "--watch-namespace", self.namespace, "--pod-name", self.name]
        told += [
            "--coordinator-url",
            url,
            "--coordinator-port",
            str(self.port),
            "--metrics-port",
            "0",
            "--probe-port",
            "0",
            *flags,
        ]
        command = [sys.executable, "-m", "surefoot_operator.controller"]
        command += ["--kubeconfig", str(self.engine.facts().kubeconfig), *told]
        with self.log.open("ab") as output:
            environment = {**os.environ, **self.variables}
            self.process = subprocess.Popen(command, stdout=output, stderr=output, cwd=layout.PROJECT, env=environment)
        return self

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def says(self, words: str, seconds: float = SECONDS) -> None:
        """Waits for these words in its log, or for one of several with | between."""
        said = wait(lambda: any(one in self.text() for one in words.split("|")), seconds)
        assert said, f"{self.name} never said {words!r}:\n{self.text()}"

    def probe(self, path: str) -> tuple[int, str]:
        """Of the last process that wrote to this log; 0 if nobody answers."""
        port = re.findall(rf"{'/metrics' if path == '/metrics' else '/readyz'} on port (\d+)", self.text())[-1]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5.0) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:  # not yet, or not any more
            return 0, str(error)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def ends(self, seconds: float = 30.0) -> int:
        assert self.process is not None
        return self.process.wait(seconds)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10.0)
