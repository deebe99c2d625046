"""What the oracle keeps by itself of words and promises: who was named, who accepted, what was read, staged and awaited.

`oracle.py` looks at data; this looks at what leaders, agents and ranks told each other. A leader's own list (in status, in
its order book) is never what it is judged by: a list that forgets would agree with itself.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from surefoot.protocol import messages as said
from surefoot.protocol.identities import Checkpoint, MemoryServerInstance, RankSave
from surefoot_operator.api.status import JobStatus, Membership
from surefoot_operator.job_snapshot import JobSnapshot
from surefoot_operator.policy.core.actions import DeleteUploaded, DeleteWorker, DropSaves, Plan
from surefoot_operator.policy.maintenance.maintenance_plan import MaintenancePlan
from surefoot_operator.policy.membership.restore_decisions import DROP_SECONDS

if TYPE_CHECKING:
    from simulator.fabric import Node
    from simulator.operators import Operator
    from simulator.oracle import Oracle
    from simulator.trainers import Trainer

STAGED_SECONDS = 0.05
"""What was staged so long before a claim is waited for by it."""

HALT_SECONDS = 25.0
"""So long a bound halt waits for its saves at least."""

CALM_SECONDS = 5.0
"""After so long without a fault no maintenance is needed."""

PILE = 8
"""Checkpoints beyond `keep` that one holder may have while nothing disturbs it, or those of `PILE_SECONDS`."""

PILE_SECONDS = 2.4
"""A holder drops one rank's save after another: eight ranks' three copies at each step of 0.15 s keep it busy."""

HEARD_SECONDS = 1.0
"""Whoever said something so lately is there."""

INFINITE = float("inf")
LISTED_SECONDS = 65.0
"""So often the persistent tier is listed and tidied at least."""


class Eyes:
    def __init__(self, oracle: Oracle) -> None:
        self.oracle, self.simulation = oracle, oracle.simulation
        self.named: set[MemoryServerInstance] = set()
        """Holders that some agent was told of, and that nobody gave up since, in front of everybody."""
        self.accepted: dict[tuple[int, int], set[int]] = defaultdict(set)
        self.served: dict[int, float] = {}
        """When the persistent tier was listed, by the number of the request."""
        self.room_since = 0.0
        """Since when no holder is full any more: what was saved before may have found no room."""
        self.staged: dict[RankSave, float] = {}
        self.kept_since: dict[RankSave, float] = {}

    # ---- who was told what ------------------------------------------------------------------------------------------

    def told(self, message: said.ToAgent) -> None:
        if isinstance(message, said.Assign | said.MemoryServers):
            self.named |= {endpoint.instance for endpoint in message.servers}

    def accepts(self, trainer: Trainer, step: int) -> None:
        self.accepted[trainer.assign.generation, step].add(trainer.rank)

    def bound(self, trainer: Trainer, step: int) -> None:
        """A rank hears that a halt binds: it waits there for ever, so all must."""
        epoch = trainer.assign.generation
        missing = set(range(self.oracle.sizes[epoch])) - self.accepted[epoch, step]
        if missing:
            self.oracle.fail(
                f"a halt of epoch {epoch} at step {step} binds, and ranks {sorted(missing)} never accepted"
            )

    # ---- what a leader decides --------------------------------------------------------------------------------------

    def deciding(self, by: Operator, observed: JobSnapshot, new: JobStatus) -> None:
        old, world = observed.status.membership, new.membership
        if world is None or old == world:
            return
        if world.state == "Committed":
            if self.simulation.store.status.membership != old:
                return  # decided over what is past, by a reading that came late: the write compares the world, and is refused
            self._there(observed, world)
            self._looked_for(observed, new)
            self._listed_last(by, observed, world.generation)
        elif old is not None and old.state == "Committed":
            self._halted(observed, new)
            self._at_peace(observed, new)

    def ending(self, observed: JobSnapshot, made: Plan) -> None:
        """Nobody is ended by force whose agent speaks: what the cluster says of its node is then wrong."""
        sessions = {(s.index, s.attempt): s for s in observed.sessions}
        workers = {w.uid: w for w in observed.workers}
        for action in made.actions:
            if isinstance(action, DeleteWorker) and action.force and action.uid in workers:
                worker = workers[action.uid]
                session = sessions.get((worker.index, worker.attempt))
                if (
                    session is not None
                    and session.connected
                    and observed.now_seconds - session.last_message_seconds < HEARD_SECONDS
                ):
                    self.oracle.fail(f"{worker.name} is deleted by force ({action.reason}) though its agent is heard")

    def committed(self, read: set[MemoryServerInstance], given_up: tuple[str, ...]) -> None:
        """Of those that were named only who was read for this epoch holds what counts; others follow as they are named."""
        self.named = {name for name in self.named & read if name.run_id not in given_up}

    def _there(self, observed: JobSnapshot, world: Membership) -> None:
        """Whoever is made a member speaks, by what the leader itself has before it, and its pod has not ended."""
        speaking = {s.incarnation for s in observed.sessions if s.connected}
        living = {(w.index, w.attempt) for w in observed.workers if w.phase not in ("Succeeded", "Failed")}
        for member in world.members:
            if member.incarnation not in speaking or (member.index, member.attempt) not in living:
                self.oracle.fail(f"{member} becomes a member of epoch {world.generation}, and is known to be away")

    def _looked_for(self, observed: JobSnapshot, new: JobStatus) -> None:
        ready = {h.endpoint.instance for h in observed.servers if h.state == "Ready"}
        places = {self.simulation.holders[name].endpoint.server_id for name in ready}
        for name in sorted(self.named - ready):
            holder = self.simulation.holders[name]
            replaced = holder.endpoint.server_id in places
            if holder.process.alive and name.run_id not in new.lost_servers and not replaced:
                epoch = new.membership.generation if new.membership else 0
                self.oracle.fail(f"epoch {epoch} is committed although {name}, of which agents were told, was not read")

    def _listed_last(self, by: Operator, observed: JobSnapshot, epoch: int) -> None:
        if observed.persistent.read_generation != epoch or by.listed_at is None:
            return
        late = {name: at for name, at in by.read_at.items() if at > by.listed_at}
        ready = {h.endpoint.instance for h in observed.servers if h.state == "Ready" and h.read_generation == epoch}
        for name in sorted(ready & set(late)):
            self.oracle.fail(
                f"epoch {epoch} is decided by a listing of {by.listed_at:.3f}, older than the index of {name}"
            )

    def _halted(self, observed: JobSnapshot, new: JobStatus) -> None:
        """A claim for which a world was halted finds what it was halted for, unless that took too long."""
        barrier, world = observed.barrier, observed.status.membership
        if (
            barrier is None
            or world is None
            or (barrier.barrier.generation, barrier.barrier.phase) != (world.generation, "bound")
        ):
            return
        if not new.incidents or new.incidents[-1].kind != "planned" or new.incidents == observed.status.incidents:
            return
        goal = Checkpoint(world.generation, barrier.barrier.step)
        missing = [save for save in self.oracle.saves_of(goal) if save not in self.oracle.once]
        if missing and observed.now_seconds < barrier.proposed_seconds + HALT_SECONDS:
            self.oracle.fail(f"the halt at {goal} ends before {missing[0]} is on a holder")

    def _at_peace(self, observed: JobSnapshot, new: JobStatus) -> None:
        """Nobody ends a world that trains, which others tell him, because one of its agents is not heard."""
        incident = new.incidents[-1] if new.incidents else None
        self._done_already(observed, new)
        world = observed.status.membership
        if new.incidents == observed.status.incidents:
            return  # a suspension: no incident of its own
        if incident is None or world is None or incident.kind not in ("agent-lost", "worker-silent", "node-lost"):
            return
        engine, network = self.simulation.engine, self.simulation.network
        ranks = self.simulation.ranks_of(world.generation)
        agents = {id(t.agent): t.agent for t in ranks}
        if len(ranks) != self.oracle.sizes.get(world.generation) or not all(t.process.running for t in ranks):
            return
        pods = self.simulation.fabric.pods
        if any(a.pod.deleting or pods.get((a.pod.index, a.pod.attempt)) is not a.pod for a in agents.values()):
            return
        steps = 2.0 * self.simulation.settings.step_seconds + 0.5
        sites = sorted({t.process.site for t in ranks})
        together = all(network.reaches(a, b) for i, a in enumerate(sites) for b in sites[i + 1 :])
        heard = [
            s for s in observed.sessions
            if s.generation == world.generation and s.connected and observed.now_seconds - s.last_message_seconds < 1.0
            and s.step_at_seconds is not None and observed.now_seconds - s.step_at_seconds < steps
        ]  # fmt: skip
        if together and heard and engine.now - self.oracle.training.stepped_at < steps:
            self.oracle.fail(
                f"a world that trains is ended ({incident.reason}); worker {heard[0].index} tells its steps"
            )

    def _done_already(self, observed: JobSnapshot, new: JobStatus) -> None:
        """Nobody takes a world for one that hangs in which every rank has ended well."""
        world = observed.status.membership
        if (
            world is None
            or not new.incidents
            or new.incidents[-1].kind != "hang"
            or new.incidents == observed.status.incidents
        ):
            return
        if self._all_done(world.generation):
            self.oracle.fail(f"epoch {world.generation} is ended as one that hangs, and all its ranks have finished")

    def _all_done(self, epoch: int) -> bool:
        ranks = self.simulation.ranks_of(epoch)
        return len(ranks) == self.oracle.sizes.get(epoch) and all(t.done and t.agent.process.running for t in ranks)

    # ---- keeping house ----------------------------------------------------------------------------------------------

    def keeping(self, observed: JobSnapshot, kept: MaintenancePlan) -> None:
        drops = [e for e in kept.actions if isinstance(e, DropSaves)]
        if not drops:
            return
        going = {save.checkpoint for drop in drops for save in drop.saves}
        if kept.pinned is not None and kept.pinned in going:
            self.oracle.fail(f"{kept.pinned} is dropped from memory by who has it uploaded")
        world = observed.status.membership
        unsealed = [
            h.endpoint.instance for h in observed.servers
            if h.state == "Ready" and (h.read_generation != world.generation or (h.fence or 0) < world.generation)
        ] if world is not None else []  # fmt: skip
        if unsealed:
            self.oracle.fail(f"{min(going)} is dropped while {unsealed[0]} is coming, which counts among the copies")

    def judged(self, by: Operator, kept: MaintenancePlan) -> None:
        """Nothing is deleted that a leader's own listing could not read: it may be all that there is."""
        tier = self.simulation.persistent
        going = {c for e in kept.actions if isinstance(e, DeleteUploaded) for c in e.checkpoints}
        for save, entry in tier.manifests.items() if tier is not None and by.listed_at is not None and going else ():
            assert tier is not None
            assert by.listed_at is not None
            unknown = entry.layout not in by.known.digests | by.sessions.requests.persistent_layouts.keys()
            since = min(
                tier.damaged.get(save, INFINITE), tier.lost_layouts.get(entry.layout, INFINITE) if unknown else INFINITE
            )
            if save.checkpoint in going and since < by.listed_at:
                self.oracle.fail(f"{save.checkpoint} is deleted, of which {save} could not be read when it was listed")

    # ---- what was staged --------------------------------------------------------------------------------------------

    def handed_over(self, save: RankSave) -> None:
        self.staged.setdefault(save, self.simulation.engine.now)

    def persisted(self, save: RankSave) -> None:
        self.kept_since.setdefault(save, self.simulation.engine.now)

    def in_time(self, parent: Checkpoint | None, bad: set[Checkpoint]) -> None:
        """Where trainers alone failed, what all ranks had handed over well before the claim is restored."""
        oracle = self.oracle
        if self.simulation.machines_struck or self.simulation.settings.refused:
            return
        step, before = parent.step if parent else 0, oracle.claimed_at - STAGED_SECONDS
        for checkpoint in oracle.states:
            if checkpoint.step <= step or checkpoint in bad or not oracle.on_path(checkpoint, oracle.base):
                continue
            if all(self.staged.get(save, before) < before for save in oracle.saves_of(checkpoint)):
                oracle.fail(f"{parent} was chosen although all ranks had handed over {checkpoint} in time")

    def _drops_since(self) -> float:
        """When a new leader of a job that goes back to good checkpoints begins to drop others."""
        if self.simulation.job.spec.health_policy.numerics is None:
            return 0.0
        known, world = [o.sessions for o in self.simulation.operators], self.simulation.store.status.membership
        first = {member.incarnation for member in world.members[:1]} if world is not None else set()
        # so long after its line came back, too: without one the first member's agent drops some by itself
        lines = [
            s.observed.since_seconds for one in known for s in one.by_worker.values() if s.observed.incarnation in first
        ]
        return max(*(one.term_seconds for one in known), *lines, 0.0) + DROP_SECONDS

    def tiers(self) -> None:
        """Once everything is well: nothing piles up, and what is saved has its copies."""
        oracle, simulation = self.oracle, self.simulation
        engine, settings = simulation.engine, simulation.settings
        # nothing is dropped before a world is committed, and one that gets no pods waits for long
        calm = engine.now > max(simulation.faults_until, oracle.committed_at, self._drops_since()) + CALM_SECONDS
        if not calm or any(until > engine.now - CALM_SECONDS for until in oracle.disturbed.values()):
            return
        world = simulation.store.status.membership
        if world is None or world.state != "Committed" or simulation.persistent_unkind:
            return
        pile = max(PILE, int(PILE_SECONDS / (settings.interval * settings.step_seconds)))
        for holder in (one for node in simulation.fabric.nodes.values() for one in node.holders):
            kept = {save.checkpoint for save in holder.index}
            # nothing newer comes after a finished world: parts of what faults took from it go with the job, which ends
            if len(kept) > settings.keep + pile and not self._all_done(world.generation):
                oracle.fail(f"{holder.id} keeps parts of {len(kept)} checkpoints though everything is well")
        tier = simulation.persistent
        before = engine.now - LISTED_SECONDS
        manifests = tier.manifests if tier is not None else {}
        listed = {save.checkpoint for save in manifests if self.kept_since.get(save, engine.now) < before}
        long_ago = max(simulation.faults_until, oracle.committed_at) < before
        if long_ago and len(listed) > 2 + PILE:
            oracle.fail(f"the persistent tier keeps {len(listed)} old checkpoints though everything is well")
        self._copied(world.generation)

    def _taken(self, save: RankSave, live: list[Node]) -> bool:
        """Whether faults took every copy that there ever was, as of a finished world's last step: nobody can copy it."""
        ever = self.oracle.ever[save]
        return bool(ever) and not any(holder in ever for node in live for holder in node.holders)

    def _copied(self, epoch: int) -> None:
        """Each save of this epoch that is old enough has its copies on nodes that are well."""
        oracle, simulation = self.oracle, self.simulation
        if simulation.settings.refused or any(h.full for h in simulation.holders.values()):
            return
        live = [n for n in simulation.fabric.nodes.values() if n.alive and not n.frozen]
        wanted = min(simulation.settings.replicas, len(live))
        newest = max((c for c in oracle.certified if c.generation == epoch), key=lambda c: c.step, default=None)
        ripe = [
            save.step for save, at in self.staged.items()
            if save.generation == epoch and self.room_since < at < simulation.engine.now - CALM_SECONDS
            and all(other in self.staged for other in oracle.saves_of(save.checkpoint))
            and not any(self._taken(other, live) for other in oracle.saves_of(save.checkpoint))
        ]  # fmt: skip
        if (
            ripe
            and wanted > 1
            and (newest is None or newest.step < min(max(ripe), max(ripe) - 2 * simulation.settings.interval))
        ):
            oracle.fail(
                f"the newest checkpoint with {wanted} copies is {newest}, and step {max(ripe)} was saved long ago"
            )
