"""Writes and reads the lineage record of each epoch in library mode.

Two copies are written; one that is good suffices. Each record also names the program that wrote it, so that another
one which comes to the same folder is told before it writes anything. Called by `library`.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from surefoot.errors import OutOfBounds, TierError
from surefoot.protocol import bounds
from surefoot.protocol.checkpoints.lineage import LineageEntry
from surefoot.protocol.identities import Checkpoint
from surefoot.tiers.persistent import ObjectStoreTier

log = logging.getLogger(__name__)

MAX_PASSED_OVER = 16
"""Checkpoints that a record names; a start passes over one or two."""


@dataclass(frozen=True, slots=True)
class EpochWriter:
    """Identifies the program that began an epoch.

    `program` is the script's path; `began_at` are Unix seconds, for people.
    """

    program: str = ""
    host: str = ""
    began_at: float = 0.0

    @classmethod
    def here(cls) -> EpochWriter:
        return cls(
            str(Path(sys.argv[0]).resolve()) if sys.argv and sys.argv[0] else "", socket.gethostname(), time.time()
        )

    @property
    def name(self) -> str:
        """The script's file name, or the package's folder for `__main__.py`.

        It stays the same when the program is started from another path.
        """
        path = Path(self.program)
        return path.parent.name if path.name == "__main__.py" else path.name

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.began_at)) if self.began_at else "at some time"
        return f"{self.program or 'a program without a name'} on {self.host or 'some host'}, {when}"


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """One epoch's lineage entry and the program that began it.

    `passed_over`: newer checkpoints than its parent, which it could not use. As long as the epoch has saved nothing
    newer they still count: the next start may be able to.
    """

    entry: LineageEntry
    writer: EpochWriter = EpochWriter()
    passed_over: tuple[Checkpoint, ...] = ()


Record = EpochRecord | TierError | None
"""An error: the tier gives no copy; None: no copy is good."""


def write_record(
    tier: ObjectStoreTier,
    entry: LineageEntry,
    writer: EpochWriter | None = None,
    passed_over: Iterable[Checkpoint] = (),
) -> None:
    """Records a claimed epoch's parent and its program."""
    newest_last = sorted(passed_over, key=lambda c: (c.step, c.epoch))
    record = EpochRecord(entry, writer or EpochWriter.here(), tuple(newest_last[-MAX_PASSED_OVER:]))
    tier.epochs.record(entry.epoch, _text(record))


def parse_records(copies: Mapping[int, Sequence[str | TierError]]) -> dict[int, Record]:
    """Parses each epoch's record from its first good copy, else None, or why the tier gives none.

    Copies that are not good are logged.
    """
    records: dict[int, Record] = {}
    for epoch, answers in copies.items():
        silent = [answer for answer in answers if isinstance(answer, TierError)]
        texts = [answer for answer in answers if isinstance(answer, str)]
        good = [record for text in texts if (record := _read(text)) is not None and record.entry.epoch == epoch]
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


def warn_of_other_program(place: str, records: Mapping[int, Record], writer: EpochWriter) -> None:
    """Logs a warning if another program began the last epoch.

    Two trainings in one folder would remove each other's checkpoints.
    """
    known = [record for _, record in sorted(records.items()) if isinstance(record, EpochRecord)]
    last = known[-1].writer if known else None
    if last is not None and last.name and writer.name and last.name != writer.name:
        log.warning(
            "%s was last written by %s; this is %s. It goes on from there and then replaces the older checkpoints: if it"
            " is another training, end it now and give it a job= or a folder= of its own",
            place,
            last,
            writer.program,
        )


def _text(known: EpochRecord) -> str:
    entry = known.entry
    parent = [entry.parent.epoch, entry.parent.step] if entry.parent else None
    body: dict[str, object] = {
        "epoch": entry.epoch,
        "parent": parent,
        "size": entry.size,
        "writer": asdict(known.writer),
        "passed_over": [[c.epoch, c.step] for c in known.passed_over],
    }
    return json.dumps({**body, "crc32": _checksum(body)})


def _read(text: str) -> EpochRecord | None:
    """Parses a record; None if it is damaged. One without a checksum was written by an earlier version."""
    try:
        bounds.check_json("an epoch's record", text, bounds.MAX_SMALL_BYTES, bounds.MAX_SMALL_VALUES)
        body = json.loads(text)
        checksum = body.pop("crc32", None)
        if checksum is not None and checksum != _checksum(body):
            return None
        parent = Checkpoint(*map(int, body["parent"])) if body["parent"] else None
        writer: dict[str, Any] = body.get("writer", {})
        told = EpochWriter(
            str(writer.get("program", "")), str(writer.get("host", "")), float(writer.get("began_at", 0.0))
        )
        entry = LineageEntry(int(body["epoch"]), parent, int(body["size"]))
        passed_over = tuple(Checkpoint(*map(int, pair)) for pair in body.get("passed_over", [])[:MAX_PASSED_OVER])
        bounds.check("an epoch's record", "size", entry.size, bounds.MAX_RANKS)
        named = [
            number for c in (*passed_over, *([parent] if parent is not None else [])) for number in (c.epoch, c.step)
        ]
        for number in (entry.epoch, *named):
            bounds.check("an epoch's record", "an epoch or step", number, bounds.MAX_COUNT, -bounds.MAX_COUNT)
        return EpochRecord(entry, told, passed_over)
    except (OutOfBounds, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _checksum(body: Mapping[str, object]) -> int:
    return crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
