"""Who runs where. "A core to spare": the trainer's compute thread alone has the first core, everything else (copying
threads, helpers' processes, servers) the others. "None": two compute threads and everything else share all cores.

Used by the worker around each part of a measurement, and by nobody else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch

from surefoot.linux_process import cpu_seconds, descendants

Mode = Literal["spare", "none", "free"]
"""`free`: no training runs, everybody has every core."""


class Cores:
    """Places this process' threads, its children, and the processes of `companions`."""

    def __init__(self, companions: Iterable[int]) -> None:
        self.all = sorted(os.sched_getaffinity(0))
        self.companions = tuple(companions)
        self._mode: Mode = "free"

    def enter(self, mode: Mode) -> None:
        self._mode = mode
        torch.set_num_threads(1 if mode == "spare" else len(self.all))
        self.settle()

    def open(self) -> None:
        """Before a call that may start threads or processes: they must not inherit the compute thread's core."""
        if self._mode == "spare":
            os.sched_setaffinity(0, self.all)

    def settle(self) -> None:
        """After such a call: everyone to where they belong."""
        main = threading.main_thread().native_id
        spare = self._mode == "spare"
        others = set(self.all[1:] or self.all) if spare else set(self.all)
        compute = {self.all[0]} if spare else set(self.all)
        for pid in (os.getpid(), *descendants(os.getpid()), *self.companions):
            for task in _tasks(pid):
                _place(task, compute if task == main else others)


def spent_seconds(pids: Iterable[int]) -> float:
    """CPU time of these processes, and of what they have reaped."""
    return sum(cpu_seconds(pid, reaped=True) for pid in pids)


def resident_bytes(pids: Iterable[int], key: str = "VmHWM") -> int:
    """Peak (`VmHWM`) or present (`VmRSS`) resident memory of these processes together."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        total += next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)
    return total


def _tasks(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _place(task: int, cores: set[int]) -> None:
    try:
        os.sched_setaffinity(task, cores)
    except OSError:
        pass  # it ended meanwhile
