"""Follows a run folder's status, events and ledgers of steps.

Touches files; called by `supervise` a few times a second, so it reads only what is new.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.protocol.checkpoints.completeness import Lineage, LineageEntry, ancestor_generations, generation_of_step
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.status import Incident, JobStatus, SkippedData
from surefoot_operator.platforms.local.platform import RunFolderStore
from surefoot_operator.platforms.local.run_folder import RunFolder

# ---- ledger of steps -------------------------------------------------------------------------------------------------
# Counts samples along the final lineage from all workers' ledgers. Pure. An agent appends one line a finished step and
# rank: {"generation", "step", "rank", "loss", "samples": [[start, stop], …], "span", "at", "seconds", "stall_seconds"}. Step
# s (the first is 1) must consume exactly positions [(s-1)·B, s·B) of the global order, once. Where steps are of unlike
# sizes, each line tells its step's `span`, of all ranks together: it must begin where the one before ended. A job that
# took up an older one's checkpoint counts from there on.


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One step as one rank finished it."""

    generation: int
    step: int
    rank: int
    loss: float | None
    samples: tuple[tuple[int, int], ...] | None
    at_seconds: float
    stall_seconds: float | None = None
    seconds: float | None = None
    span: tuple[int, int] | None = None
    """Of all ranks together, where steps are of unlike sizes."""


@dataclass(frozen=True, slots=True)
class SampleAccount:
    """Counts of samples and steps along the final lineage.

    `batch` is the largest step's samples. `lost` and `repeated` count samples, `missing_steps` names steps without any line. `unknown` counts samples of ranks
    that have no line of their step: a line that could not be written proves no sample lost.
    """

    steps: int
    batch: int
    lost: int
    repeated: int
    missing_steps: tuple[int, ...] = ()
    unknown: int = 0
    skipped: tuple[tuple[int, int], ...] = ()
    """Positions [start, stop) that a rollback had loaders leave out: neither lost nor trained on."""

    @property
    def skipped_count(self) -> int:
        return sum(stop - start for start, stop in self.skipped)


LinesByStep = dict[int, list[LedgerEntry]]


def parse_line(text: str) -> LedgerEntry | None:
    """Parses one ledger line; None where a killed writer left it torn."""
    try:
        body = json.loads(text)
        if not isinstance(body, dict):
            return None
        samples, span = body.get("samples"), body.get("span")
        return LedgerEntry(
            generation=int(body["generation"]),
            step=int(body["step"]),
            rank=int(body["rank"]),
            loss=None if body.get("loss") is None else float(body["loss"]),
            samples=None if samples is None else tuple((int(start), int(stop)) for start, stop in samples),
            at_seconds=float(body["at"]),
            stall_seconds=body.get("stall_seconds"),
            seconds=body.get("seconds"),
            span=None if span is None else (int(span[0]), int(span[1])),
        )
    except (ValueError, KeyError, TypeError, IndexError):
        return None


def counted_lines(lines: Iterable[LedgerEntry], lineage: Lineage) -> LinesByStep:
    """Keeps each step's lines of the one epoch whose execution counts."""
    if not lineage:
        return {}
    last = lineage[-1].generation
    of_step: dict[int, list[LedgerEntry]] = defaultdict(list)
    kept: dict[int, int | None] = {}
    for line in lines:
        if line.step not in kept:
            kept[line.step] = generation_of_step(lineage, last, line.step)
        if line.generation == kept[line.step]:
            of_step[line.step].append(line)
    return dict(of_step)


def world_size_by_step(of_step: Mapping[int, Sequence[LedgerEntry]], lineage: Lineage) -> dict[int, int]:
    """Maps each step to the number of ranks that executed it."""
    if not of_step:
        return {}
    sizes = {entry.generation: entry.world_size for entry in lineage}
    found = {step: generation_of_step(lineage, lineage[-1].generation, step) for step in range(1, max(of_step) + 1)}
    return {step: sizes[epoch] for step, epoch in found.items() if epoch in sizes}


def drop_unfinished(of_step: LinesByStep, ranks: Mapping[int, int]) -> LinesByStep:
    """Drops the newest steps that not every rank has finished.

    An interrupted run ends in the middle of them.
    """
    left = dict(of_step)
    while left and len({line.rank for line in left[max(left)]}) < ranks.get(max(left), 0):
        del left[max(left)]
    return left


def count_samples(
    of_step: Mapping[int, Sequence[LedgerEntry]],
    first: int = 1,
    ranks: Mapping[int, int] | None = None,
    skips: Mapping[int, int] | None = None,
) -> SampleAccount | None:
    """Counts samples from step `first` on; None where no loader reports any.

    `ranks`: of each step, where it is known (`worlds`). Else a rank without a line counts as samples lost. `skips`: of each
    step before which loaders left something out, how many steps' batches (`skips_of`).
    """
    told = {step: [span for line in lines for span in line.samples or ()] for step, lines in of_step.items()}
    if not any(told.values()):
        return None
    last = max(of_step)
    batch = max(sum(stop - start for start, stop in spans) for spans in told.values())
    ends = _ends(of_step)
    begin = _begin(told.get(first, []), first, batch)
    lost = repeated = unknown = 0
    skipped = list[tuple[int, int]]()
    for step in range(first, last + 1):
        spans = told.get(step, [])
        left_out = (skips or {}).get(step, 0)
        if left_out and spans:
            goes_on = min(start for start, _ in spans)
            goes_on = goes_on if ends else min(goes_on, begin + left_out * batch)
            skipped += [(begin, goes_on)] if goes_on > begin else []
            begin = max(begin, goes_on)
        size = sum(stop - start for start, stop in spans) if ends else batch
        end = max(begin, ends.get(step, begin + size))
        missing, twice = _compare(spans, begin, end)
        unwritten = len({line.rank for line in of_step.get(step, ())}) < (ranks or {}).get(step, 0)
        unknown, lost = (unknown + missing, lost) if unwritten else (unknown, lost + missing)
        repeated += twice
        begin = end
    nobody = tuple(step for step in range(first, last + 1) if step not in of_step)
    return SampleAccount(last, batch, lost, repeated, nobody, unknown, tuple(skipped))


def skips_of(lineage: Lineage, skipped: Iterable[SkippedData]) -> dict[int, int]:
    """Maps first steps of epochs to the steps left out before."""
    history = set(ancestor_generations(lineage, lineage[-1].generation)) if lineage else set()
    begins = {entry.generation: entry.parent.step + 1 if entry.parent else 1 for entry in lineage}
    return {begins[one.generation]: one.steps for one in skipped if one.generation in history}


def _ends(of_step: Mapping[int, Sequence[LedgerEntry]]) -> dict[int, int]:
    """Where each step ends that tells its span, or that the next one's span follows; empty where none tells it."""
    told = {step: [line.span for line in lines if line.span is not None] for step, lines in of_step.items()}
    found = {step - 1: min(start for start, _ in spans) for step, spans in told.items() if spans}
    return found | {step: max(stop for _, stop in spans) for step, spans in told.items() if spans}


def _begin(spans: Sequence[tuple[int, int]], first: int, batch: int) -> int:
    """Where step `first` must begin. Of an older job only its loader's position is known: its batches may have differed.

    A loader that stands at 0 all the same has taken nothing up: it is counted as if it should have.
    """
    told = min((start for start, _ in spans), default=0)
    return told if first > 1 and told > 0 else (first - 1) * batch


def _compare(spans: Sequence[tuple[int, int]], begin: int, end: int) -> tuple[int, int]:
    """How many positions of [begin, end) no span has, and how many positions are there too often or foreign."""
    covered, position, total = 0, begin, 0
    for start, stop in sorted(spans):
        total += stop - start
        inside = min(stop, end) - max(start, position)
        if inside > 0:
            covered += inside
            position = min(stop, end)
    return (end - begin) - covered, total - covered


def mean_loss_by_step(of_step: Mapping[int, Sequence[LedgerEntry]]) -> dict[int, float]:
    """Returns each step's loss: the mean over ranks of what they passed to `Checkpointer.step`.

    A rank passes the loss that it called `backward()` on. Where shares are uneven that loss carries `Batch.weight` already, so
    that the plain mean is the mean over all samples; a weight by samples here would count it twice.
    """
    loss_by_step: dict[int, float] = {}
    for step, lines in of_step.items():
        rank_losses = [line.loss for line in lines if line.loss is not None]
        if not rank_losses:
            continue
        # ranks that report one and the same global loss must not lose its last bits to an average
        is_global = len(set(rank_losses)) == 1
        loss_by_step[step] = rank_losses[0] if is_global else sum(rank_losses) / len(rank_losses)
    return loss_by_step


def largest_difference(mine: Mapping[int, float], other: Mapping[int, float]) -> float | None:
    """The largest difference of two loss curves; None without a common step."""
    shared = mine.keys() & other.keys()
    return max((_apart(mine[step], other[step]) for step in shared), default=None)


def _apart(one: float, other: float) -> float:
    """Two that are no number in the same way are equal; a number and none are as far apart as JSON can say."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    return abs(one - other) if math.isfinite(one) and math.isfinite(other) else sys.float_info.max


def finished_step(lines: Iterable[LedgerEntry], generation: int, world_size: int) -> int:
    """The newest step that every rank of the epoch has finished."""
    newest: dict[int, int] = {}
    for line in lines:
        if line.generation == generation:
            newest[line.rank] = max(newest.get(line.rank, 0), line.step)
    return min(newest.values()) if len(newest) >= world_size > 0 else 0


def median_stall_seconds(lines: Iterable[LedgerEntry]) -> float | None:
    """The median time that a save blocked a training step."""
    stalls = [line.stall_seconds for line in lines if line.stall_seconds is not None]
    return statistics.median(stalls) if stalls else None


# ---- progress --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunEvent:
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
    newest: dict[str, dict[int, LedgerEntry]] = field(default_factory=dict)
    """Ledger name (`worker-INDEX-ATTEMPT`) -> rank -> its newest line."""
    incidents: dict[tuple[int, float], Incident] = field(default_factory=dict)
    lineage_of: dict[int, LineageEntry] = field(default_factory=dict)
    completed: set[Checkpoint] = field(default_factory=set)
    checkpoint_bytes: int | None = None
    """Of the newest complete checkpoint whose manifests were seen."""
    _tails: dict[str, _LineTail] = field(default_factory=dict)
    _stamp: tuple[int, int] = (0, 0)

    def poll(self) -> list[RunEvent]:
        """Reads what is new; returns new events in order."""
        self._read_status()
        for path in sorted(self.folder.ledger_folder.glob("*.jsonl")):
            ranks = self.newest.setdefault(path.stem, {})
            for text in self._tail(path).lines():
                line = parse_line(text)
                if line is not None:
                    ranks[line.rank] = line
        return [e for text in self._tail(self.folder.events_file).lines() if (e := _event(text)) is not None]

    @property
    def lineage(self) -> Lineage:
        """Every epoch ever committed, also those that status has dropped."""
        return tuple(self.lineage_of[epoch] for epoch in sorted(self.lineage_of))

    @property
    def finished_step(self) -> int:
        """The newest step that every rank of the present epoch has finished."""
        world = self.status.membership
        if world is None:
            return 0
        # two attempts of one worker write two files: the epoch tells their ranks apart
        lines = [line for ranks in self.newest.values() for line in ranks.values()]
        return finished_step(lines, world.generation, world.world_size)

    @property
    def reached_step(self) -> int:
        """The current step; while an epoch restores, the step it restores."""
        world = self.status.membership
        if world is None or world.state == "Claimed":
            return self.status.step
        return max(self.finished_step, world.parent.step if world.parent is not None else 0)

    def lines_by_worker(self) -> Iterator[tuple[str, LedgerEntry]]:
        """Reads every ledger line with its worker, as `INDEX-ATTEMPT`."""
        for path in sorted(self.folder.ledger_folder.glob("*.jsonl")):
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
            found = self.folder.status_file.stat()
        except FileNotFoundError:
            return
        stamp = (found.st_mtime_ns, found.st_ino)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        self.status = RunFolderStore(self.folder).read_status()
        for incident in self.status.incidents:
            self.incidents[incident.generation, incident.detected_seconds] = incident
        for entry in self.status.lineage:
            self.lineage_of[entry.generation] = entry
        if self.status.last_complete is not None:
            self.completed.add(self.status.last_complete)


def _event(text: str) -> RunEvent | None:
    try:
        body: dict[str, Any] = json.loads(text)
        return RunEvent(float(body["at"]), str(body["reason"]), str(body["message"]), bool(body["warning"]))
    except (ValueError, KeyError, TypeError):
        return None  # cannot be: whole lines only are read; people lose a sentence, the run nothing
