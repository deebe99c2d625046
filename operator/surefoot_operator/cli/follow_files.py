"""Follows the log files of a run of `surefoot local`.

Touches files; reads of each what has come since the last look, and of a file that grew by megabytes a bounded part at a time.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from surefoot_operator.cli.followed_logs import (
    FollowChoice,
    WorkerNow,
    followed_line,
    whole_lines,
    worker_changes,
    workers_now,
)
from surefoot_operator.cli.jobs.job_view import JobView
from surefoot_operator.cli.jobs.run_folder_reads import read_run
from surefoot_operator.cli.stop_request import StopRequest
from surefoot_operator.platforms.local.run_folder import RunFolder

_READ_BYTES = 1 << 20
_WORKER = re.compile(r"worker-(\d+)-(\d+)")
_RANK = re.compile(r"rank-(\d+)")

Print = Callable[[Sequence[str]], None]


@dataclass(slots=True)
class _FileTail:
    path: Path
    worker: int
    attempt: int
    rank: int | None
    offset: int = 0
    rest: bytes = b""

    def read(self, first_lines: int | None = None) -> list[str]:
        """What has come since; with `first_lines` no more than the newest so many."""
        with open(self.path, "rb") as file:
            if first_lines is not None:
                self.offset = max(0, os.fstat(file.fileno()).st_size - _READ_BYTES)
            file.seek(self.offset)
            chunk = file.read(_READ_BYTES)
        self.offset += len(chunk)
        lines, self.rest = whole_lines(self.rest, chunk)
        # what an agent passes on of its ranks stands in their own files
        own = [line for line in lines if self.rank is not None or not line.startswith("[rank ")]
        shown = own if first_lines is None else list(deque(own, maxlen=first_lines))
        return [followed_line(self.worker, self.attempt, self.rank, line) for line in shown]


@dataclass(slots=True)
class FileFollower:
    """Follows one run until it is over, or its processes are gone."""

    root: Path
    choice: FollowChoice
    show: Print
    stop: StopRequest
    look_seconds: float = 0.5
    _tails: dict[Path, _FileTail] = field(default_factory=dict)
    _workers: dict[int, WorkerNow] = field(default_factory=dict)

    def run(self) -> str:
        """Follows, and returns the run's last phase."""
        while True:
            view = read_run(self.root)
            over = view.stored.phase in ("Complete", "Failed")
            abandoned = not over and _abandoned(view)
            now = workers_now(view.workers, self.choice.worker)
            lines = worker_changes(self._workers, now)
            first = not self._workers and not self._tails
            self._workers = now
            self.show([*lines, *self._new_lines(first)])
            if over or abandoned:
                self._show_rest()
                if abandoned:
                    self.show([f"== the processes of the run in {self.root} are gone: it ended before the job did"])
                return view.stored.phase
            self.stop.wait(self.look_seconds)
            self.stop.raise_if_requested()

    def _new_lines(self, first: bool) -> list[str]:
        found: list[str] = []
        for worker, attempt, rank, path in self._files():
            tail = self._tails.get(path)
            if tail is None:
                tail = self._tails[path] = _FileTail(path, worker, attempt, rank)
                found += tail.read(self.choice.tail if first else None)
            else:
                found += tail.read()
        return found

    def _show_rest(self) -> None:
        while lines := self._new_lines(False):
            self.show(lines)

    def _files(self) -> Iterator[tuple[int, int, int | None, Path]]:
        for folder in sorted(RunFolder(self.root).logs.glob("worker-*")):
            match = _WORKER.fullmatch(folder.name)
            if match is None or self.choice.worker not in (None, int(match[1])):
                continue
            worker, attempt = int(match[1]), int(match[2])
            for path in sorted(folder.glob("epoch-*/rank-*.log")):
                rank = _RANK.fullmatch(path.stem)
                if rank is not None and self.choice.takes(int(rank[1])):
                    yield worker, attempt, int(rank[1]), path
            if self.choice.takes(None) and (folder / "agent.log").exists():
                yield worker, attempt, None, folder / "agent.log"


def _abandoned(view: JobView) -> bool:
    """No node's process is there, though some were: nobody will finish the job."""
    return bool(view.nodes) and not any(node.ready for node in view.nodes or ())
