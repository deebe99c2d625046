"""Averages of weights in every usual form, and swapped in for evaluation behind the step as each form does it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from compatibility.case import Case, Context, Training

WIDTH, LAYERS = 768, 8
"""Large enough for its copies to go on behind the step."""
DECAY = 0.9


class Shadow:
    """What torch-ema, timm and diffusers have at heart: shadow tensors, stored and restored weights."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shadow = [p.detach().clone() for p in model.parameters()]
        self.stored: list[torch.Tensor] = []
        self.updates = 0

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        for shadow, parameter in zip(self.shadow, self.model.parameters(), strict=True):
            shadow.mul_(DECAY).add_(parameter, alpha=1 - DECAY)

    def copy_to(self) -> None:
        self.stored = [p.detach().clone() for p in self.model.parameters()]
        for shadow, parameter in zip(self.shadow, self.model.parameters(), strict=True):
            parameter.data.copy_(shadow.data)

    def restore(self) -> None:
        for stored, parameter in zip(self.stored, self.model.parameters(), strict=True):
            parameter.data.copy_(stored.data)
        self.stored = []

    def point_to(self) -> None:
        """Without copies: the data of parameters are exchanged for the shadow's."""
        for shadow, parameter in zip(self.shadow, self.model.parameters(), strict=True):
            parameter.data, shadow.data = shadow.data, parameter.data

    def state_dict(self) -> dict[str, Any]:
        return {"decay": DECAY, "num_updates": self.updates, "shadow_params": self.shadow, "collected_params": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["num_updates"]
        with torch.no_grad():
            for shadow, saved in zip(self.shadow, state["shadow_params"], strict=True):
                shadow.copy_(saved)


def _perceptron() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def _evaluated(model: nn.Module) -> None:
    with torch.no_grad():
        for seed in range(3):
            model(torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(seed)))


def _trained(average: Any, model: nn.Module, update: Callable[[], None], swap: Callable[[], None] | None) -> Training:
    optimizer = torch.optim.SGD(model.parameters(), 1.0, momentum=0.9)

    def advance(step: int) -> float:
        optimizer.zero_grad()
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean() + sum(p.square().mean() for p in model.parameters())
        loss.backward()
        optimizer.step()
        update()
        return float(loss.detach())

    objects = {"model": model, "optimizer": optimizer} | ({"ema": average} if average is not None else {})
    return Training(objects, advance, (lambda _: swap()) if swap is not None else (lambda _: None))


def _averaged_model(swapping: bool = False, **how: Any) -> Callable[[Context], Training]:
    def build(context: Context) -> Training:
        model = _perceptron()
        average = AveragedModel(model, **how)

        def swap() -> None:
            """As Lightning's WeightAveraging does: parameter by parameter, through `.data`."""
            for twice in (0, 1):
                for of_average, parameter in zip(average.module.parameters(), model.parameters(), strict=True):
                    kept = parameter.data.clone()
                    parameter.data.copy_(of_average.data)
                    of_average.data.copy_(kept)
                if not twice:
                    _evaluated(model)

        return _trained(average, model, lambda: average.update_parameters(model), swap if swapping else None)

    return build


def _shadow(swapping: str) -> Callable[[Context], Training]:
    def build(context: Context) -> Training:
        model = _perceptron()
        shadow = Shadow(model)

        def swap() -> None:
            if swapping == "point":
                shadow.point_to()
                _evaluated(model)
                shadow.point_to()
                return
            shadow.copy_to()
            _evaluated(model)
            shadow.restore()

        return _trained(shadow, model, shadow.update, swap)

    return build


def _by_hand(swapping: bool) -> Callable[[Context], Training]:
    """A deep copy, and weights exchanged by load_state_dict."""

    def build(context: Context) -> Training:
        model = _perceptron()
        average = deepcopy(model).requires_grad_(False)

        def update() -> None:
            with torch.no_grad():
                for of_average, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    of_average.lerp_(parameter, 1 - DECAY)

        def swap() -> None:
            kept = deepcopy(model.state_dict())
            model.load_state_dict(average.state_dict())
            _evaluated(model)
            model.load_state_dict(kept)

        return _trained(average, model, update, swap if swapping else None)

    return build


def _clipped(context: Context) -> Training:
    """A Wasserstein critic: its weights are clamped through `.data` behind each optimizer step."""
    model = _perceptron()

    def clamp() -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.03, 0.03)

    return _trained(None, model, clamp, None)


CASES = (
    Case("average", "AveragedModel, exponential", _averaged_model(multi_avg_fn=get_ema_multi_avg_fn(DECAY))),
    Case("average", "AveragedModel, equal (SWA), with buffers", _averaged_model(use_buffers=True)),
    Case(
        "average", "AveragedModel, swapped by .data as Lightning does",
        _averaged_model(swapping=True, avg_fn=get_ema_avg_fn(DECAY)), quick=True,
    ),
    Case("average", "torch-ema and diffusers: copy_to and restore", _shadow("copy")),
    Case("average", "shadow weights, .data exchanged", _shadow("point"), quick=True),
    Case("average", "a deep copy, averaged by hand", _by_hand(False)),
    Case("average", "a deep copy, swapped by load_state_dict", _by_hand(True)),
    Case("average", "weights clamped by .data (WGAN)", _clipped),
)  # fmt: skip
