"""Whether what was announced cost nothing: no step is lost where nothing but announcements led to a new world.

Judges every change of the world, whatever its operator calls it: a loss that is named a failure would pass else.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from surefoot.protocol.identities import Checkpoint

if TYPE_CHECKING:
    from simulator.oracle import Oracle


class Lossless:
    """Of one simulated job; `oracle` is told what it finds."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self.judged: Counter[str] = Counter()
        self._committed_at = 0.0
        self._unkind_until = -1.0
        """Until then something struck that nobody had announced, or had not ended."""
        self._damaged = False
        """Whether a record or a chunk ever was: then a world may have to go back that never made a step."""
        self._announced: set[str] = set()
        self._reached: dict[int, int] = {}

    def struck(self, seconds: float, damage: bool = False) -> None:
        """Something that nobody announced, which has another turn, or ends, after so many seconds."""
        self._unkind_until = max(self._unkind_until, self._oracle.simulation.engine.now + seconds)
        self._damaged |= damage

    def announced(self, kind: str) -> None:
        self._announced.add(kind)

    def stepped(self, epoch: int, step: int) -> None:
        self._reached[epoch] = max(step, self._reached.get(epoch, 0))

    def committed(self, parent: Checkpoint | None) -> None:
        """A world follows the newest one: it begins with the last step that any rank of that one made."""
        oracle, began = self._oracle, self._committed_at
        self._committed_at = oracle.simulation.engine.now
        told, self._announced = sorted(self._announced), set()
        if not oracle.base or self._unkind_until >= began:
            return
        before = oracle.parents[oracle.base]
        made = self._reached.get(oracle.base)
        if made is None and self._damaged:
            return
        reached = made if made is not None else before.step if before else 0
        step = parent.step if parent else 0
        if oracle.simulation.settings.refused and reached == oracle.simulation.settings.steps:
            return  # ranks had no room for their last save, and train again what it was of
        for kind in told or ("a place for one more",):
            self.judged[f"{kind}, {self._shape()}"] += 1
        if step < reached:
            oracle.fail(
                f"{reached - step} steps of epoch {oracle.base} are lost, and all that happened was announced: {told}"
            )

    def _shape(self) -> str:
        settings, size = self._oracle.simulation.settings, self._oracle.sizes[self._oracle.base]
        if settings.least_workers == settings.workers:
            return "fixed size"
        return "at its minimum" if size == settings.least_workers * settings.local_ranks else "elastic"
