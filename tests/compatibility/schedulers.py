"""torch's schedulers, alone and put together, and those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler as of
from torch.optim.swa_utils import SWALR

from compatibility.case import Case, Context, Training
from compatibility.small import advancing, net

Making = Callable[[Any], Any]

MAKINGS: dict[str, Making] = {
    "LambdaLR": lambda o: of.LambdaLR(o, lambda epoch: 1 / (epoch + 1)),
    "MultiplicativeLR": lambda o: of.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: of.StepLR(o, 2),
    "MultiStepLR": lambda o: of.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: of.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: of.LinearLR(o, 0.1, total_iters=6),
    "ExponentialLR": lambda o: of.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: of.PolynomialLR(o, 6, 2.0),
    "CosineAnnealingLR": lambda o: of.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: of.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: of.CyclicLR(o, 1e-3, 1e-1, step_size_up=3, cycle_momentum=False),
    "OneCycleLR": lambda o: of.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "ReduceLROnPlateau": lambda o: of.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "SWALR": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=5),
    "SequentialLR": lambda o: of.SequentialLR(
        o, [of.LinearLR(o, 0.1, total_iters=2), of.CosineAnnealingLR(o, 10)], [2]
    ),
    "ChainedScheduler": lambda o: of.ChainedScheduler([of.ConstantLR(o, 0.5, 3), of.ExponentialLR(o, 0.9)]),
}
QUICK = ("OneCycleLR", "SequentialLR", "ReduceLROnPlateau", "LambdaLR")


def _hugging_face(o: Any) -> Any:
    from transformers import get_cosine_schedule_with_warmup

    return get_cosine_schedule_with_warmup(o, 2, 20)


def _case(name: str, making: Making) -> Case:
    def build(context: Context) -> Training:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        scheduler = making(optimizer)

        def schedule(loss: float) -> None:
            scheduler.step(loss) if isinstance(scheduler, of.ReduceLROnPlateau) else scheduler.step()

        objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        return Training(objects, advancing(model, optimizer, schedule))

    return Case("scheduler", name, build, quick=name in QUICK)


CASES = (
    *(_case(name, making) for name, making in MAKINGS.items()),
    _case("transformers, cosine with warm-up", _hugging_face),
)
