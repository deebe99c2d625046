"""What scripts tell the harness: the loss of each step, over all ranks; slowly enough to be killed between two."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

torch.manual_seed(int(os.environ["SEED"]))
FOLDER = os.environ["CHECKPOINTS"]
STEPS = int(os.environ["STEPS"])


def tell(step: int, loss: Any) -> None:
    mean = torch.as_tensor(loss).detach().double().clone()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    print("step", step, float(mean).hex(), flush=True)
    time.sleep(float(os.environ["PAUSE"]))
