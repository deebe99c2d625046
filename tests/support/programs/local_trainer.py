"""A tiny real training for tests of `surefoot local`: gloo, two layers, every step saved as the job says.

local_trainer.py STEPS FOLDER [--gates STEP,...] [--pace SECONDS] [--width N] [--first-dtype NAME] [--unstageable BYTES]
                 [--raises STEP] [--evaluates STEP] [--evaluates-seconds S] [--hangs STEP] [--diverges STEP]
                 [--uneven-batches] [--spoiled FIRST,LAST] [--spoils STEP]

It stops behind each gate's step until `FOLDER/gate-STEP` exists: a test does there what it has to do, however slow the
machine is. A run whose gates are open already never stops. With --raises every rank of the first epoch ends by an
exception in the middle of that step. With --evaluates rank 0 computes behind that step for some seconds, unannounced,
while the others wait; with --hangs rank 1 of the first epoch stops behind that step for ever, with --diverges it reduces in
another group than all others, in the same line. With --uneven-batches a batch sampler of the program's own gives lists of
unlike sizes. With --spoiled the batches of the order's steps FIRST to LAST
are no numbers; with --spoils every epoch's model is none from that step on, whatever it reads.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

import surefoot

BATCH = 12


class UnevenBatches:
    """Lists of 1 to 2 × BATCH samples, drawn by the epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        chance = random.Random(self.epoch)
        samples = chance.sample(range(self.size), self.size)
        while samples:
            taken = chance.randint(1, 2 * BATCH)
            yield samples[:taken]
            del samples[:taken]


def evaluate(seconds: float) -> None:
    model, until = torch.nn.Linear(64, 64), time.monotonic() + seconds
    while time.monotonic() < until:
        model(torch.randn(64, 64)).sum().item()
        sorted(str(number) for number in range(1000))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gates", default="")
    parser.add_argument("--pace", type=float, default=0.02)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--first-dtype", default="float64")
    parser.add_argument("--unstageable", type=int, default=0)
    parser.add_argument("--raises", type=int, default=0)
    parser.add_argument("--evaluates", type=int, default=0)
    parser.add_argument("--evaluates-seconds", type=float, default=0.0)
    parser.add_argument("--hangs", type=int, default=0)
    parser.add_argument("--diverges", type=int, default=0)
    parser.add_argument("--uneven-batches", action="store_true")
    parser.add_argument("--spoiled", default="0,0")
    parser.add_argument("--spoils", type=int, default=0)
    parser.add_argument("--setup-seconds", type=float, default=0.0, help="what a compiler or a warm-up takes")
    given = parser.parse_args()
    gates = {int(step): given.folder / f"gate-{step}" for step in given.gates.split(",") if step}
    dist.init_process_group("gloo")
    other = dist.new_group() if given.diverges else None
    strays = given.diverges if dist.get_rank() == 1 and os.environ["SUREFOOT_GENERATION"] == "1" else 0
    torch.manual_seed(0)
    first = torch.nn.Linear(8, given.width, dtype=getattr(torch, given.first_dtype))
    second = torch.nn.Linear(given.width, 8, dtype=torch.float64)
    model = torch.nn.ModuleList([first, second])
    if given.unstageable:
        # one byte of memory that counts as so many: no machine has what staging it would take
        model.register_buffer("wide", torch.zeros(1, dtype=torch.uint8).expand(given.unstageable))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dataset = torch.utils.data.TensorDataset(torch.randn(80 * BATCH, 8, dtype=torch.float64))
    loader = (
        surefoot.ElasticLoader(dataset, batch_sampler=UnevenBatches(len(dataset)), seed=0)
        if given.uneven_batches
        else surefoot.ElasticLoader(dataset, BATCH, seed=0)
    )
    first_spoiled, last_spoiled = map(int, given.spoiled.split(","))
    checkpointer = surefoot.Checkpointer(model=model, optimizer=optimizer, loader=loader)
    start = checkpointer.restore()
    time.sleep(given.setup_seconds)
    for step, batch in zip(range(start + 1, given.steps + 1), loader, strict=False):
        if first_spoiled <= batch.start // BATCH + 1 <= last_spoiled:
            batch.data[0].fill_(float("nan"))
        if step == given.spoils:
            with torch.no_grad():
                first.weight.fill_(float("nan"))
        hidden = first(batch.data[0].to(first.weight.dtype)).double()
        loss = (second(hidden) ** 2).mean() * batch.weight
        loss.backward()
        if step == given.raises and os.environ["SUREFOOT_GENERATION"] == "1":
            raise RuntimeError(f"told to end in step {step}")
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean, group=other if step == strays else None)
        checkpointer.step(mean)
        time.sleep(given.pace)  # a step takes as long as a small model's
        if step in gates and not gates[step].exists():
            with checkpointer.pause("gate"):
                while not gates[step].exists():
                    time.sleep(0.02)
        if step == given.evaluates and dist.get_rank() == 0:
            evaluate(given.evaluates_seconds)
        if step == given.hangs and dist.get_rank() == 1 and os.environ["SUREFOOT_GENERATION"] == "1":
            time.sleep(1000)
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
