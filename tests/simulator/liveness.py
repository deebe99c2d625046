"""Whether a job trains whenever it could: a world that stands for no reason is a fault like a lost sample.

Judges by the modelled machines and links alone, never by what an operator believes of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulator.engine import Process
from simulator.tiers import Holder
from surefoot.flush.state_machine import Flushing, FlushState, StagedSlot
from surefoot.protocol.identities import Checkpoint, RankSave

if TYPE_CHECKING:
    from simulator.agents import Agent
    from simulator.oracle import Oracle

LIVELY_SECONDS = 60.0
"""Longer than a hang's time limit, a holder's return and a worker's start together."""

ASKED_SECONDS = 8.0
"""Agents that were heard for so long, and reached a holder, could have been asked what they see, and have answered."""

SAVING_SECONDS = 8.0
"""A save whose agent reaches every holder is on one by then: longer than a silent target's tries."""

RECOVERING_SECONDS = 40.0
"""The same of a claim on machines that are well, which have a complete checkpoint in memory."""


class Liveness:
    """Of one simulated job; `oracle` is told what it finds."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._able_since: float | None = None
        self._beside: list[Process] = []
        self._beside_since = 0.0

    def _struck(self, name: str) -> bool:
        """Whether something is wrong with that machine, or was a moment ago."""
        return name != "persistent" and self._oracle.disturbed[name] > self._oracle.simulation.engine.now - 1.0

    def watch_liveness(self) -> None:
        """Looks once a second: a world that is possible with what is left trains within LIVELY_SECONDS."""
        engine = self._oracle.simulation.engine
        self._oracle.eyes.tiers()
        if not self._able():
            self._able_since = None
        elif self._able_since is None:
            self._able_since = engine.now
        elif engine.now > self._due(max(self._able_since, self._oracle.training.stepped_at)):
            status = self._oracle.simulation.store.status
            since = engine.now - max(self._able_since, self._oracle.training.stepped_at)
            self._oracle.fail(
                f"no step for {since:.0f} s though {self._oracle.simulation.settings.least_workers} workers could train:"
                f" epoch {status.membership and status.membership.generation} {status.membership and status.membership.state}; {status.message}"
            )
        self._watch_saves()
        engine.after(1.0, engine.environment, self.watch_liveness)

    def _watch_saves(self) -> None:
        """No save waits while its agent and all named holders are well, whatever the operator sees of them."""
        simulation, engine = self._oracle.simulation, self._oracle.simulation.engine
        status, since = simulation.store.status, engine.now - SAVING_SECONDS
        named = [simulation.holders.get(e.instance) for e in status.assigned_servers]
        well = [h for h in named if h is not None and h.process.running and h.provisioned and not h.full]
        world, operator = status.membership, simulation.operators[-1].process
        parts = [*(h.process for h in well), operator]
        stands = bool(well) and len(well) == len(named) and world is not None and world.state == "Committed"
        if not stands or not operator.running or parts != self._beside:
            self._beside, self._beside_since = parts, engine.now
        if self._beside_since > since or self._oracle.committed_at > since or any(p.thawed_at > since for p in parts):
            return
        for agent in (p.agent for n in simulation.fabric.nodes.values() for p in n.pods):
            if agent is None or not agent.process.running or agent.process.thawed_at > since:
                continue
            if any(simulation.network.together_since(agent.node, p.site) > since for p in parts):
                continue
            for slot in (slot for drain in agent.drains.values() for slot in drain.state.slots):
                waits_long = isinstance(slot, StagedSlot | Flushing) and slot.since_seconds < since
                if (
                    waits_long and slot.staged.save.generation == world.generation
                ):  # an older one is of no use to anybody
                    waits = engine.now - slot.since_seconds
                    self._oracle.fail(
                        f"{slot.staged.save} waits on {agent.pod.name} for {waits:.0f} s beside its holders"
                    )

    def not_staged(self, agent: Agent, save: RankSave, drain: FlushState) -> None:
        """What an older epoch left in memory, and nobody writes or reads, keeps no slot from a newer one."""
        older = [s for s in drain.slots if isinstance(s, StagedSlot) and s.staged.save.generation < save.generation]
        if older:
            self._oracle.fail(f"{save} finds no slot on {agent.pod.name}: {older[0].staged.save} waits in one")

    def _due(self, since: float) -> float:
        """When a step must have been made: a claim with its checkpoint in memory has its own time, from the claim on.

        A listing that decides may take its minute; one that does not decide may not.
        """
        simulation = self._oracle.simulation
        status, now = simulation.store.status, simulation.engine.now
        claimed = status.membership is not None and status.membership.state == "Claimed"
        in_memory = self.readable(in_memory=True) if claimed else None
        longer = simulation.join_watch.patience()
        due = since + LIVELY_SECONDS + longer + (65.0 if now < simulation.listings_slow_until else 0.0)
        if in_memory is not None and not any(map(self._struck, self._oracle.disturbed)):
            return min(due, max(since, self._oracle.claimed_at) + RECOVERING_SECONDS + longer)
        return due

    def _able(self) -> bool:
        """Whether an operator and enough workers are well, and see each other and the persistent tier."""
        simulation, network = self._oracle.simulation, self._oracle.simulation.network
        tier, settings = simulation.persistent, simulation.settings
        if simulation.store.status.ending is not None:
            return False
        if not simulation.operators[-1].process.running or (tier is not None and not tier.process.running):
            return False
        nodes = simulation.fabric.nodes
        pods = [
            pod
            for pod in simulation.fabric.pods.values()
            if pod.node is not None and pod.agent is not None and pod.agent.process.running and not pod.deleting
            if nodes[pod.node].alive and nodes[pod.node].ready and not nodes[pod.node].frozen
        ]
        well = {pod.node for pod in pods}
        if simulation.fabric.answers == "no" and len({pod.index for pod in pods}) < settings.least_workers:
            return False  # one that was replaced keeps the place of another one, and its deletion is refused
        holders = {f"{name}/holder" for name in well if name}
        sites = sorted({*well, *holders, "operator", "persistent"})
        cut = {(one, other) for one in sites for other in sites if one != other and not network.reaches(one, other)}
        if cut and self.readable(in_memory=True, reached=True) is not None:
            # what it reaches is enough for an operator, however long others are out of its sight
            cut -= {(one, other) for one, other in cut if {one, other} - holders == {"operator"}}
        if cut or self._hidden():
            return False
        if (
            simulation.job.spec.suspend
            or simulation.store.away
            or simulation.plan_seconds > 0.1
            or (tier is not None and tier.failing())
            or simulation.hang_watch.stand()
        ):
            return False
        return len(well) >= (settings.workers if settings.tied else settings.least_workers)

    def _hidden(self) -> bool:
        """Whether the operator does not reach a holder, of whatever node, that may have what the job needs.

        Where nothing else has it, waiting for that holder is right.
        """
        simulation, network = self._oracle.simulation, self._oracle.simulation.network
        if self.readable(reached=True) is not None:
            return False
        out = [
            h
            for h in simulation.holders.values()
            if h.process.running and not network.reaches("operator", h.process.site)
        ]
        counts = [c for c in self._oracle.states if self._counts(c)] if out else []
        return any(h.holds(save) for c in counts for save in self._oracle.saves_of(c) for h in out)

    def in_sight(self) -> Checkpoint | None:
        """Newest checkpoint of the lineage of which some agent that the operator hears reaches every part in memory."""
        simulation, network = self._oracle.simulation, self._oracle.simulation.network
        pods = [p for n in simulation.fabric.nodes.values() for p in n.pods if p.agent is not None]
        agents = [p.agent for p in pods if p.agent is not None and p.agent.process.running and not p.deleting]
        asked = simulation.engine.now - ASKED_SECONDS
        agents = [a for a in agents if a.process.thawed_at < asked]
        agents = [a for a in agents if a.line is not None]
        heard = [a.node for a in agents if network.together_since(a.node, "operator") < asked]

        def seen(holder: Holder) -> bool:
            there = holder.process.running and holder.process.thawed_at < asked and holder.provisioned
            return there and any(network.together_since(node, holder.process.site) < asked for node in heard)

        for checkpoint in sorted(self._oracle.states, key=lambda c: -c.step):
            saves = self._oracle.saves_of(checkpoint) if self._counts(checkpoint) else []
            if saves and all(any(seen(h) and h.holds(s) for h in self._oracle.ever[s]) for s in saves):
                return checkpoint
        return None

    def readable(self, in_memory: bool = False, reached: bool = False) -> Checkpoint | None:
        """Newest checkpoint of the lineage that can be restored from holders that nothing is wrong with.

        `reached`: from those alone that the operator and agents hear: it seals what a world restores.
        """
        tier, network = None if in_memory else self._oracle.simulation.persistent, self._oracle.simulation.network
        for checkpoint in sorted(self._oracle.states, key=lambda c: -c.step):
            if not self._counts(checkpoint) or (in_memory and self._oracle.numerics.is_beyond(checkpoint)):
                continue
            if all(
                any(
                    h.process.alive
                    and h.holds(s)
                    and not (reached and network.together_since(h.process.site, "operator") == float("inf"))
                    and self._oracle.disturbed.get(h.id.node, 0.0) < self._oracle.claimed_at
                    for h in self._oracle.ever[s]
                )
                or (tier is not None and tier.holds(s))
                for s in self._oracle.saves_of(checkpoint)
            ):
                return checkpoint
        return None

    def _counts(self, checkpoint: Checkpoint) -> bool:
        """Whether the next epoch may restore it, if it can be read."""
        oracle = self._oracle
        if checkpoint in oracle.simulation.store.status.unreadable_checkpoints or oracle.numerics.is_left_behind(
            checkpoint
        ):
            return False
        return oracle.on_path(checkpoint, oracle.base)
