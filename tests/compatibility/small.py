"""The small programs that cases are made of: a perceptron, its data by step, one closure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Making = Callable[[nn.Module], torch.optim.Optimizer]


def net(width: int = 24, dtype: torch.dtype = torch.float64) -> nn.Module:
    layers = (nn.Linear(16, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, 3))
    return nn.Sequential(*layers).to(dtype)


def data(step: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a step, whoever asks in whichever life."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(8, 16, generator=generator, dtype=dtype)
    return x, torch.randn(8, 3, generator=generator, dtype=dtype)


def advancing(model: nn.Module, optimizer: Any, *after: Callable[[float], None]) -> Callable[[int], float]:
    """One step of regression, and what the script does behind it, given the loss."""

    def advance(step: int) -> float:
        x, y = data(step, next(model.parameters()).dtype)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            loss = optimizer.step(closure)
        else:
            loss = closure()
            optimizer.step()
        for one in after:
            one(float(loss.detach()))
        return float(loss.detach())

    return advance
