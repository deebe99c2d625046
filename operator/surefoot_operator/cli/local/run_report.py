"""Builds the JSON report of a run and its closing sentences.

Pure. An incident's seconds count from the fault that caused it; where none was injected (a planned change, a real
fault), from its first sign.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.protocol.checkpoints.completeness import Lineage, first_own_step
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.api.status import Incident, JobStatus, SkippedData
from surefoot_operator.cli.checkpoints import run_tool
from surefoot_operator.cli.command_base import say
from surefoot_operator.cli.local.faults import KINDS, Fault, InjectedFault
from surefoot_operator.cli.local.progress import (
    LedgerEntry,
    LinesByStep,
    RunProgress,
    SampleAccount,
    count_samples,
    counted_lines,
    drop_unfinished,
    largest_difference,
    mean_loss_by_step,
    median_stall_seconds,
    skips_of,
    world_size_by_step,
)
from surefoot_operator.policy.report.time_spent import goodput, seconds_spent

_MAX_LINES = 20
_SAME_CLOCK_SECONDS = 0.05
"""A sign may be noted this much before the fault that was noted after striking; both read the same clock."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    complete: int
    bytes: int | None
    median_stall_seconds: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences from the undisturbed run."""

    max_loss_difference: float | None = None
    max_parameter_difference: float | None = None
    bit_exact: bool | None = None
    step: int | None = None
    """At which step's checkpoint the parameters were compared."""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RunRecords:
    """What the folder of a local run holds, and what only `surefoot local` itself knows of the run."""

    lines: tuple[tuple[str, LedgerEntry], ...]
    """Each with its worker, `INDEX-ATTEMPT`."""
    lineage: Lineage
    incidents: tuple[Incident, ...]
    checkpoints: Checkpoints | None = None
    reference: Mapping[int, float] | None = None
    """The losses of a run without faults."""
    struck: tuple[InjectedFault, ...] = ()
    comparison: Comparison | None = None
    skipped: tuple[SkippedData, ...] = ()


def read_records(progress: RunProgress, struck: tuple[InjectedFault, ...] = ()) -> RunRecords:
    """Reads the whole ledger of a run that `progress` has followed."""
    lines = tuple(progress.lines_by_worker())
    stall_seconds = median_stall_seconds(line for _, line in lines)
    return RunRecords(
        lines=lines,
        lineage=progress.lineage,
        incidents=tuple(sorted(progress.incidents.values(), key=lambda i: i.detected_seconds)),
        checkpoints=Checkpoints(len(progress.completed), progress.checkpoint_bytes, stall_seconds),
        struck=struck,
        skipped=progress.status.skipped_data,
    )


def counted_lines_of(run: RunRecords) -> LinesByStep:
    """By step, the lines of the execution that counts."""
    return counted_lines((line for _, line in run.lines), run.lineage)


def count_run(run: RunRecords, counted: LinesByStep, is_complete: bool) -> tuple[LinesByStep, SampleAccount | None]:
    """Drops the steps that an unfinished run has only begun, and counts samples of the others."""
    ranks = world_size_by_step(counted, run.lineage)
    final_lines = counted if is_complete else drop_unfinished(counted, ranks)
    return final_lines, count_samples(
        final_lines, first_own_step(run.lineage), ranks, skips_of(run.lineage, run.skipped)
    )


def read_losses(progress: RunProgress) -> dict[int, float]:
    """The loss of each step that counts."""
    return mean_loss_by_step(counted_lines((line for _, line in progress.lines_by_worker()), progress.lineage))


_PHASES = (
    ("detected", "noticed"),
    ("claimed", "new epoch claimed"),
    ("stopped", "trainers stopped"),
    ("fenced", "memory sealed and read"),
    ("committed", "new world assigned"),
    ("first_step", "first new step"),
)


def cause_of(incident: Incident, struck: Iterable[InjectedFault]) -> InjectedFault | None:
    """Finds the injected fault behind an incident.

    The last one before its first sign that hit its node; else, where the incident names no node, the last before it.
    """
    before = [s for s in struck if s.at_seconds <= incident.detected_seconds + _SAME_CLOCK_SECONDS]
    if incident.kind == "planned":
        drains = [s for s in before if s.fault.kind == "drain" and f"node {s.fault.node} is drained" in incident.reason]
        return drains[-1] if drains else None
    ends = [s for s in before if KINDS[s.fault.kind].ends_something]
    same = [s for s in ends if s.fault.node is not None and s.fault.node == incident.node]
    candidates = same or [s for s in ends if incident.node is None]
    return candidates[-1] if candidates else None


def incident_report(incident: Incident, struck: Sequence[InjectedFault]) -> dict[str, Any]:
    """Reports one incident: its phases in seconds after the fault."""
    cause = cause_of(incident, struck)
    zero = min(cause.at_seconds, incident.detected_seconds) if cause else incident.detected_seconds
    ends = {f"{name}_seconds": getattr(incident, f"{name}_seconds") for name, _ in _PHASES}
    return {
        "kind": incident.kind,
        **{name: None if at is None else round(at - zero, 4) for name, at in ends.items()},
        "steps_lost": incident.steps_lost,
        "restored_from": incident.restored_from,
        "reason": incident.reason,
        "node": incident.node,
        "fault": str(cause.fault) if cause else None,
        "generation": incident.generation,
        "from_step": incident.restored_step,
        "world_size_before": incident.world_size_before,
        "world_size_after": incident.world_size_after,
        "detail": incident.detail,
    }


def sources_of(lineage: Lineage, incidents: Sequence[Incident]) -> dict[int, str | None]:
    """Maps each epoch to where its state came from.

    The incident that ended the epoch before it knows.
    """
    found: dict[int, str | None] = {e.generation: "older job" for e in lineage if e.parent and e.parent.is_imported}
    epochs = [entry.generation for entry in lineage]
    for incident in incidents:
        after = next((epoch for epoch in epochs if epoch > incident.generation), None)
        if after is not None and after not in found:
            found[after] = incident.restored_from
    return found


def build_report(outcome: str, run: RunRecords, account: SampleAccount | None, status: JobStatus) -> dict[str, Any]:
    """Builds the JSON report."""
    compared = run.comparison or Comparison()
    sources = sources_of(run.lineage, run.incidents)
    seconds, age_seconds = _time(status)
    return {
        "outcome": outcome,
        "generations": [
            {
                "generation": entry.generation,
                "world_size": entry.world_size,
                "from_step": entry.parent.step if entry.parent else 0,
                "restored_from": sources.get(entry.generation) if entry.parent else None,
            }
            for entry in run.lineage
        ],
        "incidents": [incident_report(incident, run.struck) for incident in run.incidents],
        "max_loss_difference": compared.max_loss_difference,
        "max_parameter_difference": compared.max_parameter_difference,
        "parameters_bit_exact": compared.bit_exact,
        "parameters_compared_at_step": compared.step,
        "samples_lost": account.lost if account else None,
        "samples_repeated": account.repeated if account else None,
        "samples_unknown": account.unknown if account else None,
        "samples_skipped": account.skipped_count if account else None,
        "samples_skipped_at": [list(span) for span in account.skipped] if account else [],
        "steps": account.steps if account else None,
        "checkpoints": dataclasses.asdict(run.checkpoints or Checkpoints(0, None, None)),
        "age_seconds": None if age_seconds is None else round(age_seconds, 4),
        "seconds": {category: round(spent, 4) for category, spent in seconds.items() if spent},
        "goodput": goodput(seconds) if seconds else None,
        "faults": [{"fault": str(struck.fault), "step": struck.step} for struck in run.struck],
    }


def _time(status: JobStatus) -> tuple[Mapping[str, float], float | None]:
    """Where the seconds went until the end, or until the last change that is stored; and their sum."""
    if status.start_seconds is None:
        return {}, None
    spent = status.time_spent
    until = spent.since_seconds if status.completion_seconds is None else status.completion_seconds
    return seconds_spent(spent, until), until - status.start_seconds


def phase_rows(found: dict[str, Any]) -> list[tuple[str, float, str]]:
    """Lists an incident's phases that are known: name, seconds, sentence."""
    rows = []
    for name, said in _PHASES:
        at = found[f"{name}_seconds"]
        if at is not None:
            rows.append((name, at, f"{said}{_detail(name, found)}"))
    return rows


def timeline(report: dict[str, Any]) -> list[str]:
    """Renders each incident as a few lines with its phases."""
    lines = []
    for found in report["incidents"]:
        title = f"{found['kind']}: {found['reason']}"
        lines.append(title if found["fault"] is None else f"{title} ({found['fault']})")
        lines += [f"    {line}" for line in found["detail"].splitlines()[:_MAX_LINES]]
        lines += [f"  {at:8.3f} s  {said}" for _, at, said in phase_rows(found)]
    return lines


def _detail(phase: str, found: dict[str, Any]) -> str:
    if phase == "committed":
        return (
            f": world {found['world_size_before']} -> {found['world_size_after']}, from step {found['from_step'] or 0}"
        )
    if phase == "first_step":
        lost = found["steps_lost"]
        source = f", restored from {found['restored_from']}" if found["restored_from"] else ""
        return source + ("" if lost is None else f", {lost} steps lost")
    return ""


def verdict(report: dict[str, Any]) -> list[str]:
    """Summarizes the run in a few sentences, printed last."""
    worlds = " -> ".join(str(epoch["world_size"]) for epoch in report["generations"]) or "none"
    said = [f"{report['outcome']}: {report['steps'] or 0} steps, worlds {worlds}"]
    if report["samples_lost"] is not None:
        unknown = report["samples_unknown"]
        rest = (
            f", unknown {unknown}: their steps were not written into the ledger (was the disk full?)" if unknown else ""
        )
        said.append(f"samples lost {report['samples_lost']}, repeated {report['samples_repeated']}{rest}")
    if report["samples_skipped"]:
        where = ", ".join(f"{start} to {stop}" for start, stop in report["samples_skipped_at"])
        said.append(f"samples skipped {report['samples_skipped']}, as rollbacks say: positions {where}")
    if report["max_loss_difference"] is not None:
        said.append(f"largest loss difference to the undisturbed run {report['max_loss_difference']:.3g}")
    if report["max_parameter_difference"] is not None:
        exact = ", bit-exact" if report["parameters_bit_exact"] else ""
        where = report["parameters_compared_at_step"]
        said.append(
            f"largest parameter difference {report['max_parameter_difference']:.3g}{exact} (checkpoint of step {where})"
        )
    if report["goodput"] is not None:
        parts = sorted(report["seconds"].items(), key=lambda one: -one[1])
        said.append(f"goodput {report['goodput']:.1%}: " + ", ".join(f"{name} {spent:.1f} s" for name, spent in parts))
    stored = report["checkpoints"]
    size = f", {stored['bytes'] / 1e6:.1f} MB each" if stored["bytes"] else ""
    said.append(f"complete checkpoints {stored['complete']}{size}")
    return said


# ---- comparison ------------------------------------------------------------------------------------------------------
# Compares a run's final parameters with those of an undisturbed run.

INTERVALS_PER_UPLOAD = 10
"""Memory intervals between promotions to a persistent tier that only the comparison asked for."""


def with_persistent_tier(document: dict[str, Any], job: TrainingJob, root: Path) -> dict[str, Any]:
    """Adds a folder as persistent tier to a job that has none.

    Memory is lost when a run ends. The last checkpoint is promoted whatever the interval, and it is the one compared.
    """
    if job.spec.checkpoint.persistent is not None:
        return document
    memory = job.spec.checkpoint.memory
    steps = INTERVALS_PER_UPLOAD * memory.base_steps
    uri = f"file://{root.resolve() / 'persistent'}"
    # fixed steps would be saved in addition to those that the operator chooses
    often: dict[str, Any] = {"interval": "auto"} if memory.is_adaptive else {"intervalSteps": steps}
    words = "at intervals that the operator chooses" if memory.is_adaptive else f"every {steps} steps"
    say(f"the job has no persistent tier; for the comparison it is promoted to {uri}, {words}")
    spec = document["spec"]
    checkpoint = {**(spec.get("checkpoint") or {}), "persistent": {"uri": uri, **often}}
    return {**document, "spec": {**spec, "checkpoint": checkpoint}}


def compare_parameters(mine: TrainingJob, other: TrainingJob) -> dict[str, Any]:
    """Compares two runs' final parameters: step, max_difference, bit_exact, tensors; or a problem."""
    tier = mine.spec.checkpoint.persistent
    if tier is None:
        return {"problem": "the job has no persistent tier"}
    return run_tool("compare", tier, ["--job", mine.uid, "--with", other.uid])


# ---- conclusion of a run ---------------------------------------------------------------------------------------------
# Builds the report and closing lines of a finished run. Reads the run folder; called by `run_local` when all processes
# are gone.

_LOG_LINES = 12


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """What remains of a finished run: job, progress, faults."""

    job: TrainingJob
    progress: RunProgress
    struck: tuple[InjectedFault, ...]
    not_injected: tuple[Fault, ...]
    interrupted: bool = False
    """It was told to stop; its report is still written."""

    @property
    def outcome(self) -> str:
        return "Interrupted" if self.interrupted else self.progress.status.phase


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The report and closing lines of a run.

    `sound`: every sample was used once and, where asked for, the comparison could be made.
    """

    report: dict[str, Any]
    lines: tuple[str, ...]
    sound: bool
    comparison: Comparison | None = None


def build_conclusion(ended: FinishedRun, reference: FinishedRun | None) -> Conclusion:
    """Builds the report and closing lines of a run and its reference."""
    progress = ended.progress
    run = read_records(progress, ended.struck)
    final_lines, account = count_run(run, counted_lines_of(run), ended.outcome == "Complete")
    if reference is not None:
        run = dataclasses.replace(run, comparison=_compare(ended, reference, mean_loss_by_step(final_lines)))
    report = build_report(ended.outcome, run, account, progress.status)
    lines = timeline(report)
    lines += [f"fault not injected, its step was never finished: {fault}" for fault in ended.not_injected]
    problem = run.comparison.problem if run.comparison is not None else ""
    if problem:
        lines.append(f"the parameters could not be compared: {problem}")
    if ended.outcome not in ("Complete", "Interrupted"):
        lines += explain_failure(progress)
    lines += verdict(report)
    is_sound = not problem and (account is None or account.lost == account.repeated == account.unknown == 0)
    return Conclusion(report, tuple(lines), is_sound, run.comparison)


def _compare(ended: FinishedRun, reference: FinishedRun, losses: dict[int, float]) -> Comparison:
    if reference.outcome != "Complete":
        problem = f"the undisturbed run ended {reference.outcome}: {reference.progress.status.message}"
        return Comparison(problem=problem)
    difference = compare_parameters(ended.job, reference.job)
    return Comparison(
        max_loss_difference=largest_difference(losses, read_losses(reference.progress)),
        max_parameter_difference=difference.get("max_difference"),
        bit_exact=difference.get("bit_exact"),
        step=difference.get("step"),
        problem=str(difference.get("problem") or ""),
    )


def explain_failure(progress: RunProgress) -> list[str]:
    """Quotes the operator's message and the tail of the log to blame."""
    log = log_to_blame(progress.folder.logs_folder, progress.status.incidents)
    lines = [f"the job failed: {progress.status.message}"]
    if log is not None:
        text = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        lines += [f"    {line}" for line in text[-_LOG_LINES:]]
        lines.append(f"log: {log}")
    return lines


def log_to_blame(logs: Path, incidents: tuple[Incident, ...]) -> Path | None:
    """Finds the log of the rank that failed first, else its agent's, else the newest; empty ones say nothing.

    Other ranks write last, and only that they lost the connection.
    """
    last = incidents[-1] if incidents else None
    patterns = ["worker-*/epoch-*/rank-*.log", "worker-*/agent.log"]
    if last is not None and last.rank is not None and last.first_step_seconds is None:
        patterns = [
            f"worker-*/epoch-{last.generation}/rank-{last.rank}.log",
            f"worker-{last.worker}-*/agent.log",
            *patterns,
        ]
    for pattern in patterns:
        written = [path for path in logs.glob(pattern) if path.stat().st_size > 0]
        if written:
            return max(written, key=lambda path: path.stat().st_mtime_ns)
    return None
