"""`place_of_process` finds rank and world of this process, without loading torch."""

from __future__ import annotations

import os
import sys


def place_of_process() -> tuple[int, int]:
    """Returns rank and world of the process group, else the launcher's.

    The launcher's are `RANK` and `WORLD_SIZE`; without them, rank 0 of 1.
    """
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
