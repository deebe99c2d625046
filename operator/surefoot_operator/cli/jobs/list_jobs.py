"""Implements `surefoot list`, and summarises jobs for `surefoot describe`.

Called by `main`. Only `run_list` reads a cluster or a run folder and prints; all others are pure.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console

from surefoot.protocol.text import count_of, format_bytes
from surefoot_operator.api.status import CheckpointLatency, Incident, JobStatus, StoredCheckpoints
from surefoot_operator.api.time_spent import goodput, seconds_spent
from surefoot_operator.cli.cluster_access import add_cluster
from surefoot_operator.cli.command_base import EXIT_OK, UsageError
from surefoot_operator.cli.jobs.read_jobs import (
    JobProgress,
    StoredJob,
    add_run_folder,
    on_cluster,
    pace_of,
    read_job,
    read_jobs,
    read_run,
)
from surefoot_operator.cli.tables import UNKNOWN, add_output, age, emit, number, table_lines

# ---- job summary -----------------------------------------------------------------------------------------------------
# Summarises one job as a row of `surefoot list`. Pure.


@dataclass(frozen=True, slots=True)
class JobSummary:
    """A row of `surefoot list`; None where a value is not known."""

    namespace: str
    name: str
    state: str
    latency: CheckpointLatency
    recovery_seconds: float | None
    """Seconds from the detection of the newest failure to the first new step."""
    goodput: float | None
    ready: int | None
    """Number of workers that are ready, of `workers`; both None before an operator wrote a status."""
    workers: int | None
    world_size: int | None
    generation: int | None
    pace: JobProgress
    restarts: int | None
    age_seconds: float | None
    message: str
    memory_bytes: int | None = None
    """Size of the job's checkpoints in the memory tier, counting every copy."""
    persistent_bytes: int | None = None


def summarize(stored: StoredJob, now: float) -> JobSummary:
    """Summarises a job at Unix time `now`; its message names a spec or status that cannot be read."""
    status = stored.status
    membership = status.membership if status is not None else None
    stored_bytes = StoredCheckpoints() if status is None else persistent_contents(status)
    message = "" if status is None else status.message
    if not stored.phase:
        message = "no operator has reconciled this job yet: is surefoot-operator running?"
    recoveries = () if status is None else recovery_durations(status.incidents).get("failure", ())
    ready, workers = (int(count) if count.isdecimal() else None for count in stored.ready.partition("/")[::2])
    start_seconds = stored.created_seconds or (status.start_seconds if status is not None else None)
    return JobSummary(
        namespace=stored.namespace,
        name=stored.name,
        state=stored.phase or "Unseen",
        latency=CheckpointLatency() if status is None else status.checkpoint_latency,
        recovery_seconds=recoveries[-1] if recoveries else None,
        goodput=None if status is None else goodput(seconds_spent(status.time_spent, now)),
        ready=ready,
        workers=workers,
        world_size=None if membership is None else membership.world_size,
        generation=None if membership is None else membership.generation,
        pace=pace_of(stored, now),
        restarts=stored.restarts,
        age_seconds=None if start_seconds is None else max(0.0, now - start_seconds),
        message="; ".join(stored.problems) or message,
        memory_bytes=None if stored_bytes.memory is None else stored_bytes.memory.bytes,
        persistent_bytes=None if stored_bytes.persistent is None else stored_bytes.persistent.bytes,
    )


def recovery_durations(incidents: Sequence[Incident]) -> dict[str, list[float]]:
    """Returns the seconds from detection to the first new step of failures and of planned changes, oldest first."""
    durations: dict[str, list[float]] = {}
    for incident in incidents:
        if incident.first_step_seconds is not None:
            kind = "planned change" if incident.kind == "planned" else "failure"
            durations.setdefault(kind, []).append(incident.first_step_seconds - incident.detected_seconds)
    return durations


def persistent_contents(status: JobStatus) -> StoredCheckpoints:
    """Returns the contents of each tier. A job that is over has nothing left in memory."""
    is_over = status.phase in ("Complete", "Failed")
    return StoredCheckpoints(persistent=status.checkpoints.persistent) if is_over else status.checkpoints


def format_ready(job: JobSummary) -> str:
    """Renders the ready workers of all, `2/3`."""
    return UNKNOWN if job.ready is None else f"{job.ready}/{job.workers}"


JOB_COLUMNS: dict[str, Callable[[JobSummary], str]] = {
    "NAME": lambda job: job.name,
    "STATE": lambda job: job.state,
    "CHECKPOINT LATENCY": lambda job: format_latency(job.latency),
    "RECOVERY": lambda job: UNKNOWN if job.recovery_seconds is None else format_seconds(job.recovery_seconds),
    "GOODPUT": lambda job: UNKNOWN if job.goodput is None else f"{job.goodput:.1%}",
    "READY": format_ready,
    "STEP": lambda job: format_progress(job.pace),
    "LEFT": lambda job: age(job.pace.remaining_seconds),
    "CHECKPOINT": lambda job: format_newest_checkpoint(job.pace),
    "RESTARTS": lambda job: number(job.restarts),
    "AGE": lambda job: age(job.age_seconds),
}
WIDE_COLUMNS: dict[str, Callable[[JobSummary], str]] = {
    "WORLD SIZE": lambda job: number(job.world_size),
    "GENERATION": lambda job: number(job.generation),
    "RATE": lambda job: UNKNOWN if job.pace.steps_per_second is None else f"{job.pace.steps_per_second:.3g}/s",
    "EXPOSED": lambda job: format_at_risk(job.pace),
    "IN-MEMORY": lambda job: UNKNOWN if job.memory_bytes is None else format_bytes(job.memory_bytes),
    "PERSISTENT": lambda job: UNKNOWN if job.persistent_bytes is None else format_bytes(job.persistent_bytes),
    "MESSAGE": lambda job: job.message,
}


def format_latency(latency: CheckpointLatency) -> str:
    """Renders the 99th percentiles of stall, replicated and persistent: `8ms/33ms/2.1s`; one without a value is `-`."""
    stages = (latency.stall, latency.replicated, latency.persistent)
    texts = [UNKNOWN if stage is None else format_seconds(stage.p99_seconds) for stage in stages]
    return "/".join(texts) if any(stages) else UNKNOWN


def format_seconds(seconds: float) -> str:
    """Renders a duration with its milliseconds, as `7.7ms`, `2.1s` or `4m36s`."""
    if seconds < 1:
        return f"{1000 * seconds:.2g}ms" if seconds < 0.0995 else f"{1000 * seconds:.0f}ms"
    return f"{seconds:.3g}s" if seconds < 120 else age(seconds)


def format_progress(pace: JobProgress) -> str:
    """Renders the step and the total, `420/1000 (42%)`, or the step alone."""
    if pace.step is None or pace.total_steps is None:
        return number(pace.step)
    return f"{pace.step}/{pace.total_steps} ({min(100, 100 * pace.step // pace.total_steps)}%)"


def format_newest_checkpoint(pace: JobProgress) -> str:
    """Renders the newest complete checkpoint and its age: `420 (12s)`."""
    if pace.checkpoint_step is None:
        return UNKNOWN
    age_seconds = pace.checkpoint_age_seconds
    return str(pace.checkpoint_step) if age_seconds is None else f"{pace.checkpoint_step} ({age(age_seconds)})"


def format_at_risk(pace: JobProgress) -> str:
    """Renders the steps and the time that a failure now would repeat: `5 steps (2s)`."""
    if pace.exposed_steps is None:
        return UNKNOWN
    steps = count_of(pace.exposed_steps, "step")
    return steps if pace.exposed_seconds is None else f"{steps} ({age(pace.exposed_seconds)})"


# ---- list jobs -------------------------------------------------------------------------------------------------------
# Implements `surefoot list`: one row per job.


_WATCH_SECONDS = 2.0


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", metavar="JOB", help="this job alone")
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="jobs of all namespaces")
    parser.add_argument("-w", "--watch", action="store_true", help="print the table again every 2 s, until Ctrl-C")
    add_run_folder(parser)
    add_cluster(parser)
    add_output(parser)


def run_list(args: argparse.Namespace) -> int:
    if args.watch and args.output in ("json", "yaml"):
        raise UsageError("--watch prints tables: leave --output out, or give wide")
    if args.job is not None and (args.all_namespaces or args.run_folder is not None):
        raise UsageError("JOB is one job of one namespace: give it without --all-namespaces and --run-folder")
    console = Console()
    while True:
        summaries = _read_summaries(args)
        if args.watch:
            console.clear()  # does nothing unless the output is a terminal
        emit(summaries, args.output, lambda wide, jobs=summaries: job_lines(jobs, wide, args.all_namespaces))  # type: ignore[misc]
        if not args.watch:
            return EXIT_OK
        time.sleep(_WATCH_SECONDS)


def _read_summaries(args: argparse.Namespace) -> list[JobSummary]:
    if args.run_folder is not None:
        view = read_run(args.run_folder)
        return [summarize(view.stored, view.now)]
    if args.job is not None:
        return [summarize(on_cluster(args, lambda cluster: read_job(cluster, args.job)), time.time())]
    stored, now = on_cluster(args, read_jobs), time.time()
    return [summarize(job, now) for job in sorted(stored, key=str)]


def job_lines(summaries: list[JobSummary], wide: bool, everywhere: bool) -> list[str]:
    """Renders the table of jobs, or one line if there are none. `everywhere`: of all namespaces."""
    if not summaries:
        return [f"no TrainingJobs{'' if everywhere else ' in this namespace; -A lists all'}"]
    namespace_column: dict[str, Callable[[JobSummary], str]] = {"NAMESPACE": lambda job: job.namespace}
    columns = {**(namespace_column if everywhere else {}), **JOB_COLUMNS, **(WIDE_COLUMNS if wide else {})}
    return table_lines(summaries, columns)
