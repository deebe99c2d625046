"""This process among the ranks of its job: rank, world, and one word from the first to all others.

Used only at the start, when there is no agent: what is decided once is shared through the job's own store. No
collective, and nothing of it is used while training. Called by `library`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from surefoot.errors import ConfigurationError, TierError

STORE_PREFIX = "surefoot"
_turn = 0  # how many decisions this process took part in; the same on all ranks, as they construct alike


@dataclass(frozen=True, slots=True)
class World:
    rank: int
    size: int
    store: Any = None
    """The default process group's store; None in a world of one."""


def current_world() -> World:
    """From the process group; a launcher's environment without a process group is refused."""
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            from torch.distributed.distributed_c10d import _get_default_store

            return World(dist.get_rank(), dist.get_world_size(), _get_default_store())
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        raise ConfigurationError(
            f"WORLD_SIZE is {size} and there is no process group: call torch.distributed.init_process_group first"
        )
    return World(0, 1)


def decided_once(world: World, decide: Callable[[], str]) -> str:
    """What rank 0 decides, on every rank; an error of rank 0 is raised on every rank."""
    global _turn
    if world.size == 1:
        return decide()
    _turn += 1
    key = f"{STORE_PREFIX}/{_turn}"
    if world.rank != 0:
        found = world.store.get(key).decode()
        if found.startswith("!"):
            raise TierError(f"rank 0 could not begin: {found[1:]}")
        return str(found[1:])
    try:
        decision = decide()
    except Exception as error:
        world.store.set(key, f"!{error}")
        raise
    world.store.set(key, f"={decision}")
    return decision
