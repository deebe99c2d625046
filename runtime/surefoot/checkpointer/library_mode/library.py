"""Claims the epoch and chooses the restore point where no agent runs.

Rank 0 decides once, for all ranks of a plain `python` or `torchrun`. Rank 0 claims by exclusive create in the
persistent tier, reads what is there, and records what the epoch stands on; the others hear of it through the job's own
store. Afterwards every rank saves alone, as with an agent. What is damaged is passed over with its name, and what is
silent is waited for; neither is taken for absent: a job that was there is continued or refused, and begins at step 0
only where nothing restorable was ever saved. Called by `backends`.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from surefoot.checkpointer.library_mode.epoch_records import (
    FolderReading,
    Patience,
    Record,
    answered,
    doubt_of,
    owner_of,
    parse_records,
    passed_over,
    reopened,
    step_seconds_of,
    write_record,
)
from surefoot.checkpointer.library_mode.other_writers import WriterMark, wait_for_former_writers
from surefoot.checkpointer.library_mode.run_identity import GenerationOwner, start_line
from surefoot.checkpointer.process_group import ProcessGroupInfo, decide_from_all_ranks, withdraw
from surefoot.errors import ConfigurationError, Corrupt, SurefootError, TierError, TierUnavailable, Unreadable
from surefoot.flush.garbage_collection import (
    Survey,
    explain_unrestorable,
    judge_coverage,
    retry_while_unavailable,
    survey_tier,
    undecidable_checkpoints,
)
from surefoot.ipc.trainer_messages import Attached
from surefoot.protocol.checkpoints.completeness import (
    Covers,
    Lineage,
    LineageEntry,
    complete_in_persistent_tier,
    newest_checkpoint,
)
from surefoot.protocol.identities import Checkpoint
from surefoot.settings import JobSettings
from surefoot.tiers.persistent import ObjectStoreTier

log = logging.getLogger(__name__)


_MAX_LISTED = 5
"""Checkpoints that a sentence names."""
ACCEPT_STEP = "SUREFOOT_ACCEPT_STEP"
SECOND_WRITER = "SUREFOOT_SECOND_WRITER"


@dataclass(frozen=True, slots=True)
class StartDecision:
    """Holds the lineage an epoch begins with and the checkpoints to keep.

    The lineage's last entry is the epoch's own.
    """

    lineage: Lineage
    kept_for_rollback: frozenset[Checkpoint] = frozenset()

    def to_text(self) -> str:
        spared = [[c.generation, c.step] for c in sorted(self.kept_for_rollback)]
        lineage = [
            [e.generation, [e.parent.generation, e.parent.step] if e.parent else None, e.world_size]
            for e in self.lineage
        ]
        return json.dumps({"lineage": lineage, "spared": spared})

    @classmethod
    def from_text(cls, text: str) -> StartDecision:
        """Parses the decision that rank 0 shared."""
        body = json.loads(text)
        entries = tuple(LineageEntry(e, Checkpoint(*p) if p else None, n) for e, p, n in body["lineage"])
        return cls(entries, frozenset(Checkpoint(*c) for c in body["spared"]))


@dataclass(frozen=True, slots=True)
class Allowed:
    """Holds what a person allows this start.

    `step` to go on from, though a newer one may be there; a second writer beside one that has not ended.
    """

    step: int | None = None
    second_writer: bool = False

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Allowed:
        """Reads what the variables say. Raises ConfigurationError that names one."""
        step, second = environment.get(ACCEPT_STEP), environment.get(SECOND_WRITER)
        if step and not (step.isascii() and step.isdecimal()):
            raise ConfigurationError(
                f"{ACCEPT_STEP} is {step!r}: set it to the step to continue from, 0 for the beginning"
            )
        if second and second != "allow":
            raise ConfigurationError(f"{SECOND_WRITER} is {second!r}: set it to allow, or leave it out")
        return cls(int(step) if step else None, bool(second))


NOTHING = Allowed()


def claim(
    tier: ObjectStoreTier,
    world_size: int,
    writer: GenerationOwner | None = None,
    allowed: Allowed = NOTHING,
    hint: str = "",
) -> str:
    """Claims the next epoch, chooses its restore point and records both.

    Returns the decision as text for every rank. Raises Unreadable where checkpoints were saved and none can be
    restored, or a newer one may be there; nothing is written or removed then.
    """
    writer, mark = writer or GenerationOwner.here(), WriterMark.here()
    wait_for_former_writers(tier, mark, allowed.second_writer)
    reading = _settled(tier, frozenset(), allowed)
    parent, spared = _chosen(reading, frozenset())
    epoch = answered(tier.location, tier.claim_generation)
    # at once: a run that this claim overtakes may save now, and names by this heartbeat who overtook it
    answered(tier.location, lambda: tier.generations.write_heartbeat(epoch, mark.to_text()))
    if epoch > 1 + max((c.generation for c in reading.seen), default=0) and epoch - 1 not in reading.records:
        # claims were there that no listing had shown: another start came first, or the listing was an old one
        reading = _settled(tier, frozenset(), allowed, before=epoch)
        parent, spared = _chosen(reading, frozenset())
    entry = LineageEntry(epoch, parent, world_size)
    step = parent.step if parent is not None else 0
    log.warning("%s", start_line(reading.place, step, owner_of(reading.records, parent), writer, hint))
    skipped = passed_over(reading, parent, frozenset())
    answered(tier.location, lambda: write_record(tier, entry, writer, skipped))
    return StartDecision((*reading.lineage, entry), spared).to_text()


def choose_again(
    tier: ObjectStoreTier, decision: StartDecision, bad: Mapping[Checkpoint, str], allowed: Allowed = NOTHING
) -> str:
    """Chooses the next older restore point after one proved unreadable.

    It is recorded for the same epoch, for every rank. Raises Unreadable where there is none.
    """
    own = decision.lineage[-1]
    reading = _settled(tier, frozenset(bad), allowed, before=own.generation)
    parent, spared = _chosen(reading, frozenset(bad), bad)
    if parent is None:
        raise Unreadable("; ".join(bad.values()))
    entry = LineageEntry(own.generation, parent, own.world_size)
    skipped = passed_over(reading, parent, frozenset(bad))
    answered(tier.location, lambda: write_record(tier, entry, GenerationOwner.here(), skipped))
    return StartDecision((*reading.lineage, entry), spared | decision.kept_for_rollback).to_text()


def build_attach_reply(
    decision: StartDecision, world: ProcessGroupInfo, settings: JobSettings, incarnation: str | None = None
) -> Attached:
    """This rank's start, from what rank 0 decided."""
    lineage = decision.lineage
    persistent = settings.persistent
    interval = persistent.interval_steps if persistent is not None else settings.interval_steps
    return Attached(
        job=settings.job,
        generation=lineage[-1].generation,
        world_size=world.size,
        rank=world.rank,
        incarnation=incarnation or secrets.token_hex(8),
        parent=lineage[-1].parent,
        lineage=tuple((e.generation, e.parent, e.world_size) for e in lineage),
        servers=(),
        replicas=1,
        interval_steps=interval,
        persistent_interval_steps=interval,
        interval_exponent=0,
    )


def _settled(
    tier: ObjectStoreTier, bad: frozenset[Checkpoint], allowed: Allowed, before: int | None = None
) -> FolderReading:
    """Reads the folder until nothing speaks against the choice; raises where that takes longer than it is worth."""
    patience = Patience()
    while True:
        reading = answered(tier.location, lambda: _read_folder(tier, before))
        doubt = doubt_of(reading, bad)
        if doubt is None:
            return reading
        parent = reading.newest_good(bad)
        if allowed.step == (parent.step if parent is not None else 0):
            log.warning("%s; the job continues from step %d because %s is set", doubt.reason, allowed.step, ACCEPT_STEP)
            return reading
        if not patience.wait(f"{tier.location}: {doubt.reason}", doubt.seconds):
            raise Unreadable(_doubtful(reading, doubt.reason, parent))


def _read_folder(tier: ObjectStoreTier, before: int | None = None) -> FolderReading:
    """Reads the folder and selects what counts. `before`: as it was when that epoch was claimed."""
    newest_recorded, problem = _named_newest(tier, before)
    surveyed = survey_tier(tier, expected_checkpoint=newest_recorded)
    if before is not None:
        earlier_checkpoints = tuple(c for c in surveyed.all_checkpoints if c.generation < before)
        manifests = tuple(m for m in surveyed.manifests if m.save.generation < before)
        surveyed = Survey(earlier_checkpoints, manifests, surveyed.unread_records)
    covers, lost = judge_coverage(tier, surveyed.manifests)
    records = parse_records(retry_while_unavailable(tier.generations.read_lineage_records))
    records = {epoch: record for epoch, record in records.items() if before is None or epoch < before}
    lineage = _lineage(surveyed, records, covers)
    complete = _complete(surveyed, lineage, covers)
    for checkpoint in sorted(reopened(lineage, records) - set(complete)):
        if checkpoint in complete_in_persistent_tier(
            surveyed.manifests, lineage, checkpoint.generation, frozenset(), covers
        ):
            complete.append(checkpoint)
    unsure = undecidable_checkpoints(surveyed, covers, lost)
    silent = undecidable_checkpoints(
        replace(surveyed, unread_records=tuple(r for r in surveyed.unread_records if r.is_silent)),
        covers,
        [r for r in lost if r.is_silent],
    )
    unrestorable_reasons = explain_unrestorable(surveyed, covers, unsure)
    for checkpoint in set(surveyed.all_checkpoints) - set(complete) - unrestorable_reasons.keys():
        unrestorable_reasons[checkpoint] = (
            "another start of this job continued from an older step and saved, so the current branch does not have it"
        )
    return FolderReading(
        tier.location,
        lineage,
        records,
        tuple(complete),
        frozenset(surveyed.all_checkpoints),
        unrestorable_reasons,
        unsure,
        silent,
        newest_recorded,
        problem,
        step_seconds_of(surveyed.manifests),
    )


def _named_newest(tier: ObjectStoreTier, before: int | None) -> tuple[Checkpoint | None, str]:
    """What the record of the newest checkpoint names, and why it cannot be read; it alone stops no start."""
    try:
        newest_recorded = retry_while_unavailable(tier.read_newest_record)
    except (TierUnavailable, Corrupt) as problem:
        log.warning("the record of the newest checkpoint cannot be used, only the listing: %s", problem)
        return None, str(problem)
    if newest_recorded is not None and before is not None and newest_recorded.generation >= before:
        return None, ""
    return newest_recorded, ""


def _lineage(surveyed: Survey, records: Mapping[int, Record], covers: Covers) -> Lineage:
    """The chain of epochs that saved. One whose record is lost stood on the newest checkpoint that was complete before
    its own first: that is what a start chooses. One that saved nothing, recorded or not, is no part of any branch: it
    may have seen too little, and what it did not see is as good as before."""
    entries: list[LineageEntry] = []
    worlds = {m.save.generation: m.world_size for m in surveyed.manifests}
    saved = worlds.keys() | {r.checkpoint.generation for r in surveyed.unread_records if r.checkpoint is not None}
    for epoch in sorted(saved):
        record = records.get(epoch)
        if isinstance(record, TierError):
            raise TierUnavailable(f"no record of epoch {epoch} can be read: {record}")
        if record is not None:
            entries.append(record.entry)
        elif epoch in worlds:
            first = min(c.step for c in surveyed.all_checkpoints if c.generation == epoch)
            parent = newest_checkpoint(c for c in _complete(surveyed, tuple(entries), covers) if c.step < first)
            log.warning("no record says what epoch %d stood on: it is taken for %s", epoch, parent or "step 0")
            entries.append(LineageEntry(epoch, parent, worlds[epoch]))
    return tuple(entries)


def _complete(surveyed: Survey, lineage: Lineage, covers: Covers) -> list[Checkpoint]:
    if not lineage:
        return []
    return complete_in_persistent_tier(surveyed.manifests, lineage, lineage[-1].generation, frozenset(), covers)


def _chosen(
    reading: FolderReading, bad: frozenset[Checkpoint], why: Mapping[Checkpoint, str] | None = None
) -> tuple[Checkpoint | None, frozenset[Checkpoint]]:
    """The newest complete checkpoint that is not bad; those passed over are logged by name."""
    reasons = {**reading.told, **(why or {})}
    unseen = frozenset([reading.named] if reading.named is not None else []) - reading.seen
    spared = frozenset(reading.unsure) | bad | unseen
    parent = reading.newest_good(bad)
    if parent is not None:
        for checkpoint in sorted((c for c in reasons if c.step > parent.step), key=lambda c: c.step, reverse=True):
            log.warning(
                "%s is not restored: %s; %s is restored instead. The next start tries the former again if no newer step is saved",
                checkpoint,
                reasons[checkpoint],
                parent,
            )
        return parent, spared
    if reading.unsure or bad or (reasons and reading.named is not None):
        raise Unreadable(_nothing(reading, reasons))
    for checkpoint, reason in sorted(reasons.items()):
        log.warning("%s was never complete: %s; the job begins at step 0", checkpoint, reason)
    return None, spared


def _doubtful(reading: FolderReading, reason: str, parent: Checkpoint | None) -> str:
    older = f"{parent} is the newest that can be restored" if parent is not None else "no checkpoint can be restored"
    return (
        f"{reading.place}: {reason}; {older}. This start is refused, and wrote and removed nothing there. Put the missing"
        " files back or make them readable, or set"
        f" {ACCEPT_STEP}={parent.step if parent is not None else 0} to continue without them"
    )


def _nothing(reading: FolderReading, told: Mapping[Checkpoint, str]) -> str:
    """Describes what was there, why none of it can be restored, and what a person can do."""
    newest_first = sorted(told, key=lambda c: (c.step, c.generation), reverse=True)
    listed = "; ".join(f"{checkpoint}: {told[checkpoint]}" for checkpoint in newest_first[:_MAX_LISTED])
    more = f"; and {len(newest_first) - _MAX_LISTED} more" if len(newest_first) > _MAX_LISTED else ""
    return (
        f"{reading.place} has checkpoints and none can be restored. This start is refused, and wrote and removed nothing"
        f" there: {listed}{more}. Put the named files back from a copy, or start from step 0 under another job_uid= or folder="
    )


# ---- restore agreement -----------------------------------------------------------------------------------------------
# Makes all ranks restore the same checkpoint, or the next older one. Without an agent nobody stops the ranks when a
# checkpoint turns out to be damaged. A rank that chose another by itself would train on another state than its peers;
# one that gave up would do so again at each start, beside good older checkpoints. So each says how its reading ended,
# rank 0 decides for all, and they read again.

Again = Callable[[dict[Checkpoint, str]], str]
"""Chooses anew, given what proved unreadable and why; rank 0's alone."""


class RestoreAgreement:
    """Takes one rank's part in the agreement.

    `moved` receives each new decision before this rank reads again.
    """

    def __init__(
        self, world: ProcessGroupInfo, decision: StartDecision, again: Again, moved: Callable[[StartDecision], None]
    ) -> None:
        self._world, self._decision, self._again, self._moved = world, decision, again, moved
        self._bad: dict[Checkpoint, str] = {}

    def agree(self, problem: Unreadable | None) -> bool:
        """Returns whether every rank read the checkpoint; if not, moves to another.

        Raises Unreadable where no older checkpoint is good.
        """
        parent = self._decision.lineage[-1].parent
        assert parent is not None, "only what was restored is agreed on"
        rank_message = f"?{problem}" if problem is not None else ""
        decision_text = decide_from_all_ranks(self._world, rank_message, lambda words: self._decided(parent, words))
        if not decision_text:
            return True
        self._decision = StartDecision.from_text(decision_text)
        if problem is not None:
            log.warning("%s cannot be read: %s", parent, problem)
        log.warning("%s is restored instead of %s, on every rank", self._decision.lineage[-1].parent, parent)
        self._moved(self._decision)
        return False

    def withdraw(self, error: BaseException) -> None:
        """Fails the agreement after this rank's own error, so nobody waits."""
        withdraw(self._world, f"{type(error).__name__}: {error}")

    def _decided(self, parent: Checkpoint, said: list[str]) -> str:
        ended = [(rank, text[1:]) for rank, text in enumerate(said) if text.startswith("!")]
        if ended:
            raise SurefootError(f"rank {ended[0][0]} could not restore {parent}: {ended[0][1]}")
        unreadable = [(rank, text[1:]) for rank, text in enumerate(said) if text.startswith("?")]
        if not unreadable:
            return ""
        self._bad[parent] = f"rank {unreadable[0][0]} cannot read it: {unreadable[0][1]}"
        return self._again(self._bad)
