"""Claims the epoch and chooses the restore point where no agent runs.

Rank 0 decides once, for all ranks of a plain `python` or `torchrun`. Rank 0 claims by exclusive create in the
persistent tier, reads what is there, and records what the epoch stands on; the others hear of it through the job's own
store. Afterwards every rank saves alone, as with an agent. What cannot be read is passed over with its name, and never
taken for absent: a job that was there is continued or refused, and begins at step 0 only where nothing restorable was
ever saved. Called by `backends`.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.checkpointer.library_mode.epoch_records import (
    EpochRecord,
    EpochWriter,
    parse_records,
    warn_of_other_program,
    write_record,
)
from surefoot.checkpointer.world import ProcessWorld
from surefoot.drain.survey import Survey, coverage, patiently, reasons, survey, unjudged
from surefoot.errors import Unreadable
from surefoot.ipc.trainer_messages import Attached
from surefoot.protocol.checkpoints.completeness import Covers, complete_persistent
from surefoot.protocol.checkpoints.lineage import Lineage, LineageEntry, newest
from surefoot.protocol.identities import Checkpoint
from surefoot.settings import JobSettings
from surefoot.tiers.persistent import ObjectStoreTier

log = logging.getLogger(__name__)

_MOST_TOLD = 5
"""Checkpoints that a sentence names."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Holds the lineage an epoch begins with and the checkpoints to keep.

    The lineage's last entry is the epoch's own.
    """

    lineage: Lineage
    spared: frozenset[Checkpoint] = frozenset()

    def to_text(self) -> str:
        spared = [[c.epoch, c.step] for c in sorted(self.spared)]
        lineage = [[e.epoch, [e.parent.epoch, e.parent.step] if e.parent else None, e.size] for e in self.lineage]
        return json.dumps({"lineage": lineage, "spared": spared})

    @classmethod
    def from_text(cls, text: str) -> Decision:
        """Parses the decision that rank 0 shared."""
        body = json.loads(text)
        entries = tuple(LineageEntry(e, Checkpoint(*p) if p else None, n) for e, p, n in body["lineage"])
        return cls(entries, frozenset(Checkpoint(*c) for c in body["spared"]))


def claim(tier: ObjectStoreTier, world_size: int, writer: EpochWriter | None = None) -> str:
    """Claims the next epoch, chooses its restore point and records both.

    Returns the decision as text for every rank. Raises Unreadable where checkpoints were saved and none can be
    restored; nothing is written or removed then.
    """
    writer = writer or EpochWriter.here()
    found = _look(tier)
    parent, spared = _chosen(found, frozenset())
    warn_of_other_program(found.place, found.records, writer)
    epoch = patiently(tier.claim_epoch)
    entry = LineageEntry(epoch, parent, world_size)
    write_record(tier, entry, writer)
    return Decision((*found.lineage, entry), spared).to_text()


def choose_again(tier: ObjectStoreTier, decision: Decision, bad: Mapping[Checkpoint, str]) -> str:
    """Chooses the next older restore point after one proved unreadable.

    It is recorded for the same epoch, for every rank. Raises Unreadable where there is none.
    """
    own = decision.lineage[-1]
    found = _look(tier, before=own.epoch)
    parent, spared = _chosen(found, frozenset(bad), bad)
    if parent is None:
        raise Unreadable("; ".join(bad.values()))
    entry = LineageEntry(own.epoch, parent, own.size)
    write_record(tier, entry, EpochWriter.here())
    return Decision((*found.lineage, entry), spared | decision.spared).to_text()


def attached(
    decision: Decision, world: ProcessWorld, settings: JobSettings, incarnation: str | None = None
) -> Attached:
    """This rank's start, from what rank 0 decided."""
    lineage = decision.lineage
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
        replicas=1,
        interval_steps=interval,
        persistent_interval_steps=interval,
        level=0,
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """Holds one reading of the job's folder."""

    place: str
    lineage: Lineage
    records: Mapping[int, EpochRecord | None]
    complete: tuple[Checkpoint, ...]
    """On the lineage, oldest first."""
    told: Mapping[Checkpoint, str]
    """Why the others cannot be restored."""
    unsure: Mapping[Checkpoint, str]
    """Those of them of which nobody can say whether they are complete."""
    was_complete: bool
    """Some checkpoint had been complete here, as its own record says."""


def _look(tier: ObjectStoreTier, before: int | None = None) -> _Found:
    """Reads the folder and selects what counts. `before`: as it was when that epoch was claimed."""
    surveyed = survey(tier)
    if before is not None:
        kept = tuple(c for c in surveyed.seen if c.epoch < before)
        manifests = tuple(m for m in surveyed.manifests if m.save.epoch < before)
        surveyed = Survey(kept, manifests, surveyed.left_out)
    covers, lost = coverage(tier, surveyed.manifests)
    records = parse_records(patiently(tier.epochs.recorded))
    lineage = _lineage(surveyed, {e: r for e, r in records.items() if before is None or e < before}, covers)
    complete = _complete(surveyed, lineage, covers)
    unsure = unjudged(surveyed, covers, lost)
    told = reasons(surveyed, covers, unsure)
    for checkpoint in set(surveyed.seen) - set(complete) - told.keys():
        told[checkpoint] = "another start of this job went on from an older step: it is on no branch that counts"
    return _Found(tier.place, lineage, records, tuple(complete), told, unsure, patiently(tier.had_newest))


def _lineage(surveyed: Survey, records: Mapping[int, EpochRecord | None], covers: Covers) -> Lineage:
    """The chain of epochs. One that saved and whose record is lost stood on the newest checkpoint that was complete
    before its own first: that is what a start chooses. One that saved nothing is no part of any branch."""
    entries: list[LineageEntry] = []
    worlds = {m.save.epoch: m.world for m in surveyed.manifests}
    for epoch in sorted({c.epoch for c in surveyed.seen} | records.keys()):
        known = records.get(epoch)
        if known is not None:
            entries.append(known.entry)
        elif epoch in worlds:
            first = min(c.step for c in surveyed.seen if c.epoch == epoch)
            parent = newest(c for c in _complete(surveyed, tuple(entries), covers) if c.step < first)
            log.warning("no record says what epoch %d stood on: it is taken for %s", epoch, parent or "step 0")
            entries.append(LineageEntry(epoch, parent, worlds[epoch]))
    return tuple(entries)


def _complete(surveyed: Survey, lineage: Lineage, covers: Covers) -> list[Checkpoint]:
    if not lineage:
        return []
    return complete_persistent(surveyed.manifests, lineage, lineage[-1].epoch, frozenset(), covers)


def _chosen(
    found: _Found, bad: frozenset[Checkpoint], why: Mapping[Checkpoint, str] | None = None
) -> tuple[Checkpoint | None, frozenset[Checkpoint]]:
    """The newest complete checkpoint that is not bad; those passed over are logged by name."""
    told = {**found.told, **(why or {})}
    spared = frozenset(found.unsure) | bad
    parent = newest(c for c in found.complete if c not in bad)
    if parent is not None:
        for checkpoint in sorted((c for c in told if c.step > parent.step), key=lambda c: c.step, reverse=True):
            log.warning("%s is passed over: %s; %s is restored", checkpoint, told[checkpoint], parent)
        return parent, spared
    if found.unsure or bad or (told and found.was_complete):
        raise Unreadable(_nothing(found, told))
    for checkpoint, reason in sorted(told.items()):
        log.warning("%s was never complete: %s; the job begins at step 0", checkpoint, reason)
    return None, spared


def _nothing(found: _Found, told: Mapping[Checkpoint, str]) -> str:
    """Describes what was there, why none of it can be restored, and what a person can do."""
    newest_first = sorted(told, key=lambda c: (c.step, c.epoch), reverse=True)
    listed = "; ".join(f"{checkpoint}: {told[checkpoint]}" for checkpoint in newest_first[:_MOST_TOLD])
    more = f"; and {len(newest_first) - _MOST_TOLD} more" if len(newest_first) > _MOST_TOLD else ""
    return (
        f"{found.place} has checkpoints and none can be restored, so nothing is begun, written or removed there: "
        f"{listed}{more}. Put the named files back from a copy, or begin anew under another job= or folder="
    )
