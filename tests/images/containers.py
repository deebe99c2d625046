"""Containers as the chart's pods are: read-only, without capabilities or new privileges, by the image's own user."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from images.docker import Docker

RESTRICTED = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
POLL_SECONDS = 0.2
_numbers = itertools.count()


@dataclass(frozen=True)
class Said:
    """How a container ended, and everything that it printed."""

    code: int
    text: str


@dataclass(frozen=True)
class Container:
    """One that runs in the background."""

    docker: Docker
    name: str

    def run(self, *command: str, seconds: float = 30.0) -> Said:
        """A command inside of it."""
        done = self.docker.tried("exec", self.name, *command, seconds=seconds)
        return Said(done.returncode, done.stdout + done.stderr)

    def wait_until_it_says(self, wanted: str, *command: str, seconds: float) -> str:
        """Asks until the answer contains that; fails with the last answer and the log."""
        deadline = time.monotonic() + seconds
        while wanted not in (said := self.run(*command)).text:
            log = self.docker.tried("logs", self.name)
            assert time.monotonic() < deadline, f"{said.text}\n{log.stdout}{log.stderr}"
            time.sleep(POLL_SECONDS)
        return said.text


@dataclass
class Containers:
    """Begins containers on one docker; those in the background end with the block that began them."""

    docker: Docker
    network: str = "none"

    def run(self, image: str, *command: str, options: Sequence[str] = (), seconds: float = 120.0) -> Said:
        """One that runs to its end."""
        with self._named() as name:
            line = ("run", "--name", name, "--network", self.network, *RESTRICTED, *options, image, *command)
            done = self.docker.tried(*line, seconds=seconds)
            return Said(done.returncode, done.stdout + done.stderr)

    @contextmanager
    def running(self, image: str, *command: str, options: Sequence[str] = ()) -> Iterator[Container]:
        """One in the background. Another joins its network with the option `--network container:NAME`."""
        network = () if "--network" in options else ("--network", self.network)
        with self._named() as name:
            self.docker.run("run", "--detach", "--name", name, *network, *RESTRICTED, *options, image, *command)
            yield Container(self.docker, name)

    @contextmanager
    def _named(self) -> Iterator[str]:
        name = f"surefoot-test-{os.getpid()}-{next(_numbers)}"
        try:
            yield name
        finally:
            self.docker.tried("rm", "--force", "--volumes", name)
