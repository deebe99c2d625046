"""Writes one JSON line for each step of each local rank.

`surefoot local --compare` counts samples and losses from it. A line that cannot be written waits in memory and follows
when the disk takes it: a disk that was full for ten seconds must not look like samples that were lost. Beyond
`MOST_WAITING` lines are given up, counted and said once; the training goes on. Whoever counts takes a step without a
line for unknown.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from surefoot import metrics
from surefoot.ipc.trainer_messages import Stepped

_log = logging.getLogger(__name__)

MOST_WAITING = 20_000
"""Lines: some megabytes, and hours of a full disk where steps take a second."""


class StepLedger:
    """Appends to `{scratch_folder}/ledger/worker-INDEX-ATTEMPT.jsonl`, a line at a time.

    `later` calls what it is given some seconds later: lines that wait must not wait for the next step, which may wait
    for them. `write`: as `os.write`.
    """

    def __init__(
        self,
        path: Path,
        later: Callable[[Callable[[], None]], None],
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        self._path = path
        self._later = later
        self._write = write
        self._due = self._closed = False
        self._waiting: deque[bytes] = deque()
        self._failing = self._dropped = False
        path.parent.mkdir(parents=True, exist_ok=True)
        # unbuffered: a buffer that could not be flushed keeps a part of a line, and nobody knows which
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, epoch: int, rank: int, stepped: Stepped) -> None:
        progress = stepped.progress
        entry = {
            "epoch": epoch,
            "step": progress.step,
            "rank": rank,
            "loss": progress.loss,
            "samples": list(stepped.samples) if stepped.samples is not None else None,
            "span": stepped.span,
            "at": time.time(),
            "seconds": progress.step_seconds,
            "stall_seconds": progress.stall_seconds,
        }
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append((json.dumps(entry) + "\n").encode())
        else:
            metrics.fallbacks.labels(what="ledger_lost").inc()
            if not self._dropped:
                self._dropped = True
                _log.error("the ledger %s has %d lines waiting: steps are not recorded", self._path, MOST_WAITING)
        self._catch_up()

    def _catch_up(self) -> None:
        try:
            while self._waiting:
                written = self._write(self._descriptor, self._waiting[0])
                if written == len(self._waiting[0]):
                    self._waiting.popleft()
                else:
                    self._waiting[0] = self._waiting[0][written:]  # the rest of this line is the next to be written
        except OSError as error:
            if not (self._due or self._closed):
                self._due = True
                self._later(self._try_again)
            if not self._failing:
                self._failing = True
                _log.error("the ledger %s cannot be written (%s); its lines wait in memory", self._path, error)
            return
        if self._failing:
            self._failing = self._dropped = False
            _log.info("the ledger %s can be written again", self._path)

    def _try_again(self) -> None:
        self._due = False
        if not self._closed:
            self._catch_up()

    def close(self) -> None:
        self._closed = True
        self._catch_up()
        if self._waiting:
            metrics.fallbacks.labels(what="ledger_lost").inc(len(self._waiting))
            _log.error("the last %d lines of the ledger %s could not be written", len(self._waiting), self._path)
        try:
            os.close(self._descriptor)
        except OSError as error:
            _log.error("the end of the ledger %s was lost: %s", self._path, error)
