"""Exchanges restore reads between ranks: metadata by the store, bytes over gloo.

A group of its own for each exchange, between its members alone and never registered with torch: an operation that times
out or loses a member breaks its group for good, and must not break one that the training goes on with. For the same
reason bytes never go over NCCL, which ends the process after a timeout; they are verified in host memory anyway. Used
by `restoring`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from surefoot.ipc.trainer_messages import Attached
from surefoot.restore.exchange import ExchangeFailed

WITHDRAWN = "withdrawn"
_TORCH_SAYS = (RuntimeError, ValueError)
_turns = 0  # how many restores of this process could share; the same on all ranks, as they restore alike


@dataclass(frozen=True, slots=True)
class ShareReads:
    """When ranks that restore the same bytes share the reading."""

    least_bytes: int = 64 * 1024 * 1024
    """What a group of replicas must have in common: a smaller exchange takes longer than it saves."""
    wait_seconds: float = 20.0
    """How long a member waits for the others, each time, before it reads by itself."""


class RestorePeers:
    """All ranks that restore together, in one restore."""

    def __init__(self, rank: int, store: Any, name: str, options: ShareReads) -> None:
        self.rank, self.options = rank, options
        self._store, self._name = store, name

    def among(self, members: tuple[int, ...]) -> GlooPeers:
        """The line between some of them, this rank included."""
        name = f"{self._name}/{'-'.join(map(str, members))}"
        return GlooPeers(self._store, name, members, self.rank, self.options.wait_seconds)


def restore_peers(about: Attached, options: ShareReads) -> RestorePeers | None:
    """The peers to exchange reads with; None: each rank reads alone.

    That is so without gloo, and without a process group of exactly this epoch's ranks.
    """
    global _turns
    if about.world == 1 or "torch.distributed" not in sys.modules:
        return None
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and hasattr(dist, "ProcessGroupGloo")):
        return None
    if (dist.get_rank(), dist.get_world_size()) != (about.rank, about.world):
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    _turns += 1
    return RestorePeers(about.rank, _get_default_store(), f"surefoot/share/{about.epoch}/{_turns}", options)


class GlooPeers:
    """`restore.exchange.Peers` between ranks of a process group."""

    def __init__(self, store: Any, name: str, members: tuple[int, ...], rank: int, wait_seconds: float) -> None:
        self.members, self.me = members, members.index(rank)
        self.wait_seconds = wait_seconds
        self._store, self._name = store, name
        self._group: Any = None
        self._calls = 0

    def cards(self, mine: str) -> list[str]:
        """Publishes this member's card and waits for the others'.

        A member that times out withdraws its card, so that one that comes later does not wait for it.
        """
        keys = [f"{self._name}/{rank}" for rank in self.members]
        try:
            self._store.set(keys[self.me], mine)
            try:
                self._store.wait(keys, timedelta(seconds=self.wait_seconds))
            except _TORCH_SAYS as late:
                self._store.set(keys[self.me], WITHDRAWN)
                raise ExchangeFailed(
                    f"not all of ranks {self.members} came within {self.wait_seconds} s: {_short(late)}"
                ) from late
            return [self._store.get(key).decode(errors="replace") for key in keys]
        except _TORCH_SAYS as broken:
            raise ExchangeFailed(f"the store of the process group does not answer: {_short(broken)}") from broken

    def swap(self, sent: memoryview, into: Sequence[memoryview]) -> Callable[[], None]:
        works: list[Any] = []
        count = len(self.members)
        self._calls += 1  # a tag of its own: what one call sends is never taken for another's
        try:
            group = self._join()
            for step in range(1, count):
                source = (self.me - step) % count
                if into[source].nbytes:
                    works.append(group.recv([torch.frombuffer(into[source], dtype=torch.uint8)], source, self._calls))
            for step in range(1, count if sent.nbytes else 1):
                target = (self.me + step) % count
                works.append(group.send([torch.frombuffer(sent, dtype=torch.uint8)], target, self._calls))
        except _TORCH_SAYS as broken:
            raise self._lost(broken) from broken

        def wait() -> None:
            try:
                for work in works:
                    work.wait(timedelta(seconds=self.wait_seconds))
            except _TORCH_SAYS as broken:
                raise self._lost(broken) from broken

        return wait

    def close(self) -> None:
        self._group = None

    def _join(self) -> Any:
        """The group, made when it is first needed: all members do so at once."""
        if self._group is None:
            from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

            store = PrefixStore(f"{self._name}/gloo", self._store)
            limit = timedelta(seconds=self.wait_seconds)
            self._group = ProcessGroupGloo(store, self.me, len(self.members), limit)
        return self._group

    def _lost(self, problem: Exception) -> ExchangeFailed:
        return ExchangeFailed(f"a member of ranks {self.members} is lost or slow: {_short(problem)}")


def _short(problem: Exception) -> str:
    """The first line of torch's message, without its stack."""
    return str(problem).partition("\n")[0][:300]
