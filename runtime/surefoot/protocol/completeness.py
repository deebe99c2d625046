"""Which checkpoints are complete, full, and where to restore from: pure, from what holders and S3 were read to have.

Called by the operator when it changes the world, by whoever computes the watermark, and by library mode. A silent
tier is unknown, never empty: callers say who answered, nothing here guesses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from surefoot.protocol.identities import Checkpoint, HolderId
from surefoot.protocol.lineage import Lineage, entry_of, newest, on_lineage
from surefoot.protocol.records import RankManifest

Covers = Mapping[frozenset[str], bool]
"""For each set of layout digests that was checked: whether together they cover every tensor exactly once."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """One record that a listing could not read. `why` names the record and what is wrong with it.

    `silent`: the tier did not give it, so it may be good; else it was read, and is damaged or gone. It is a manifest of
    `checkpoint`, or the layout record `digest`.
    """

    why: str
    silent: bool
    checkpoint: Checkpoint | None = None
    digest: str | None = None

    def __str__(self) -> str:
        return self.why


@dataclass(frozen=True, slots=True)
class TierReading:
    """What was read: index entries by sealed holder, and manifests in the persistent tier (None: not read, unknown)."""

    holders: Mapping[HolderId, tuple[RankManifest, ...]]
    persistent: tuple[RankManifest, ...] | None
    _found: dict[Checkpoint, dict[int, list[RankManifest]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _having: dict[Checkpoint, dict[int, list[HolderId]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def manifests(self) -> Mapping[Checkpoint, Mapping[int, list[RankManifest]]]:
        """checkpoint → rank → every manifest seen for it, wherever. Worked out once: many rules ask, saves are many."""
        if not self._found:
            found: dict[tuple[int, int], dict[int, list[RankManifest]]] = defaultdict(lambda: defaultdict(list))
            for source in (*self.holders.values(), self.persistent or ()):
                for manifest in source:
                    save = manifest.save
                    found[save.epoch, save.step][save.rank].append(manifest)
            self._found.update({Checkpoint(*key): dict(ranks) for key, ranks in found.items()})
        return self._found

    def having(self) -> Mapping[Checkpoint, Mapping[int, list[HolderId]]]:
        """checkpoint → rank → holders that have that rank save. Worked out once."""
        if not self._having:
            found: dict[tuple[int, int], dict[int, list[HolderId]]] = defaultdict(lambda: defaultdict(list))
            for holder, manifests in self.holders.items():
                for manifest in manifests:
                    save = manifest.save
                    found[save.epoch, save.step][save.rank].append(holder)
            self._having.update({Checkpoint(*key): dict(ranks) for key, ranks in found.items()})
        return self._having


def layouts_to_check(reading: TierReading) -> set[frozenset[str]]:
    """Sets of layout digests of checkpoints that have all their ranks: whose coverage `Covers` must answer."""
    wanted = set()
    for ranks in reading.manifests().values():
        world = next(iter(ranks.values()))[0].world
        if all(rank in ranks for rank in range(world)):
            wanted.add(frozenset(m.layout for copies in ranks.values() for m in copies))
    return wanted


def is_complete(ranks: Mapping[int, list[RankManifest]], covers: Covers) -> bool:
    """Every rank of that epoch's world is there, all agree on the world, and the layouts cover each tensor once.

    Two manifests of one rank that describe different bytes make the checkpoint incomplete: somebody wrote twice.
    """
    if not ranks:
        return False
    world = next(iter(ranks.values()))[0].world
    if set(ranks) != set(range(world)):
        return False
    for copies in ranks.values():
        if any(m.world != world or not m.same_bytes_as(copies[0]) for m in copies):
            return False
    return covers.get(frozenset(copies[0].layout for copies in ranks.values()), False)


def complete(
    reading: TierReading, lineage: Lineage, epoch: int, bad: frozenset[Checkpoint], covers: Covers
) -> list[Checkpoint]:
    """Complete checkpoints on the lineage of `epoch`, oldest first, none of `bad`."""
    found = [
        checkpoint
        for checkpoint, ranks in reading.manifests().items()
        if checkpoint not in bad
        and on_lineage(lineage, checkpoint, epoch)
        and _world_fits(lineage, checkpoint, len(ranks))
        and is_complete(ranks, covers)
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def _world_fits(lineage: Lineage, checkpoint: Checkpoint, ranks: int) -> bool:
    """As many ranks as that epoch's world had: manifests that agree among themselves may still be of another world."""
    entry = entry_of(lineage, checkpoint.epoch)
    return entry is None or entry.size == ranks


def copies_of(checkpoint: Checkpoint, reading: TierReading, domains: Mapping[HolderId, str]) -> int:
    """The least over ranks of the number of failure domains whose holders have that rank save; 0 if a rank has none."""
    ranks = reading.having().get(checkpoint, {})
    of_holders = TierReading(reading.holders, None) if reading.persistent else reading
    copies = of_holders.manifests().get(checkpoint, {}).values()
    world = max((manifest.world for of_rank in copies for manifest in of_rank), default=0)
    return min((len({domains.get(h, h.node) for h in ranks.get(rank, ())}) for rank in range(world)), default=0)


def complete_persistent(
    persistent: Iterable[RankManifest], lineage: Lineage, epoch: int, bad: frozenset[Checkpoint], covers: Covers
) -> list[Checkpoint]:
    """Checkpoints that the persistent tier alone completes, oldest first."""
    return complete(TierReading({}, tuple(persistent)), lineage, epoch, bad, covers)


def effective_replicas(replicas: int, live_domains: int) -> int:
    """R_eff: as many copies as there are live failure domains, at most R, never less than one."""
    return max(1, min(replicas, live_domains))


def watermark(
    reading: TierReading,
    lineage: Lineage,
    epoch: int,
    bad: frozenset[Checkpoint],
    covers: Covers,
    domains: Mapping[HolderId, str],
    replicas_effective: int,
) -> Checkpoint | None:
    """W: the newest Full checkpoint on the lineage, read from indexes. A fact about the holders, not a decision."""
    candidates = complete(reading, lineage, epoch, bad, covers)
    return newest(c for c in candidates if copies_of(c, reading, domains) >= replicas_effective)
