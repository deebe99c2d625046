"""One system's turn, in a process of its own: `python -m bench.worker SYSTEM TASK OUT`. Writes one JSON object to OUT.

The turn: stretches of plain steps and of steps with saves, with a core to spare or with none; saves with nothing else
running; a load. Times are of the monotonic clock; nothing is left out of a stall.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.cores import Cores, Mode, resident_bytes, spent_seconds
from bench.lost import DENSE, PLAIN
from bench.program import Program
from bench.systems import ASIDE, SYSTEMS
from bench.systems.system import System
from surefoot.linux_process import descendants


@dataclass
class Stretch:
    """A stretch of training: seconds of each step, and the stall of each save in it."""

    interval: int
    seconds: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    left_seconds: float = 0.0
    """How long the last save still had to be waited for when the steps were over."""


class Turn:
    def __init__(self, name: str, task: dict[str, Any], folder: Path) -> None:
        module, _, kind = (SYSTEMS | ASIDE)[name].partition(":")
        self.task = task
        self.program = Program(task["width"], task["layers"], task["sequences"])
        self.cores = Cores(map(int, os.environ.get("BENCH_COMPANIONS", "").split()))
        self.cores.enter("spare")
        self.program.train()
        self.cores.enter("free")
        found: type[System] = getattr(importlib.import_module(f"bench.systems.{module}"), kind)
        self.system = found(self.program, folder)
        self.step = 0
        self.advances: list[float] = []

    def measured(self) -> dict[str, Any]:
        task, size = self.task, self.program.size_bytes
        me = os.getpid()
        found: dict[str, Any] = {"state_bytes": size, "warm_copy_seconds": warm_copy(self.program)}
        plain = resident_bytes([me], "VmRSS")
        began = time.monotonic()
        self.system.prepare()
        found["prepare_seconds"] = time.monotonic() - began
        mode = task["mode"]
        found[mode] = self.trained(mode, task["saving"], task["steps"])
        if task["idle_saves"]:
            found["idle"] = self.idle(task["idle_saves"])
        found["peak_extra_bytes"] = resident_bytes([me, *descendants(me)]) - plain
        found["incomplete"] = self.system.incomplete()
        if task["loads"]:
            found["load_seconds"] = [timed(self.system.load) for _ in range(task["loads"])]
        found["warm_copy_seconds_after"] = warm_copy(self.program)
        found["advance_seconds"] = statistics.median(self.advances)
        found["drains"] = self.system.drains()
        self.system.close()
        return found

    def trained(self, mode: Mode, saving: list[int], steps: dict[str, int]) -> dict[str, Any]:
        """The first saves of all; then stretches with saves at the given intervals, a plain one on either side of each."""
        self.cores.enter(mode)
        self.train(1, PLAIN)  # warms this way of running
        found = [self.train(steps["first"], DENSE)]
        for interval in saving:
            found += [self.train(steps[str(PLAIN)], PLAIN), self.train(steps[str(interval)], interval)]
        if saving:
            found.append(self.train(steps[str(PLAIN)], PLAIN))
        self.cores.enter("free")
        return {"stretches": [asdict(stretch) for stretch in found]}

    def train(self, steps: int, interval: int) -> Stretch:
        """`steps` steps; each `interval`-th begins with a save of what the one before it left. Ends with all saves safe."""
        found = Stretch(interval)
        for number in range(steps):
            begun = time.monotonic()
            saving = interval != PLAIN and number % interval == 0
            stall = 0.0
            if saving:
                self.step += 1
                self.cores.open()
                before = time.monotonic()
                self.system.begin(self.step)
                stall += time.monotonic() - before
                self.cores.settle()
            self.program.train()
            if interval != PLAIN:
                before = time.monotonic()
                self.system.before_step()
                stall += time.monotonic() - before
            before = time.monotonic()
            self.program.advance()
            self.advances.append(time.monotonic() - before)
            found.seconds.append(time.monotonic() - begun)
            if saving:
                found.stalls.append(stall)
        found.left_seconds = timed(self.system.finish) if interval != PLAIN else 0.0
        return found

    def idle(self, saves: int) -> dict[str, Any]:
        """Saves one after the other, each of a state that a step has changed and waited for, with every core free.

        What did not change since the save before is not sent again: saves of one state would be measured as fast as none.
        """
        self.cores.enter("free")
        pids = [os.getpid(), *self.cores.companions]
        seconds, cpu = [], []
        for _ in range(saves):
            self.step += 1
            self.program.train()
            self.program.advance()
            spent = spent_seconds([*pids, *descendants(os.getpid())])
            began = time.monotonic()
            self.system.begin(self.step)
            self.system.before_step()
            self.system.finish()
            seconds.append(time.monotonic() - began)
            cpu.append(spent_seconds([*pids, *descendants(os.getpid())]) - spent)
        return {"seconds": seconds, "cpu_seconds": cpu}


def timed(call: Any) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def warm_copy(program: Program) -> float:
    """One copy of the whole state into memory that was written before, by one thread: the floor of a stall."""
    tensors = program.tensors()
    kept = torch.get_num_threads()
    torch.set_num_threads(1)
    copies = [torch.empty_like(t).zero_() for t in tensors]

    def once() -> None:
        for target, tensor in zip(copies, tensors, strict=True):
            target.copy_(tensor)

    found = [timed(once) for _ in range(6)][1:]
    torch.set_num_threads(kept)
    return statistics.median(found)


def main() -> None:
    name, task, out = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    with tempfile.TemporaryDirectory(prefix="surefoot-bench-", dir=task["folder"]) as folder:
        found = Turn(name, task, Path(folder)).measured()
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
