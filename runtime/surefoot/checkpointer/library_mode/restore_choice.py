"""Chooses the restore point from one reading of a folder, and says what makes it doubtful.

Pure. One look decides about all later work: what is silent may be there in a moment, and what the record of the newest
checkpoint names must not be taken for never saved. Called by `library`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.checkpointer.library_mode.epoch_records import EpochRecord, Record
from surefoot.checkpointer.library_mode.waiting import MISSING_SECONDS, worth_seconds
from surefoot.protocol.checkpoints.lineage import Lineage, ancestry, newest
from surefoot.protocol.identities import Checkpoint


@dataclass(frozen=True, slots=True)
class FolderReading:
    """Holds one reading of the job's folder."""

    place: str
    lineage: Lineage
    records: Mapping[int, Record]
    complete: tuple[Checkpoint, ...]
    """What may be restored: on the lineage, or passed over by a start that has saved nothing newer."""
    seen: frozenset[Checkpoint]
    told: Mapping[Checkpoint, str]
    """Why the others cannot be restored."""
    unsure: Mapping[Checkpoint, str]
    """Those of them of which nobody can say whether they are complete."""
    silent: Mapping[Checkpoint, str]
    """Those of them that the tier does not give: they may be good."""
    named: Checkpoint | None = None
    """The newest whole checkpoint, as its record says."""
    named_problem: str = ""
    """Why that record says nothing, though it is there."""
    step_seconds: float | None = None

    def newest_good(self, bad: frozenset[Checkpoint]) -> Checkpoint | None:
        return newest(c for c in self.complete if c not in bad)


@dataclass(frozen=True, slots=True)
class Doubt:
    """Says why a reading may not show all there is, and how long another one is worth waiting for."""

    reason: str
    seconds: float


def doubt_of(reading: FolderReading, bad: frozenset[Checkpoint]) -> Doubt | None:
    """Returns what stands against the newest good checkpoint, or against beginning at step 0."""
    parent = reading.newest_good(bad)
    step = parent.step if parent is not None else 0
    silent = newest(c for c in reading.silent if c.step > step and c not in bad)
    if silent is not None:
        return Doubt(
            f"{silent} cannot be read: {reading.silent[silent]}",
            worth_seconds(silent.step - step, reading.step_seconds),
        )
    named = reading.named
    if named is not None and named not in reading.seen | bad and _is_missed(named, parent):
        return Doubt(f"newest.json names {named}, but no file of it exists", MISSING_SECONDS)
    if reading.named_problem and parent is None and not bad:
        return Doubt(f"no checkpoint can be restored, and {reading.named_problem}", MISSING_SECONDS)
    return None


def _is_missed(named: Checkpoint, parent: Checkpoint | None) -> bool:
    """Whether work is lost with it: a crash leaves the record behind what was saved since."""
    return parent is None or (named.step > parent.step and named.epoch >= parent.epoch)


def passed_over(reading: FolderReading, parent: Checkpoint | None, bad: frozenset[Checkpoint]) -> list[Checkpoint]:
    """What is newer than the parent, was seen or named, and is not used now."""
    named = frozenset([reading.named]) if reading.named is not None else frozenset()
    step = parent.step if parent is not None else 0
    return [c for c in reading.seen | named | bad if c.step > step]


def reopened(lineage: Lineage, records: Mapping[int, Record]) -> frozenset[Checkpoint]:
    """What the starts that led to the newest epoch passed over."""
    entries = [records.get(epoch) for epoch in (ancestry(lineage, lineage[-1].epoch) if lineage else ())]
    return frozenset(c for record in entries if isinstance(record, EpochRecord) for c in record.passed_over)
