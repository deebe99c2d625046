"""`place_of_process` finds rank and world of this process, without loading torch."""

from __future__ import annotations

import os
import sys

from surefoot.errors import ConfigurationError


def place_of_process() -> tuple[int, int]:
    """Returns rank and world of the process group, else the launcher's.

    The launcher's are `RANK` and `WORLD_SIZE`; without them, rank 0 of 1.
    """
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def checked_place(rank: int | None, world: int | None) -> tuple[int, int]:
    """Returns rank and world as given, else this process'.

    Raises:
        ConfigurationError: the rank is not of that world.
    """
    found_rank, found_world = place_of_process()
    rank, world = (found_rank if rank is None else rank), (found_world if world is None else world)
    if not 0 <= rank < world:
        raise ConfigurationError(f"rank {rank} of {world}: a rank is from 0 to world − 1")
    return rank, world
