"""One rank of training loops that looks must not misjudge: who is slow in it, and who does more than the others.

unkind_loops.py. Says for each case the totals of its looks as JSON, at some moments: `[RANK, WORK, LOOKS, OWN, SAMPLES, LINES]`.
Work is sleep, so that a busy machine makes no rank slower than another.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from support.gloo_world import leave
from surefoot.checkpointer import activity_monitor
from surefoot.checkpointer.activity_monitor import ActivityMonitor

LOOK_SECONDS = 0.003
STEPS, WINDOWS = 30, 5
WORK_SECONDS = 0.006
SLOW = 3.0
"""How many times as long who is slow takes."""


class Rank:
    """What a case makes its own loop of."""

    def __init__(self, case: str) -> None:
        self.case, self.rank, self.world = case, dist.get_rank(), dist.get_world_size()
        self.is_slow = case.startswith("slow") and self.rank == 2
        self.pace = ActivityMonitor([torch.nn.Linear(2, 2)], self.rank, self.world)
        self.told = list[tuple[object, ...]]()
        self.steps, self.samples = 0, 4

    def work(self, part: float = 1.0) -> None:
        time.sleep(WORK_SECONDS * part * (SLOW if self.is_slow or self.case == "all are slow" else 1.0))

    def forward(self) -> None:
        self.work()

    def reduce(self) -> None:
        dist.all_reduce(torch.ones(1))

    def step(self) -> None:
        self.steps += 1
        (pace,) = self.pace.end_step(self.samples) or ((),)
        if pace and self.steps % STEPS == 0:
            self.told.append(tuple(pace))

    @property
    def goes_on(self) -> bool:
        return self.steps < STEPS * (WINDOWS + 1)


def plain(rank: Rank) -> None:
    """The loop that most programs have."""
    while rank.goes_on:
        rank.forward()
        rank.reduce()
        rank.work(0.2)
        rank.step()


def logs(rank: Rank) -> None:
    while rank.goes_on:
        rank.forward()
        rank.reduce()
        rank.step()
        if rank.rank == 0:
            time.sleep(2 * WORK_SECONDS)


def logs_in_a_call_of_all(rank: Rank) -> None:
    def log() -> None:
        if rank.rank == 0:
            time.sleep(2 * WORK_SECONDS)

    while rank.goes_on:
        rank.forward()
        rank.reduce()
        log()
        rank.step()


def logs_within_the_call_that_makes_a_step(rank: Rank) -> None:
    def train_step() -> None:
        rank.forward()
        rank.reduce()
        if rank.rank == 0:
            time.sleep(2 * WORK_SECONDS)

    while rank.goes_on:
        train_step()
        rank.step()


def evaluates(rank: Rank) -> None:
    while rank.goes_on:
        rank.forward()
        rank.reduce()
        rank.step()
        if rank.steps % 5 == 0 and rank.rank == 0:
            for _ in range(5):
                rank.forward()
                rank.forward()


def more_data(rank: Rank) -> None:
    """A rank has twice as many samples of each batch, and says so."""
    times = 2 if rank.rank == 1 else 1
    rank.samples *= times
    while rank.goes_on:
        for _ in range(times):
            rank.forward()
        rank.reduce()
        rank.step()


def pipeline(rank: Rank) -> None:
    """Stages of one size, of which one works at a time; the last computes a loss as well."""
    there = torch.ones(4)
    while rank.goes_on:
        if rank.rank > 0:
            dist.recv(there, rank.rank - 1)
        rank.forward()
        if rank.rank < rank.world - 1:
            dist.send(there, rank.rank + 1)
        elif rank.case == "the last stage computes a loss":
            time.sleep(2 * WORK_SECONDS)
        rank.reduce()
        rank.step()


class Samples(Dataset[torch.Tensor]):
    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.rank.is_slow:
            time.sleep(2 * WORK_SECONDS)
        return torch.ones(1)


def loads(rank: Rank) -> None:
    """The disk or data server of one rank is slow; the others hardly wait for theirs."""
    for _ in DataLoader(Samples(rank), batch_size=1):
        if not rank.goes_on:
            break
        time.sleep(WORK_SECONDS)
        rank.reduce()
        rank.step()


class Trainer:
    """A framework: `fit` calls hooks, one of which calls `step`."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.hooks: list[Callable[[], None]] = [self.on_step_end]
        if rank.rank == 0 and rank.case == "a framework's hook logs":
            self.hooks.append(self.on_log)

    def on_step_end(self) -> None:
        self.rank.step()

    def on_log(self) -> None:
        time.sleep(2 * WORK_SECONDS)

    def call_hooks(self) -> None:
        for hook in self.hooks:
            hook()

    def training_step(self) -> None:
        self.rank.forward()
        self.rank.reduce()

    def fit(self) -> None:
        while self.rank.goes_on:
            self.training_step()
            self.call_hooks()


CASES: dict[str, Callable[[Rank], None]] = {
    "equal": plain,
    "all are slow": plain,
    "slow": plain,
    "rank 0 logs": logs,
    "rank 0 logs in a call of all": logs_in_a_call_of_all,
    "rank 0 logs in the call that makes a step": logs_within_the_call_that_makes_a_step,
    "rank 0 evaluates": evaluates,
    "more data": more_data,
    "a pipeline": pipeline,
    "slow in a pipeline": pipeline,
    "the last stage computes a loss": pipeline,
    "slow to load": loads,
    "a framework's hook logs": lambda rank: Trainer(rank).fit(),
    "slow in a framework": lambda rank: Trainer(rank).fit(),
}


def main() -> None:
    activity_monitor.POLL_SECONDS = LOOK_SECONDS
    dist.init_process_group(
        "gloo", init_method=os.environ["GROUP"], rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    told = {}
    for case, loop in CASES.items():
        rank = Rank(case)
        loop(rank)
        rank.pace.close()
        told[case] = rank.told
        dist.barrier()
    print(json.dumps(told))
    leave()


if __name__ == "__main__":
    main()
