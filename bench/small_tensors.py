"""What many small tensors cost: preparing a save, the call that saves, the restore.

`python -m bench.small_tensors [--tensors 10000] [--kib 8] [--turns 5] [--adam] [--out FILE]`. One real Checkpointer beside
an agent's staging memory and two Redis holders, each turn with processes of its own. Of `--tensors` float32 tensors all are
parameters, or with `--adam` each fourth is one and the others are what AdamW keeps of it (amsgrad, and a counter more).
Every byte is compared after each restore. CPU seconds are those of the calling thread inside the call, else of the trainer's
process. A warm copy of the same tensors by `torch._foreach_copy_` stands beside.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench import holders
from bench.jobs import run_module
from bench.systems.surefoot import Asked
from surefoot import Checkpointer

TASK: dict[str, Any] = {"tensors": 10_000, "elements": 2048, "adam": False}
"""As `run` measures it."""
COLUMNS = (32, 64, 16, 0)
"""Columns of each of a block's parameters; 0: of one dimension."""
SAVES = 6
"""In each turn; the first is left out of the stall, and stands alone."""
RESTORES = 3
FLUSH_SECONDS = 120.0
TURN_SECONDS = 300.0


class Block(nn.Module):
    """Four parameters of equal size and different shape."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        for number, columns in enumerate(COLUMNS):
            shape = (elements // columns, columns) if columns else (elements,)
            self.register_parameter(f"weight{number}", nn.Parameter(torch.randn(shape)))


class Program:
    def __init__(self, tensors: int, elements: int, adam: bool) -> None:
        parameters = tensors // 4 if adam else tensors
        self.model = nn.Sequential(*(Block(elements) for _ in range(parameters // len(COLUMNS))))
        kept = list(self.model.parameters())
        if not adam:
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(kept, lr=1e-3)
            return
        self.optimizer = torch.optim.AdamW(kept, amsgrad=True)
        for p in kept:
            moments = {"exp_avg": p.detach() + 1, "exp_avg_sq": p.detach() + 2, "max_exp_avg_sq": p.detach() + 3}
            self.optimizer.state[p] = {"step": torch.tensor(1.0), **moments}

    def tensors(self) -> list[torch.Tensor]:
        kept = [p.detach() for p in self.model.parameters()]
        states = [self.optimizer.state.get(p, {}) for p in self.model.parameters()]
        return kept + [state[key] for state in states for key in sorted(state)]


class Turn:
    """One turn: prepare, saves, restores from holders into tensors that were overwritten."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.program = Program(task["tensors"], task["elements"], task["adam"])
        self._asked: Any = Asked()

    def measured(self) -> dict[str, Any]:
        os.environ["SUREFOOT_GENERATION"] = "1"
        mine = self._opened()
        mine.restore()
        began, spent = time.monotonic(), time.process_time()
        mine._saver.prepare()
        mine._saver._join_preparation()
        found: dict[str, Any] = {"prepare_seconds": time.monotonic() - began}
        found["prepare_cpu_seconds"] = time.process_time() - spent
        stalls, cpu, joins = [], [], []
        for _ in range(SAVES):
            with torch.no_grad():
                torch._foreach_add_([t for t in self.program.tensors() if t.dim()], 1.0)
            self._asked.due_now = True
            spent = time.thread_time()
            stalls.append(_timed(mine.step))
            cpu.append(time.thread_time() - spent)
            self._asked.due_now = False
            joins.append(_timed(mine._saver.join))
            mine._saver.wait()
            if not mine._backend.wait_for_flush(FLUSH_SECONDS) or mine._saver.staged_step != mine._step:
                raise RuntimeError("a save did not reach its holders")
        found |= {
            "in_call_seconds": stalls,
            "in_call_cpu_seconds": cpu,
            "join_seconds": joins,
            "warm_copy_seconds": self._warm_copy(),
        }
        mine._end(flush_seconds=FLUSH_SECONDS)
        restores = [self._restored() for _ in range(RESTORES)]
        found["restore_seconds"], found["restore_cpu_seconds"] = map(list, zip(*restores, strict=True))
        return found

    def _restored(self) -> tuple[float, float]:
        """Seconds, and CPU seconds of this process."""
        kept = [t.clone() for t in self.program.tensors()]
        with torch.no_grad():
            for tensor in self.program.tensors():
                tensor.fill_(-1)
        os.environ["SUREFOOT_GENERATION"] = "2"
        reading = self._opened()
        spent = time.process_time()
        seconds, spent = _timed(reading.restore), time.process_time() - spent
        reading._end(flush_seconds=0.0)
        if not all(map(torch.equal, kept, self.program.tensors())):
            raise AssertionError("a restore brought back other bytes than were saved")
        return seconds, spent

    def _opened(self) -> Checkpointer:
        made = Checkpointer(model=self.program.model, optimizer=self.program.optimizer)
        made._saves.schedule = self._asked
        return made

    def _warm_copy(self) -> float:
        tensors = self.program.tensors()
        copies = [torch.empty_like(t).zero_() for t in tensors]
        found = [_timed(lambda: torch._foreach_copy_(copies, tensors)) for _ in range(5)]
        return statistics.median(found[1:])


def summary(turns: list[dict[str, Any]], tensors: int) -> dict[str, Any]:
    """Medians over all turns, with (least, largest)."""
    return {
        f"stall_milliseconds_{tensors}_tensors": _of([1e3 * s for t in turns for s in _stalls(t)[1:]]),
        f"stall_cpu_milliseconds_{tensors}_tensors": _of(
            [1e3 * s for t in turns for s in t["in_call_cpu_seconds"][1:]]
        ),
        f"first_stall_milliseconds_{tensors}_tensors": _of([1e3 * _stalls(t)[0] for t in turns]),
        f"prepare_seconds_{tensors}_tensors": _of([t["prepare_seconds"] for t in turns]),
        f"prepare_cpu_seconds_{tensors}_tensors": _of([t["prepare_cpu_seconds"] for t in turns]),
        f"restore_seconds_{tensors}_tensors": _of([s for t in turns for s in t["restore_seconds"]]),
        f"restore_cpu_seconds_{tensors}_tensors": _of([s for t in turns for s in t["restore_cpu_seconds"]]),
        "warm_copy_milliseconds": _of([1e3 * t["warm_copy_seconds"] for t in turns]),
    }


def _stalls(turn: dict[str, Any]) -> list[float]:
    return [call + join for call, join in zip(turn["in_call_seconds"], turn["join_seconds"], strict=True)]


def _of(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "least": round(min(values), 4),
        "most": round(max(values), 4),
    }


def _timed(call: Any) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def turn(task: dict[str, Any]) -> dict[str, Any]:
    size = task["tensors"] * task["elements"] * 4
    with holders.running(size) as tier:
        return run_module("bench.small_tensors", [json.dumps(task)], tier.environment(), TURN_SECONDS)


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1].startswith("{"):  # a turn's own process
        Path(sys.argv[2]).write_text(json.dumps(Turn(json.loads(sys.argv[1])).measured()))
        return
    parser = argparse.ArgumentParser(prog="python -m bench.small_tensors", description=__doc__)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--kib", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--adam", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    task = {"tensors": options.tensors, "elements": options.kib * 256, "adam": options.adam}
    load = [os.getloadavg()[0]]
    turns = [turn(task) for _ in range(options.turns)]
    load.append(os.getloadavg()[0])
    failed = [t["error"] for t in turns if "error" in t]
    if failed:
        raise SystemExit("\n".join(failed))
    found = {"task": task, "load_before_and_after": load, "summary": summary(turns, options.tensors), "turns": turns}
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({k: v for k, v in found.items() if k != "turns"}, indent=1))


if __name__ == "__main__":
    main()
