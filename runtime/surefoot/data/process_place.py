"""Rank and world of this process, as the process group or the launcher says. Reads the environment; loads no torch."""

from __future__ import annotations

import os
import sys


def place_of_process() -> tuple[int, int]:
    """Rank and world of the process group if there is one, else of the launcher's environment."""
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
