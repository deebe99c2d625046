"""What every case of a loader has: numbers that a rank draws, and a program that fits one weight to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from compatibility.case import Case, Context, Training

GLOBAL_BATCH, SIZE = 6, 100
Draw = Callable[[], Iterator[list[int]]]
"""Batches of sample numbers, for one rank, from where the loader stands."""


def training_of(loader: Any, batches: Draw, world: int, per_step: int = 1, **options: Any) -> Training:
    """Fits one number to what was drawn; every rank has the same weight, as DDP would keep it."""
    weight = torch.nn.Linear(1, 1, bias=False).double()
    optimizer = torch.optim.SGD(weight.parameters(), 1e-3, momentum=0.9)
    drawing: list[Iterator[list[int]]] = []
    drawn: list[int] = []

    def advance(step: int) -> float:
        if not drawing:
            drawing.append(batches())  # behind the restore, as scripts do
        drawn.clear()
        for _ in range(per_step):
            drawn.extend(next(drawing[0]))
        summed = torch.tensor([sum(drawn), len(drawn)], dtype=torch.float64)
        if world > 1:
            dist.all_reduce(summed)
        loss = (weight(summed[:1] / summed[1]) - 1.0).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    objects = {"model": weight, "optimizer": optimizer, "loader": loader}
    return Training(objects, advance, picture=dict, samples=lambda: list(drawn), options=options)


def per_rank(context: Context) -> int:
    return GLOBAL_BATCH // context.world


def cases_of(name: str, build: Callable[[Context], Training], quick: bool = False) -> tuple[Case, ...]:
    """As many ranks, and two changes of the world each way; in the quick part one change."""
    found = (
        Case("loader", name, build, ranks=2, resumed=2),
        Case("loader", name, build, ranks=3, resumed=2, again=3),
        Case("loader", name, build, ranks=4, resumed=1, again=4),
    )
    return (*found, Case("loader", name, build, ranks=2, resumed=3, quick=True)) if quick else found
