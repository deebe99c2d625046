"""Tries this agent's node once, before it gets a rank.

Run by `node_monitor` in a thread. `surefoot.node_tests` is a process of its own: numbers that go wrong may end it, a disk may hold
it, and the warm process imports at the same time. What is slow proves nothing and is logged; what fails no well
node does. A node that was found well is not tried again for some hours, whichever worker comes.
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.protocol.messages import NodeFinding
from surefoot.protocol.text import escape_control_characters, join_names, shorten

_log = logging.getLogger(__name__)


LIMIT_SECONDS = 9.0
"""For all trials together; what was told by then counts. A `node_monitor` says of longer ones that they hang."""

KEPT_SECONDS = 6 * 3600.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")

Probe = Callable[[], Sequence[str]]
"""Tries the node and returns what was told, line by line."""


class JoinCheck:
    """Finds what fails on this node.

    `blamed` False: people are told, and nothing follows.
    """

    name = "join"
    period_seconds = math.inf

    def __init__(
        self, node: str, folder: Path, blamed: bool, probe: Probe, clock: Callable[[], float] = time.time
    ) -> None:
        self._node, self._kept = node, folder / f"join-check-{node}.json"
        self._blamed, self._probe, self._clock = blamed, probe, clock

    def find_faults(self) -> Sequence[NodeFinding]:
        if self._passed_recently():
            return ()
        records = _read(self._probe())
        results = [record for record in records if "verdict" in record]
        failed = [record for record in results if record.get("verdict") == "fails"]
        for record in results:
            if record.get("verdict") == "unknown":
                _log.info("before joining, %s proves nothing: %s", record.get("name"), record.get("text"))
        _log.info("this node was tried before joining: %s", _rates(results) or "nothing could be tried")
        if not failed:
            if not any(record.get("over") for record in records):
                raise ChildProcessError(_cut_off(records, results))  # proves nothing, and people are told
            self._keep()
        blame = "node" if self._blamed else "unknown"
        return [NodeFinding(str(record["reason"]), escape_control_characters(str(record["text"])), blame) for record in failed]  # type: ignore[arg-type]

    def _passed_recently(self) -> bool:
        try:
            passed = json.loads(self._kept.read_text())
            age_seconds = self._clock() - float(passed["at_seconds"])
            return passed["boot"] == _boot() and passed["node"] == self._node and 0.0 <= age_seconds < KEPT_SECONDS
        except (OSError, ValueError, KeyError, TypeError):
            return False  # none, or one of another version

    def _keep(self) -> None:
        text = json.dumps({"node": self._node, "boot": _boot(), "at_seconds": self._clock()})
        temporary_path = self._kept.with_suffix(f".{os.getpid()}")
        try:
            temporary_path.write_text(text)
            temporary_path.replace(self._kept)
        except OSError as error:
            _log.info("that this node is well is not kept: %s", error)


class NodeTestProcess:
    """Runs `surefoot.node_tests`; `own` is its process while it runs."""

    def __init__(self, host: str, folder: Path, environment: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-m", "surefoot.node_tests", str(os.getpid()), host, str(folder)]
        # one thread: what is tried is whether results are right, and all cores are busy with imports
        self._environment = {**environment, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._running: set[int] = set()

    def own(self) -> set[int]:
        return set(self._running)

    def __call__(self) -> Sequence[str]:
        process = subprocess.Popen(
            self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self._running.add(process.pid)
        end_reason = ""
        try:
            output, errors = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            end_reason = f"took longer than {LIMIT_SECONDS:g} s"
            process.kill()
            output, errors = process.communicate()
        finally:
            self._running.discard(process.pid)
        if not end_reason and process.returncode < 0:
            end_reason = f"was ended by signal {-process.returncode}"
        if errors:
            _log.info("the trial of this node said: %s", shorten(escape_control_characters(errors), 500))
        return [*output.splitlines(), *([json.dumps({"ended": end_reason})] if end_reason else [])]


def _read(lines: Sequence[str]) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def _cut_off(records: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]) -> str:
    """Says how far the probe came."""
    end_reason = next((str(record["ended"]) for record in records if "ended" in record), "ended early")
    completed = join_names([str(record.get("name")) for record in results]) if results else "nothing"
    return f"the trial of this node {end_reason}, after {completed}: what is left of it proves nothing, and the worker joins"


def _rates(results: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{record['name']} {record['rate']:.3g} {record['unit']}/s" for record in results if record.get("rate"))


def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
