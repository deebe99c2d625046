"""Gathers the facts of a report: from the view of a job, and for a local run also from its step ledger.

Pure. None means unknown: a cluster has no step ledger, and a job that has just started has no checkpoint.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from surefoot.protocol.checkpoints.completeness import Lineage
from surefoot_operator.api.status import CheckpointLatency, Incident, JobStatus, LatencyQuantiles
from surefoot_operator.api.time_spent import goodput, seconds_spent
from surefoot_operator.cli.jobs.describe import worker_state
from surefoot_operator.cli.jobs.read_jobs import JobView
from surefoot_operator.cli.local import run_report
from surefoot_operator.cli.local.faults import InjectedFault
from surefoot_operator.cli.local.progress import (
    LedgerEntry,
    LinesByStep,
    SampleAccount,
    TrainerStart,
    mean_loss_by_step,
)
from surefoot_operator.cli.local.run_report import Checkpoints, Comparison, RunRecords
from surefoot_operator.cli.report.charts import Point, select_finite

# ---- report facts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IncidentFacts:
    """An incident with the phases of its recovery, with the same seconds as in `surefoot timeline`."""

    number: int
    """Number of the incident on the page, from 1 for the oldest."""
    incident: Incident
    at_seconds: float
    """Unix time of its start: of the injected fault if one caused it, else of its detection."""
    phases: tuple[tuple[str, float, str], ...]
    """Each phase's name, its end in seconds after the incident's start, and a sentence."""
    fault: str | None = None
    """Injected fault that caused the incident; None if none did or it is not known."""

    @property
    def planned(self) -> bool:
        return self.incident.kind == "planned"

    @property
    def took_seconds(self) -> float | None:
        """Seconds from the incident's start to the first new step; None while the job recovers."""
        return next((seconds for name, seconds, _ in self.phases if name == "first_step"), None)


@dataclass(frozen=True, slots=True)
class LossFacts:
    """Losses by step, as points of the loss chart."""

    counted: tuple[Point, ...]
    """Steps of the execution that counts."""
    discarded: tuple[tuple[Point, ...], ...]
    """For each generation, the steps that a later generation repeated."""
    reference: tuple[Point, ...]
    """Steps of the undisturbed run; empty without one."""
    non_finite_count: int
    """Steps whose loss was NaN or infinite."""


@dataclass(frozen=True, slots=True)
class StallFacts:
    """Stalls: the seconds for which saves blocked training, measured on the slowest rank of each save."""

    by_step: tuple[Point, ...] = ()
    """Step and stall of each saved step."""
    median_seconds: float | None = None
    p99_seconds: float | None = None
    max_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """An attempt of a worker: its node, and the ranks and steps that it trained."""

    worker: str
    """Worker and attempt, as `INDEX-ATTEMPT`."""
    node: str
    """Name of its node; empty if it is not known."""
    state: str
    """Pod phase, or `gone` for an attempt that only the ledger still shows."""
    ranks: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()
    first_step: int | None = None
    """First step that it finished; None if there is none or no ledger."""
    last_step: int | None = None
    """Last step that it finished; None if there is none or no ledger."""


@dataclass(frozen=True, slots=True)
class LedgerFacts:
    """Facts that only the step ledger of a local run contains."""

    loss: LossFacts
    account: SampleAccount | None
    stalls: StallFacts
    checkpoints: Checkpoints | None
    comparison: Comparison | None


@dataclass(frozen=True, slots=True)
class ReportFacts:
    """Everything that the report page shows."""

    view: JobView
    source: str
    """Where the job was read, as text for the footer."""
    status: JobStatus
    """The job's status; a default one if it cannot be read."""
    seconds: dict[str, float]
    """Seconds by category, as the operator counts them; empty before it has counted any."""
    goodput: float | None
    lineage: Lineage
    restored_from: dict[int, str | None]
    """Generation -> source of its restored state, as the incidents record it."""
    incidents: tuple[IncidentFacts, ...]
    placements: tuple[Placement, ...]
    nodes: tuple[tuple[str, str, str], ...]
    """For each node that the job uses: its name, its state and the state of its memory servers."""
    latency: CheckpointLatency
    """Checkpoint latency of the newest saves, as the status has it; the stall of all saves, if there is a ledger."""
    ledger: LedgerFacts | None = None
    """Facts from the step ledger; None for a job in a cluster, which has none."""


# ---- gathering -------------------------------------------------------------------------------------------------------


def gather_facts(
    view: JobView, source: str, run: RunRecords | None = None, until_seconds: float | None = None
) -> ReportFacts:
    """Gathers everything that the page shows.

    Args:
        view: The job and its surroundings.
        source: Text for the page's footer: where they were read.
        run: Records from the folder of a local run; None for a job in a cluster.
        until_seconds: Unix time until which an unfinished job is known to have run; None: the time of `view`.
    """
    status = view.stored.status or JobStatus()
    seconds = seconds_spent(status.time_spent, view.now if until_seconds is None else until_seconds)
    lineage, incidents = (status.lineage, status.incidents) if run is None else (run.lineage, run.incidents)
    placements = _place_workers(view)
    ledger = None if run is None else _read_ledger(run, view.stored.phase)
    latency = status.checkpoint_latency
    if ledger is not None and ledger.stalls.median_seconds is not None and ledger.stalls.p99_seconds is not None:
        stall = LatencyQuantiles(ledger.stalls.median_seconds, ledger.stalls.p99_seconds)
        latency = dataclasses.replace(latency, stall=stall)
    return ReportFacts(
        view=view,
        source=source,
        status=status,
        seconds={name: spent for name, spent in seconds.items() if spent > 0},
        goodput=goodput(seconds),
        lineage=lineage,
        restored_from=run_report.sources_of(lineage, incidents),
        incidents=number_incidents(incidents)
        if run is None
        else number_incidents(incidents, run.struck, _trainer_starts(run)),
        placements=placements if run is None else _add_ledgers(placements, run),
        nodes=_describe_nodes(view, has_processes=run is not None),
        ledger=ledger,
        latency=latency,
    )


def number_incidents(
    incidents: Iterable[Incident],
    struck: Sequence[InjectedFault] = (),
    starts: Mapping[int, TrainerStart] | None = None,
) -> tuple[IncidentFacts, ...]:
    """Numbers incidents, oldest first, with the seconds that `timeline` prints.

    Args:
        incidents: Incidents in any order.
        struck: Faults that were injected.
        starts: Generation -> when its slowest trainers were ready, which divides the last phase of a recovery.
    """
    facts = []
    for number, incident in enumerate(sorted(incidents, key=lambda incident: incident.detected_seconds), 1):
        report = run_report.incident_report(incident, struck)
        begin_seconds = incident.detected_seconds - report["detected_seconds"]
        phases = tuple(run_report.phase_rows(report))
        start = next(
            (start for generation, start in sorted((starts or {}).items()) if generation > incident.generation), None
        )
        if start is not None and phases and phases[-1][0] == "first_step":
            phases = (*phases[:-1], *_divide_last_phase(phases, start, begin_seconds))
        facts.append(IncidentFacts(number, incident, begin_seconds, phases, report["fault"]))
    return tuple(facts)


_START_PHASES = (
    ("attached", "trainers forked, and the program started"),
    ("connected", "connected to the other ranks, and the model built"),
    ("restored", "state restored"),
)


def _divide_last_phase(
    phases: Sequence[tuple[str, float, str]], start: TrainerStart, begin_seconds: float
) -> list[tuple[str, float, str]]:
    """Divides the phase from the commit to the first new step; each part ends within it."""
    *_, (name, end_seconds, text) = phases
    ready = phases[-2][1] if len(phases) > 1 else 0.0
    parts = []
    for (part, sentence), at_seconds in zip(_START_PHASES, start, strict=True):
        ready = min(end_seconds, max(ready, round(at_seconds - begin_seconds, 4)))
        parts.append((part, ready, sentence))
    return [*parts, (name, end_seconds, f"{text}, compilation included")]


def _trainer_starts(run: RunRecords) -> dict[int, TrainerStart]:
    """Returns for each generation when its slowest rank was ready; without generations that recorded no start."""
    starts: dict[int, list[TrainerStart]] = defaultdict(list)
    for _, line in run.lines:
        if line.start is not None:
            starts[line.generation].append(line.start)
    return {generation: TrainerStart(*map(max, zip(*times, strict=True))) for generation, times in starts.items()}


def _read_ledger(run: RunRecords, phase: str) -> LedgerFacts:
    counted = run_report.counted_lines_of(run)
    final_lines, account = run_report.count_run(run, counted, is_complete=phase == "Complete")
    return LedgerFacts(
        _loss_facts(counted, final_lines, run), account, _stall_facts(run), run.checkpoints, run.comparison
    )


def _loss_facts(counted: LinesByStep, final_lines: LinesByStep, run: RunRecords) -> LossFacts:
    """Collects the loss curves: of the steps that count, of repeated steps and of the undisturbed run."""
    discarded: dict[int, LinesByStep] = defaultdict(lambda: defaultdict(list))
    for _, line in run.lines:
        if line.step not in counted or counted[line.step][0].generation != line.generation:
            discarded[line.generation][line.step].append(line)
    losses = mean_loss_by_step(final_lines)
    points = select_finite(sorted(losses.items()))
    discarded_curves = (
        select_finite(sorted(mean_loss_by_step(lines).items())) for _, lines in sorted(discarded.items())
    )
    return LossFacts(
        counted=tuple(points),
        discarded=tuple(tuple(curve) for curve in discarded_curves if curve),
        reference=tuple(select_finite(sorted((run.reference or {}).items()))),
        non_finite_count=len(losses) - len(points),
    )


def _stall_facts(run: RunRecords) -> StallFacts:
    """Collects the longest stall of each save over its ranks, and their distribution."""
    stall_by_save: dict[tuple[int, int], float] = {}
    for _, line in run.lines:
        if line.stall_seconds is not None:
            save = (line.generation, line.step)
            stall_by_save[save] = max(stall_by_save.get(save, 0.0), line.stall_seconds)
    if not stall_by_save:
        return StallFacts()
    by_step: dict[int, float] = {}
    for (_, step), seconds in stall_by_save.items():
        by_step[step] = max(by_step.get(step, 0.0), seconds)
    sorted_stalls = sorted(stall_by_save.values())
    return StallFacts(
        by_step=tuple((float(step), seconds) for step, seconds in sorted(by_step.items())),
        median_seconds=statistics.median(sorted_stalls),
        p99_seconds=sorted_stalls[min(len(sorted_stalls) - 1, int(0.99 * len(sorted_stalls)))],
        max_seconds=sorted_stalls[-1],
    )


# ---- who ran where ---------------------------------------------------------------------------------------------------


def _place_workers(view: JobView) -> tuple[Placement, ...]:
    """Lists the observed workers. Only members of the current generation have it set: pods record no earlier one."""
    membership = view.stored.status.membership if view.stored.status is not None else None
    members = {(member.index, member.attempt) for member in membership.members} if membership is not None else set()
    generations = () if membership is None else (membership.generation,)
    return tuple(
        Placement(
            worker=f"{worker.index}-{worker.attempt}",
            node=worker.node or "",
            state=worker_state(worker),
            generations=generations if (worker.index, worker.attempt) in members else (),
        )
        for worker in view.workers
    )


def _describe_nodes(view: JobView, has_processes: bool) -> tuple[tuple[str, str, str], ...]:
    """Lists name, state and memory server state of each node that the job uses.

    `has_processes`: nodes are processes of a local run, which end with the job, so that none of them has failed.
    """
    has_ended = has_processes and view.stored.phase in ("Complete", "Failed")
    stopped = "ended" if has_ended else "not running"
    servers = {node: "running" if is_running else stopped for node, is_running in (view.servers or {}).items()}
    used_names = {worker.node for worker in view.workers} | servers.keys()
    rows = []
    for node in view.nodes or ():
        if node.name in used_names:
            state_words = ("ready" if node.ready else "not ready", "" if node.schedulable else "cordoned")
            state = ", ".join(filter(None, (*state_words, node.reason or node.unconfirmed_failure)))
            state = "ended" if has_ended and not node.ready else state
            rows.append((node.name, state, servers.get(node.name, "none")))
    return tuple(rows)


def _add_ledgers(placements: Sequence[Placement], run: RunRecords) -> tuple[Placement, ...]:
    """Adds ranks and steps from the ledger, and a row for each attempt that only the ledger shows.

    The node of such an attempt is known only if an incident names it.
    """
    lines_by_worker: dict[str, list[LedgerEntry]] = defaultdict(list)
    for worker, line in run.lines:
        lines_by_worker[worker].append(line)
    placement_by_worker: Mapping[str, Placement] = {placement.worker: placement for placement in placements}
    rows = []
    for worker in sorted(lines_by_worker.keys() | placement_by_worker.keys(), key=_worker_order):
        lines = lines_by_worker.get(worker, [])
        steps = [line.step for line in lines]
        rows.append(
            dataclasses.replace(
                placement_by_worker.get(worker)
                or Placement(worker, _former_node(worker, lines, run.incidents), "gone"),
                ranks=tuple(sorted({line.rank for line in lines})),
                generations=tuple(sorted({line.generation for line in lines})),
                first_step=min(steps, default=None),
                last_step=max(steps, default=None),
            )
        )
    return tuple(rows)


def _former_node(worker: str, lines: Sequence[LedgerEntry], incidents: Iterable[Incident]) -> str:
    """Returns the node of a worker that is gone, from the incident in its last generation; empty if none names it."""
    last_generation = max((line.generation for line in lines), default=None)
    index = worker.partition("-")[0]
    return next(
        (
            incident.node or ""
            for incident in incidents
            if str(incident.worker) == index and incident.generation == last_generation
        ),
        "",
    )


def _worker_order(worker: str) -> tuple[int, ...]:
    """Returns a sort key that orders `INDEX-ATTEMPT` by number."""
    return tuple(int(part) if part.isdigit() else 0 for part in worker.split("-"))
