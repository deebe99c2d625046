"""Writes and reads the lineage record of each epoch in library mode.

Two copies are written; one that is good suffices. Each record also names the program that wrote it, so that another
one which comes to the same folder is told before it writes anything. Called by `library`.
"""

from __future__ import annotations

import json
import logging
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar
from zlib import crc32

from surefoot.checkpointer.library_mode.run_identity import GenerationOwner
from surefoot.errors import OutOfBounds, TierError, TierUnavailable
from surefoot.protocol import bounds
from surefoot.protocol.checkpoints.completeness import Lineage, LineageEntry, ancestor_generations, newest_checkpoint
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.timeouts import Backoff
from surefoot.tiers.persistent import ObjectStoreTier

log = logging.getLogger(__name__)


MAX_PASSED_OVER = 16
"""Checkpoints that a record names; a start passes over one or two."""


@dataclass(frozen=True, slots=True)
class GenerationRecord:
    """One epoch's lineage entry and the program that began it.

    `passed_over`: newer checkpoints than its parent, which it could not use. As long as the epoch has saved nothing
    newer they still count: the next start may be able to.
    """

    entry: LineageEntry
    writer: GenerationOwner = field(default_factory=GenerationOwner)
    passed_over: tuple[Checkpoint, ...] = ()


Record = GenerationRecord | TierError | None
"""An error: the tier gives no copy; None: no copy is good."""


def write_record(
    tier: ObjectStoreTier,
    entry: LineageEntry,
    writer: GenerationOwner | None = None,
    passed_over: Iterable[Checkpoint] = (),
) -> None:
    """Records a claimed epoch's parent and its program."""
    newest_last = sorted(passed_over, key=lambda c: (c.step, c.generation))
    record = GenerationRecord(entry, writer or GenerationOwner.here(), tuple(newest_last[-MAX_PASSED_OVER:]))
    tier.generations.write_lineage_record(entry.generation, _text(record))


def parse_records(copies: Mapping[int, Sequence[str | TierError]]) -> dict[int, Record]:
    """Parses each epoch's record from its first good copy, else None, or why the tier gives none.

    Copies that are not good are logged.
    """
    records: dict[int, Record] = {}
    for epoch, answers in copies.items():
        silent = [answer for answer in answers if isinstance(answer, TierError)]
        texts = [answer for answer in answers if isinstance(answer, str)]
        good = [record for text in texts if (record := _read(text)) is not None and record.entry.generation == epoch]
        if len(good) < len(texts):
            log.warning(
                "%d of %d copies of the record of epoch %d are damaged", len(texts) - len(good), len(answers), epoch
            )
        if good and silent:
            log.warning(
                "one copy of the record of epoch %d cannot be read, the other one is used: %s", epoch, silent[0]
            )
        records[epoch] = good[0] if good else next(iter(silent), None)
    return records


def owner_of(records: Mapping[int, Record], parent: Checkpoint | None) -> GenerationOwner | None:
    """Returns the run that saved a start's restore point; None: there is no restore point, or its record is lost."""
    record = records.get(parent.generation) if parent is not None else None
    return record.writer if isinstance(record, GenerationRecord) and record.writer.program else None


def _text(known: GenerationRecord) -> str:
    entry = known.entry
    parent = [entry.parent.generation, entry.parent.step] if entry.parent else None
    body: dict[str, object] = {
        "generation": entry.generation,
        "parent": parent,
        "size": entry.world_size,
        "writer": asdict(known.writer),
        "passed_over": [[c.generation, c.step] for c in known.passed_over],
    }
    return json.dumps({**body, "crc32": _checksum(body)})


def _read(text: str) -> GenerationRecord | None:
    """Parses a record; None if it is damaged."""
    try:
        bounds.require_json_in_bounds(
            "an epoch's record", text, bounds.MAX_SMALL_RECORD_BYTES, bounds.MAX_SMALL_RECORD_VALUES
        )
        body = json.loads(text)
        if body.pop("crc32") != _checksum(body):
            return None
        parent = Checkpoint(*map(int, body["parent"])) if body["parent"] else None
        writer = GenerationOwner.from_record(body["writer"])
        entry = LineageEntry(int(body["generation"]), parent, int(body["size"]))
        passed_over = tuple(Checkpoint(*map(int, pair)) for pair in body["passed_over"][:MAX_PASSED_OVER])
        bounds.require_in_range("an epoch's record", "size", entry.world_size, bounds.MAX_RANKS)
        named = [
            number
            for c in (*passed_over, *([parent] if parent is not None else []))
            for number in (c.generation, c.step)
        ]
        for number in (entry.generation, *named):
            bounds.require_in_range(
                "an epoch's record", "an epoch or step", number, bounds.MAX_COUNT, -bounds.MAX_COUNT
            )
        return GenerationRecord(entry, writer, passed_over)
    except (OutOfBounds, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _checksum(body: Mapping[str, object]) -> int:
    return crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


# ---- waiting for a silent tier ---------------------------------------------------------------------------------------
# Waits for a tier that is silent, for as long as the steps at stake are worth. The rule is pure. A start that gave up
# after a moment of throttling would repeat steps that nobody had lost; one that waited for ever would stand before a
# disk that is broken.

T = TypeVar("T")

MIN_SECONDS, MAX_SECONDS = 10.0, 900.0
AWAY_SECONDS = 20.0
"""For a tier that says nothing at all: no step is lost where the start then fails."""
MISSING_SECONDS = 10.0
"""For a checkpoint that its record names and no listing shows: caches of listings live for seconds."""
UNKNOWN_STEP_SECONDS = 1.0
_MAX_STEPS = 10**9
"""A number from a folder's name: a larger one would not even fit a float."""
_WAITS = Backoff(0.5, 10.0)


def worth_seconds(lost_steps: int, step_seconds: float | None) -> float:
    """How long to wait before so many steps are done again: as long as they took, within bounds."""
    if step_seconds is None or not math.isfinite(step_seconds) or step_seconds <= 0:
        step_seconds = UNKNOWN_STEP_SECONDS
    return min(MAX_SECONDS, max(MIN_SECONDS, min(lost_steps, _MAX_STEPS) * step_seconds))


def step_seconds_of(manifests: Iterable[RankManifest]) -> float | None:
    """Seconds a step took between the last two saves of one epoch; None where there are no two."""
    by_epoch: dict[int, dict[int, float]] = defaultdict(dict)
    for manifest in manifests:
        by_epoch[manifest.save.generation][manifest.save.step] = manifest.saved_at
    for _, saved_at in sorted(by_epoch.items(), reverse=True):
        if len(saved_at) > 1:
            (first, began), (last, ended) = sorted(saved_at.items())[-2:]
            return (ended - began) / (last - first)
    return None


class Patience:
    """Waits between two looks, and logs whenever the time waited has doubled."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._began: float | None = None
        self._tries, self._next_line = 0, 0.0

    def wait(self, reason: str, seconds: float) -> bool:
        """Waits for a moment; False once `seconds` have passed since the first call."""
        now = self._clock()
        self._began = now if self._began is None else self._began
        spent = now - self._began
        if spent >= seconds:
            return False
        if spent >= self._next_line:
            log.warning("%s: retried for up to %.0f s, %.0f s have passed", reason, seconds, spent)
            self._next_line = max(1.0, 2 * spent)
        self._tries += 1
        self._sleep(min(_WAITS.wait_seconds(self._tries, random.random()), seconds - spent))
        return True


def answered(place: str, read: Callable[[], T]) -> T:
    """Asks a tier until it answers; raises its last word where that takes too long."""
    patience = Patience()
    while True:
        try:
            return read()
        except TierUnavailable as away:
            if not patience.wait(f"{place} does not answer: {away}", AWAY_SECONDS):
                raise


# ---- restore choice --------------------------------------------------------------------------------------------------
# Chooses the restore point from one reading of a folder, and says what makes it doubtful. Pure. One look decides about
# all later work: what is silent may be there in a moment, and what the record of the newest checkpoint names must not
# be taken for never saved.


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
        return newest_checkpoint(c for c in self.complete if c not in bad)


@dataclass(frozen=True, slots=True)
class Doubt:
    """Says why a reading may not show all there is, and how long another one is worth waiting for."""

    reason: str
    seconds: float


def doubt_of(reading: FolderReading, bad: frozenset[Checkpoint]) -> Doubt | None:
    """Returns what stands against the newest good checkpoint, or against beginning at step 0."""
    parent = reading.newest_good(bad)
    step = parent.step if parent is not None else 0
    silent = newest_checkpoint(c for c in reading.silent if c.step > step and c not in bad)
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
    return parent is None or (named.step > parent.step and named.generation >= parent.generation)


def passed_over(reading: FolderReading, parent: Checkpoint | None, bad: frozenset[Checkpoint]) -> list[Checkpoint]:
    """What is newer than the parent, was seen or named, and is not used now."""
    named = frozenset([reading.named]) if reading.named is not None else frozenset()
    step = parent.step if parent is not None else 0
    return [c for c in reading.seen | named | bad if c.step > step]


def reopened(lineage: Lineage, records: Mapping[int, Record]) -> frozenset[Checkpoint]:
    """What the starts that led to the newest epoch passed over."""
    entries = [
        records.get(epoch) for epoch in (ancestor_generations(lineage, lineage[-1].generation) if lineage else ())
    ]
    return frozenset(c for record in entries if isinstance(record, GenerationRecord) for c in record.passed_over)
