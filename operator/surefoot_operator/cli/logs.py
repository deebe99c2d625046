"""Implements `surefoot logs`, which shows the log of one rank or worker.

Called by `main`. Reads a worker pod's log from the API server, or a file of a run folder. In a failure most ranks log
only that they lost the connection to another rank, so the default is the log of the rank that the newest failure
blames.
"""

from __future__ import annotations

import argparse
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from surefoot_operator.api.status import Incident, JobStatus, parse_rfc3339
from surefoot_operator.cli.cluster_access import ClusterConnection, Permission, describe_api_error
from surefoot_operator.cli.command_base import EXIT_OK, UsageError, say
from surefoot_operator.cli.jobs.read_jobs import (
    StoredJob,
    add_job,
    check_named,
    on_cluster,
    read_job,
    read_run,
    read_worker_pods,
)
from surefoot_operator.cli.tables import print_lines
from surefoot_operator.errors import PlatformError
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.api_objects import ApiError
from surefoot_operator.platforms.local.run_folder import RunFolder

MAX_LINE_BYTES = 16 << 10
"""A longer line is shown in pieces, so that a line without an end cannot fill this command's memory."""
_MAX_LINES = 2000
_SILENCE_SECONDS = 3600.0
"""Timeout between two chunks of a log. A log may pause, but without a limit a cut connection never ends."""
_RANK_PREFIX = re.compile(r"\[rank (\d+)\] ?(.*)", re.DOTALL)
_LOG_FILE = re.compile(r"worker-(\d+)-(\d+)/(?:epoch-(\d+)/rank-\d+\.log|agent\.log)")

Object = dict[str, Any]
Log = TypeVar("Log")


@dataclass(frozen=True, slots=True)
class LogChoice:
    """Selects a log to show."""

    rank: int | None
    """Rank whose lines to show; None: all lines of the worker, from its agent and its ranks."""
    worker: int | None
    """Index of the worker; None: the worker that has the rank."""
    attempt: int | None
    """Attempt of the worker; None: the newest that has a log."""
    blamed: Incident | None = None
    """Failure that blames this rank or worker; limits the choice to attempts in the generation that failed."""


def add_logs_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("--rank", type=int, metavar="N", help="this rank alone")
    parser.add_argument("--worker", type=int, metavar="N", help="this worker, its agent and ranks")
    parser.add_argument("--attempt", type=int, metavar="N", help="of the worker (default: the newest that has a log)")
    parser.add_argument("--tail", type=int, default=20, metavar="LINES", help="the newest so many (default: 20)")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="keep showing lines until the pod ends; only on a cluster"
    )


def run_logs(args: argparse.Namespace) -> int:
    """Prints the selected log. Raises UsageError, RunError, OperatorError."""
    check_named(args)
    if not 0 < args.tail <= _MAX_LINES:
        raise UsageError(f"--tail {args.tail} is not allowed; between 1 and {_MAX_LINES} lines are shown")
    if args.run_folder is not None:
        _show_file(args)
    else:
        on_cluster(args, lambda cluster: _show_pod_log(cluster, args))
    return EXIT_OK


def log_choices(status: JobStatus | None, args: argparse.Namespace) -> list[LogChoice]:
    """Lists the logs to try in order: the requested one; else the blamed one, then that of rank 0."""
    if args.rank is not None or args.worker is not None:
        return [LogChoice(args.rank, args.worker, args.attempt)]
    blamed = None if status is None else blamed_incident(status.incidents)
    choices = [] if blamed is None else [LogChoice(blamed.rank, blamed.worker, args.attempt, blamed)]
    has_ranks = status is not None and status.membership is not None and bool(status.membership.members)
    # Before the first generation no rank exists; the agents' logs explain why it has not started.
    return [*choices, LogChoice(0, None, args.attempt) if has_ranks else LogChoice(None, 0, args.attempt)]


def blamed_incident(incidents: Sequence[Incident]) -> Incident | None:
    """Returns the newest failure that names a rank or worker; None if there is none."""
    candidates = (
        incident
        for incident in reversed(incidents)
        if incident.kind != "planned" and (incident.rank, incident.worker) != (None, None)
    )
    return next(candidates, None)


def heading(choice: LogChoice, worker: int, attempt: int) -> str:
    """Renders the heading of a log: `== rank 1, worker 1 (attempt 1)`, and the reason if a failure blames it."""
    rank = "" if choice.rank is None else f"rank {choice.rank}, "
    blame = "" if choice.blamed is None else f", blamed: {choice.blamed.reason}"
    return f"== {rank}worker {worker} (attempt {attempt}){blame}"


def first_log(choices: Sequence[LogChoice], select: Callable[[LogChoice], Log | None]) -> tuple[LogChoice, Log] | None:
    """Returns the first choice that has a log, and that log; prints a line if the blamed one has none."""
    for choice in choices:
        if (log := select(choice)) is not None:
            return choice, log
        if choice.blamed is not None:
            say(f"of whom the newest failure blames there is no log: {choice.blamed.reason}")
    say("no log lines: a pod that was deleted took its log along")
    return None


# ---- pod logs --------------------------------------------------------------------------------------------------------


async def _show_pod_log(cluster: ClusterConnection, args: argparse.Namespace) -> None:
    """Prints the selected log of a worker pod, and with --follow its further lines."""
    stored = await read_job(cluster, args.job)
    pods = await read_worker_pods(cluster, stored)
    selected = first_log(log_choices(stored.status, args), lambda choice: select_pod(choice, stored, pods))
    if selected is None:
        return
    choice, pod = selected
    say(
        heading(
            choice, _label_number(pod, api_objects.WORKER_INDEX_LABEL), _label_number(pod, api_objects.ATTEMPT_LABEL)
        )
    )
    lines = _pod_lines(cluster, pod, args, choice.rank)
    if args.follow:
        async for line in lines:
            print_lines([line])
    else:
        print_lines(deque([line async for line in lines], maxlen=args.tail))


def select_pod(choice: LogChoice, stored: StoredJob, pods: Sequence[Object]) -> Object | None:
    """Returns the newest pod that matches a choice; None if there is none.

    Raises:
        UsageError: The user asked for a rank that no worker has now.
    """
    worker, attempt = choice.worker, choice.attempt
    # Find the worker that has the rank in the current generation.
    if worker is None:
        members = (
            stored.status.membership.members
            if stored.status is not None and stored.status.membership is not None
            else ()
        )
        group_rank = (choice.rank or 0) // (stored.job.spec.nproc_per_node if stored.job is not None else 1)
        if not 0 <= group_rank < len(members):
            if choice.blamed is not None:
                return None
            raise UsageError(f"no worker of {stored} has rank {choice.rank} now; --worker N shows a worker's log")
        worker, attempt = members[group_rank].index, attempt or members[group_rank].attempt
    # A pod made after the failure cannot have caused it.
    matching_pods = [
        pod
        for pod in pods
        if _label_number(pod, api_objects.WORKER_INDEX_LABEL) == worker
        and attempt in (None, _label_number(pod, api_objects.ATTEMPT_LABEL))
        and (choice.blamed is None or _created_seconds(pod) <= choice.blamed.detected_seconds)
    ]
    return max(matching_pods, key=lambda pod: _label_number(pod, api_objects.ATTEMPT_LABEL), default=None)


def _label_number(pod: Object, name: str) -> int:
    text = str(pod["metadata"].get("labels", {}).get(name, ""))
    return int(text) if text.isdecimal() else -1


def _created_seconds(pod: Object) -> float:
    return parse_rfc3339(pod["metadata"].get("creationTimestamp")) or 0.0


async def _pod_lines(
    cluster: ClusterConnection, pod: Object, args: argparse.Namespace, rank: int | None
) -> AsyncIterator[str]:
    """Yields the newest lines of a trainer container, or of one of its ranks. Raises ClusterRequestFailed."""
    metadata = pod["metadata"]
    path = api_objects.core_path(metadata["namespace"], "pods", metadata["name"]) + "/log"
    # All ranks of a worker share one stream: request more lines than are shown, to find enough of this rank.
    line_count = args.tail if rank is None or args.follow else min(_MAX_LINES, 10 * args.tail)
    query: dict[str, str | int] = {"container": api_objects.TRAINER_CONTAINER, "tailLines": line_count}
    follow = {"follow": "true"} if args.follow else {}
    unfinished_line = b""
    try:
        async for chunk in cluster.api.stream_text(path, {**query, **follow}, _SILENCE_SECONDS):
            lines, unfinished_line = split_lines(unfinished_line + chunk)
            for line in rank_lines(rank, lines):
                yield line
        for line in rank_lines(rank, [unfinished_line.decode(errors="replace")] if unfinished_line else []):
            yield line
    except PlatformError as error:
        if not isinstance(error, ApiError) or error.code not in (400, 404):
            raise describe_api_error(
                error, Permission("get", "pods/log", metadata["namespace"]), cluster.server
            ) from error
        say(f"{metadata['name']} has no log: {error}")


def split_lines(data: bytes) -> tuple[list[str], bytes]:
    """Splits received bytes into complete lines and the remaining bytes of an unfinished line."""
    *lines, unfinished_line = data.split(b"\n")
    while len(unfinished_line) > MAX_LINE_BYTES:
        lines.append(unfinished_line[:MAX_LINE_BYTES])
        unfinished_line = unfinished_line[MAX_LINE_BYTES:]
    return [line.decode(errors="replace") for line in lines], unfinished_line


def rank_lines(rank: int | None, lines: Sequence[str]) -> Sequence[str]:
    """Returns the lines of one rank, without their `[rank N]` prefix; with None, all lines unchanged."""
    if rank is None:
        return lines
    matches = (_RANK_PREFIX.fullmatch(line) for line in lines)
    return [match[2] for match in matches if match is not None and int(match[1]) == rank]


# ---- files of a run folder -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogFile:
    """A log file of one attempt of a worker."""

    worker: int
    attempt: int
    epoch: int
    """Generation of the log; 0 for an agent's log, which covers all generations of the attempt."""
    path: Path


def _show_file(args: argparse.Namespace) -> None:
    """Prints the newest lines of the selected log file in a run folder."""
    logs = RunFolder(args.run_folder).logs_folder
    choices = log_choices(read_run(args.run_folder).stored.status, args)
    selected = first_log(choices, lambda choice: select_file(choice, logs))
    if selected is None:
        return
    choice, file = selected
    if args.follow:
        raise UsageError(f"--follow needs a cluster; this log is a file: tail -f {file.path}")
    say(heading(choice, file.worker, file.attempt))
    with open(file.path, encoding="utf-8", errors="replace") as lines:
        print_lines(line.rstrip("\n") for line in deque(lines, maxlen=args.tail))


def select_file(choice: LogChoice, logs: Path) -> LogFile | None:
    """Returns the newest file that matches a choice, a rank's or an agent's log; None if there is none."""
    files = []
    for path in logs.glob("worker-*/agent.log" if choice.rank is None else f"worker-*/epoch-*/rank-{choice.rank}.log"):
        if (match := _LOG_FILE.fullmatch(path.relative_to(logs).as_posix())) is None:
            continue
        worker, attempt, generation = (int(text or 0) for text in match.groups())
        file = LogFile(worker, attempt, generation, path)
        if (
            choice.worker in (None, file.worker)
            and choice.attempt in (None, file.attempt)
            and _is_of_blamed_generation(choice, file)
        ):
            files.append(file)
    return max(files, key=lambda file: (file.epoch, file.attempt), default=None)


def _is_of_blamed_generation(choice: LogChoice, file: LogFile) -> bool:
    """Returns whether the file covers the generation whose failure blames it, or no failure does."""
    if choice.blamed is None or file.epoch == choice.blamed.generation:
        return True
    return choice.rank is None and (file.path.parent / f"epoch-{choice.blamed.generation}").is_dir()
