"""A leader's janitor: what lies on a holder without an entry, at two looks in a row, goes.

The removal itself looks once more on the holder: between look and call a late write may have got its entry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simulator.calls import CALL_LIMIT_SECONDS
from simulator.engine import Refusal, Unavailable
from simulator.tiers import Holder
from surefoot.protocol.identities import MemoryServerInstance, RankSave

if TYPE_CHECKING:
    from simulator.operators import Operator

SWEEP_SECONDS = 3.0


class Janitor:
    """Of one operator."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._leftovers: dict[MemoryServerInstance, set[RankSave]] = {}

    def begin(self) -> None:
        self._operator.engine.after(SWEEP_SECONDS, self._operator.process, self._sweep)

    def _sweep(self) -> None:
        self.begin()
        epoch = self._operator.committed_epoch()
        if epoch is None:
            return
        for identity, watch in self._operator.watches.items():
            if watch.state == "Ready" and not watch.busy:
                self._sweep_one(identity, self._operator.simulation.holders[identity], epoch)

    def _sweep_one(self, identity: MemoryServerInstance, holder: Holder, epoch: int) -> None:
        process, network = self._operator.process, self._operator.network

        def found(answer: Any) -> None:
            if isinstance(answer, Unavailable | Refusal):
                return
            again = answer & self._leftovers.get(identity, set())
            self._leftovers[identity] = answer
            if again:
                network.call(process, holder.process, lambda: holder.sweep(again, epoch), lambda _: None)

        network.call(process, holder.process, holder.unindexed, found, CALL_LIMIT_SECONDS)
