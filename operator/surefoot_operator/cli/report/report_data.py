"""Gathers a report's facts from a look at a job.

Pure. `facts_of_view` knows what every command knows, of a cluster too; `with_ledger` adds what only the folder of a local run holds.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from surefoot.protocol.checkpoints.completeness import Lineage, first_step
from surefoot_operator.api.status import DataRead, Incident, Interval, SkippedData
from surefoot_operator.cli.jobs.describe import lasting, stored_words, worker_state
from surefoot_operator.cli.jobs.read_jobs import JobView
from surefoot_operator.cli.local import progress, run_report
from surefoot_operator.cli.local.progress import Account, Happened, LedgerLine
from surefoot_operator.cli.local.run_report import Checkpoints, Comparison, Struck
from surefoot_operator.policy.report.time_spent import goodput, seconds_spent

# ---- curves ----------------------------------------------------------------------------------------------------------
# Thins curves and chooses the ticks of their axes. A run of 100,000 steps has more points than a screen has columns: of
# each column the lowest and the highest are kept, so that a spike of one step is still there.

Point = tuple[float, float]

_LARGEST = 1e300
"""The distance of two larger ones may be no number."""
_LOGARITHMIC_FROM = 50.0
"""The ratio of the largest value to the smallest at which a linear axis shows the largest alone."""


def thinned(points: Sequence[Point], columns: int) -> list[Point]:
    """Keeps each column's lowest and highest point; ends are kept too."""
    if len(points) <= 2 * columns:
        return list(points)
    first, last = points[0][0], points[-1][0]
    width = (last - first) / columns or 1.0
    kept: dict[int, tuple[Point, Point]] = {}
    for point in points:
        column = min(columns - 1, int((point[0] - first) / width))
        low, high = kept.get(column, (point, point))
        kept[column] = (min(low, point, key=lambda p: p[1]), max(high, point, key=lambda p: p[1]))
    found = {points[0], points[-1], *(point for pair in kept.values() for point in pair)}
    return sorted(found)


def finite(points: Iterable[tuple[int, float]]) -> list[Point]:
    """Leaves out values that no axis can have."""
    return [(float(step), value) for step, value in points if math.isfinite(value) and abs(value) < _LARGEST]


def wants_logarithm(values: Sequence[float]) -> bool:
    """Whether only a logarithmic axis would show the small values."""
    return bool(values) and min(values) > 0 and max(values) / min(values) >= _LOGARITHMIC_FROM


def ticks(low: float, high: float, most: int) -> list[float]:
    """Chooses at most `most` round values from `low` to `high`."""
    if not high > low:
        return [low]
    step = _round_up((high - low) / most)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def logarithmic_ticks(low: float, high: float, most: int) -> list[float]:
    """Chooses powers of ten, or where they are few the halves between."""
    begin, end = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, math.ceil((end - begin) / most))
    found = [10.0**power for power in range(begin, end + 1, stride) if low <= 10.0**power <= high]
    return found if len(found) > 1 else ticks(low, high, most)


def _round_up(step: float) -> float:
    """The next of 1, 2, 5, 10, …; never 0."""
    power = 10.0 ** math.floor(math.log10(step))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= step * 0.999), 10 * power)


# ---- report facts ----------------------------------------------------------------------------------------------------
# Defines everything a report page says. Pure values, gathered below and laid out by `page`. None is what is not known:
# a cluster keeps no ledger of steps, a job that has just begun no checkpoint.


@dataclass(frozen=True, slots=True)
class EpochFacts:
    """One epoch: its ranks and the step that it began from."""

    epoch: int
    ranks: int
    from_step: int
    restored_from: str | None = None


@dataclass(frozen=True, slots=True)
class PhaseFacts:
    """The end of one phase of a recovery.

    Seconds count from the recovery's beginning.
    """

    name: str
    at_seconds: float
    said: str


@dataclass(frozen=True, slots=True)
class IncidentFacts:
    """One incident with its phases, the figures of `surefoot timeline`."""

    number: int
    kind: str
    reason: str
    at_seconds: float
    """Unix seconds of its beginning: the injected fault, else the first sign."""
    last_step: int
    epoch: int
    phases: tuple[PhaseFacts, ...]
    steps_lost: int | None = None
    restored_from: str | None = None
    world_before: int = 0
    world_after: int | None = None
    node: str | None = None
    worker: int | None = None
    rank: int | None = None
    fault: str | None = None
    detail: str = ""

    @property
    def planned(self) -> bool:
        return self.kind == "planned"

    @property
    def took_seconds(self) -> float | None:
        """Until the first new step; None while it goes on."""
        return next((one.at_seconds for one in self.phases if one.name == "first_step"), None)


@dataclass(frozen=True, slots=True)
class LossFacts:
    """The loss by step: what counts, what was run again, and undisturbed."""

    kept: tuple[Point, ...] = ()
    discarded: tuple[tuple[Point, ...], ...] = ()
    """Of each epoch the steps that a later one ran again."""
    undisturbed: tuple[Point, ...] = ()
    not_finite: int = 0
    """Steps whose loss was no number."""


@dataclass(frozen=True, slots=True)
class StallFacts:
    """How long saves stopped the training.

    Of each saved step its slowest rank counts.
    """

    by_step: tuple[Point, ...] = ()
    median_seconds: float | None = None
    p95_seconds: float | None = None
    most_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """One worker's attempt: where it ran, and what it trained."""

    worker: str
    """`INDEX-ATTEMPT`."""
    node: str
    state: str
    ranks: tuple[int, ...] = ()
    epochs: tuple[int, ...] = ()
    first_step: int | None = None
    last_step: int | None = None


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node as it stood when the page was made."""

    name: str
    state: str
    holder: str


@dataclass(frozen=True, slots=True)
class ReportFacts:
    """Everything on one page."""

    job: str
    uid: str
    source: str
    made_seconds: float
    outcome: str
    message: str = ""
    start_seconds: float | None = None
    end_seconds: float | None = None
    step: int | None = None
    total_steps: int | None = None
    loss: LossFacts | None = None
    """None: no ledger of steps can be read."""
    epochs: tuple[EpochFacts, ...] = ()
    incidents: tuple[IncidentFacts, ...] = ()
    data: DataRead | None = None
    """As the loader told; None: it tells nothing."""
    account: Account | None = None
    comparison: Comparison | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """By category, the operator's own account; empty: it did not count yet."""
    goodput: float | None = None
    stalls: StallFacts = field(default_factory=StallFacts)
    checkpoints: Checkpoints | None = None
    newest_checkpoint: str = ""
    persistent_step: int | None = None
    stored: str = ""
    """What each tier has, with its bytes."""
    memory_interval: Interval | None = None
    persistent_interval: Interval | None = None
    placements: tuple[Placement, ...] = ()
    nodes: tuple[NodeFacts, ...] = ()
    events: tuple[Happened, ...] = ()
    unread: tuple[str, ...] = ()


# ---- report data -----------------------------------------------------------------------------------------------------

OfStep = dict[int, list[LedgerLine]]


@dataclass(frozen=True, slots=True)
class RunRecords:
    """What only the folder of a local run holds."""

    lines: tuple[tuple[str, LedgerLine], ...]
    """Each with its worker, `INDEX-ATTEMPT`."""
    lineage: Lineage
    incidents: tuple[Incident, ...]
    checkpoints: Checkpoints | None = None
    undisturbed: Mapping[int, float] | None = None
    """The losses of a run without faults."""
    struck: tuple[Struck, ...] = ()
    comparison: Comparison | None = None
    skipped: tuple[SkippedData, ...] = ()


def facts_of_view(view: JobView, source: str, until_seconds: float | None = None) -> ReportFacts:
    """Gathers what one look at a job says.

    Args:
        view: the look.
        source: where it looked, for people.
        until_seconds: when an unfinished job was last known to go on; None: when it was looked at.
    """
    stored, status = view.stored, view.stored.status
    found = ReportFacts(
        job=str(stored),
        uid=stored.uid,
        source=source,
        made_seconds=view.now,
        outcome=stored.phase or "not seen by an operator yet",
        step=stored.step,
        total_steps=stored.total_steps,
        placements=_placements(view),
        nodes=_nodes(view),
        events=view.events,
        unread=(*stored.problems, *view.unread),
    )
    if status is None:
        return found
    seconds = seconds_spent(status.time_spent, view.now if until_seconds is None else until_seconds)
    return dataclasses.replace(
        found,
        message=status.message,
        start_seconds=status.start_seconds,
        end_seconds=status.completion_seconds,
        epochs=epochs_of(status.lineage, status.incidents),
        incidents=incidents_of(status.incidents, ()),
        newest_checkpoint="" if status.last_complete is None else str(status.last_complete),
        persistent_step=None if status.floor is None else status.floor.step,
        stored=stored_words(lasting(status)),
        memory_interval=status.memory_interval,
        persistent_interval=status.persistent_interval,
        data=status.data,
        seconds={name: spent for name, spent in seconds.items() if spent > 0},
        goodput=goodput(seconds),
    )


def with_ledger(facts: ReportFacts, run: RunRecords) -> ReportFacts:
    """Adds losses, samples, stalls, and who ran what."""
    lines = [line for _, line in run.lines]
    kept = progress.counted_lines(lines, run.lineage)
    ranks = progress.world_size_by_step(kept, run.lineage)
    discarded = _discarded(lines, kept)
    if facts.outcome != "Complete":
        kept = progress.drop_unfinished(kept, ranks)
    return dataclasses.replace(
        facts,
        loss=_losses(kept, discarded, run.undisturbed),
        epochs=epochs_of(run.lineage, run.incidents),
        incidents=incidents_of(run.incidents, run.struck),
        account=progress.count_samples(
            kept, first_step(run.lineage), ranks, progress.skips_of(run.lineage, run.skipped)
        ),
        comparison=run.comparison,
        stalls=_stalls(lines),
        checkpoints=run.checkpoints,
        placements=_with_lines(facts.placements, run),
    )


def epochs_of(lineage: Lineage, incidents: Sequence[Incident]) -> tuple[EpochFacts, ...]:
    """Translates a lineage; where each state came from is the incidents' word."""
    sources = run_report.sources_of(lineage, incidents)
    return tuple(
        EpochFacts(entry.epoch, entry.size, entry.parent.step if entry.parent else 0, sources.get(entry.epoch))
        for entry in lineage
    )


def incidents_of(incidents: Iterable[Incident], struck: Sequence[Struck]) -> tuple[IncidentFacts, ...]:
    """Translates incidents, oldest first, with the seconds that `timeline` prints."""
    found = []
    for number, one in enumerate(sorted(incidents, key=lambda i: i.detected_seconds), 1):
        told = run_report.incident_report(one, struck)
        found.append(
            IncidentFacts(
                number=number,
                kind=one.kind,
                reason=one.reason,
                at_seconds=one.detected_seconds - told["detected_seconds"],
                last_step=one.last_step,
                epoch=one.epoch,
                phases=tuple(PhaseFacts(*row) for row in run_report.phase_rows(told)),
                steps_lost=one.steps_lost,
                restored_from=one.restored_from,
                world_before=one.world_before,
                world_after=one.world_after,
                node=one.node,
                worker=one.worker,
                rank=one.rank,
                fault=told["fault"],
                detail=one.detail,
            )
        )
    return tuple(found)


def _discarded(lines: Iterable[LedgerLine], kept: OfStep) -> dict[int, OfStep]:
    """By epoch, the steps whose execution no longer counts."""
    found: dict[int, OfStep] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if line.step not in kept or kept[line.step][0].epoch != line.epoch:
            found[line.epoch][line.step].append(line)
    return {epoch: dict(of_step) for epoch, of_step in found.items()}


def _losses(kept: OfStep, discarded: Mapping[int, OfStep], undisturbed: Mapping[int, float] | None) -> LossFacts:
    told = progress.mean_loss_by_step(kept)
    points = finite(sorted(told.items()))
    again = (finite(sorted(progress.mean_loss_by_step(of_step).items())) for _, of_step in sorted(discarded.items()))
    return LossFacts(
        kept=tuple(points),
        discarded=tuple(tuple(one) for one in again if one),
        undisturbed=tuple(finite(sorted((undisturbed or {}).items()))),
        not_finite=len(told) - len(points),
    )


def _stalls(lines: Iterable[LedgerLine]) -> StallFacts:
    slowest: dict[tuple[int, int], float] = {}
    for line in lines:
        if line.stall_seconds is not None:
            key = (line.epoch, line.step)
            slowest[key] = max(slowest.get(key, 0.0), line.stall_seconds)
    if not slowest:
        return StallFacts()
    values = sorted(slowest.values())
    by_step: dict[int, float] = {}
    for (_, step), seconds in slowest.items():
        by_step[step] = max(by_step.get(step, 0.0), seconds)
    return StallFacts(
        by_step=tuple((float(step), seconds) for step, seconds in sorted(by_step.items())),
        median_seconds=statistics.median(values),
        p95_seconds=values[min(len(values) - 1, int(0.95 * len(values)))],
        most_seconds=values[-1],
    )


# ---- who ran where ----------------------------------------------------------------------------------------------------


def _placements(view: JobView) -> tuple[Placement, ...]:
    world = view.stored.status.world if view.stored.status is not None else None
    members = {(m.index, m.attempt): place for place, m in enumerate(world.members)} if world is not None else {}
    epochs = () if world is None else (world.epoch,)
    return tuple(
        Placement(
            worker=f"{one.index}-{one.attempt}",
            node=one.node or "",
            state=worker_state(one),
            epochs=epochs if (one.index, one.attempt) in members else (),
        )
        for one in view.workers
    )


def _nodes(view: JobView) -> tuple[NodeFacts, ...]:
    held = {one.node: "running" if one.running else "not running" for one in view.holders or ()}
    used = {one.node for one in view.workers} | held.keys()
    found = []
    for node in view.nodes or ():
        if node.name in used:
            state, why = "ready" if node.ready else "not ready", node.reason or node.doubt
            said = [state, *([] if node.schedulable else ["cordoned"]), *([why] if why else [])]
            found.append(NodeFacts(node.name, ", ".join(said), held.get(node.name, "none")))
    return tuple(found)


def _with_lines(known: Sequence[Placement], run: RunRecords) -> tuple[Placement, ...]:
    """Each attempt that wrote a line or is known; of one that is gone an incident may still name the node."""
    of_worker: dict[str, list[LedgerLine]] = defaultdict(list)
    for worker, line in run.lines:
        of_worker[worker].append(line)
    by_name = {one.worker: one for one in known}
    found = []
    for worker in sorted(of_worker.keys() | by_name.keys(), key=_order):
        lines = of_worker.get(worker, [])
        steps = [line.step for line in lines]
        found.append(
            dataclasses.replace(
                by_name.get(worker) or Placement(worker, _former_node(worker, lines, run.incidents), "gone"),
                ranks=tuple(sorted({line.rank for line in lines})),
                epochs=tuple(sorted({line.epoch for line in lines})),
                first_step=min(steps, default=None),
                last_step=max(steps, default=None),
            )
        )
    return tuple(found)


def _former_node(worker: str, lines: Sequence[LedgerLine], incidents: Iterable[Incident]) -> str:
    last = max((line.epoch for line in lines), default=None)
    index = worker.partition("-")[0]
    return next((i.node or "" for i in incidents if str(i.worker) == index and i.epoch == last), "")


def _order(worker: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in worker.split("-"))
