"""What is sent of a state that is mostly frozen: a LoRA program, one of whose weights in twenty is trained.

`python -m bench.frozen_weights [--turns 3] [--out FILE]`. One real Checkpointer beside an agent's staging memory and two
Redis holders, each turn with processes of its own. `bytes_sent` is what both servers received of a save (INFO
`total_net_input_bytes`), over two copies of the state; the first save, which sends everything, stands alone. Both
servers' memory is read back and compared after the last save, by a restore.
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
from surefoot.memory_server.connection import Credentials, RespConnection

TASK: dict[str, Any] = {"layers": 24, "width": 1536, "rank": 14}
"""As `run` measures it: 240 MB, of which 5 % are adapters and their moments."""
SAVES = 6
FLUSH_SECONDS = 120.0
TURN_SECONDS = 300.0


class Adapted(nn.Module):
    """A frozen weight with two small trained ones beside it, as LoRA has them."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, width))
        self.lora_b = nn.Parameter(torch.zeros(width, rank))


class Turn:
    def __init__(self, task: dict[str, Any]) -> None:
        self.model = nn.Sequential(*(Adapted(task["width"], task["rank"]) for _ in range(task["layers"])))
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained)
        self._asked: Any = Asked()

    def measured(self) -> dict[str, Any]:
        os.environ["SUREFOOT_GENERATION"] = "1"
        self._step()
        mine = self._opened()
        mine.restore()
        sent, seconds = [], []
        for _ in range(SAVES):
            self._step()
            before, began = received_bytes(), time.monotonic()
            self._asked.due_now = True
            mine.step()
            self._asked.due_now = False
            mine._saver.join()
            mine._saver.wait()
            if not mine._backend.wait_for_flush(FLUSH_SECONDS) or mine._saver.staged_step != mine._step:
                raise RuntimeError("a save did not reach its holders")
            seconds.append(time.monotonic() - began)
            sent.append(received_bytes() - before)
        mine._end(flush_seconds=FLUSH_SECONDS)
        self._restored()
        frozen, every = (sum(t.nbytes for t in tensors) for tensors in (self._frozen(), self._every()))
        return {
            "state_bytes": every,
            "frozen": frozen / every,
            "bytes_sent": [one / (2 * every) for one in sent],
            "save_seconds": seconds,
        }

    def _step(self) -> None:
        for parameter in self.trained:
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()

    def _frozen(self) -> list[torch.Tensor]:
        return [p for p in self.model.parameters() if not p.requires_grad]

    def _every(self) -> list[torch.Tensor]:
        moments = [state[key] for state in self.optimizer.state.values() for key in sorted(state)]
        return [p.detach() for p in self.model.parameters()] + moments

    def _restored(self) -> None:
        kept = [tensor.clone() for tensor in self._every()]
        with torch.no_grad():
            for tensor in self._every():
                tensor.fill_(-1)
        os.environ["SUREFOOT_GENERATION"] = "2"
        reading = self._opened()
        reading.restore()
        reading._end(flush_seconds=0.0)
        if not all(map(torch.equal, kept, self._every())):
            raise AssertionError("a restore brought back other bytes than were saved")

    def _opened(self) -> Checkpointer:
        made = Checkpointer(model=self.model, optimizer=self.optimizer)
        made._saves.schedule = self._asked
        return made


def received_bytes() -> int:
    """What both servers have received since they began."""
    total = 0
    for _, _, host, port in json.loads(os.environ["BENCH_ENDPOINTS"]):
        wire = RespConnection(host, port, Credentials("", holders.PASSWORD), 5.0)
        total += int(wire.info("stats")["total_net_input_bytes"])
        wire.close()
    return total


def summary(turns: list[dict[str, Any]]) -> dict[str, float]:
    """Medians; of the bytes also the most, and those of the first save."""
    later = [share for turn in turns for share in turn["bytes_sent"][1:]]
    return {
        "frozen": round(turns[0]["frozen"], 4),
        "bytes_sent": round(statistics.median(later), 4),
        "bytes_sent_most": round(max(later), 4),
        "bytes_sent_first": round(statistics.median(turn["bytes_sent"][0] for turn in turns), 4),
        "save_seconds": round(statistics.median(s for turn in turns for s in turn["save_seconds"][1:]), 4),
        "save_seconds_first": round(statistics.median(turn["save_seconds"][0] for turn in turns), 4),
    }


def state_bytes(task: dict[str, Any]) -> int:
    return 4 * task["layers"] * task["width"] * (task["width"] + 6 * task["rank"])


def turn(task: dict[str, Any]) -> dict[str, Any]:
    with holders.running(state_bytes(task)) as tier:
        return run_module("bench.frozen_weights", [json.dumps(task)], tier.environment(), TURN_SECONDS)


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1].startswith("{"):  # a turn's own process
        Path(sys.argv[2]).write_text(json.dumps(Turn(json.loads(sys.argv[1])).measured()))
        return
    parser = argparse.ArgumentParser(prog="python -m bench.frozen_weights", description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    load = [os.getloadavg()[0]]
    turns = [turn(TASK) for _ in range(options.turns)]
    load.append(os.getloadavg()[0])
    failed = [t["error"] for t in turns if "error" in t]
    if failed:
        raise SystemExit("\n".join(failed))
    found = {"task": TASK, "load_before_and_after": load, "summary": summary(turns), "turns": turns}
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({k: v for k, v in found.items() if k != "turns"}, indent=1))


if __name__ == "__main__":
    main()
