"""Restoring the same program from two Redis holders, with `dcp.load` from tmpfs, and in place, turn by turn in one process.

`python -m bench.restores TASK OUT`. Before each load the tensors are overwritten; after it their digests are compared
with those of what was saved. dcp.load is timed alone; Surefoot's time is that of all of `Checkpointer.restore`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from xxhash import xxh3_64_hexdigest

from bench.cores import spent_seconds
from bench.keeper import IN_PLACE
from bench.program import Program
from bench.systems.dcp import join_world_of_one
from bench.systems.surefoot import Asked
from surefoot import Checkpointer


class Restores:
    def __init__(self, task: dict[str, Any], folder: Path) -> None:
        self.program = Program(task["width"], task["layers"], sequences=0)
        self.folder = folder
        self.companions = [int(pid) for pid in os.environ["BENCH_COMPANIONS"].split()]

    def measured(self, times: int) -> dict[str, Any]:
        join_world_of_one()
        dcp.save(self.program.state(), checkpoint_id=self.folder)
        self._save()
        saved = self._digests()
        ways = {
            "surefoot": lambda: self._surefoot(2),
            "dcp.load": self._dcp,
            "surefoot in place": lambda: self._surefoot(IN_PLACE),
        }
        found: dict[str, Any] = {"state_bytes": self.program.size_bytes}
        for name in ways:
            found[name] = {"seconds": [], "cpu_seconds": []}
        for _ in range(times + 1):
            for name, way in ways.items():
                self._spoil()
                spent = spent_seconds([os.getpid(), *self.companions])
                seconds = way()
                found[name]["seconds"].append(seconds)
                found[name]["cpu_seconds"].append(spent_seconds([os.getpid(), *self.companions]) - spent)
                if self._digests() != saved:
                    raise AssertionError(f"{name} brought back other bytes than were saved")
        return found

    def _save(self) -> None:
        os.environ["SUREFOOT_GENERATION"] = "1"
        saving = self._opened()
        saving.restore()
        saving.step()
        if not saving.save_now():
            raise RuntimeError("the save to restore from failed")
        saving._end(flush_seconds=60.0)

    def _surefoot(self, epoch: int) -> float:
        os.environ["SUREFOOT_GENERATION"] = str(epoch)
        reading = self._opened()
        began = time.monotonic()
        reading.restore()
        seconds = time.monotonic() - began
        reading._end(flush_seconds=0.0)
        return seconds

    def _dcp(self) -> float:
        state = self.program.state()
        began = time.monotonic()
        dcp.load(state, checkpoint_id=self.folder)
        return time.monotonic() - began

    def _opened(self) -> Checkpointer:
        made = Checkpointer(model=self.program.model, optimizer=self.program.optimizer)
        asked: Any = Asked()
        made._saves.schedule = asked
        return made

    def _digests(self) -> list[str]:
        return [xxh3_64_hexdigest(t.detach().contiguous().numpy().data) for t in self.program.tensors()]

    def _spoil(self) -> None:
        with torch.no_grad():
            for tensor in self.program.tensors():
                tensor.fill_(-1)


def main() -> None:
    task = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="surefoot-bench-", dir=task["folder"]) as folder:
        found = Restores(task, Path(folder)).measured(task["restores"])
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
