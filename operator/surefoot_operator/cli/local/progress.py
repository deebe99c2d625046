"""Follows the status, events and step ledgers in the folder of a local run.

Reads files. `supervise` polls it several times a second, so each poll reads only the lines added since the last one.
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
from typing import Any, NamedTuple

from surefoot.protocol.checkpoints.completeness import Lineage, LineageEntry, ancestor_generations, generation_of_step
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.status import Incident, JobStatus, SkippedData
from surefoot_operator.cli.local.run_event import RunEvent
from surefoot_operator.platforms.local.platform import RunFolderStore
from surefoot_operator.platforms.local.run_folder import RunFolder

# ---- ledger of steps -------------------------------------------------------------------------------------------------
# Counts samples along the final lineage from all workers' ledgers. Pure. For each finished step of each rank its agent
# appends one line:
# {"generation", "step", "rank", "loss", "samples": [[start, stop], …], "span", "at", "seconds", "stall_seconds"}.
# A rank's first line in a generation also has {"attached_at", "restored_at", "restore_seconds"}.
# Step s (the first is 1) must consume exactly the positions [(s-1)·B, s·B) of the global sample order, once. If steps
# differ in size, each line carries its step's `span` over all ranks, which must begin where the previous step's ended.
# A job that started from another job's checkpoint is counted from the step after it.


class TrainerStart(NamedTuple):
    """Unix times of a trainer's start, in their order."""

    attached_seconds: float
    """Its process runs the program, which has connected to its agent."""
    restoring_seconds: float
    """It began to restore its state."""
    restored_seconds: float
    """It had restored its state; its first step began."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """A ledger line: one step that one rank finished, with the loss and the sample positions it used."""

    generation: int
    step: int
    rank: int
    loss: float | None
    samples: tuple[tuple[int, int], ...] | None
    at_seconds: float
    stall_seconds: float | None = None
    seconds: float | None = None
    span: tuple[int, int] | None = None
    """Positions [start, stop) of this step over all ranks; None if all steps have one size."""
    start: TrainerStart | None = None
    """Times of the trainer's start, in a rank's first step of a generation; None in its other steps."""


@dataclass(frozen=True, slots=True)
class SampleAccount:
    """Counts of samples and steps along the final lineage."""

    steps: int
    """Last step that was counted."""
    batch: int
    """Samples of the largest step."""
    lost: int
    """Samples that no rank trained on, except those counted as unknown."""
    repeated: int
    """Samples trained on more than once, or outside their step's positions."""
    missing_steps: tuple[int, ...] = ()
    """Steps for which no rank has a ledger line."""
    unknown: int = 0
    """Samples missing in steps that lack a rank's line: it may not have been written, so they need not be lost."""
    skipped: tuple[tuple[int, int], ...] = ()
    """Positions [start, stop) that loaders skipped on purpose after a rollback; not counted as lost."""

    @property
    def skipped_count(self) -> int:
        return sum(stop - start for start, stop in self.skipped)


LinesByStep = dict[int, list[LedgerEntry]]


def parse_line(text: str) -> LedgerEntry | None:
    """Parses one ledger line; None if it is incomplete because its writer was killed."""
    try:
        record = json.loads(text)
        if not isinstance(record, dict):
            return None
        samples, span = record.get("samples"), record.get("span")
        return LedgerEntry(
            generation=int(record["generation"]),
            step=int(record["step"]),
            rank=int(record["rank"]),
            loss=None if record.get("loss") is None else float(record["loss"]),
            samples=None if samples is None else tuple((int(start), int(stop)) for start, stop in samples),
            at_seconds=float(record["at"]),
            stall_seconds=record.get("stall_seconds"),
            seconds=record.get("seconds"),
            span=None if span is None else (int(span[0]), int(span[1])),
            start=_parse_start(record),
        )
    except (ValueError, KeyError, TypeError, IndexError):
        return None


def _parse_start(record: Mapping[str, Any]) -> TrainerStart | None:
    if "attached_at" not in record or "restored_at" not in record:
        return None
    attached, restored = float(record["attached_at"]), float(record["restored_at"])
    return TrainerStart(attached, max(attached, restored - float(record["restore_seconds"])), restored)


def counted_lines(lines: Iterable[LedgerEntry], lineage: Lineage) -> LinesByStep:
    """Groups lines by step and drops those of executions that a later generation rolled back and repeated."""
    if not lineage:
        return {}
    newest_generation = lineage[-1].generation
    lines_by_step: dict[int, list[LedgerEntry]] = defaultdict(list)
    generation_by_step: dict[int, int | None] = {}
    for line in lines:
        if line.step not in generation_by_step:
            generation_by_step[line.step] = generation_of_step(lineage, newest_generation, line.step)
        if line.generation == generation_by_step[line.step]:
            lines_by_step[line.step].append(line)
    return dict(lines_by_step)


def world_size_by_step(lines_by_step: Mapping[int, Sequence[LedgerEntry]], lineage: Lineage) -> dict[int, int]:
    """Maps each step to the world size of the generation whose execution counts."""
    if not lines_by_step:
        return {}
    sizes_by_generation = {entry.generation: entry.world_size for entry in lineage}
    generation_by_step = {
        step: generation_of_step(lineage, lineage[-1].generation, step) for step in range(1, max(lines_by_step) + 1)
    }
    return {
        step: sizes_by_generation[generation]
        for step, generation in generation_by_step.items()
        if generation in sizes_by_generation
    }


def drop_unfinished(lines_by_step: LinesByStep, ranks: Mapping[int, int]) -> LinesByStep:
    """Drops the newest steps that not every rank has finished, as an interrupted run leaves them."""
    remaining_lines = dict(lines_by_step)
    while remaining_lines and len({line.rank for line in remaining_lines[max(remaining_lines)]}) < ranks.get(
        max(remaining_lines), 0
    ):
        del remaining_lines[max(remaining_lines)]
    return remaining_lines


def count_samples(
    lines_by_step: Mapping[int, Sequence[LedgerEntry]],
    first: int = 1,
    ranks: Mapping[int, int] | None = None,
    skips: Mapping[int, int] | None = None,
) -> SampleAccount | None:
    """Counts samples from step `first` to the last one; None if no loader reports any.

    Args:
        ranks: World size of each step (`world_size_by_step`). Without it, samples of a missing line count as lost.
        skips: Step -> number of steps whose batches loaders skipped on purpose before it (`skips_of`).
    """
    spans_by_step = {
        step: [span for line in lines for span in line.samples or ()] for step, lines in lines_by_step.items()
    }
    if not any(spans_by_step.values()):
        return None
    last_step = max(lines_by_step)
    batch = max(sum(stop - start for start, stop in spans) for spans in spans_by_step.values())
    ends = _end_positions(lines_by_step)
    begin = _begin_position(spans_by_step.get(first, []), first, batch)
    lost = repeated = unknown = 0
    skipped = list[tuple[int, int]]()
    for step in range(first, last_step + 1):
        # A rollback may have had loaders skip samples before this step: move its start, and count them as skipped.
        spans = spans_by_step.get(step, [])
        skipped_steps = (skips or {}).get(step, 0)
        if skipped_steps and spans:
            resume_position = min(start for start, _ in spans)
            resume_position = resume_position if ends else min(resume_position, begin + skipped_steps * batch)
            skipped += [(begin, resume_position)] if resume_position > begin else []
            begin = max(begin, resume_position)
        # Without spans every step has the size of the largest one; with spans the ledger gives each step's own end.
        size = sum(stop - start for start, stop in spans) if ends else batch
        end = max(begin, ends.get(step, begin + size))
        missing, extra = _compare(spans, begin, end)
        # Missing samples of a rank without a line are unknown, not lost: its line may not have been written.
        has_unwritten_lines = len({line.rank for line in lines_by_step.get(step, ())}) < (ranks or {}).get(step, 0)
        unknown, lost = (unknown + missing, lost) if has_unwritten_lines else (unknown, lost + missing)
        repeated += extra
        begin = end
    missing_steps = tuple(step for step in range(first, last_step + 1) if step not in lines_by_step)
    return SampleAccount(last_step, batch, lost, repeated, missing_steps, unknown, tuple(skipped))


def skips_of(lineage: Lineage, skipped: Iterable[SkippedData]) -> dict[int, int]:
    """Maps each generation's first step to the number of steps whose batches were skipped before it."""
    history = set(ancestor_generations(lineage, lineage[-1].generation)) if lineage else set()
    first_steps = {entry.generation: entry.parent.step + 1 if entry.parent else 1 for entry in lineage}
    return {first_steps[skip.generation]: skip.steps for skip in skipped if skip.generation in history}


def _end_positions(lines_by_step: Mapping[int, Sequence[LedgerEntry]]) -> dict[int, int]:
    """Maps steps to their end position, from their own or the next step's span; empty if no line has a span."""
    spans_by_step = {
        step: [line.span for line in lines if line.span is not None] for step, lines in lines_by_step.items()
    }
    ends_from_next = {step - 1: min(start for start, _ in spans) for step, spans in spans_by_step.items() if spans}
    return ends_from_next | {step: max(stop for _, stop in spans) for step, spans in spans_by_step.items() if spans}


def _begin_position(spans: Sequence[tuple[int, int]], first: int, batch: int) -> int:
    """Returns the position at which step `first` must begin.

    After a start from another job's checkpoint, the loader's reported position is used, since the other job's batch
    size may have differed. A loader at position 0 did not restore its state, so the samples it should have skipped
    count.
    """
    reported_start = min((start for start, _ in spans), default=0)
    return reported_start if first > 1 and reported_start > 0 else (first - 1) * batch


def _compare(spans: Sequence[tuple[int, int]], begin_position: int, end_position: int) -> tuple[int, int]:
    """Returns how many positions of the range no span contains, and how many are repeated or outside the range."""
    covered, position, reported = 0, begin_position, 0
    for start, stop in sorted(spans):
        reported += stop - start
        inside = min(stop, end_position) - max(start, position)
        if inside > 0:
            covered += inside
            position = min(stop, end_position)
    return (end_position - begin_position) - covered, reported - covered


def mean_loss_by_step(lines_by_step: Mapping[int, Sequence[LedgerEntry]]) -> dict[int, float]:
    """Returns each step's loss: the mean over ranks of the values passed to `Checkpointer.step`.

    A rank passes the loss on which it called `backward()`. For uneven shares that loss includes `Batch.weight`, so the
    plain mean is the mean over all samples; weighting by samples here would apply the weight twice.
    """
    loss_by_step: dict[int, float] = {}
    for step, lines in lines_by_step.items():
        rank_losses = [line.loss for line in lines if line.loss is not None]
        if not rank_losses:
            continue
        # If all ranks report the same global loss, averaging would only round its last bits.
        is_global = len(set(rank_losses)) == 1
        loss_by_step[step] = rank_losses[0] if is_global else sum(rank_losses) / len(rank_losses)
    return loss_by_step


def largest_difference(losses: Mapping[int, float], other_losses: Mapping[int, float]) -> float | None:
    """Returns the largest difference between two loss curves; None if they have no step in common."""
    shared_steps = losses.keys() & other_losses.keys()
    return max((_loss_difference(losses[step], other_losses[step]) for step in shared_steps), default=None)


def _loss_difference(loss: float, other_loss: float) -> float:
    """Returns the absolute difference; NaN equals NaN. If only one is finite, the largest float of JSON."""
    if loss == other_loss or (math.isnan(loss) and math.isnan(other_loss)):
        return 0.0
    return abs(loss - other_loss) if math.isfinite(loss) and math.isfinite(other_loss) else sys.float_info.max


def finished_step(lines: Iterable[LedgerEntry], generation: int, world_size: int) -> int:
    """Returns the newest step that every rank of the generation has finished; 0 if there is none."""
    newest_step_by_rank: dict[int, int] = {}
    for line in lines:
        if line.generation == generation:
            newest_step_by_rank[line.rank] = max(newest_step_by_rank.get(line.rank, 0), line.step)
    return min(newest_step_by_rank.values()) if len(newest_step_by_rank) >= world_size > 0 else 0


def median_stall_seconds(lines: Iterable[LedgerEntry]) -> float | None:
    """Returns the median time for which a save blocked training; None if no line has one."""
    stalls = [line.stall_seconds for line in lines if line.stall_seconds is not None]
    return statistics.median(stalls) if stalls else None


# ---- progress --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _LineTail:
    """Reader of an append-only file from `offset` on; a last line without a line end stays for the next read."""

    path: Path
    offset: int = 0

    def lines(self) -> Iterator[str]:
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                content = file.read()
        except FileNotFoundError:
            return
        complete_lines = content.rpartition(b"\n")[0]
        if not complete_lines:
            return
        self.offset += len(complete_lines) + 1
        for line in complete_lines.split(b"\n"):
            yield line.decode(errors="replace")


@dataclass(slots=True)
class RunProgress:
    """Collects the whole history of a run; the status keeps only its newest part."""

    folder: RunFolder
    status: JobStatus = field(default_factory=JobStatus)
    newest: dict[str, dict[int, LedgerEntry]] = field(default_factory=dict)
    """Ledger name (`worker-INDEX-ATTEMPT`) -> rank -> that rank's newest line."""
    incidents: dict[tuple[int, float], Incident] = field(default_factory=dict)
    lineage_of: dict[int, LineageEntry] = field(default_factory=dict)
    completed: set[Checkpoint] = field(default_factory=set)
    checkpoint_bytes: int | None = None
    """Bytes of the newest complete checkpoint that was measured; None before the first."""
    _tails: dict[str, _LineTail] = field(default_factory=dict)
    _stamp: tuple[int, int] = (0, 0)

    def poll(self) -> list[RunEvent]:
        """Reads everything added since the last call; returns the new events in order."""
        self._read_status()
        for path in sorted(self.folder.ledger_folder.glob("*.jsonl")):
            ranks = self.newest.setdefault(path.stem, {})
            for text in self._tail(path).lines():
                line = parse_line(text)
                if line is not None:
                    ranks[line.rank] = line
        return [
            event for text in self._tail(self.folder.events_file).lines() if (event := _parse_event(text)) is not None
        ]

    @property
    def lineage(self) -> Lineage:
        """Every generation ever committed, including those that the status no longer lists."""
        return tuple(self.lineage_of[generation] for generation in sorted(self.lineage_of))

    @property
    def finished_step(self) -> int:
        """Newest step that every rank of the current generation has finished; 0 if there is none."""
        membership = self.status.membership
        if membership is None:
            return 0
        # Two attempts of one worker write two files with the same ranks; `finished_step` selects by generation.
        lines = [line for ranks in self.newest.values() for line in ranks.values()]
        return finished_step(lines, membership.generation, membership.world_size)

    @property
    def reached_step(self) -> int:
        """Current step of the job; while a generation restores, the step that it restores."""
        membership = self.status.membership
        if membership is None or membership.state == "Claimed":
            return self.status.step
        return max(self.finished_step, membership.parent.step if membership.parent is not None else 0)

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
        """Reads the status if its file has changed, and adds it to the history."""
        try:
            stat = self.folder.status_file.stat()
        except FileNotFoundError:
            return
        # The file is replaced at each write, so a new inode is a change even within the clock's resolution.
        stamp = (stat.st_mtime_ns, stat.st_ino)
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


def _parse_event(text: str) -> RunEvent | None:
    try:
        record: dict[str, Any] = json.loads(text)
        return RunEvent(float(record["at"]), str(record["reason"]), str(record["message"]), bool(record["warning"]))
    except (ValueError, KeyError, TypeError):
        return None  # Not expected, as only complete lines are read. Only the display of this event is lost.
