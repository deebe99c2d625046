"""The memory and persistent tiers of the fake world, and the truth about which copies there are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from surefoot.protocol.checkpoints.completeness import is_on_lineage, lineage_entry_of
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, MemoryServerInstance, RankSave
from surefoot_operator.api.status import JobStatus
from surefoot_operator.job_snapshot import ObservedMemoryServer


@dataclass
class Node:
    name: str
    alive: bool = True
    frozen: bool = False
    cordoned: bool = False
    holder: ObservedMemoryServer | None = None
    life: int = 0

    @property
    def takes_pods(self) -> bool:
        return self.alive and not self.frozen and not self.cordoned


@dataclass
class FakeTiers:
    """A holder a node, which does what the scripts of a real one would; `s3` keeps what was uploaded."""

    replicas: int
    nodes: dict[str, Node] = field(default_factory=dict)
    s3: dict[RankSave, RankManifest] = field(default_factory=dict)

    def start_holder(self, name: str, now: float) -> None:
        """A Redis that starts is empty, and another instance."""
        node = self.nodes[name]
        node.life += 1
        endpoint = MemoryServerEndpoint(MemoryServerInstance(name, f"{name}-{node.life}"), "127.0.0.1", 7000, name)
        node.holder = ObservedMemoryServer(endpoint, "Ready", now)

    def holder(self, identity: MemoryServerInstance) -> ObservedMemoryServer | None:
        """The instance, if it answers."""
        holder = self.nodes[identity.node].holder
        ready = holder is not None and holder.endpoint.instance == identity and holder.state == "Ready"
        return holder if ready else None

    def seal(self, identity: MemoryServerInstance, epoch: int) -> bool:
        holder = self.holder(identity)
        if holder is None or (holder.fence or 0) > epoch:
            return False
        self.nodes[identity.node].holder = replace(holder, fence=epoch, read_generation=epoch)
        return True

    def store(self, identity: MemoryServerInstance, copy: RankManifest) -> None:
        holder = self.holder(identity)
        if holder is not None and all(m.save != copy.save for m in holder.entries):
            self.nodes[identity.node].holder = replace(holder, entries=(*holder.entries, copy))

    def drop(self, identity: MemoryServerInstance, epoch: int, saves: tuple[RankSave, ...], status: JobStatus) -> None:
        holder = self.holder(identity)
        if holder is not None and (holder.fence or 0) <= epoch:
            for checkpoint in {s.checkpoint for s in saves}:
                self._assert_superseded(checkpoint, status)
            kept = tuple(m for m in holder.entries if m.save not in saves)
            self.nodes[identity.node].holder = replace(holder, entries=kept)

    def readable(self, checkpoint: Checkpoint) -> bool:
        """Whether every rank save of it lies somewhere that is not gone."""
        there = set(self.s3)
        for node in self.nodes.values():
            if node.holder is not None and node.holder.state != "Gone":
                there |= {m.save for m in node.holder.entries}
        worlds = {m.world_size for s, m in self.all().items() if s.checkpoint == checkpoint}
        return bool(worlds) and all(
            RankSave(checkpoint.generation, checkpoint.step, r) in there for r in range(max(worlds))
        )

    def all(self) -> dict[RankSave, RankManifest]:
        found = dict(self.s3)
        for node in self.nodes.values():
            if node.holder is not None:
                found |= {m.save: m for m in node.holder.entries}
        return found

    def _assert_superseded(self, checkpoint: Checkpoint, status: JobStatus) -> None:
        """Invariant 1, by the truth and not by what anybody read."""
        world, lineage = status.membership, status.lineage
        if (
            world is None
            or not is_on_lineage(lineage, checkpoint, world.generation)
            or checkpoint in status.unreadable_checkpoints
        ):
            return
        ready = [n.holder for n in self.nodes.values() if n.holder is not None and n.holder.state == "Ready"]
        needed = min(self.replicas, len(ready))
        copies = Counter(m.save for h in ready for m in h.entries)
        for newer in {s.checkpoint for s in (*copies, *self.s3) if s.step > checkpoint.step}:
            entry = lineage_entry_of(lineage, newer.generation)
            if entry is None or not is_on_lineage(lineage, newer, world.generation):
                continue
            ranks = [RankSave(newer.generation, newer.step, rank) for rank in range(entry.world_size)]
            if all(copies[save] >= needed for save in ranks) or all(save in self.s3 for save in ranks):
                return
        raise AssertionError(f"{checkpoint} is dropped, and nothing newer is safe")
