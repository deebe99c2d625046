"""A tiny real training whose data comes in other people's ways; a line a step in FOLDER/losses-RANK.txt: step, loss.

stream_trainer.py STEPS FOLDER [--kind KIND] [--workers N] [--pace SECONDS] [--dies STEP]

KIND: stream (torchdata's loader over this rank's own stream), sampler (the same over a DistributedSampler), accumulate
(three ElasticLoader batches a step, behind a prefetcher of one), ahead (nanoGPT's loop: the next batch is drawn from the
global generator before the step ends). Float64 and dropout; gloo where there are several ranks. With --dies it kills
itself once behind that step's save.
"""

from __future__ import annotations

import argparse
import os
import signal
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

    def __init__(self, given: argparse.Namespace, **objects: Any) -> None:
        torch.manual_seed(0)
        self.given = given
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 9), torch.nn.Dropout(0.3), torch.nn.Linear(9, 1)
        ).double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.checkpointer = surefoot.Checkpointer(model=self.model, optimizer=self.optimizer, **objects)
        self.done = self.checkpointer.restore()
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
        with (self.given.folder / f"losses-{self.rank}.txt").open("a") as file:
            file.write(f"{self.done} {loss!r}\n")
        self.checkpointer.step(loss)
        time.sleep(self.given.pace)
        died = self.given.folder / "died"
        if self.done == self.given.dies and not died.exists():
            assert self.checkpointer.save_now()
            while not any(c.step == self.done for c in self.checkpointer.list()):
                time.sleep(0.02)
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    @property
    def goes_on(self) -> bool:
        return bool(self.done < self.given.steps)


def stream(given: argparse.Namespace) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    own = torch.Generator()  # a loader without one draws its workers' seed from the global one
    if given.kind == "sampler":
        fixed = torch.Generator().manual_seed(3)
        data = torch.utils.data.TensorDataset(torch.randn(40 * world, WIDTH, dtype=torch.float64, generator=fixed))
        order: Any = torch.utils.data.DistributedSampler(data, world, rank, shuffle=True, seed=1)
        loader: Any = StatefulDataLoader(data, 2, sampler=order, num_workers=given.workers, generator=own)
    else:
        loader = StatefulDataLoader(Stream(rank), 2, num_workers=given.workers, generator=own)
    training = Training(given, loader=loader)
    batches = iter(loader)
    while training.goes_on:
        batch = next(batches)
        training.step(training.backward(batch[0] if given.kind == "sampler" else batch))
    training.checkpointer.close()


def accumulate(given: argparse.Namespace) -> None:
    data = torch.randn(200, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    loader = surefoot.ElasticLoader(data, 4, seed=2, batches_per_step=3)
    training = Training(given, loader=loader)
    training.model[1].p = 0.0  # type: ignore[assignment]  # so that a world of another size has the same losses
    batches = iter(loader)
    waiting = next(batches)
    while training.goes_on:
        total = 0.0
        for _ in range(3):
            batch, waiting = waiting, next(batches)
            total += training.backward(batch.data, batch.weight / 3)
        training.step(total)
    training.checkpointer.close()


def ahead(given: argparse.Namespace) -> None:
    training = Training(given)

    def drawn() -> torch.Tensor:
        return torch.randn(4, WIDTH, dtype=torch.float64)

    batch = drawn()
    while training.goes_on:
        for _ in range(2):
            loss = training.model(batch).square().mean() / 2
            with training.checkpointer.prefetching():
                batch = drawn()
            loss.backward()
        training.step(float(loss))
    training.checkpointer.close()


KINDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "stream": stream,
    "sampler": stream,
    "accumulate": accumulate,
    "ahead": ahead,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="stream")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--dies", type=int, default=0)
    parser.add_argument("--gates", default="")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    KINDS[given.kind](given)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
