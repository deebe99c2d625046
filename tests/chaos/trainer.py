"""A training that writes down what it saw: each step's sample ids and loss, and the parameters at the end.

trainer.py STEPS FOLDER [--pace SECONDS] [--alone]

With --alone it is one process without agent and without checkpoints: what a disturbed run is held against. Every line
is written before `step`, so that no checkpoint knows of a step that is not in the notes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import surefoot

BATCH, SAMPLES = 12, 960


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--gates", default="", help="not used here")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if not given.alone:
        dist.init_process_group("gloo")
    rank, world = (0, 1) if given.alone else (dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    values = torch.randn(SAMPLES, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dataset = torch.utils.data.TensorDataset(torch.arange(SAMPLES), values)
    loader = surefoot.ElasticLoader(dataset, BATCH, seed=0)
    checkpointer = None if given.alone else surefoot.Checkpointer(model=model, optimizer=optimizer, loader=loader)
    start = 0 if checkpointer is None else checkpointer.restore()
    epoch = 0 if given.alone else int(os.environ["SUREFOOT_GENERATION"])
    notes = os.open(given.folder / f"notes-{epoch}-{rank}-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    _note(notes, {"generation": epoch, "rank": rank, "world": world, "restored": start})
    for step, batch in zip(range(start + 1, given.steps + 1), loader, strict=False):
        ids, inputs = batch.data
        loss = (model(inputs) ** 2).mean() * batch.weight
        loss.backward()
        mean = loss.detach() / world
        if not given.alone:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
            dist.all_reduce(mean)
        optimizer.step()
        optimizer.zero_grad()
        _note(notes, {"step": step, "ids": ids.tolist(), "loss": float(mean)})
        if checkpointer is not None:
            checkpointer.step(mean)
        time.sleep(given.pace)
    _note(notes, {"parameters": [p.detach().flatten().tolist() for p in model.parameters()]})
    os.close(notes)
    if checkpointer is not None:
        checkpointer.close()
        dist.destroy_process_group()


def _note(notes: int, line: dict[str, object]) -> None:
    """One write a line: a process that is killed leaves whole lines."""
    os.write(notes, (json.dumps(line) + "\n").encode())


if __name__ == "__main__":
    main()
