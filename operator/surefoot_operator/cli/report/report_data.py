"""Gathers the facts of a report from a job's view, and of a local run from its ledger of steps.

Pure. None means unknown: a cluster keeps no ledger of steps, a job that has just begun has no checkpoint.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from surefoot.protocol.checkpoints.completeness import Lineage
from surefoot_operator.api.status import Incident, JobStatus
from surefoot_operator.cli.jobs.describe import worker_state
from surefoot_operator.cli.jobs.read_jobs import JobView
from surefoot_operator.cli.local import run_report
from surefoot_operator.cli.local.faults import InjectedFault
from surefoot_operator.cli.local.progress import LedgerEntry, LinesByStep, SampleAccount, mean_loss_by_step
from surefoot_operator.cli.local.run_report import Checkpoints, Comparison, RunRecords
from surefoot_operator.cli.report.charts import Point, select_finite
from surefoot_operator.policy.report.time_spent import goodput, seconds_spent

# ---- report facts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IncidentFacts:
    """One incident with the phases of its recovery, the figures of `surefoot timeline`."""

    number: int
    incident: Incident
    at_seconds: float
    """Unix seconds of its beginning: the injected fault, else the first sign."""
    phases: tuple[tuple[str, float, str], ...]
    """Of each phase its name, the seconds from the beginning to its end, and a sentence."""
    fault: str | None = None

    @property
    def planned(self) -> bool:
        return self.incident.kind == "planned"

    @property
    def took_seconds(self) -> float | None:
        """Until the first new step; None while it goes on."""
        return next((at for name, at, _ in self.phases if name == "first_step"), None)


@dataclass(frozen=True, slots=True)
class LossFacts:
    """The loss by step: what counts, what was run again, and undisturbed."""

    counted: tuple[Point, ...]
    discarded: tuple[tuple[Point, ...], ...]
    """Of each generation the steps that a later one ran again."""
    reference: tuple[Point, ...]
    non_finite_count: int
    """Steps whose loss was NaN or infinite."""


@dataclass(frozen=True, slots=True)
class StallFacts:
    """How long saves stopped the training: of each saved step its slowest rank."""

    by_step: tuple[Point, ...] = ()
    median_seconds: float | None = None
    p95_seconds: float | None = None
    max_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """One worker's attempt: where it ran, and what it trained."""

    worker: str
    """`INDEX-ATTEMPT`."""
    node: str
    state: str
    ranks: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()
    first_step: int | None = None
    last_step: int | None = None


@dataclass(frozen=True, slots=True)
class LedgerFacts:
    """What the ledger of a local run adds."""

    loss: LossFacts
    account: SampleAccount | None
    stalls: StallFacts
    checkpoints: Checkpoints | None
    comparison: Comparison | None


@dataclass(frozen=True, slots=True)
class ReportFacts:
    """Everything on one page."""

    view: JobView
    source: str
    status: JobStatus
    """An empty one where the job's cannot be read."""
    seconds: dict[str, float]
    """By category, the operator's own account; empty: it did not count yet."""
    goodput: float | None
    lineage: Lineage
    restored_from: dict[int, str | None]
    """Where the state of each generation came from, by the incidents."""
    incidents: tuple[IncidentFacts, ...]
    placements: tuple[Placement, ...]
    nodes: tuple[tuple[str, str, str], ...]
    """Name, state, and state of the memory servers of each node that the job uses."""
    ledger: LedgerFacts | None = None
    """None: no ledger of steps can be read, as of a cluster."""


# ---- gathering -------------------------------------------------------------------------------------------------------


def gather_facts(
    view: JobView, source: str, run: RunRecords | None = None, until_seconds: float | None = None
) -> ReportFacts:
    """Gathers everything that the page shows.

    Args:
        view: the job and its surroundings.
        source: where they were read, for people.
        run: what the folder of a local run holds besides.
        until_seconds: when an unfinished job was last known to go on; None: when it was read.
    """
    status = view.stored.status or JobStatus()
    seconds = seconds_spent(status.time_spent, view.now if until_seconds is None else until_seconds)
    lineage, incidents = (status.lineage, status.incidents) if run is None else (run.lineage, run.incidents)
    placements = _place_workers(view)
    return ReportFacts(
        view=view,
        source=source,
        status=status,
        seconds={name: spent for name, spent in seconds.items() if spent > 0},
        goodput=goodput(seconds),
        lineage=lineage,
        restored_from=run_report.sources_of(lineage, incidents),
        incidents=number_incidents(incidents, () if run is None else run.struck),
        placements=placements if run is None else _add_ledgers(placements, run),
        nodes=_describe_nodes(view),
        ledger=None if run is None else _read_ledger(run, view.stored.phase),
    )


def number_incidents(incidents: Iterable[Incident], struck: Sequence[InjectedFault]) -> tuple[IncidentFacts, ...]:
    """Numbers incidents, oldest first, with the seconds that `timeline` prints."""
    facts = []
    for number, incident in enumerate(sorted(incidents, key=lambda i: i.detected_seconds), 1):
        report = run_report.incident_report(incident, struck)
        begin_seconds = incident.detected_seconds - report["detected_seconds"]
        phases = tuple(run_report.phase_rows(report))
        facts.append(IncidentFacts(number, incident, begin_seconds, phases, report["fault"]))
    return tuple(facts)


def _read_ledger(run: RunRecords, phase: str) -> LedgerFacts:
    counted = run_report.counted_lines_of(run)
    kept, account = run_report.count_run(run, counted, is_complete=phase == "Complete")
    return LedgerFacts(_losses(counted, kept, run), account, _stalls(run), run.checkpoints, run.comparison)


def _losses(counted: LinesByStep, kept: LinesByStep, run: RunRecords) -> LossFacts:
    discarded: dict[int, LinesByStep] = defaultdict(lambda: defaultdict(list))
    for _, line in run.lines:
        if line.step not in counted or counted[line.step][0].generation != line.generation:
            discarded[line.generation][line.step].append(line)
    losses = mean_loss_by_step(kept)
    points = select_finite(sorted(losses.items()))
    again = (select_finite(sorted(mean_loss_by_step(lines).items())) for _, lines in sorted(discarded.items()))
    return LossFacts(
        counted=tuple(points),
        discarded=tuple(tuple(curve) for curve in again if curve),
        reference=tuple(select_finite(sorted((run.reference or {}).items()))),
        non_finite_count=len(losses) - len(points),
    )


def _stalls(run: RunRecords) -> StallFacts:
    slowest: dict[tuple[int, int], float] = {}
    for _, line in run.lines:
        if line.stall_seconds is not None:
            save = (line.generation, line.step)
            slowest[save] = max(slowest.get(save, 0.0), line.stall_seconds)
    if not slowest:
        return StallFacts()
    by_step: dict[int, float] = {}
    for (_, step), seconds in slowest.items():
        by_step[step] = max(by_step.get(step, 0.0), seconds)
    ordered = sorted(slowest.values())
    return StallFacts(
        by_step=tuple((float(step), seconds) for step, seconds in sorted(by_step.items())),
        median_seconds=statistics.median(ordered),
        p95_seconds=ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        max_seconds=ordered[-1],
    )


# ---- who ran where ---------------------------------------------------------------------------------------------------


def _place_workers(view: JobView) -> tuple[Placement, ...]:
    world = view.stored.status.membership if view.stored.status is not None else None
    members = {(member.index, member.attempt) for member in world.members} if world is not None else set()
    epochs = () if world is None else (world.generation,)
    return tuple(
        Placement(
            worker=f"{worker.index}-{worker.attempt}",
            node=worker.node or "",
            state=worker_state(worker),
            generations=epochs if (worker.index, worker.attempt) in members else (),
        )
        for worker in view.workers
    )


def _describe_nodes(view: JobView) -> tuple[tuple[str, str, str], ...]:
    servers = {node: "running" if runs else "not running" for node, runs in (view.servers or {}).items()}
    used = {worker.node for worker in view.workers} | servers.keys()
    rows = []
    for node in view.nodes or ():
        if node.name in used:
            words = ("ready" if node.ready else "not ready", "" if node.schedulable else "cordoned")
            state = ", ".join(filter(None, (*words, node.reason or node.unconfirmed_failure)))
            rows.append((node.name, state, servers.get(node.name, "none")))
    return tuple(rows)


def _add_ledgers(placements: Sequence[Placement], run: RunRecords) -> tuple[Placement, ...]:
    """Adds ranks and steps; attempts that only a ledger knows are gone, and an incident may name their node."""
    lines_by_worker: dict[str, list[LedgerEntry]] = defaultdict(list)
    for worker, line in run.lines:
        lines_by_worker[worker].append(line)
    known: Mapping[str, Placement] = {placement.worker: placement for placement in placements}
    rows = []
    for worker in sorted(lines_by_worker.keys() | known.keys(), key=_worker_order):
        lines = lines_by_worker.get(worker, [])
        steps = [line.step for line in lines]
        rows.append(
            dataclasses.replace(
                known.get(worker) or Placement(worker, _former_node(worker, lines, run.incidents), "gone"),
                ranks=tuple(sorted({line.rank for line in lines})),
                generations=tuple(sorted({line.generation for line in lines})),
                first_step=min(steps, default=None),
                last_step=max(steps, default=None),
            )
        )
    return tuple(rows)


def _former_node(worker: str, lines: Sequence[LedgerEntry], incidents: Iterable[Incident]) -> str:
    last = max((line.generation for line in lines), default=None)
    index = worker.partition("-")[0]
    return next((i.node or "" for i in incidents if str(i.worker) == index and i.generation == last), "")


def _worker_order(worker: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in worker.split("-"))
