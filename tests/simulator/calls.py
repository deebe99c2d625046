"""Creates and deletes that one modelled operator has under way, as `reconcile.worker_calls` keeps them.

The fabric answers as it likes: at once, late, with a refusal, or not at all although it did what was asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from simulator.engine import Process
from surefoot_operator.job_snapshot import PendingCreate
from surefoot_operator.policy.core.actions import CreateWorker, DeleteWorker

if TYPE_CHECKING:
    from simulator.fabric import Fabric

REFUSED_SECONDS = 2.0
NO_ANSWER = "no answer"
CALL_LIMIT_SECONDS = 1.0
"""After which a call of an operator to a holder counts as failed."""


class Calls:
    """Of one operator, which `poke` has plan again."""

    def __init__(self, fabric: Fabric, process: Process, poke: Callable[[], None]) -> None:
        self._fabric, self._process, self._poke = fabric, process, poke
        self._creates: dict[tuple[int, int], PendingCreate] = {}
        self._deletes: dict[tuple[str, bool], float] = {}
        self._undecided: set[str] = set()
        """Uids of pods whose deletion is under way, or was never answered."""

    def seen(self) -> tuple[PendingCreate, ...]:
        return tuple(call for _, call in sorted(self._creates.items()))

    def deletions(self) -> frozenset[str]:
        return frozenset(self._undecided)

    def create(self, order: CreateWorker) -> None:
        """Asks for it, unless that is under way or was refused lately."""
        key, now = (order.index, order.attempt), self._fabric.engine.now
        known = self._creates.get(key)
        if known is not None and (known.in_progress or now < known.until_seconds):
            return
        self._creates[key] = PendingCreate(*key, in_progress=True)

        def done(refusal: str) -> None:
            until = self._fabric.engine.now + REFUSED_SECONDS
            if refusal:
                self._creates[key] = PendingCreate(*key, False, refusal, until_seconds=until)
            else:
                del self._creates[key]
            self._poke()

        self._fabric.asked(self._process, lambda: self._fabric.create(order), done)

    def delete(self, order: DeleteWorker) -> None:
        """As `create`."""
        key, now = (order.uid, order.force), self._fabric.engine.now
        if now < self._deletes.get(key, 0.0):
            return
        self._deletes[key] = float("inf")
        before = order.uid in self._undecided
        self._undecided.add(order.uid)

        def done(refusal: str) -> None:
            self._deletes[key] = self._fabric.engine.now + REFUSED_SECONDS if refusal else 0.0
            if not refusal or not (before or refusal == NO_ANSWER):
                self._undecided.discard(order.uid)
            self._poke()

        self._fabric.asked(self._process, lambda: self._fabric.delete(order), done)
