"""What one modelled operator's own calls to holders show: it finds, provisions and pings them, seals and reads them.

Each call takes time, is refused, or is never answered; one at a time for each holder.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from simulator.calls import CALL_LIMIT_SECONDS
from simulator.engine import Refusal, Unavailable
from simulator.tiers import Holder
from simulator.views import Watch
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import MemoryServerInstance
from surefoot_operator.coordinator import listings

if TYPE_CHECKING:
    from simulator.operators import Operator


class HolderWatches:
    """Of one operator."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self.by_holder: dict[MemoryServerInstance, Watch] = {}

    def look(self) -> None:
        """Finds instances, notices the dead ones, provisions and pings the living, one call at a time each."""
        fabric = self._operator.simulation.fabric
        current = {holder.id: holder for node in fabric.nodes.values() for holder in node.holders}
        world = self._operator.told_world
        for holder in current.values():
            if holder.process.alive and holder.id not in self.by_holder:
                self.by_holder[holder.id] = Watch(holder.endpoint, "Unreachable", self._operator.now)
        for identity, watch in list(self.by_holder.items()):
            actual = self._operator.simulation.holders[identity]
            if self._is_known_dead(actual) or current.get(identity) is None:
                self._turn(watch, "Gone")
            elif not watch.busy and self._operator.now - watch.polled >= 0.5 and world is not None:
                watch.polled = self._operator.now
                self._provision(watch, actual, world.generation)

    def _is_known_dead(self, holder: Holder) -> bool:
        silent = holder.process.silent and self._operator.simulation.fabric.nodes[holder.id.node].ready
        return not holder.process.alive and not silent

    def _turn(self, watch: Watch, state: str) -> None:
        if watch.state != state:
            watch.state, watch.since = state, self._operator.now
            if state == "Gone":
                watch.read_epoch, watch.entries = None, ()
            self._operator.engine.say("{}: {} is {}", self._operator.process.name, watch.endpoint.instance, state)
            self._operator.changed()

    def _provision(self, watch: Watch, holder: Holder, epoch: int) -> None:
        watch.busy = True

        def done(answer: Any) -> None:
            watch.busy = False
            if isinstance(answer, Unavailable | Refusal):
                self._turn(watch, "Unreachable")
                return
            watch.fence, entries, layouts = answer
            self._operator.known.learn(layouts)
            now = self._operator.told_world
            if entries is not None and now is not None and (now.generation, now.state) == (epoch, "Committed"):
                changed = (watch.read_epoch, watch.entries) != (epoch, entries)
                watch.read_epoch, watch.entries = epoch, entries
                if changed:
                    self._operator.poke()
            self._turn(watch, "Ready")

        claimed = self._operator.told_world is not None and self._operator.told_world.state == "Claimed"

        # while Claimed only SealHolder raises a fence and reads: the drains of the old epoch still have their grace
        def visit() -> tuple[int, tuple[RankManifest, ...] | None, frozenset[str]]:
            fence = holder.provision(epoch - 1 if claimed else epoch)
            return fence, None if claimed else holder.read(), holder.good_layouts()

        self._operator.network.call(self._operator.process, holder.process, visit, done, CALL_LIMIT_SECONDS)

    def seal(self, identity: MemoryServerInstance, epoch: int) -> None:
        watch, holder = self.by_holder.get(identity), self._operator.simulation.holders[identity]
        if watch is None or watch.sealing:
            return
        if watch.busy:
            self._operator.engine.after(0.02, self._operator.process, self.seal, identity, epoch)
            return
        watch.sealing = watch.busy = True

        def failed() -> None:
            watch.busy = watch.sealing = False
            self._turn(watch, "Unreachable")
            self._operator.poke()

        def sealed(answer: Any) -> None:
            if isinstance(answer, Unavailable):
                failed()
            elif isinstance(answer, Refusal):
                watch.busy = watch.sealing = False
                self._operator.poke()
            else:
                watch.fence = max(watch.fence or 0, epoch)
                look = lambda: (self._operator.engine.now, holder.read(), holder.good_layouts())  # noqa: E731
                self._operator.network.call(self._operator.process, holder.process, look, read, CALL_LIMIT_SECONDS)

        def read(answer: Any) -> None:
            if isinstance(answer, Unavailable | Refusal):
                failed()
                return
            watch.busy = watch.sealing = False
            watch.read_epoch, watch.entries = epoch, answer[1]
            self._operator.read_at[identity] = answer[0]
            self._operator.known.learn(answer[2])
            if self._operator.simulation.rules.list_after_read:
                self._operator.sessions = replace(
                    self._operator.sessions, requests=listings.discard_listing(self._operator.sessions.requests)
                )
            self._operator.simulation.oracle.read(holder, epoch)
            self._operator.poke()

        self._operator.network.call(
            self._operator.process, holder.process, lambda: holder.seal(epoch), sealed, CALL_LIMIT_SECONDS
        )
