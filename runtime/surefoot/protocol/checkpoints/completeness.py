"""Decides which checkpoints are complete, fully replicated, and to restore from.

Pure, over what holders and the persistent tier were read to have. Called by the operator when it changes the world, by
whoever computes the watermark, and by library mode. A silent tier is unknown, never empty: callers say who answered,
nothing here guesses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from surefoot.protocol.bounds import has_every_rank
from surefoot.protocol.checkpoints.lineage import Lineage, entry_of, newest, on_lineage
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, HolderId

Covers = Mapping[frozenset[str], bool]
"""For each set of layout digests that was checked: whether together they cover every tensor exactly once."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Names one record that a listing could not read, and `why`.

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
    """Holds the index entries that were read, by tier.

    Those of sealed holders, and manifests in the persistent tier (None: not read, unknown).
    """

    holders: Mapping[HolderId, tuple[RankManifest, ...]]
    persistent: tuple[RankManifest, ...] | None
    _found: dict[Checkpoint, dict[int, list[RankManifest]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _having: dict[Checkpoint, dict[int, dict[HolderId, RankManifest]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    _layouts: dict[Checkpoint, frozenset[str] | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _copies: dict[Checkpoint, tuple[Mapping[HolderId, str], int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def manifests(self) -> Mapping[Checkpoint, Mapping[int, list[RankManifest]]]:
        """Maps checkpoint and rank to all manifests seen; computed once."""
        if not self._found:
            found: dict[tuple[int, int], dict[int, list[RankManifest]]] = defaultdict(lambda: defaultdict(list))
            for source in (*self.holders.values(), self.persistent or ()):
                for manifest in source:
                    save = manifest.save
                    found[save.epoch, save.step][save.rank].append(manifest)
            self._found.update({Checkpoint(*key): dict(ranks) for key, ranks in found.items()})
        return self._found

    def having(self) -> Mapping[Checkpoint, Mapping[int, Mapping[HolderId, RankManifest]]]:
        """Maps checkpoint and rank to holders with their manifests; computed once."""
        if not self._having:
            found: dict[tuple[int, int], dict[int, dict[HolderId, RankManifest]]] = defaultdict(
                lambda: defaultdict(dict)
            )
            for holder, manifests in self.holders.items():
                for manifest in manifests:
                    save = manifest.save
                    found[save.epoch, save.step][save.rank][holder] = manifest
            self._having.update({Checkpoint(*key): dict(ranks) for key, ranks in found.items()})
        return self._having


def layouts_to_check(reading: TierReading) -> set[frozenset[str]]:
    """Sets of layout digests, one per checkpoint with all ranks.

    `Covers` must answer whether each set covers all tensors.
    """
    wanted = set()
    for ranks in reading.manifests().values():
        if has_every_rank(ranks, next(iter(ranks.values()))[0].world):
            wanted.add(frozenset(m.layout for copies in ranks.values() for m in copies))
    return wanted


def is_complete(ranks: Mapping[int, list[RankManifest]], covers: Covers) -> bool:
    """Returns whether every rank's save is there and covers each tensor once.

    All must agree on the size of the world. Two manifests of one rank that describe different bytes make the checkpoint
    incomplete: somebody wrote twice.
    """
    layouts = _agreed_layouts(ranks)
    return layouts is not None and covers.get(layouts, False)


def _agreed_layouts(ranks: Mapping[int, list[RankManifest]]) -> frozenset[str] | None:
    """The layouts of a checkpoint whose ranks are all there and agree; None: they are not, or do not."""
    if not ranks:
        return None
    world = next(iter(ranks.values()))[0].world
    if not has_every_rank(ranks, world):
        return None
    for copies in ranks.values():
        if any(m.world != world or not m.same_bytes_as(copies[0]) for m in copies):
            return None
    return frozenset(copies[0].layout for copies in ranks.values())


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
        and (layouts := _layouts_of(reading, checkpoint, ranks)) is not None
        and covers.get(layouts, False)
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def _layouts_of(
    reading: TierReading, checkpoint: Checkpoint, ranks: Mapping[int, list[RankManifest]]
) -> frozenset[str] | None:
    """`_agreed_layouts`, worked out once a reading: every round asks, and what was read seldom changes."""
    if checkpoint not in reading._layouts:
        reading._layouts[checkpoint] = _agreed_layouts(ranks)
    return reading._layouts[checkpoint]


def _world_fits(lineage: Lineage, checkpoint: Checkpoint, ranks: int) -> bool:
    """Whether the manifests' world is that epoch's: manifests that agree among themselves may still be of another
    world."""
    entry = entry_of(lineage, checkpoint.epoch)
    return entry is None or entry.size == ranks


def copies_of(checkpoint: Checkpoint, reading: TierReading, domains: Mapping[HolderId, str]) -> int:
    """Counts failure domains with a rank's save; the minimum over ranks."""
    counted = reading._copies.get(checkpoint)
    if counted is None or counted[0] is not domains:
        ranks = reading.having().get(checkpoint, {})
        world = max((manifest.world for copies in ranks.values() for manifest in copies.values()), default=0)
        copies = [len({domains.get(h, h.node) for h in holders}) for holders in ranks.values()]
        counted = reading._copies[checkpoint] = (domains, min(copies) if has_every_rank(ranks, world) else 0)
    return counted[1]


def complete_persistent(
    persistent: Iterable[RankManifest], lineage: Lineage, epoch: int, bad: frozenset[Checkpoint], covers: Covers
) -> list[Checkpoint]:
    """Checkpoints that the persistent tier alone completes, oldest first."""
    return complete(TierReading({}, tuple(persistent)), lineage, epoch, bad, covers)


def effective_replicas(replicas: int, live_domains: int) -> int:
    """R_eff: `replicas`, at most one per live failure domain, at least 1."""
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
    """W: the newest fully replicated checkpoint on the lineage.

    Read from the indexes: a fact about the holders, not a decision.
    """
    candidates = complete(reading, lineage, epoch, bad, covers)
    return newest(c for c in candidates if copies_of(c, reading, domains) >= replicas_effective)
