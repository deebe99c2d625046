"""Builds the JSON report of a run and its closing sentences.

Pure. An incident's seconds count from the fault that caused it; where none was injected (a planned change, a real
fault), from its first sign.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.protocol.checkpoints.completeness import Lineage, first_step
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.api.status import Incident, JobStatus
from surefoot_operator.cli.checkpoints import run_tool
from surefoot_operator.cli.command_base import say
from surefoot_operator.cli.local.progress import (
    Account,
    Fault,
    RunProgress,
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

_MOST_LINES = 20
_SAME_CLOCK_SECONDS = 0.05
"""A sign may be noted this much before the fault that was noted after striking; both read the same clock."""


@dataclass(frozen=True, slots=True)
class Struck:
    """An injected fault, when and at which step."""

    fault: Fault
    at_seconds: float
    step: int
    worker: int | None = None
    """The worker that ran on that node."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    complete: int
    bytes: int | None
    median_stall_seconds: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences from the undisturbed run."""

    max_loss_difference: float | None
    max_parameter_difference: float | None
    bit_exact: bool | None
    step: int | None
    """At which step's checkpoint the parameters were compared."""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Input of `build`."""

    outcome: str
    lineage: Lineage
    restored_from: dict[int, str | None]
    incidents: tuple[Incident, ...]
    struck: tuple[Struck, ...]
    account: Account | None
    checkpoints: Checkpoints
    comparison: Comparison | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Where the job's seconds went, by category; empty: it never started."""
    age_seconds: float | None = None
    """From its start to its end, or to the last that is known."""


def cause_of(incident: Incident, struck: Iterable[Struck]) -> Struck | None:
    """Finds the injected fault behind an incident.

    The last one before its first sign that hit its node; else, where the incident names no node, the last before it.
    """
    before = [s for s in struck if s.at_seconds <= incident.detected_seconds + _SAME_CLOCK_SECONDS]
    if incident.kind == "planned":
        drains = [s for s in before if s.fault.kind == "drain" and f"node {s.fault.node} is drained" in incident.reason]
        return drains[-1] if drains else None
    ends = [s for s in before if s.fault.ends_something]
    same = [s for s in ends if s.fault.node is not None and s.fault.node == incident.node]
    candidates = same or [s for s in ends if incident.node is None]
    return candidates[-1] if candidates else None


def incident_report(incident: Incident, struck: Sequence[Struck]) -> dict[str, Any]:
    """Reports one incident: its phases in seconds after the fault."""
    cause = cause_of(incident, struck)
    zero = min(cause.at_seconds, incident.detected_seconds) if cause else incident.detected_seconds
    phases = {
        "detected_seconds": incident.detected_seconds,
        "claimed_seconds": incident.claimed_seconds,
        "stopped_seconds": incident.stopped_seconds,
        "sealed_seconds": incident.sealed_seconds,
        "assigned_seconds": incident.assigned_seconds,
        "first_step_seconds": incident.first_step_seconds,
    }
    return {
        "kind": incident.kind,
        **{name: None if at is None else round(at - zero, 4) for name, at in phases.items()},
        "steps_lost": incident.steps_lost,
        "restored_from": incident.restored_from,
        "reason": incident.reason,
        "node": incident.node,
        "fault": str(cause.fault) if cause else None,
        "epoch": incident.epoch,
        "from_step": incident.parent_step,
        "world_before": incident.world_before,
        "world_after": incident.world_after,
        "detail": incident.detail,
    }


def sources_of(lineage: Lineage, incidents: Sequence[Incident]) -> dict[int, str | None]:
    """Maps each epoch to where its state came from.

    The incident that ended the epoch before it knows.
    """
    found: dict[int, str | None] = {e.epoch: "older job" for e in lineage if e.parent and e.parent.imported}
    epochs = [entry.epoch for entry in lineage]
    for incident in incidents:
        after = next((epoch for epoch in epochs if epoch > incident.epoch), None)
        if after is not None and after not in found:
            found[after] = incident.restored_from
    return found


def build_report(run: RunFacts) -> dict[str, Any]:
    """Builds the JSON report."""
    compared = run.comparison
    return {
        "outcome": run.outcome,
        "epochs": [
            {
                "epoch": entry.epoch,
                "world": entry.size,
                "from_step": entry.parent.step if entry.parent else 0,
                "restored_from": run.restored_from.get(entry.epoch) if entry.parent else None,
            }
            for entry in run.lineage
        ],
        "incidents": [incident_report(incident, run.struck) for incident in run.incidents],
        "max_loss_difference": compared.max_loss_difference if compared else None,
        "max_parameter_difference": compared.max_parameter_difference if compared else None,
        "parameters_bit_exact": compared.bit_exact if compared else None,
        "parameters_compared_at_step": compared.step if compared else None,
        "samples_lost": run.account.lost if run.account else None,
        "samples_repeated": run.account.repeated if run.account else None,
        "samples_unknown": run.account.unknown if run.account else None,
        "samples_skipped": sum(stop - start for start, stop in run.account.skipped) if run.account else None,
        "samples_skipped_at": [list(span) for span in run.account.skipped] if run.account else [],
        "steps": run.account.steps if run.account else None,
        "checkpoints": {
            "complete": run.checkpoints.complete,
            "bytes": run.checkpoints.bytes,
            "median_stall_seconds": run.checkpoints.median_stall_seconds,
        },
        "age_seconds": None if run.age_seconds is None else round(run.age_seconds, 4),
        "seconds": {category: round(spent, 4) for category, spent in run.seconds.items() if spent},
        "goodput": goodput(run.seconds) if run.seconds else None,
        "faults": [{"fault": str(s.fault), "step": s.step} for s in run.struck],
    }


_PHASES = (
    ("detected", "noticed"),
    ("claimed", "new epoch claimed"),
    ("stopped", "trainers stopped"),
    ("sealed", "memory sealed and read"),
    ("assigned", "new world assigned"),
    ("first_step", "first new step"),
)


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
        lines += [f"    {line}" for line in found["detail"].splitlines()[:_MOST_LINES]]
        lines += [f"  {at:8.3f} s  {said}" for _, at, said in phase_rows(found)]
    return lines


def _detail(phase: str, found: dict[str, Any]) -> str:
    if phase == "assigned":
        return f": world {found['world_before']} -> {found['world_after']}, from step {found['from_step'] or 0}"
    if phase == "first_step":
        lost = found["steps_lost"]
        source = f", restored from {found['restored_from']}" if found["restored_from"] else ""
        return source + ("" if lost is None else f", {lost} steps lost")
    return ""


def verdict(report: dict[str, Any]) -> list[str]:
    """Summarizes the run in a few sentences, printed last."""
    worlds = " -> ".join(str(epoch["world"]) for epoch in report["epochs"]) or "none"
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

INTERVALS_PER_PROMOTION = 10
"""Memory intervals between promotions to a persistent tier that only the comparison asked for."""


def with_persistent_tier(document: dict[str, Any], job: TrainingJob, root: Path) -> dict[str, Any]:
    """Adds a folder as persistent tier to a job that has none.

    Memory is lost when a run ends. The last checkpoint is promoted whatever the interval, and it is the one compared.
    """
    if job.spec.checkpoint.persistent is not None:
        return document
    memory = job.spec.checkpoint.memory
    steps = INTERVALS_PER_PROMOTION * memory.base_steps
    uri = f"file://{root.resolve() / 'persistent'}"
    # fixed steps would be saved in addition to those that the operator chooses
    often: dict[str, Any] = {"interval": "auto"} if memory.adaptive else {"intervalSteps": steps}
    words = "at intervals that the operator chooses" if memory.adaptive else f"every {steps} steps"
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
class EndedRun:
    """What remains of a finished run: job, progress, faults."""

    job: TrainingJob
    progress: RunProgress
    struck: tuple[Struck, ...]
    unstruck: tuple[Fault, ...]
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


def conclude(ended: EndedRun, reference: EndedRun | None) -> Conclusion:
    """Builds the report and closing lines of a run and its reference."""
    progress = ended.progress
    lines = list(progress.all_lines())
    kept = counted_lines(lines, progress.lineage)
    ranks = world_size_by_step(kept, progress.lineage)
    if ended.outcome != "Complete":
        kept = drop_unfinished(kept, ranks)
    skips = skips_of(progress.lineage, progress.status.skipped)
    account = count_samples(kept, first_step(progress.lineage), ranks, skips)
    incidents = tuple(sorted(progress.incidents.values(), key=lambda i: i.detected_seconds))
    compared = None if reference is None else _compare(ended, reference, mean_loss_by_step(kept))
    found = build_report(
        RunFacts(
            outcome=ended.outcome,
            lineage=progress.lineage,
            restored_from=sources_of(progress.lineage, incidents),
            incidents=incidents,
            struck=ended.struck,
            account=account,
            checkpoints=Checkpoints(len(progress.completed), progress.checkpoint_bytes, median_stall_seconds(lines)),
            comparison=compared,
            **_time(progress.status),
        )
    )
    said = [*timeline(found)]
    said += [f"fault not injected, its step was never finished: {fault}" for fault in ended.unstruck]
    if compared is not None and compared.problem:
        said.append(f"the parameters could not be compared: {compared.problem}")
    if ended.outcome not in ("Complete", "Interrupted"):
        said += explain_failure(progress)
    said += verdict(found)
    whole = account is None or (account.lost == account.repeated == account.unknown == 0)
    return Conclusion(found, tuple(said), whole and (compared is None or not compared.problem), compared)


def _time(status: JobStatus) -> dict[str, Any]:
    """Where the seconds went until the end, or until the last change that is stored."""
    if status.start_seconds is None:
        return {}
    spent = status.time_spent
    until = spent.since_seconds if status.completion_seconds is None else status.completion_seconds
    return {"seconds": seconds_spent(spent, until), "age_seconds": until - status.start_seconds}


def _compare(ended: EndedRun, reference: EndedRun, losses: dict[int, float]) -> Comparison:
    if reference.outcome != "Complete":
        problem = f"the undisturbed run ended {reference.outcome}: {reference.progress.status.message}"
        return Comparison(None, None, None, None, problem)
    progress = reference.progress
    undisturbed = mean_loss_by_step(counted_lines(progress.all_lines(), progress.lineage))
    found = compare_parameters(ended.job, reference.job)
    return Comparison(
        max_loss_difference=largest_difference(losses, undisturbed),
        max_parameter_difference=found.get("max_difference"),
        bit_exact=found.get("bit_exact"),
        step=found.get("step"),
        problem=str(found.get("problem") or ""),
    )


def explain_failure(progress: RunProgress) -> list[str]:
    """Quotes the operator's message and the tail of the log to blame."""
    log = blamed_log(progress.folder.logs, progress.status.incidents) or newest_log(progress.folder.logs)
    lines = [f"the job failed: {progress.status.message}"]
    if log is not None:
        text = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        lines += [f"    {line}" for line in text[-_LOG_LINES:]]
        lines.append(f"log: {log}")
    return lines


def blamed_log(logs: Path, incidents: tuple[Incident, ...]) -> Path | None:
    """Finds the log of the rank that failed first, else its agent's.

    Peers write last, and only that they lost the connection. None where no rank is blamed or its logs are empty.
    """
    last = incidents[-1] if incidents else None
    if last is None or last.rank is None or last.first_step_seconds is not None:
        return None
    for pattern in (f"worker-*/epoch-{last.epoch}/rank-{last.rank}.log", f"worker-{last.worker}-*/agent.log"):
        found = [path for path in logs.glob(pattern) if path.stat().st_size > 0]
        if found:
            return max(found, key=lambda path: path.stat().st_mtime_ns)
    return None


def newest_log(logs: Path) -> Path | None:
    """Finds the newest rank log that is not empty, else an agent's."""
    for pattern in ("worker-*/epoch-*/rank-*.log", "worker-*/agent.log"):
        found = [path for path in logs.glob(pattern) if path.stat().st_size > 0]
        if found:
            return max(found, key=lambda path: path.stat().st_mtime_ns)
    return None
