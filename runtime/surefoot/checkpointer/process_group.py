"""Finds this process' rank and world, and shares rank 0's decisions.

Used only at the start, when there is no agent: what is decided once is shared through the job's own store. No
collective, and nothing of it is used while training. Called by `library`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from surefoot.errors import ConfigurationError, SurefootError, TierError

STORE_PREFIX = "surefoot"
DECISION_TIMEOUT_SECONDS = 1800.0
"""How long a rank waits for another one's word: that one may be reading a whole checkpoint."""

_turn = 0  # how many decisions this process took part in; the same on all ranks, as they construct alike


@dataclass(frozen=True, slots=True)
class ProcessGroupInfo:
    rank: int
    size: int
    store: Any = None
    """The default process group's store; None in a world of one."""


def current_process_group() -> ProcessGroupInfo:
    """Finds rank and world size from the process group.

    Raises ConfigurationError for a launcher's environment without a process group.
    """
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            from torch.distributed.distributed_c10d import _get_default_store

            return ProcessGroupInfo(dist.get_rank(), dist.get_world_size(), _get_default_store())
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        raise ConfigurationError(
            f"WORLD_SIZE is {size} and there is no process group: call torch.distributed.init_process_group first"
        )
    return ProcessGroupInfo(0, 1)


def decide_on_rank_zero(world: ProcessGroupInfo, decide: Callable[[], str]) -> str:
    """Decides on rank 0 and shares the result with every rank.

    An error of rank 0 is raised on every rank.
    """
    global _turn
    if world.size == 1:
        return decide()
    _turn += 1
    key = f"{STORE_PREFIX}/{_turn}"
    if world.rank != 0:
        decision_text = _wait_for_decision(world, key, 0)
        if decision_text.startswith("!"):
            raise SurefootError(f"rank 0 could not begin: {decision_text[1:]}")
        return str(decision_text[1:])
    try:
        decision = decide()
    except Exception as error:
        world.store.set(key, f"!{error}")
        raise
    world.store.set(key, f"={decision}")
    return decision


def decide_from_all_ranks(world: ProcessGroupInfo, said: str, decide: Callable[[list[str]], str]) -> str:
    """Decides on rank 0 from all ranks' messages; else as `decide_once`."""
    if world.size == 1:
        return decide([said])
    turn = _turn + 1
    if world.rank != 0:
        world.store.set(f"{STORE_PREFIX}/{turn}/{world.rank}", said)
    others = range(1, world.size)
    return decide_on_rank_zero(
        world,
        lambda: decide([said, *(_wait_for_decision(world, f"{STORE_PREFIX}/{turn}/{rank}", rank) for rank in others)]),
    )


def withdraw(world: ProcessGroupInfo, said: str) -> None:
    """Withdraws this rank from the next decision, so nobody waits for it."""
    global _turn
    if world.size > 1:
        _turn += 1
        world.store.set(f"{STORE_PREFIX}/{_turn}/{world.rank}" if world.rank else f"{STORE_PREFIX}/{_turn}", f"!{said}")


def _wait_for_decision(world: ProcessGroupInfo, key: str, rank: int) -> str:
    try:
        world.store.wait([key], timedelta(seconds=DECISION_TIMEOUT_SECONDS))
    except RuntimeError as silent:
        raise TierError(
            f"rank {rank} has said nothing for {DECISION_TIMEOUT_SECONDS:g} s: it hangs, or has ended"
        ) from silent
    return str(world.store.get(key).decode())
