"""Scripted agents of the cluster's workers: processes beside it, and a Service's endpoints for them, for no kube-proxy serves the host."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.scripted_agents import ScriptedWorker

from cluster import layout
from cluster.processes import wait
from cluster.scenarios.installed import Installed, is_ready
from surefoot_operator.controller.leader.election_rules import leader_label, shard_url

LOOK_SECONDS = 0.2
END_SECONDS = 20.0


class CoordinatorAddresses:
    """Writes the address of each shard's leader to a file, again and again, as its Service would have it."""

    def __init__(self, installed: Installed, shards: int, file: Path) -> None:
        self._installed, self._shards, self.file = installed, shards, file
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="addresses of coordinators", daemon=True)
        self.url = ""

    def start(self, url: str) -> None:
        self.url = url
        self._look()
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(END_SECONDS)

    def _run(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            try:
                self._look()
            except OSError:  # the server is away at this moment: what was known stays
                continue

    def _look(self) -> None:
        ready = [pod for pod in self._installed.pods("operator") if is_ready(pod)]
        found = {}
        for shard in range(self._shards):
            name = urlsplit(shard_url(self.url, shard)).hostname or ""
            leading = [p for p in ready if p["metadata"]["labels"].get(leader_label(shard)) == "true"]
            found[name] = leading[0]["status"]["podIP"] if leading else ""
        made = self.file.with_suffix(".new")
        made.write_text(json.dumps(found))
        made.replace(self.file)


class ScriptedLines:
    """The processes that the agents live in."""

    def __init__(self, authority: Path, addresses: Path, processes: int) -> None:
        command = [
            sys.executable,
            "-m",
            "bench.scripted_agents",
            f"--authority={authority}",
            f"--addresses={addresses}",
        ]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=layout.PROJECT)
            for _ in range(processes)
        ]

    def join(self, workers: Iterable[ScriptedWorker]) -> None:
        """Starts an agent for each; those of one job are spread over the processes."""
        shares: list[list[dict[str, Any]]] = [[] for _ in self._processes]
        for worker in workers:
            shares[worker.index % len(shares)].append(asdict(worker))
        for process, share in zip(self._processes, shares, strict=True):
            self._say(process, {"join": share})

    def leave(self, job: str, index: int) -> None:
        """Ends one agent: its pod is gone."""
        self._say(self._processes[index % len(self._processes)], {"leave": [job, index]})

    def heard(self, job: str, epoch: int) -> dict[str, Any]:
        """How many heard the epoch's Stop and Assign, and when the last did."""
        found = [self._asked(process, {"heard": [job, epoch]}) for process in self._processes]
        whole: dict[str, Any] = {name: sum(one[name] for one in found) for name in ("stops", "assigns")}
        for name in ("last_stop", "last_assign"):
            whole[name] = max((one[name] for one in found if one[name] is not None), default=None)
        return whole

    def lines(self) -> dict[str, tuple[int, int, float]]:
        """By job: open lines, how many broke so far, and when the last was opened."""
        whole: dict[str, tuple[int, int, float]] = {}
        for process in self._processes:
            for job, (lines, broken, at) in self._asked(process, {"lines": True})["jobs"].items():
                before = whole.get(job, (0, 0, 0.0))
                whole[job] = before[0] + lines, before[1] + broken, max(before[2], at)
        return whole

    def until(self, what: str, open_lines: int, seconds: float) -> None:
        def reached() -> bool:
            return sum(lines for lines, _, _ in self.lines().values()) >= open_lines

        if not wait(reached, seconds):
            there = sum(lines for lines, _, _ in self.lines().values())
            raise AssertionError(f"not within {seconds:g} s: {what}; {there} of {open_lines} lines are open")

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @staticmethod
    def _say(process: subprocess.Popen[bytes], word: dict[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(word).encode() + b"\n")
        process.stdin.flush()

    def _asked(self, process: subprocess.Popen[bytes], word: dict[str, Any]) -> dict[str, Any]:
        assert process.stdout is not None
        self._say(process, word)
        answer: dict[str, Any] = json.loads(process.stdout.readline())
        return answer
