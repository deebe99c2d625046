"""The training of the scenarios: gloo, float64, two layers. It writes down every step where a crashed node cannot take it.

trainer.py STEPS FOLDER [--pace SECONDS] [--trace]

`FOLDER/last` may name an earlier last step while it runs: rank 0 reads it and tells the others within the step's own
collective, so that all stop at the same one. Each process appends to a file of its own; rank 0 leaves the parameters
of the last step in `final.json`, and with --trace those of every step in `parameters.bin`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from trainer_files import FINAL, LAST, TRACE  # it lies beside this program

import surefoot

BATCH = 12
WIDTH = 16
SAMPLES = 4096


class Written:
    """One process's own file: a line a step, each written whole before the next step begins."""

    def __init__(self, folder: Path, rank: int) -> None:
        here = os.environ
        self._epoch, self._rank = int(here["SUREFOOT_GENERATION"]), rank
        self._worker = f"{here['SUREFOOT_WORKER_INDEX']}-{here['SUREFOOT_WORKER_ATTEMPT']}"
        self._node = here["SUREFOOT_NODE"]
        name = f"epoch-{self._epoch}-rank-{rank}-worker-{self._worker}-{time.time_ns()}.jsonl"
        self._file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)

    def step(self, step: int, loss: float, samples: tuple[int, int], seconds: float) -> None:
        line = {
            "generation": self._epoch,
            "step": step,
            "rank": self._rank,
            "loss": loss,
            "samples": [samples],
            "at": time.time(),
            "seconds": seconds,
            "worker": self._worker,
            "node": self._node,
            "pid": os.getpid(),
        }
        os.write(self._file, json.dumps(line).encode() + b"\n")


def parameters(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def last_step(folder: Path, otherwise: int) -> int:
    try:
        return min(otherwise, int((folder / LAST).read_text()))
    except (FileNotFoundError, ValueError):  # not there, or not written whole yet
        return otherwise


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--trace", action="store_true")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = torch.nn.Sequential(torch.nn.Linear(8, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 4))
    inputs = torch.randn(SAMPLES, 8)
    wanted = torch.sin(inputs @ torch.randn(8, 4)) + 0.1 * torch.randn(SAMPLES, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    loader = surefoot.ElasticLoader(torch.utils.data.TensorDataset(inputs, wanted), BATCH, seed=0)
    checkpointer = surefoot.Checkpointer(model=model, optimizer=optimizer, loader=loader)
    start = checkpointer.restore()
    written = Written(given.folder, rank)
    print(f"rank {rank} of {world} continues from step {start}", flush=True)
    for step, batch in zip(range(start + 1, given.steps + 1), loader, strict=False):
        began = time.perf_counter()
        loss = (model(batch.data[0]) - batch.data[1]).square().mean() * batch.weight
        loss.backward()
        stop = last_step(given.folder, given.steps) if rank == 0 else 0
        shared = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        shared = torch.cat([shared, loss.detach().reshape(1)])
        dist.all_reduce(shared)
        shared /= world
        told = torch.tensor([stop])
        dist.broadcast(told, 0)
        place = 0
        for p in model.parameters():
            p.grad = shared[place : place + p.numel()].view_as(p).clone()
            place += p.numel()
        optimizer.step()
        optimizer.zero_grad()
        mean = float(shared[-1])
        if given.trace and rank == 0:
            with (given.folder / TRACE).open("ab") as file:
                file.write(parameters(model).numpy().tobytes())
        time.sleep(given.pace)  # a step takes as long as a small model's
        # first: what a checkpoint has must be written down, and a held step ends inside the next call
        written.step(step, mean, (batch.start, batch.stop), time.perf_counter() - began)
        checkpointer.step(mean)
        if step >= int(told):
            break
    if rank == 0:
        final = given.folder / FINAL
        fresh = final.with_suffix(".new")
        fresh.write_text(json.dumps({"step": step, "parameters": parameters(model).tolist()}))
        fresh.rename(final)
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
