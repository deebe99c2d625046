"""The small model that `layout_kinds` spreads over ranks, a step of it, and its whole state as the framework gathers it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Whole = dict[str, torch.Tensor]


class Net(nn.Module):
    """Sizes that four ranks divide and others that they do not, tied weights, experts, a 0-d parameter, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 16), nn.Linear(16, 10), nn.Linear(10, 16)
        self.again = nn.Linear(6, 16)
        self.again.weight = self.first.weight
        self.experts = nn.Parameter(torch.randn(6, 3, 5))
        self.scale = nn.Parameter(torch.randn(1))
        self.register_buffer("seen", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.zeros(())
        if self.first is not None:
            out = out + torch.tanh(self.second(torch.tanh(self.first(x)))).sum() + self.again(x).sum()
        if self.third is not None:
            experts = self.experts.full_tensor() if hasattr(self.experts, "full_tensor") else self.experts
            scale = self.scale.full_tensor() if hasattr(self.scale, "full_tensor") else self.scale
            out = (
                out
                + torch.tanh(self.third(x.repeat(1, 2)[:, :10])).sum()
                + experts.square().sum()
                + scale.sum() * x.mean()
            )
        return out


@dataclass
class Built:
    """What a Checkpointer would be given, and how to step it and gather it whole."""

    model: Any
    optimizer: Any
    gather: Callable[[], Whole]
    replicas: Any = None
    width: int = 6

    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


def stepped(built: Built, seed: int) -> None:
    """One real forward, backward and step."""
    torch.manual_seed(seed)
    built.model(torch.randn(4, built.width)).sum().backward()
    built.optimizer.step()
    built.optimizer.zero_grad()


def fresh(seed: int) -> Net:
    torch.manual_seed(seed)
    model = Net()
    with torch.no_grad():
        model.seen.fill_(seed)
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def mesh(*sizes: int, names: tuple[str, ...] = ("a", "b")) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=names[: len(sizes)])


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def gathered(model: nn.Module, optimizer: torch.optim.Optimizer) -> Whole:
    """Names as the plain model has them; state behind its parameter's name."""
    found = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        found[name] = full(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}/{key}"] = full(value)
    return found


def clean(found: Whole, *prefixes: str) -> Whole:
    for prefix in prefixes:
        found = {name.replace(prefix, ""): value for name, value in found.items()}
    return found
