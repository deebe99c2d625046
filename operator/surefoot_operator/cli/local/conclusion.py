"""Builds the report and closing lines of a finished run.

Reads the run folder; called by `run_local` when all processes are gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.protocol.checkpoints.lineage import first_step
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.api.status import Incident, JobStatus
from surefoot_operator.cli.local import ledger, run_report
from surefoot_operator.cli.local.comparison import compare_parameters
from surefoot_operator.cli.local.faults import Fault
from surefoot_operator.cli.local.progress import RunProgress
from surefoot_operator.cli.local.run_report import Checkpoints, Comparison, RunFacts, Struck
from surefoot_operator.policy.report.time_spent import seconds_spent

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
    kept = ledger.along(lines, progress.lineage)
    ranks = ledger.worlds(kept, progress.lineage)
    if ended.outcome != "Complete":
        kept = ledger.finished(kept, ranks)
    skips = ledger.skips_of(progress.lineage, progress.status.skipped)
    account = ledger.account(kept, first_step(progress.lineage), ranks, skips)
    incidents = tuple(sorted(progress.incidents.values(), key=lambda i: i.detected_seconds))
    compared = None if reference is None else _compare(ended, reference, ledger.losses(kept))
    found = run_report.build(
        RunFacts(
            outcome=ended.outcome,
            lineage=progress.lineage,
            restored_from=run_report.sources_of(progress.lineage, incidents),
            incidents=incidents,
            struck=ended.struck,
            account=account,
            checkpoints=Checkpoints(
                len(progress.completed), progress.checkpoint_bytes, ledger.median_stall_seconds(lines)
            ),
            comparison=compared,
            **_time(progress.status),
        )
    )
    said = [*run_report.timeline(found)]
    said += [f"fault not injected, its step was never finished: {fault}" for fault in ended.unstruck]
    if compared is not None and compared.problem:
        said.append(f"the parameters could not be compared: {compared.problem}")
    if ended.outcome not in ("Complete", "Interrupted"):
        said += explain_failure(progress)
    said += run_report.verdict(found)
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
    undisturbed = ledger.losses(ledger.along(progress.all_lines(), progress.lineage))
    found = compare_parameters(ended.job, reference.job)
    return Comparison(
        max_loss_difference=ledger.largest_difference(losses, undisturbed),
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
