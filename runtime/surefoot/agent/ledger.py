"""The ledger: one JSON line for each step of each local rank. What `--compare` counts samples and losses from.

A ledger that cannot be written is counted and said once; the training goes on.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

from surefoot import metrics
from surefoot.agent.line import Stepped

_log = logging.getLogger(__name__)


class Ledger:
    """Appends to `{scratch_folder}/ledger/worker-INDEX-ATTEMPT.jsonl`, a line at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._said = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, epoch: int, rank: int, stepped: Stepped) -> None:
        entry = {
            "epoch": epoch,
            "step": stepped.step,
            "rank": rank,
            "loss": stepped.loss,
            "samples": list(stepped.samples) if stepped.samples is not None else None,
            "at": time.time(),
            "seconds": stepped.seconds,
            "stall_seconds": stepped.stall_seconds,
        }
        try:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
        except OSError as error:
            metrics.fallbacks.labels(what="ledger_lost").inc()
            if not self._said:
                self._said = True
                _log.error("the ledger %s cannot be written, steps are not recorded: %s", self._path, error)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            _log.error("the end of the ledger %s was lost: %s", self._path, error)
