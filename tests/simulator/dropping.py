"""A leader's drops on its way to holders: each is sent only while it is due, and arrives whenever it arrives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simulator.calls import CALL_LIMIT_SECONDS
from simulator.engine import Refusal, Unavailable
from surefoot.protocol.identities import MemoryServerInstance, RankSave

if TYPE_CHECKING:
    from simulator.operators import Operator


class Dropping:
    """Of one operator."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator

    def _due(self, epoch: int, expires: float) -> bool:
        """Whether a drop may still be sent: its epoch is the committed one, and its time is not over."""
        return self._operator.committed_epoch() == epoch and self._operator.now < expires

    def drop(self, target: MemoryServerInstance, epoch: int, saves: list[RankSave], expires: float) -> None:
        """One save after another; each is sent only while it is due, and arrives whenever it arrives."""
        watch = self._operator.watches.get(target)
        if not saves or not self._due(epoch, expires) or watch is None or watch.state != "Ready" or watch.dropping:
            return
        watch.dropping = True
        holder, save = self._operator.simulation.holders[target], saves[0]

        def done(answer: Any) -> None:
            watch.dropping = False
            if not isinstance(answer, Unavailable | Refusal):
                watch.entries = tuple(m for m in watch.entries if m.save != save)
                self.drop(target, epoch, saves[1:], expires)

        self._operator.network.call(
            self._operator.process, holder.process, lambda: holder.drop(save, epoch), done, CALL_LIMIT_SECONDS
        )
