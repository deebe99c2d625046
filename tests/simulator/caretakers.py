"""An agent that keeps house while nobody leads, or who leads reaches no holder: the rules are `drain.upkeep`'s, the holders are modelled.

It reads all holders that it knows, takes for the watermark what has R copies on sealed ones, and drops by the leader's
own retention, in the epoch's name: a newer claim refuses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simulator.engine import Refusal, Unavailable
from simulator.layouts import KnownLayouts
from simulator.tiers import Holder
from surefoot.agent.coordinator_requests import knows_all_servers, loss_history_of
from surefoot.flush.garbage_collection import select_rollback_points
from surefoot.protocol.checkpoints.completeness import (
    LineageEntry,
    TierReading,
    complete_checkpoints,
    find_watermark,
    lineage_entry_of,
)
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.checkpoints.retention import RetentionInputs, memory_saves_to_delete
from surefoot.protocol.identities import MemoryServerInstance, RankSave

if TYPE_CHECKING:
    from simulator.agents import Agent

AWAY_SECONDS = 4.0
"""Shorter than in life, where no leader comes back so soon."""


class Keeper:
    """Of one agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._alone_since: float | None = None
        self._busy = False
        self._known = KnownLayouts()

    def look(self) -> None:
        """Begins a round if this agent must; called now and then."""
        agent, life = self._agent, self._agent.life
        now = agent.engine.now
        assign = life.assign
        led = agent.line is not None and not (assign is not None and assign.servers_unreachable)
        self._alone_since = None if led else self._alone_since or now
        if (
            assign is None
            or assign.group_rank != 0
            or not knows_all_servers(assign)
            or self._alone_since is None
            or self._busy
        ):
            return
        runs = (
            life.has_running_trainers
            and not life.killing
            and life.started_generation == life.claimed_generation == assign.generation
        )
        if runs and now - self._alone_since > AWAY_SECONDS:
            self._busy = True
            agent.simulation.kept_alone += 1
            known = [h for e in agent.endpoints if (h := agent.holder(e.instance)) is not None]
            self._read(assign.generation, known, {})

    def _read(
        self, epoch: int, rest: list[Holder], found: dict[MemoryServerInstance, tuple[RankManifest, ...]]
    ) -> None:
        if not rest:
            self._keep(epoch, found)
            return
        holder = rest[0]

        def answered(answer: Any) -> None:
            if not isinstance(answer, Unavailable | Refusal) and answer[0] >= epoch:
                if answer[0] > epoch:
                    self._busy = False
                    return
                found[holder.id] = answer[1]
                self._known.learn(answer[2])
            self._read(epoch, rest[1:], found)

        network = self._agent.network
        network.call(
            self._agent.process, holder.process, lambda: (holder.fence, holder.read(), holder.good_layouts()), answered
        )

    def _keep(self, epoch: int, found: dict[MemoryServerInstance, tuple[RankManifest, ...]]) -> None:
        assign, simulation = self._agent.life.assign, self._agent.simulation
        if assign is None or assign.generation != epoch:
            self._busy = False
            return
        lineage = tuple(LineageEntry(*entry) for entry in assign.lineage)
        domains = {name: name.node for name in found}
        replicas = simulation.settings.replicas
        water = find_watermark(
            TierReading(found, None), lineage, epoch, frozenset(), self._known.covers({}), domains, replicas
        )
        if water is None:
            self._busy = False
            return
        simulation.oracle.watermarks.vouched(water, epoch, replicas)
        entry = lineage_entry_of(lineage, epoch)
        whole = complete_checkpoints(TierReading(found, None), lineage, epoch, frozenset(), self._known.covers({}))
        sound = loss_history_of(self._agent.life.progress, simulation.settings.good_after)
        good = select_rollback_points(whole, [m for entries in found.values() for m in entries], sound)
        standing = RetentionInputs(
            lineage,
            epoch,
            False,
            entry.parent if entry is not None else None,
            water,
            None,
            None,
            frozenset(),
            known_good=good,
        )
        drops = [
            (simulation.holders[name], save)
            for name, entries in sorted(found.items())
            for save in memory_saves_to_delete(entries, standing, simulation.settings.keep)
        ]
        self._drop(epoch, drops)

    def _drop(self, epoch: int, rest: list[tuple[Holder, RankSave]]) -> None:
        if not rest:
            self._busy = False
            return
        holder, save = rest[0]
        network = self._agent.network
        network.call(
            self._agent.process, holder.process, lambda: holder.drop(save, epoch), lambda _: self._drop(epoch, rest[1:])
        )
