"""Follows a run folder: status, events and each rank's newest step.

Touches files; called by `supervise` a few times a second, so it reads only what is new.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.protocol.checkpoints.lineage import Lineage, LineageEntry
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.status import Incident, JobStatus
from surefoot_operator.cli.local.ledger import LedgerLine, finished_step, parse_line
from surefoot_operator.platforms.local.job_store import Store
from surefoot_operator.platforms.local.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class Happened:
    """One event from the operator."""

    at_seconds: float
    reason: str
    message: str
    warning: bool


@dataclass(slots=True)
class _LineTail:
    """A file that only grows, read up to `offset`; a line without its end waits for it."""

    path: Path
    offset: int = 0

    def lines(self) -> Iterator[str]:
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                content = file.read()
        except FileNotFoundError:
            return
        whole = content.rpartition(b"\n")[0]
        if not whole:
            return
        self.offset += len(whole) + 1
        for line in whole.split(b"\n"):
            yield line.decode(errors="replace")


@dataclass(slots=True)
class RunProgress:
    """Collects a run's history, of which status keeps only the newest."""

    folder: RunFolder
    status: JobStatus = field(default_factory=JobStatus)
    newest: dict[str, dict[int, LedgerLine]] = field(default_factory=dict)
    """Ledger name (`worker-INDEX-ATTEMPT`) -> rank -> its newest line."""
    incidents: dict[tuple[int, float], Incident] = field(default_factory=dict)
    lineage_of: dict[int, LineageEntry] = field(default_factory=dict)
    completed: set[Checkpoint] = field(default_factory=set)
    checkpoint_bytes: int | None = None
    """Of the newest complete checkpoint whose manifests were seen."""
    _tails: dict[str, _LineTail] = field(default_factory=dict)
    _stamp: tuple[int, int] = (0, 0)

    def look(self) -> list[Happened]:
        """Reads what is new; returns new events in order."""
        self._read_status()
        for path in sorted(self.folder.ledger.glob("*.jsonl")):
            ranks = self.newest.setdefault(path.stem, {})
            for text in self._tail(path).lines():
                line = parse_line(text)
                if line is not None:
                    ranks[line.rank] = line
        return [e for text in self._tail(self.folder.events).lines() if (e := _event(text)) is not None]

    @property
    def lineage(self) -> Lineage:
        """Every epoch ever committed, also those that status has dropped."""
        return tuple(self.lineage_of[epoch] for epoch in sorted(self.lineage_of))

    @property
    def finished_step(self) -> int:
        """The newest step that every rank of the present epoch has finished."""
        world = self.status.world
        if world is None:
            return 0
        # two attempts of one worker write two files: the epoch tells their ranks apart
        lines = [line for ranks in self.newest.values() for line in ranks.values()]
        return finished_step(lines, world.epoch, world.size)

    @property
    def reached_step(self) -> int:
        """The current step; while an epoch restores, the step it restores."""
        world = self.status.world
        if world is None or world.state == "Claimed":
            return self.status.step
        return max(self.finished_step, world.parent.step if world.parent is not None else 0)

    def all_lines(self) -> Iterator[LedgerLine]:
        """Reads every ledger line of the run."""
        return (line for _, line in self.lines_by_worker())

    def lines_by_worker(self) -> Iterator[tuple[str, LedgerLine]]:
        """Reads every ledger line with its worker, as `INDEX-ATTEMPT`."""
        for path in sorted(self.folder.ledger.glob("*.jsonl")):
            worker = path.stem.removeprefix("worker-")
            with open(path, encoding="utf-8", errors="replace") as file:
                for text in file:
                    line = parse_line(text)
                    if line is not None:
                        yield worker, line

    def _tail(self, path: Path) -> _LineTail:
        return self._tails.setdefault(path.name, _LineTail(path))

    def _read_status(self) -> None:
        try:
            found = self.folder.status.stat()
        except FileNotFoundError:
            return
        stamp = (found.st_mtime_ns, found.st_ino)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        self.status = Store(self.folder).status()
        for incident in self.status.incidents:
            self.incidents[incident.epoch, incident.detected_seconds] = incident
        for entry in self.status.lineage:
            self.lineage_of[entry.epoch] = entry
        if self.status.last_complete is not None:
            self.completed.add(self.status.last_complete)


def _event(text: str) -> Happened | None:
    try:
        body: dict[str, Any] = json.loads(text)
        return Happened(float(body["at"]), str(body["reason"]), str(body["message"]), bool(body["warning"]))
    except (ValueError, KeyError, TypeError):
        return None  # cannot be: whole lines only are read; people lose a sentence, the run nothing
