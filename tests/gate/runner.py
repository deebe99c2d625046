"""Runs the lanes of stages in parallel, logs their output, and ends all when one fails.

Each stage leads its own process group. To end a stage, the gate sends its group SIGINT, so that `finally` blocks take
clusters and servers down; after a minute it kills the group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gate.stages import LOW_PRIORITY, ROOT, Lane, Stage
from surefoot.linux_process import die_with_parent

_END_SECONDS = 60.0
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one stage."""

    outcome: str
    """`passed`, `failed`, `stopped` (another stage failed, or the user ended the run) or `not run`."""
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    why: str = ""

    def record(self) -> dict[str, object]:
        return {
            "result": self.outcome,
            "wallSeconds": round(self.wall_seconds, 1),
            "cpuSeconds": round(self.cpu_seconds, 1),
            "why": self.why,
        }


class Runner:
    """Runs stages and keeps what became of them."""

    def __init__(self, logs: Path, environment: dict[str, str], keep_going: bool) -> None:
        self._logs, self._environment, self._keep_going = logs, environment, keep_going
        self._results: dict[str, Result] = {}
        self._groups: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        self._terminal = threading.Lock()
        self._stopping = ""
        """Why no further stage begins; empty while all is well."""

    def run(self, lanes: Sequence[Lane], skip: frozenset[str], only: frozenset[str]) -> dict[str, Result]:
        """Runs all lanes to their end; returns what became of each stage, in the order of the lanes."""
        ended = {lane.name: threading.Event() for lane in lanes}
        threads = [
            threading.Thread(target=self._run_lane, args=(lane, ended, skip, only), name=lane.name) for lane in lanes
        ]
        with self._stops_on_signals():
            for thread in threads:
                thread.start()
            for thread in threads:
                # without a timeout the main thread would not run the handlers of signals
                while thread.is_alive():
                    thread.join(_POLL_SECONDS)
        names = [stage.name for lane in lanes for stage in lane.stages]
        return {name: self._results[name] for name in names if name in self._results}

    def _run_lane(
        self, lane: Lane, ended: dict[str, threading.Event], skip: frozenset[str], only: frozenset[str]
    ) -> None:
        try:
            for name in lane.after:
                ended[name].wait()
            for stage in lane.stages:
                if stage.name in skip or (only and stage.name not in only):
                    continue
                if self._stopping:
                    self._results[stage.name] = Result("not run", why=self._stopping)
                    continue
                self._run_stage(stage)
        finally:
            ended[lane.name].set()

    def _run_stage(self, stage: Stage) -> None:
        began = time.monotonic()
        log = self._logs / f"{stage.name}.log"
        (self._logs / f"{stage.name}.xml").unlink(missing_ok=True)
        self._say(f"{stage.name}: begins; its log is {log.relative_to(ROOT)}")
        command = (*LOW_PRIORITY, *stage.command) if stage.yields else stage.command
        time_file = self._logs / f"{stage.name}.cpu"
        parent = os.getpid()
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "gate.measured", str(time_file), *command],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509  # the child only asks the kernel
            )
            with self._lock:
                self._groups[stage.name] = process
            if self._stopping:  # it began just when another stage failed
                self._stop(self._stopping)
            assert process.stdout is not None
            follower = threading.Thread(target=self._follow, args=(stage.name, process.stdout, file))
            follower.start()
            code = process.wait()
            with self._lock:
                del self._groups[stage.name]
            _kill_group(
                process.pid
            )  # a process left in the background holds the pipe open: the follower would wait for ever
            follower.join()
            process.stdout.close()
        wall, spent = time.monotonic() - began, _read_seconds(time_file)
        outcome = "passed" if code == 0 else "stopped" if self._stopping else "failed"
        self._results[stage.name] = Result(outcome, wall, spent, "" if code == 0 else f"exit code {code}; {log}")
        self._say(f"{stage.name}: {outcome} after {wall:.0f} s wall, {spent:.0f} s CPU")
        if outcome == "failed" and not self._keep_going:
            self._stop(f"{stage.name} failed", besides=stage.name)

    def _follow(self, name: str, output: IO[bytes], log: IO[bytes]) -> None:
        for line in output:
            log.write(line)
            log.flush()
            with self._terminal:
                sys.stdout.write(f"{name} | {line.decode(errors='replace')}")
                sys.stdout.flush()

    def _say(self, text: str) -> None:
        with self._terminal:
            print(f"== {text}", flush=True)

    def _stop(self, why: str, besides: str = "") -> None:
        self._stopping = self._stopping or why
        with self._lock:
            running = {name: process for name, process in self._groups.items() if name != besides}
        for process in running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
        threading.Thread(target=_kill_late, args=(tuple(running.values()),), daemon=True).start()

    @contextlib.contextmanager
    def _stops_on_signals(self) -> Iterator[None]:
        def stop(number: int, _frame: object) -> None:
            # in a thread, because the interrupted main thread may hold the lock that _stop needs
            why = f"{signal.Signals(number).name} was received"
            threading.Thread(target=self._stop, args=(why,), daemon=True).start()

        former = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)


def _kill_late(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _END_SECONDS
    for process in processes:
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        _kill_group(process.pid)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _read_seconds(file: Path) -> float:
    try:
        return float(file.read_text())
    except (OSError, ValueError):
        return 0.0
