"""A training that forks as programs do: children that leave by sys.exit, by an exception, by close, and workers.

forking_trainer.py STEPS FOLDER
"""

from __future__ import annotations

import multiprocessing
import os
import sys

import torch

import surefoot


def child(checkpointer: surefoot.Checkpointer, step: int) -> None:
    """What a forked child may do to whatever it was born with."""
    if step % 4 == 0:
        sys.exit(0)
    if step % 4 == 1:
        raise RuntimeError("a child's own")
    if step % 4 == 2:
        checkpointer.close()
        sys.exit(0)
    try:
        checkpointer.step()
    except surefoot.errors.ConfigurationError as error:
        print("refused:", error, flush=True)
    sys.exit(3)


def nothing() -> None:
    """A worker of multiprocessing."""


def main() -> None:
    steps, folder = int(sys.argv[1]), sys.argv[2]
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.TensorDataset(torch.randn(64, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    workers = torch.utils.data.DataLoader(data, batch_size=8, num_workers=1, multiprocessing_context="fork")
    checkpointer = surefoot.Checkpointer(model=model, optimizer=optimizer, folder=folder, interval_steps=5)
    with checkpointer:
        assert len(list(workers)) == 8  # gone again before any other child could end them
        for step, (batch,) in zip(range(checkpointer.restore() + 1, steps + 1), loader, strict=False):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
            pid = os.fork()
            if pid == 0:
                child(checkpointer, step)
            os.waitpid(pid, 0)
            worker = multiprocessing.get_context("fork").Process(target=nothing)
            worker.start()
            worker.join()
            assert worker.exitcode == 0
    print("saved", checkpointer.list()[-1].step, flush=True)


if __name__ == "__main__":
    main()
