"""Sees everything and checks, at each event, what must always hold. Raises Violation with a sentence.

It looks at the modelled data itself and keeps its own account of lineages, saves and losses; nothing it compares with
was computed by the decisions that it judges.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from simulator.eyes import Eyes
from simulator.liveness import Liveness
from simulator.lossless import Lossless
from simulator.numerics_watch import NumericsWatch
from simulator.tiers import CHUNKS, Holder, Persistent, Piece, Watcher
from simulator.training_watch import TrainingWatch
from simulator.watermarks import Watermarks
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, MemoryServerInstance, RankSave
from surefoot_operator.api.status import JobStatus
from surefoot_operator.job_snapshot import JobSnapshot
from surefoot_operator.policy.membership.final_checkpoint import RESCUE_SECONDS

if TYPE_CHECKING:
    from simulator.operators import Operator
    from simulator.world import Simulation


class Violation(Exception):
    """Something that must never happen, happened. `check`: who saw it."""

    def __init__(self, text: str, check: str) -> None:
        super().__init__(text)
        self.check = check


class Oracle(Watcher):
    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.parents: dict[int, Checkpoint | None] = {}
        self.sizes: dict[int, int] = {}
        self.base = 0
        """Newest committed epoch."""
        self.states: dict[Checkpoint, int] = {}
        self.contents: dict[RankSave, tuple[str, int]] = {}
        self.ever: dict[RankSave, set[Holder]] = defaultdict(set)
        """Holders that have the save, or had it when a fault took them; dropped copies are gone from here."""
        self.disturbed: dict[str, float] = {}
        """Node → until when something was wrong with it (infinite: still)."""
        self.taken_before: dict[int, float] = {}
        """Epochs that another history of this job has claimed in the persistent tier, since when."""
        self.certified: set[Checkpoint] = set()
        """Checkpoints that a leader rightly took for fully replicated: older ones may go, these count as safe."""
        self.hopeless: set[Checkpoint] = set()
        """What some leader said can never become complete."""
        self.once: set[RankSave] = set()  # were committed on some holder, whatever became of them
        self.most_kept = 0
        """Checkpoints that one holder had parts of at once."""
        self.claimed_at = self.committed_at = 0.0
        self.eyes = Eyes(self)
        self.liveness = Liveness(self)
        self.lossless = Lossless(self)
        self.numerics = NumericsWatch(self)
        self.training = TrainingWatch(self)
        self.watermarks = Watermarks(self)
        self._read: dict[int, set[MemoryServerInstance]] = defaultdict(set)
        """Holders that were read for an epoch, whoever led."""
        self.commits = self.drops = self.deletes = 0
        self._gone_back: int | None = None
        """Of the status that is being written: the last step that its commit might restore."""

    def fail(self, text: str) -> None:
        raise Violation(f"at {self.simulation.engine.now:.4f}: {text}", sys._getframe(1).f_code.co_name.strip("_"))

    # ---- lineage ----------------------------------------------------------------------------------------------------

    def on_path(self, checkpoint: Checkpoint, epoch: int) -> bool:
        bound = float("inf")
        while epoch:
            parent = self.parents[epoch]
            begin = parent.step if parent else 0
            if checkpoint.generation == epoch:
                return begin < checkpoint.step <= bound
            if parent is None:
                return False
            bound = min(bound, parent.step)
            epoch = parent.generation
        return False

    def state_at(self, checkpoint: Checkpoint) -> int:
        return self.states[checkpoint]

    def saves_of(self, checkpoint: Checkpoint) -> list[RankSave]:
        return [RankSave(checkpoint.generation, checkpoint.step, r) for r in range(self.sizes[checkpoint.generation])]

    # ---- status -----------------------------------------------------------------------------------------------------

    def deciding(self, by: Operator, observed: JobSnapshot, new: JobStatus) -> None:
        """A leader is about to change the world: did it look everywhere it had to?"""
        self.eyes.deciding(by, observed, new)
        world = new.membership
        if world is None or world.state != "Committed" or observed.status.membership == world:
            return
        listed_at = by.listed_at if observed.persistent.read_generation == world.generation else None
        if listed_at is not None and self.taken_before.get(world.generation, listed_at) < listed_at:
            self.fail(f"epoch {world.generation} is committed although the tier named it before: status was restored")
        named = {e.instance for e in observed.status.assigned_servers}
        for holder in observed.servers:
            name = holder.endpoint.instance
            if holder.state == "Ready" and holder.read_generation != world.generation:
                self.fail(f"epoch {world.generation} is committed although {name} was not read for it")
            another = any(
                h.state == "Ready" and h.endpoint.server_id == holder.endpoint.server_id and h.endpoint.instance != name
                for h in observed.servers
            )  # another instance runs in its place: it is no more, which is known and not silence
            if holder.state == "Unreachable" and name in named and name.run_id not in new.lost_servers and not another:
                self.fail(f"epoch {world.generation} is committed although {name} is silent and not given up")

    def written(self, old: JobStatus, new: JobStatus) -> None:
        """The stored status changes."""
        if new.restarts < old.restarts or new.next_attempt < old.next_attempt:
            counts = f"{old.restarts, old.next_attempt} to {new.restarts, new.next_attempt}"
            self.fail(f"restarts or attempts went back: {counts}")
        self.numerics.claimed(old, new)
        if old.had_checkpoint and not new.had_checkpoint and self.numerics.goes_back(new) != 0:
            self.fail("status forgot that something was recorded")
        binding = (
            old.last_uploaded.step
            if old.last_uploaded is not None and old.last_uploaded not in old.unreadable_checkpoints
            else 0
        )
        if any(
            c.is_imported or c.step >= binding
            for c in set(old.unreadable_checkpoints) - set(new.unreadable_checkpoints)
        ):
            self.fail(f"a bad checkpoint was forgiven: {old.unreadable_checkpoints} to {new.unreadable_checkpoints}")
        before, after = old.membership, new.membership
        self._gone_back = None
        if before != after:
            self._world(old, new)
        self._floor(old, new)
        if before is not None and after is not None and after.generation > before.generation:
            self.claimed_at = self.simulation.engine.now

    def _world(self, old: JobStatus, new: JobStatus) -> None:
        before, after = old.membership, new.membership
        if after is None:
            self.fail("the world was taken back")
            return
        epoch = before.generation if before else 0
        if after.generation < epoch:
            self.fail(f"the epoch went back from {epoch} to {after.generation}")
        if before is not None and after.generation == epoch and before.state == "Committed":  # noqa: SIM102
            if after.state != "Committed" or after.parent != before.parent or after.members != before.members:
                self.fail(f"the committed world of epoch {epoch} was changed")
        if after.state == "Committed" and after.generation not in self.parents:
            self._gone_back = self.numerics.goes_back(new)
            self._commit(old, new)
        elif after.state == "Committed" and after.parent != self.parents[after.generation]:
            self.fail(f"epoch {after.generation} has two parents: {self.parents[after.generation]} and {after.parent}")

    def _commit(self, old: JobStatus, new: JobStatus) -> None:
        world = new.membership
        assert world is not None
        settings = self.simulation.settings
        if world.world_size != len(world.members) * settings.local_ranks:
            self.fail(f"world of {world.world_size} ranks from {len(world.members)} members")
        nobody = not world.members and self.simulation.suspended_until >= self.claimed_at
        if len(world.members) not in settings.allowed_workers and not nobody:
            self.fail(f"a world of {len(world.members)} workers is not allowed: {settings.allowed_workers}")
        if len({m.index for m in world.members}) != len(world.members):
            self.fail("one index is twice in the world")
        parent = world.parent
        if parent is not None and (parent not in self.states or not self.on_path(parent, self.base)):
            self.fail(
                f"epoch {world.generation} branches from {parent}, which is not on the lineage of epoch {self.base}"
            )
        if parent is not None and parent in old.unreadable_checkpoints:
            self.fail(f"epoch {world.generation} branches from {parent}, which is known to be bad")
        most = self.numerics.goes_back(new)
        binds = (
            old.last_uploaded is not None
            and not self._damaged(old.last_uploaded)
            and (most is None or old.last_uploaded.step <= most)
        )
        if binds and old.last_uploaded is not None and (parent is None or parent.step < old.last_uploaded.step):
            self.fail(f"epoch {world.generation} branches from {parent}, below the floor {old.last_uploaded}")
        if (
            settings.tied
            and parent is not None
            and world.world_size
            and world.world_size != self.sizes[parent.generation]
        ):
            self.fail(
                f"{world.world_size} ranks are to restore {parent}, whose state is that of {self.sizes[parent.generation]}"
            )
        beyond = {c for c in self.states if most is not None and c.step > most}
        self._newest(parent, set(new.unreadable_checkpoints) | beyond)
        self.eyes.in_time(parent, set(new.unreadable_checkpoints) | beyond)
        self.numerics.committed(new, parent)
        if most is not None:
            self.lossless.struck(0.0)
        self.lossless.committed(parent)
        self.eyes.committed(self._read.pop(world.generation, set()), new.lost_servers)
        entries = [(e.generation, e.parent, e.world_size) for e in new.lineage]
        if (world.generation, parent, world.world_size) not in entries:
            self.fail(f"the lineage does not name epoch {world.generation}")
        if parent is None and old.had_checkpoint and most != 0:
            self.fail(f"epoch {world.generation} begins at step 0 though something was recorded, and nobody was asked")
        self.parents[world.generation], self.sizes[world.generation] = parent, world.world_size
        self.base = world.generation
        self.committed_at = self.simulation.engine.now
        self.commits += 1

    def _damaged(self, checkpoint: Checkpoint) -> bool:
        """Whether a fault made a record of it unreadable: then it binds nobody."""
        tier = self.simulation.persistent
        return tier is not None and any(tier.struck(save) for save in self.saves_of(checkpoint))

    def _newest(self, parent: Checkpoint | None, bad: set[Checkpoint]) -> None:
        """Nothing newer may be complete on holders that were well all the time since the claim, or persistent."""
        step = parent.step if parent else 0
        for checkpoint in self.states:
            if checkpoint.step <= step or checkpoint in bad or not self.on_path(checkpoint, self.base):
                continue
            if all(self._seen_well(save) for save in self.saves_of(checkpoint)):
                self.fail(f"{parent} was chosen although {checkpoint} is complete on holders that answer")

    def _seen_well(self, save: RankSave) -> bool:
        return any(
            h.process.alive and save in h.index and save not in h.written_after_fence and h.holds(save)
            and self.disturbed.get(h.id.node, 0.0) < self.claimed_at
            for h in self.ever[save]
        ) or self._kept_well(save)  # fmt: skip

    def _kept_well(self, save: RankSave) -> bool:
        tier = self.simulation.persistent
        if tier is None or not tier.holds(save) or self.disturbed.get("persistent", 0.0) >= self.claimed_at:
            return False
        return self.eyes.kept_since.get(save, self.claimed_at) < self.claimed_at

    def _floor(self, old: JobStatus, new: JobStatus) -> None:
        if old.last_uploaded == new.last_uploaded:
            return
        most = self._gone_back
        binds = (
            old.last_uploaded is not None
            and not self._damaged(old.last_uploaded)
            and (most is None or old.last_uploaded.step <= most)
        )
        if (
            binds
            and old.last_uploaded is not None
            and (new.last_uploaded is None or new.last_uploaded.step < old.last_uploaded.step)
        ):
            self.fail(f"the floor went back from {old.last_uploaded} to {new.last_uploaded}")
        if new.last_uploaded is None:
            return
        tier = self.simulation.persistent
        if not self.on_path(new.last_uploaded, self.base):
            self.fail(f"the floor {new.last_uploaded} is not on the lineage of epoch {self.base}")
        if tier is None or not all(tier.holds(s) or tier.struck(s) for s in self.saves_of(new.last_uploaded)):
            self.fail(f"the floor {new.last_uploaded} is not complete in the persistent tier")

    # ---- tiers ------------------------------------------------------------------------------------------------------

    def committed(self, holder: Holder, entry: RankManifest, writer: int) -> None:
        save = entry.save
        for part in range(CHUNKS):
            if (save, part) not in holder.chunks:
                self.fail(f"{holder.id} has an index entry of {save} without all its chunks")
        known = self.contents.get(save)
        if known is None or known[0] != entry.incarnation:
            self.fail(f"{save} comes from incarnation {entry.incarnation}, and from {known and known[0]}")
        if writer not in self.parents:
            self.fail(
                f"{save} is committed as epoch {writer}, which nobody has committed: drains before it are refused"
            )
        self.ever[save].add(holder)
        self.once.add(save)
        self.most_kept = max(self.most_kept, len({other.checkpoint for other in holder.index}))
        self._despaired(save.checkpoint)

    def despair(self, checkpoints: Iterable[Checkpoint]) -> None:
        """A leader takes these for such that can never become complete."""
        for checkpoint in checkpoints:
            self.hopeless.add(checkpoint)
            self._despaired(checkpoint)

    def _despaired(self, checkpoint: Checkpoint) -> None:
        if checkpoint in self.hopeless and all(save in self.once for save in self.saves_of(checkpoint)):
            self.fail(f"{checkpoint} was given up as one that can never become complete, and every rank has saved it")

    def persisted(self, entry: RankManifest) -> None:
        known = self.contents.get(entry.save)
        if known is None or known[0] != entry.incarnation:
            self.fail(f"{entry.save} in the persistent tier comes from another incarnation")
        self.eyes.persisted(entry.save)

    def overwriting(self, tier: Persistent, save: RankSave, piece: Piece) -> None:
        """Bytes are about to be written: under a committed name never others than are there."""
        there = tier.chunks.get((save, piece.part))
        if save in tier.manifests and there is not None and there.content != piece.content:
            self.fail(f"{save} is committed in the persistent tier, and other bytes are written in its place")

    def dropping(self, holder: Holder, save: RankSave, writer: int) -> None:
        if save in holder.index:
            self.drops += 1  # what an unsealed holder has counts in nothing, as long as it lies elsewhere
            if holder.fence >= self.base or not self.exists(save, but=holder):
                tier, saves = self.simulation.persistent, self.saves_of(save.checkpoint)
                elsewhere = tier is not None and all(tier.holds(one) for one in saves)
                self._may_go(save.checkpoint, f"{holder.id} drops {save} (writer {writer})", elsewhere)
        self.ever[save].discard(holder)

    def deleting(self, checkpoint: Checkpoint) -> None:
        self.deletes += 1
        floor = self.simulation.store.status.last_uploaded
        if checkpoint == floor:
            self.fail(f"the floor {floor} is deleted from the persistent tier")
        elsewhere = all(self.ever[save] for save in self.saves_of(checkpoint))
        self._may_go(checkpoint, f"{checkpoint} is deleted from the persistent tier", elsewhere)

    def _may_go(self, checkpoint: Checkpoint, what: str, elsewhere: bool) -> None:
        if checkpoint.generation not in self.sizes or not self.on_path(checkpoint, self.base):
            return
        if not all(self.exists(save) for save in self.saves_of(checkpoint)):
            return  # never was complete, or faults took it
        self.numerics.may_go(checkpoint, what, elsewhere)
        on_path = [c for c in self.states if c.step > checkpoint.step and self.on_path(c, self.base)]
        newer = [c for c in on_path if c not in self.simulation.store.status.unreadable_checkpoints]
        if any(map(self._safe, newer)):
            return
        # a fault took what was rightly counted on, unseen; what its holders have since is as safe as that was
        if any(c in self.certified for c in on_path) and any(map(self.watermarks.stands, newer)):
            return
        self.fail(f"{what}, and nothing newer on the lineage of epoch {self.base} is safe")

    def exists(self, save: RankSave, but: Holder | None = None) -> bool:
        tier = self.simulation.persistent
        return bool(self.ever[save] - {but}) or (tier is not None and tier.holds(save))

    def _safe(self, checkpoint: Checkpoint) -> bool:
        """Complete in the persistent tier, or once fully replicated, and no copy gone since but by faults or for newer."""
        tier = self.simulation.persistent
        saves = self.saves_of(checkpoint)
        if tier is not None and all(tier.holds(save) or tier.struck(save) for save in saves):
            return True
        return checkpoint in self.certified and all(self.ever[save] for save in saves)

    def lost(self, holder: Holder) -> None:
        """A fault took this instance: its copies count as lost."""

    def read(self, holder: Holder, epoch: int) -> None:
        self._read[epoch].add(holder.id)
        for save in holder.index:
            if any((save, part) not in holder.chunks and (save, part) not in holder.holes for part in range(CHUNKS)):
                self.fail(f"{holder.id} has an index entry of {save} without all its chunks")
        for save in holder.written_after_fence & set(holder.index):
            if save.generation in self.sizes and self.on_path(save.checkpoint, self.base):
                self.fail(f"{save}, written to {holder.id} after its fence, was read to decide epoch {epoch}")

    def saved(self, save: RankSave, incarnation: str, content: int, state: int) -> None:
        if self.contents.setdefault(save, (incarnation, content)) != (incarnation, content):
            self.fail(f"{save} is saved twice, differently")
        if self.states.setdefault(save.checkpoint, state) != state:
            self.fail(f"ranks disagree about the state at {save.checkpoint}")
        self.eyes.handed_over(save)

    def finished(self) -> None:
        """The job is complete."""
        self.numerics.finished()
        self.training.finished()

    def ended_early(self, status: JobStatus) -> None:
        """A job ended that was not complete: what it had in memory is stored, if an agent was there that could store it."""
        if self.simulation.engine.now > (self.simulation.settings.active_deadline_seconds or 0.0) + RESCUE_SECONDS:
            return  # nobody could, for as long as it is waited for
        members = (
            {member.incarnation for member in status.membership.members} if status.membership is not None else set()
        )
        pods = [pod for node in self.simulation.fabric.nodes.values() for pod in node.pods if pod.agent is not None]
        there = [
            p for p in pods if p.agent and p.agent.incarnation in members and p.agent.line and p.agent.process.running
        ]
        newest, floor = self.liveness.readable(in_memory=True), status.last_uploaded
        if there and newest is not None and (floor is None or floor.step < newest.step):
            self.fail(f"the job ended ({status.message}) with {floor} stored and {newest} in memory")

    def kept(self, tier: Persistent) -> None:
        """What a complete job ended with lies in the persistent tier, if every rank ever had it on a holder."""
        found = [c for c in self.states if c.step == self.simulation.settings.steps and self.on_path(c, self.base)]
        whole = [c for c in found if all(save in self.once for save in self.saves_of(c))]
        if whole and not any(all(tier.holds(save) or tier.struck(save) for save in self.saves_of(c)) for c in found):
            self.fail(f"the job is complete, and its last checkpoint {max(whole)} is not in the persistent tier")
        floor = self.simulation.store.status.last_uploaded
        if floor is not None and floor.generation == self.base and floor.step < self.simulation.settings.steps:
            self.fail(f"the job is complete with {floor}, and every rank had its last step saved, or tried to")
