"""A small float64 training that writes down what it saw: one rank of a world that the test makes. Run as a program.

tiny_training.py KIND STEPS FOLDER OUT     KIND is fsdp (uneven shards), ddp or plain; RANK, WORLD_SIZE and GROUP (a file
store) in the environment
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import surefoot
from support.gloo_world import leave


class Net(nn.Module):
    """Rows that no world size divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 131), nn.Linear(131, 67), nn.Linear(67, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


def built(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model: Any = Net().double()
    if kind == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator]  # a DTensor's method
    return full.detach().clone()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        plain = name.removeprefix("module.")
        found[plain] = whole(parameter)
        for key, value in optimizer.state[parameter].items():
            found[f"{plain}/{key}"] = whole(value)
    return found


def main() -> None:
    kind, steps, folder, out = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    if kind != "plain":
        dist.init_process_group(
            "gloo",
            init_method=os.environ["GROUP"],
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=60),
        )
    model, optimizer = built(kind)
    generator = torch.Generator().manual_seed(1)
    samples = torch.randn(50, 7, dtype=torch.float64, generator=generator)
    loader = surefoot.ElasticLoader(samples, 8, seed=5)
    checkpointer = surefoot.Checkpointer(
        model=model, optimizer=optimizer, loader=loader, folder=folder, interval_steps=2, keep=5
    )
    start = checkpointer.restore()
    seen: dict[str, Any] = {"start": start, "restored": snapshot(model, optimizer) if start else {}, "losses": {}}
    seen["samples"] = {}
    for step, batch in zip(range(start + 1, steps + 1), loader, strict=False):
        loss = (model(batch.data[:, :6])[:, 0] - batch.data[:, 6]).square().mean() * batch.weight
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if kind != "plain":
            mean /= dist.get_world_size()
            dist.all_reduce(mean)
        seen["losses"][step], seen["samples"][step] = float(mean), batch.indices
        checkpointer.step(mean)
    seen["final"] = snapshot(model, optimizer)
    checkpointer.close()
    rank = dist.get_rank() if kind != "plain" else 0
    torch.save(seen, out / f"{rank}.pt")
    if kind != "plain":
        leave()


if __name__ == "__main__":
    main()
