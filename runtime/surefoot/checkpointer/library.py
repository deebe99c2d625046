"""Without an agent (plain `python`, `torchrun`): claiming the epoch and choosing the restore point, once for all ranks.

Rank 0 claims by exclusive create in the persistent tier, reads what is there, and records what the epoch stands on;
the others hear of it through the job's own store. Afterwards every rank saves alone, as with an agent. Called by
`links`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable

from surefoot.agent.line import Attached
from surefoot.checkpointer.world import World
from surefoot.errors import Corrupt, ProtocolError, TierError
from surefoot.format.layouts import read_layout
from surefoot.protocol.completeness import TierReading, complete_persistent, layouts_to_check
from surefoot.protocol.coverage import uncovered
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.lineage import Lineage, LineageEntry, newest
from surefoot.protocol.records import RankManifest
from surefoot.settings import JobSettings
from surefoot.tiers.persistent import PersistentTier


def claim(tier: PersistentTier, world_size: int) -> str:
    """Claims the next epoch, chooses its restore point, records both; returns the record of the whole lineage."""
    epoch = tier.claim_epoch()
    lineage = recorded_lineage(tier)
    parent = newest(usable(tier, lineage))
    entry = LineageEntry(epoch, parent, world_size)
    record(tier, entry)
    return json.dumps([_entry_text(e) for e in (*lineage, entry)])


def record(tier: PersistentTier, entry: LineageEntry) -> None:
    """Says what a claimed epoch stands on."""
    tier.record_epoch(entry.epoch, _entry_text(entry))


def usable(tier: PersistentTier, lineage: Lineage) -> list[Checkpoint]:
    """Complete checkpoints on the lineage of the newest recorded epoch, oldest first."""
    if not lineage:
        return []
    manifests = tier.manifests()
    covers = coverage(tier, manifests)
    return complete_persistent(manifests, lineage, lineage[-1].epoch, frozenset(), covers)


def coverage(tier: PersistentTier, manifests: Iterable[RankManifest]) -> dict[frozenset[str], bool]:
    """For each set of layouts that some world saved: whether they cover every tensor. Unreadable is not."""
    found = {}
    for digests in layouts_to_check(TierReading({}, tuple(manifests))):
        try:
            found[digests] = uncovered(read_layout(d, tier.read_layout(d)).layout for d in digests) is None
        except (Corrupt, ProtocolError, TierError):
            found[digests] = False
    return found


def recorded_lineage(tier: PersistentTier) -> Lineage:
    """What earlier starts recorded; a record that cannot be read is an epoch that never began."""
    found = []
    for text in tier.recorded_epochs().values():
        try:
            found.append(_entry(text))
        except (ValueError, KeyError, TypeError):
            continue
    return tuple(found)


def attached(record: str, world: World, settings: JobSettings, incarnation: str | None = None) -> Attached:
    """This rank's start, from what rank 0 decided."""
    lineage = tuple(_entry(text) for text in json.loads(record))
    persistent = settings.persistent
    interval = persistent.interval_steps if persistent is not None else settings.interval_steps
    return Attached(
        job=settings.job,
        epoch=lineage[-1].epoch,
        world=world.size,
        rank=world.rank,
        incarnation=incarnation or secrets.token_hex(8),
        parent=lineage[-1].parent,
        lineage=tuple((e.epoch, e.parent, e.size) for e in lineage),
        holders=(),
        targets=(),
        replicas=1,
        interval_steps=interval,
        persistent_interval_steps=interval,
        level=0,
    )


def _entry_text(entry: LineageEntry) -> str:
    parent = [entry.parent.epoch, entry.parent.step] if entry.parent else None
    return json.dumps({"epoch": entry.epoch, "parent": parent, "size": entry.size})


def _entry(text: str) -> LineageEntry:
    body = json.loads(text)
    parent = Checkpoint(*map(int, body["parent"])) if body["parent"] else None
    return LineageEntry(int(body["epoch"]), parent, int(body["size"]))
