"""Runs the node tests once, before this agent's worker gets a rank.

`node_monitor` runs this in a thread. `surefoot.node_tests` is a process of its own: faulty hardware may crash it, a disk
may block it, and the fork server imports at the same time. Slow results prove nothing and are only logged; a failed test
never happens on a healthy node. A node that passed is not tested again for some hours, whichever worker comes.
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
from typing import Any, Literal

from surefoot.protocol.messages import NodeFinding
from surefoot.protocol.text import escape_control_characters, join_names, shorten

_log = logging.getLogger(__name__)


LIMIT_SECONDS = 9.0
"""Timeout of all tests together; results that exist by then count. It is below the timeout of `node_monitor`."""

KEPT_SECONDS = 6 * 3600.0
"""How long a passed test of a node is valid, until a reboot."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")

Probe = Callable[[], Sequence[str]]
"""Runs the node tests and returns their output, line by line."""


class JoinCheck:
    """Finds node tests that fail. Without `blamed` the findings are only reported and the node is still used."""

    name = "join"
    period_seconds = math.inf

    def __init__(
        self, node: str, folder: Path, blamed: bool, probe: Probe, clock: Callable[[], float] = time.time
    ) -> None:
        self._node, self._record_path = node, folder / f"join-check-{node}.json"
        self._blamed, self._probe, self._clock = blamed, probe, clock

    def find_faults(self) -> Sequence[NodeFinding]:
        if self._passed_recently():
            return ()
        records = _parse_records(self._probe())
        results = [record for record in records if "verdict" in record]
        failed = [record for record in results if record.get("verdict") == "fails"]
        for record in results:
            if record.get("verdict") == "unknown":
                _log.info(
                    "node test %s could not be run and proves nothing: %s", record.get("name"), record.get("text")
                )
        _log.info("node tests before joining have run: %s", _format_rates(results) or "none could be run")
        if not failed:
            if not any(record.get("over") for record in records):
                raise ChildProcessError(
                    _describe_early_end(records, results)
                )  # proves nothing, but is reported by a notice
            self._record_pass()
        blame: Literal["node", "unknown"] = "node" if self._blamed else "unknown"
        return [
            NodeFinding(str(record["reason"]), escape_control_characters(str(record["text"])), blame)
            for record in failed
        ]

    def _passed_recently(self) -> bool:
        try:
            passed = json.loads(self._record_path.read_text())
            age_seconds = self._clock() - float(passed["at_seconds"])
            return passed["boot"] == _boot_id() and passed["node"] == self._node and 0.0 <= age_seconds < KEPT_SECONDS
        except (OSError, ValueError, KeyError, TypeError):
            return False  # no record, or one of another version

    def _record_pass(self) -> None:
        text = json.dumps({"node": self._node, "boot": _boot_id(), "at_seconds": self._clock()})
        temporary_path = self._record_path.with_suffix(f".{os.getpid()}")
        try:
            temporary_path.write_text(text)
            temporary_path.replace(self._record_path)
        except OSError as error:
            _log.info("the passed node tests could not be recorded, so the next worker runs them again: %s", error)


class NodeTestProcess:
    """Runs `surefoot.node_tests` in a process; `own` returns its pid while it runs."""

    def __init__(self, host: str, folder: Path, environment: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-m", "surefoot.node_tests", str(os.getpid()), host, str(folder)]
        # one thread: the tests check that results are right, and all cores are busy with imports
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
            _log.info("the node tests wrote to stderr: %s", shorten(escape_control_characters(errors), 500))
        return [*output.splitlines(), *([json.dumps({"ended": end_reason})] if end_reason else [])]


def _parse_records(lines: Sequence[str]) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def _describe_early_end(records: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]) -> str:
    """Describes which node tests had completed when their process ended."""
    end_reason = next((str(record["ended"]) for record in records if "ended" in record), "ended early")
    completed = join_names([str(record.get("name")) for record in results]) if results else "nothing"
    return (
        f"the process of the node tests {end_reason}, after {completed}: the remaining tests prove nothing, and the worker "
        "joins"
    )


def _format_rates(results: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(
        f"{record['name']} {record['rate']:.3g} {record['unit']}/s" for record in results if record.get("rate")
    )


def _boot_id() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
