"""Implements `surefoot logs`: by rank and attempt, the blamed first.

Called by `main`. Reads containers' output from a cluster, or the log files of a run folder.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections import deque
from pathlib import Path

from surefoot_operator.cli.cluster_access import OpenCluster
from surefoot_operator.cli.command_base import EXIT_FAILED, EXIT_OK, UsageError, stop_requests
from surefoot_operator.cli.follow_logs import (
    FileFollower,
    FollowChoice,
    LogLine,
    LogPart,
    PodFollower,
    blamed_incident,
    by_time,
    in_order,
    part_lines,
    parts_of_pod,
    read_pod_log,
)
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
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.local.run_folder import RunFolder

_AT_ONCE = 16
"""Pods that are asked at one moment."""
_MOST_LINES = 2000
_WORKER = re.compile(r"worker-(\d+)-(\d+)")

Found = tuple[StoredJob, list[LogPart], list[str]]


def add_logs_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("--rank", type=int, metavar="N", help="this rank alone")
    parser.add_argument("--worker", type=int, metavar="N", help="this worker alone")
    parser.add_argument(
        "--tail", type=int, default=20, metavar="LINES", help="of each, the newest so many (default: 20)"
    )
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on showing lines as they come, until the job is over"
    )
    parser.add_argument("--by-time", action="store_true", help="all in the order they were written; of a cluster alone")


def run_logs(given: argparse.Namespace) -> int:
    check_named(given)
    if not 0 < given.tail <= _MOST_LINES:
        raise UsageError(f"--tail {given.tail} is not allowed; between 1 and {_MOST_LINES} lines are shown")
    if given.run_folder is not None and given.by_time:
        raise UsageError("--by-time needs a cluster: the files of a run folder do not say when a line was written")
    if given.follow:
        return _follow(given)
    stored, parts, notes = _files(given) if given.run_folder else on_cluster(given, lambda c: _pods(c, given))
    wanted = [one for one in parts if given.rank is None or one.rank == given.rank]
    blamed = blamed_incident(stored.status.incidents) if stored.status is not None else None
    shown = in_order(wanted, blamed)
    print_lines(by_time(shown, given.tail) if given.by_time else part_lines(shown, given.tail))
    if blamed is not None and not any(part.blamed for part in shown):
        notes.append(f"of whom the newest failure blames there is no line here: {blamed.reason}")
    print_lines(notes if shown else [*notes, "no log lines: a pod that was deleted took its log along"])
    return EXIT_OK


def _follow(given: argparse.Namespace) -> int:
    if given.by_time:
        raise UsageError("--by-time and --follow exclude each other: lines that come are shown as they come")
    choice = FollowChoice(given.rank, given.worker, given.tail)
    if given.run_folder is not None:
        with stop_requests() as stop:
            phase = FileFollower(given.run_folder, choice, print_lines, stop).run()
    else:
        phase = on_cluster(given, lambda cluster: PodFollower(cluster, given.job, choice, print_lines).run())
    return EXIT_OK if phase == "Complete" else EXIT_FAILED


async def _pods(cluster: OpenCluster, given: argparse.Namespace) -> Found:
    stored = await read_job(cluster, given.job)
    notes: list[str] = []
    turns = asyncio.Semaphore(_AT_ONCE)
    # a rank's lines are among the others' in one stream: more are asked for than are shown
    asked = min(_MOST_LINES, 10 * given.tail)

    async def read(pod: dict[str, object], index: int, attempt: int) -> list[LogPart]:
        async with turns:
            return parts_of_pod(index, attempt, await read_pod_log(cluster, pod, asked, notes))

    pods = []
    for pod in await read_worker_pods(cluster, stored):
        index, attempt = (
            str(pod["metadata"]["labels"].get(name, "")) for name in (api_objects.WORKER_INDEX, api_objects.ATTEMPT)
        )
        if index.isdecimal() and attempt.isdecimal() and given.worker in (None, int(index)):
            pods.append((pod, int(index), int(attempt)))
    found = await asyncio.gather(*(read(*one) for one in pods))
    return stored, [part for parts in found for part in parts], notes


def _files(given: argparse.Namespace) -> Found:
    view = read_run(given.run_folder)
    parts = []
    for folder in sorted(RunFolder(given.run_folder).logs.glob("worker-*")):
        match = _WORKER.fullmatch(folder.name)
        if match is None or given.worker not in (None, int(match[1])):
            continue
        worker, attempt = int(match[1]), int(match[2])
        if (folder / "agent.log").exists():
            # what it passes on of its ranks stands in their own files
            own = tuple(one for one in _tail(folder / "agent.log", _MOST_LINES) if not one.text.startswith("[rank "))
            parts.append(LogPart(worker, attempt, None, own))
        for path in folder.glob("epoch-*/rank-*.log"):
            epoch, rank = (int(name.partition("-")[2]) for name in (path.parent.name, path.stem))
            parts.append(LogPart(worker, attempt, rank, _tail(path, given.tail), epoch))
    return view.stored, [part for part in parts if part.lines], []


def _tail(path: Path, most: int) -> tuple[LogLine, ...]:
    with open(path, encoding="utf-8", errors="replace") as file:
        return tuple(LogLine(line.rstrip("\n")) for line in deque(file, maxlen=most))
