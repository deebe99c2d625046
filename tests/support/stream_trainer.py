"""A tiny real training whose data comes in other people's ways; a line a step in OUT/losses-RANK.txt: step, loss, data.

stream_trainer.py KIND STEPS OUT     KIND: stateful (torchdata's loader over this rank's own stream), sampler (the same
over a DistributedSampler), accumulate (three ElasticLoader batches a step), ahead (nanoGPT's loop: the next batch is
drawn from the global generator before the step ends, behind dropout). Float64, gloo where there are several ranks;
with GATE in the environment it stops behind that step until OUT/gate exists.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import surefoot

WIDTH = 6


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    """This rank's own shards, read at its own pace, augmented from a generator of its own."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at = rank, 0
        self.generator = torch.Generator().manual_seed(rank)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.at += self.rank + 1
            noise = torch.rand(WIDTH, dtype=torch.float64, generator=self.generator)
            yield torch.full((WIDTH,), self.rank + self.at / 100, dtype=torch.float64) + noise

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.generator.set_state(state["generator"])


class Training:
    """The model, its checkpointer, and the file of what was seen."""

    def __init__(self, out: Path, **objects: Any) -> None:
        torch.manual_seed(0)
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 9), torch.nn.Dropout(0.3), torch.nn.Linear(9, 1)
        ).double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.checkpointer = surefoot.Checkpointer(model=self.model, optimizer=self.optimizer, **objects)
        self.done = self.checkpointer.restore()
        self.out = out
        if self.done == 0:
            torch.manual_seed(100 + self.rank)  # each rank its own dropout

    def backward(self, data: torch.Tensor, weight: float = 1.0) -> float:
        loss = self.model(data).square().mean() * weight
        loss.backward()
        return float(loss)

    def step(self, loss: float) -> None:
        if self.world > 1:
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
                assert parameter.grad is not None
                parameter.grad /= self.world
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        with (self.out / f"losses-{self.rank}.txt").open("a") as file:
            file.write(f"{self.done} {loss!r}\n")
        self.checkpointer.step(loss)
        while self.done == int(os.environ.get("GATE", "0")) and not (self.out / "gate").exists():
            time.sleep(0.02)


def stateful(out: Path, steps: int, sampler: bool) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if sampler:
        data = torch.utils.data.TensorDataset(torch.randn(40 * world, WIDTH, dtype=torch.float64))
        order: Any = torch.utils.data.DistributedSampler(data, world, rank, shuffle=True, seed=1)
        loader: Any = StatefulDataLoader(data, 2, sampler=order, generator=torch.Generator())
    else:
        loader = StatefulDataLoader(
            Stream(rank), 2, num_workers=int(os.environ.get("WORKERS", "0")), generator=torch.Generator()
        )
    training = Training(out, loader=loader)
    batches = iter(loader)
    while training.done < steps:
        batch = next(batches)
        training.step(training.backward(batch[0] if sampler else batch))
    training.checkpointer.close()


def accumulate(out: Path, steps: int) -> None:
    data = torch.randn(200, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    loader = surefoot.ElasticLoader(data, 4, seed=2, batches_per_step=3)
    training = Training(out, loader=loader)
    training.model[1].p = 0.0  # type: ignore[assignment]  # so that a world of another size has the same losses
    batches = iter(loader)
    while training.done < steps:
        parts = [next(batches) for _ in range(3)]
        losses = torch.tensor([training.backward(b.data, b.weight / 3) for b in parts], dtype=torch.float64)
        training.step(float(losses.sum()))
    training.checkpointer.close()


def ahead(out: Path, steps: int) -> None:
    training = Training(out)

    def drawn() -> torch.Tensor:
        return torch.randn(4, WIDTH, dtype=torch.float64)

    batch = drawn()
    while training.done < steps:
        for _ in range(2):
            loss = training.model(batch).square().mean() / 2
            with training.checkpointer.ahead():
                batch = drawn()
            loss.backward()
        training.step(float(loss))
    training.checkpointer.close()


KINDS: dict[str, Callable[[Path, int], None]] = {
    "stateful": lambda out, steps: stateful(out, steps, sampler=False),
    "sampler": lambda out, steps: stateful(out, steps, sampler=True),
    "accumulate": accumulate,
    "ahead": ahead,
}


def main() -> None:
    kind, steps, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    KINDS[kind](out, steps)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
