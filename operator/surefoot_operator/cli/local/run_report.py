"""Builds the JSON report of a run and its closing sentences.

The seconds of an incident count from the injected fault that caused it. If none did (a planned change, a real failure),
they count from its detection.
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
from surefoot_operator.api.time_spent import goodput, seconds_spent
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

MAX_DETAIL_LINES = 20
_SAME_CLOCK_SECONDS = 0.05
"""An incident may be detected this much before the recorded time of its fault; both use the clock of this machine."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Figures about a run's checkpoints, as they appear in the report."""

    complete: int
    """Number of checkpoints that became complete."""
    bytes: int | None
    """Bytes of the newest complete one; None if none was measured."""
    median_stall_seconds: float | None
    """Median time for which a save blocked training; None if there was no save."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between a run with faults and an undisturbed run; None where they are not known."""

    max_loss_difference: float | None = None
    max_parameter_difference: float | None = None
    bit_exact: bool | None = None
    step: int | None = None
    """Step of the checkpoint whose parameters were compared."""
    problem: str = ""
    """Reason why the parameters could not be compared; empty if they were."""


@dataclass(frozen=True, slots=True)
class RunRecords:
    """Everything recorded about a run: in its folder, and, for a run just finished, in `surefoot local` itself."""

    lines: tuple[tuple[str, LedgerEntry], ...]
    """All ledger lines, each with its worker as `INDEX-ATTEMPT`."""
    lineage: Lineage
    incidents: tuple[Incident, ...]
    checkpoints: Checkpoints | None = None
    reference: Mapping[int, float] | None = None
    """Loss of each step in a run without faults; None if there was none to compare."""
    struck: tuple[InjectedFault, ...] = ()
    comparison: Comparison | None = None
    skipped: tuple[SkippedData, ...] = ()


def read_records(progress: RunProgress, struck: tuple[InjectedFault, ...] = ()) -> RunRecords:
    """Reads the complete ledger of a run that `progress` has followed."""
    lines = tuple(progress.lines_by_worker())
    stall_seconds = median_stall_seconds(line for _, line in lines)
    return RunRecords(
        lines=lines,
        lineage=progress.lineage,
        incidents=tuple(sorted(progress.incidents.values(), key=lambda incident: incident.detected_seconds)),
        checkpoints=Checkpoints(len(progress.completed), progress.checkpoint_bytes, stall_seconds),
        struck=struck,
        skipped=progress.status.skipped_data,
    )


def counted_lines_of(run: RunRecords) -> LinesByStep:
    """Returns by step the ledger lines of the execution that counts."""
    return counted_lines((line for _, line in run.lines), run.lineage)


def count_run(run: RunRecords, counted: LinesByStep, is_complete: bool) -> tuple[LinesByStep, SampleAccount | None]:
    """Drops the newest unfinished steps of a run that is not complete, and counts the samples of the others."""
    ranks = world_size_by_step(counted, run.lineage)
    final_lines = counted if is_complete else drop_unfinished(counted, ranks)
    return final_lines, count_samples(
        final_lines, first_own_step(run.lineage), ranks, skips_of(run.lineage, run.skipped)
    )


def read_losses(progress: RunProgress) -> dict[int, float]:
    """Returns the loss of each step, from the execution that counts."""
    return mean_loss_by_step(counted_lines((line for _, line in progress.lines_by_worker()), progress.lineage))


_PHASES = (
    ("detected", "noticed"),
    ("claimed", "new generation claimed"),
    ("stopped", "trainers stopped"),
    ("fenced", "memory fenced and read"),
    ("committed", "new membership committed"),
    ("first_step", "first new step"),
)


def cause_of(incident: Incident, struck: Iterable[InjectedFault]) -> InjectedFault | None:
    """Returns the injected fault that caused an incident; None if no fault fits.

    That is the last fault on its node before it was detected. If the incident names no node, it is the last fault at
    all.
    """
    earlier_faults = [
        injected for injected in struck if injected.at_seconds <= incident.detected_seconds + _SAME_CLOCK_SECONDS
    ]
    if incident.kind == "planned":
        drain_faults = [
            injected
            for injected in earlier_faults
            if injected.fault.kind == "drain" and f"node {injected.fault.node} is drained" in incident.reason
        ]
        return drain_faults[-1] if drain_faults else None
    ending_faults = [injected for injected in earlier_faults if KINDS[injected.fault.kind].ends_something]
    same_node = [
        injected
        for injected in ending_faults
        if injected.fault.node is not None and injected.fault.node == incident.node
    ]
    candidates = same_node or [injected for injected in ending_faults if incident.node is None]
    return candidates[-1] if candidates else None


def incident_report(incident: Incident, struck: Sequence[InjectedFault]) -> dict[str, Any]:
    """Builds the report of one incident, with its phases in seconds after the fault."""
    cause = cause_of(incident, struck)
    zero_seconds = min(cause.at_seconds, incident.detected_seconds) if cause else incident.detected_seconds
    seconds_by_phase = {f"{name}_seconds": getattr(incident, f"{name}_seconds") for name, _ in _PHASES}
    return {
        "kind": incident.kind,
        **{
            name: None if at_seconds is None else round(at_seconds - zero_seconds, 4)
            for name, at_seconds in seconds_by_phase.items()
        },
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
    """Maps each generation to the source of its state, as recorded by the incident that ended the previous one."""
    sources: dict[int, str | None] = {
        entry.generation: "source job" for entry in lineage if entry.parent and entry.parent.is_imported
    }
    generations = [entry.generation for entry in lineage]
    for incident in incidents:
        next_generation = next((generation for generation in generations if generation > incident.generation), None)
        if next_generation is not None and next_generation not in sources:
            sources[next_generation] = incident.restored_from
    return sources


def build_report(outcome: str, run: RunRecords, account: SampleAccount | None, status: JobStatus) -> dict[str, Any]:
    """Builds the JSON report. `outcome`: the job's last phase, or Interrupted."""
    comparison = run.comparison or Comparison()
    sources = sources_of(run.lineage, run.incidents)
    seconds, age_seconds = _time_spent(status)
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
        "max_loss_difference": comparison.max_loss_difference,
        "max_parameter_difference": comparison.max_parameter_difference,
        "parameters_bit_exact": comparison.bit_exact,
        "parameters_compared_at_step": comparison.step,
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


def _time_spent(status: JobStatus) -> tuple[Mapping[str, float], float | None]:
    """Returns the seconds by category, and their sum; None if the job has not started.

    They count to the job's end, or to the last change in its stored status.
    """
    if status.start_seconds is None:
        return {}, None
    time_spent = status.time_spent
    end_seconds = time_spent.since_seconds if status.completion_seconds is None else status.completion_seconds
    return seconds_spent(time_spent, end_seconds), end_seconds - status.start_seconds


def phase_rows(incident_facts: dict[str, Any]) -> list[tuple[str, float, str]]:
    """Lists the phases that an incident went through, each as name, seconds and sentence."""
    rows = []
    for name, sentence in _PHASES:
        seconds = incident_facts[f"{name}_seconds"]
        if seconds is not None:
            rows.append((name, seconds, f"{sentence}{_phase_detail(name, incident_facts)}"))
    return rows


def timeline(report: dict[str, Any]) -> list[str]:
    """Renders each incident as a few lines with its phases."""
    lines = []
    for incident_facts in report["incidents"]:
        title = f"{incident_facts['kind']}: {incident_facts['reason']}"
        lines.append(title if incident_facts["fault"] is None else f"{title} ({incident_facts['fault']})")
        lines += [f"    {line}" for line in incident_facts["detail"].splitlines()[:MAX_DETAIL_LINES]]
        lines += [f"  {seconds:8.3f} s  {sentence}" for _, seconds, sentence in phase_rows(incident_facts)]
    return lines


def _phase_detail(phase: str, incident_facts: dict[str, Any]) -> str:
    if phase == "committed":
        return f": world {incident_facts['world_size_before']} -> {incident_facts['world_size_after']}, from step {incident_facts['from_step'] or 0}"
    if phase == "first_step":
        steps_lost = incident_facts["steps_lost"]
        source = f", restored from {incident_facts['restored_from']}" if incident_facts["restored_from"] else ""
        return source + ("" if steps_lost is None else f", {steps_lost} steps lost")
    return ""


def verdict(report: dict[str, Any]) -> list[str]:
    """Summarizes the run in a few sentences, which are printed last."""
    world_sizes = " -> ".join(str(generation["world_size"]) for generation in report["generations"]) or "none"
    sentences = [f"{report['outcome']}: {report['steps'] or 0} steps, worlds {world_sizes}"]
    if report["samples_lost"] is not None:
        unknown = report["samples_unknown"]
        unknown_text = (
            f", unknown {unknown}: their steps were not written into the ledger (was the disk full?)" if unknown else ""
        )
        sentences.append(f"samples lost {report['samples_lost']}, repeated {report['samples_repeated']}{unknown_text}")
    if report["samples_skipped"]:
        where = ", ".join(f"{start} to {stop}" for start, stop in report["samples_skipped_at"])
        sentences.append(f"samples skipped by rollbacks {report['samples_skipped']}: positions {where}")
    if report["max_loss_difference"] is not None:
        sentences.append(f"largest loss difference to the undisturbed run {report['max_loss_difference']:.3g}")
    if report["max_parameter_difference"] is not None:
        exact_text = ", bit-exact" if report["parameters_bit_exact"] else ""
        where = report["parameters_compared_at_step"]
        sentences.append(
            f"largest parameter difference {report['max_parameter_difference']:.3g}{exact_text} (checkpoint of step {where})"
        )
    if report["goodput"] is not None:
        spent_by_category = sorted(report["seconds"].items(), key=lambda entry: -entry[1])
        sentences.append(
            f"goodput {report['goodput']:.1%}: "
            + ", ".join(f"{name} {spent:.1f} s" for name, spent in spent_by_category)
        )
    checkpoints = report["checkpoints"]
    size_text = f", {checkpoints['bytes'] / 1e6:.1f} MB each" if checkpoints["bytes"] else ""
    sentences.append(f"complete checkpoints {checkpoints['complete']}{size_text}")
    return sentences


# ---- comparison ------------------------------------------------------------------------------------------------------
# Compares a run's final parameters with those of an undisturbed run, from their checkpoints in the persistent tier.

INTERVALS_PER_UPLOAD = 10
"""Memory save intervals per upload to a persistent tier that was added only for the comparison."""


def with_persistent_tier(document: dict[str, Any], job: TrainingJob, root: Path) -> dict[str, Any]:
    """Adds a folder as persistent tier to a job that has none, because the memory tier is lost when a run ends.

    The last checkpoint, which is the one compared, is uploaded at the job's end whatever the interval.
    """
    if job.spec.checkpoint.persistent is not None:
        return document
    memory = job.spec.checkpoint.memory
    steps = INTERVALS_PER_UPLOAD * memory.base_steps
    uri = f"file://{root.resolve() / 'persistent'}"
    # An adaptive job needs an adaptive upload interval: fixed steps would be saved in addition to the operator's.
    interval: dict[str, Any] = {"interval": "auto"} if memory.is_adaptive else {"intervalSteps": steps}
    interval_text = "at intervals that the operator chooses" if memory.is_adaptive else f"every {steps} steps"
    say(f"the job has no persistent tier; for the comparison it uploads to {uri}, {interval_text}")
    spec = document["spec"]
    checkpoint = {**(spec.get("checkpoint") or {}), "persistent": {"uri": uri, **interval}}
    return {**document, "spec": {**spec, "checkpoint": checkpoint}}


def compare_parameters(job: TrainingJob, reference: TrainingJob) -> dict[str, Any]:
    """Compares two runs' final parameters.

    Returns:
        The keys `step`, `max_difference`, `bit_exact` and `tensors`; or `problem` with the reason for none.
    """
    tier = job.spec.checkpoint.persistent
    if tier is None:
        return {"problem": "the job has no persistent tier"}
    return run_tool("compare", tier, ["--job", job.uid, "--with", reference.uid])


# ---- conclusion of a run ---------------------------------------------------------------------------------------------
# Builds the report and closing lines of a finished run. Reads the run folder; called by `run_local` after all processes
# have ended.

_LOG_LINES = 12


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A finished run: its job, its recorded progress and its faults."""

    job: TrainingJob
    progress: RunProgress
    struck: tuple[InjectedFault, ...]
    """Faults that were injected."""
    not_injected: tuple[Fault, ...]
    """Faults whose step was never finished."""
    interrupted: bool = False
    """Whether the user stopped the run; its report is still written."""

    @property
    def outcome(self) -> str:
        return "Interrupted" if self.interrupted else self.progress.status.phase


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The report and closing lines of a run."""

    report: dict[str, Any]
    lines: tuple[str, ...]
    sound: bool
    """Whether every sample was used exactly once and the comparison, if requested, was possible."""
    comparison: Comparison | None = None


def build_conclusion(finished: FinishedRun, reference: FinishedRun | None) -> Conclusion:
    """Builds the report and closing lines of a run. `reference`: the undisturbed run to compare with, or None."""
    progress = finished.progress
    run = read_records(progress, finished.struck)
    final_lines, account = count_run(run, counted_lines_of(run), finished.outcome == "Complete")
    if reference is not None:
        run = dataclasses.replace(
            run, comparison=_compare_with_reference(finished, reference, mean_loss_by_step(final_lines))
        )
    report = build_report(finished.outcome, run, account, progress.status)
    lines = timeline(report)
    lines += [f"fault not injected, its step was never finished: {fault}" for fault in finished.not_injected]
    problem = run.comparison.problem if run.comparison is not None else ""
    if problem:
        lines.append(f"the parameters could not be compared: {problem}")
    if finished.outcome not in ("Complete", "Interrupted"):
        lines += explain_failure(progress)
    lines += verdict(report)
    is_sound = not problem and (account is None or account.lost == account.repeated == account.unknown == 0)
    return Conclusion(report, tuple(lines), is_sound, run.comparison)


def _compare_with_reference(finished: FinishedRun, reference: FinishedRun, losses: dict[int, float]) -> Comparison:
    if reference.outcome != "Complete":
        problem = f"the undisturbed run ended {reference.outcome}: {reference.progress.status.message}"
        return Comparison(problem=problem)
    difference = compare_parameters(finished.job, reference.job)
    return Comparison(
        max_loss_difference=largest_difference(losses, read_losses(reference.progress)),
        max_parameter_difference=difference.get("max_difference"),
        bit_exact=difference.get("bit_exact"),
        step=difference.get("step"),
        problem=str(difference.get("problem") or ""),
    )


def explain_failure(progress: RunProgress) -> list[str]:
    """Returns the operator's message and the last lines of the log that most likely shows the cause."""
    log_path = log_to_blame(progress.folder.logs_folder, progress.status.incidents)
    lines = [f"the job failed: {progress.status.message}"]
    if log_path is not None:
        log_lines = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        lines += [f"    {line}" for line in log_lines[-_LOG_LINES:]]
        lines.append(f"log: {log_path}")
    return lines


def log_to_blame(logs: Path, incidents: tuple[Incident, ...]) -> Path | None:
    """Finds the log of the rank that failed first, else its agent's log, else the newest log; skips empty logs.

    The newest log is the last choice: ranks that only lost their connection write after the one that failed.
    """
    last_incident = incidents[-1] if incidents else None
    patterns = ["worker-*/epoch-*/rank-*.log", "worker-*/agent.log"]
    if last_incident is not None and last_incident.rank is not None and last_incident.first_step_seconds is None:
        patterns = [
            f"worker-*/epoch-{last_incident.generation}/rank-{last_incident.rank}.log",
            f"worker-{last_incident.worker}-*/agent.log",
            *patterns,
        ]
    for pattern in patterns:
        nonempty_logs = [path for path in logs.glob(pattern) if path.stat().st_size > 0]
        if nonempty_logs:
            return max(nonempty_logs, key=lambda path: path.stat().st_mtime_ns)
    return None
