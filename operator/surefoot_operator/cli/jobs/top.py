"""Implements `surefoot top`: jobs as they go, refreshed in place.

Called by `main`. Looks every few seconds with a person's own rights; without a terminal it prints a line for each change instead.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from surefoot.protocol.text import plain, shorten
from surefoot_operator.api.status import JobStatus
from surefoot_operator.cli.cluster_access import ClusterRefused, OpenCluster, add_cluster
from surefoot_operator.cli.command_base import EXIT_FAILED, EXIT_OK, UsageError, clock, say
from surefoot_operator.cli.jobs.describe import exposed, progressed, saved
from surefoot_operator.cli.jobs.read_jobs import (
    Pace,
    StoredJob,
    add_run_folder,
    on_cluster,
    pace_of,
    read_job,
    read_jobs,
    read_run,
)
from surefoot_operator.cli.local.view import ProgressRate
from surefoot_operator.cli.tables import UNKNOWN, age
from surefoot_operator.reasons import CHECKPOINT_PROTECTED

# ---- top table -------------------------------------------------------------------------------------------------------
# Lays out what `surefoot top` shows of each job. Pure. Jobs that do not train come first: in a list of hundreds, sorted
# by name, the one that is recovering is on no screen.

COLUMNS = ("JOB", "STATE", "READY", "STEP", "RATE", "LEFT", "EXPOSED", "CHECKPOINT", "COPIES", "INCIDENTS")
_QUIET = ("Running", "Complete", "Suspended")


@dataclass(frozen=True, slots=True)
class TopRow:
    """One job as `top` shows it."""

    job: str
    state: str
    message: str
    cells: tuple[str, ...]
    """In the order of `COLUMNS`."""

    @property
    def well(self) -> bool:
        return self.state in _QUIET


def top_row(stored: StoredJob, now: float, steps_per_second: float | None, everywhere: bool) -> TopRow:
    """Lays one job out.

    `steps_per_second` is as it was seen to go; None: not yet.
    """
    pace = as_seen(pace_of(stored, now), steps_per_second)
    name = str(stored) if everywhere else stored.name
    state = stored.phase or "Unseen"
    message = stored.status.message if stored.status is not None else ""
    cells = (
        name,
        state,
        stored.ready or UNKNOWN,
        progressed(pace),
        _rate(pace, state),
        age(pace.left_seconds),
        exposed(pace),
        saved(pace),
        copies(stored.status),
        incidents(stored.status, now),
    )
    return TopRow(name, state, "; ".join(stored.problems) or message, cells)


def in_view(rows: Sequence[TopRow]) -> list[TopRow]:
    """Orders rows: those that do not train first, then by name."""
    return sorted(rows, key=lambda row: (row.well, row.job))


def copies(status: JobStatus | None) -> str:
    """Whether the newest complete checkpoint would survive a node: `enough`, `too few`."""
    if status is None or status.last_complete is None or status.phase in ("Complete", "Failed"):
        return UNKNOWN
    found = next((one for one in status.conditions if one.type == CHECKPOINT_PROTECTED), None)
    if found is None or found.status == "Unknown":
        return UNKNOWN
    return "enough" if found.status == "True" else "too few"


def incidents(status: JobStatus | None, now: float) -> str:
    """Failures that the status keeps, and the newest one's age: `2 (40s ago)`."""
    if status is None:
        return UNKNOWN
    failures = [one for one in status.incidents if one.kind != "planned"]
    return f"{len(failures)} ({age(now - failures[-1].detected_seconds)} ago)" if failures else "0"


def plain_line(row: TopRow) -> str:
    """Renders one row for a log: values with their names."""
    told = zip(COLUMNS[2:], row.cells[2:], strict=True)
    values = ", ".join(f"{name.lower()} {value}" for name, value in told if value != UNKNOWN)
    rest = f": {row.message}" if row.message and not row.well else ""
    return f"{row.job} {row.state}, {values}{rest}"


def as_seen(pace: Pace, steps_per_second: float | None) -> Pace:
    """Replaces a status' rate by the one that was seen."""
    if not steps_per_second or pace.steps_per_second is None:
        return pace if not steps_per_second else replace(pace, steps_per_second=steps_per_second)
    slower = pace.steps_per_second / steps_per_second
    return replace(
        pace,
        steps_per_second=steps_per_second,
        left_seconds=None if pace.left_seconds is None else pace.left_seconds * slower,
        exposed_seconds=None if pace.exposed_seconds is None else pace.exposed_seconds * slower,
    )


def _rate(pace: Pace, state: str) -> str:
    rate = pace.steps_per_second
    return UNKNOWN if rate is None or state != "Running" else f"{rate:.3g}/s"


# ---- top -------------------------------------------------------------------------------------------------------------

_LEAST_SECONDS = 0.5
_MOST_MESSAGES = 5
_STYLES = {"Running": "green", "Complete": "green", "Failed": "red"}

Look = Callable[[], Awaitable[Sequence[StoredJob]]]


def add_top_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", metavar="JOB", help="one TrainingJob (default: all of the namespace)")
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="jobs of all namespaces")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks (default: 2, at least 0.5)"
    )
    parser.add_argument("--once", action="store_true", help="look once and end")
    add_run_folder(parser)
    add_cluster(parser)


def run_top(given: argparse.Namespace) -> int:
    """Shows jobs until they are over, or Ctrl-C. Raises UsageError, RunError."""
    if not given.interval >= _LEAST_SECONDS:
        raise UsageError(f"--interval {given.interval} is not allowed; {_LEAST_SECONDS} s is the least")
    if given.job is not None and (given.run_folder is not None or given.all_namespaces):
        raise UsageError("top needs one of JOB, --run-folder and --all-namespaces")
    top = JobsTop(view_for(given.once), given.interval, given.once, given.all_namespaces)
    try:
        if given.run_folder is not None:
            return asyncio.run(top.run(lambda: _of_folder(given), one=True))
        return on_cluster(
            given, lambda cluster: top.run(lambda: _of_cluster(cluster, given.job), given.job is not None)
        )
    except KeyboardInterrupt:
        return EXIT_OK  # the usual end: nothing is left behind


async def _of_cluster(cluster: OpenCluster, job: str | None) -> Sequence[StoredJob]:
    return await read_jobs(cluster) if job is None else [await read_job(cluster, job)]


async def _of_folder(given: argparse.Namespace) -> Sequence[StoredJob]:
    view = await asyncio.to_thread(read_run, given.run_folder)
    return [view.stored]


class TopView(AbstractContextManager["TopView"], Protocol):
    """Where rows are shown; a context manager that restores the terminal."""

    def show(self, rows: Sequence[TopRow], note: str) -> None: ...


def view_for(once: bool) -> TopView:
    """Chooses a table in place on a terminal, else lines."""
    return LineTop() if once or not sys.stdout.isatty() else TableTop()


@dataclass(slots=True)
class JobsTop:
    """Looks, measures and shows, until the one job meant is over."""

    view: TopView
    interval_seconds: float
    once: bool = False
    everywhere: bool = False
    _rates: dict[str, ProgressRate] = field(default_factory=dict)
    _rows: list[TopRow] = field(default_factory=list)
    _silent_since: float | None = None

    async def run(self, look: Look, one: bool) -> int:
        """Returns the exit code.

        Raises ClusterRefused where the first look is refused, or a right is missing.
        """
        with self.view as view:
            while True:
                found = await self._look(look)
                note = "" if self._silent_since is None else self._note()
                await asyncio.to_thread(view.show, self._rows, note)
                over = one and found is not None and all(job.phase in ("Complete", "Failed") for job in found)
                if over or self.once:
                    return EXIT_FAILED if one and any(job.phase == "Failed" for job in found or ()) else EXIT_OK
                await asyncio.sleep(self.interval_seconds)

    async def _look(self, look: Look) -> Sequence[StoredJob] | None:
        try:
            found = await look()
        except ClusterRefused as error:
            # an API server that restarts must not end a screen that has stood for days
            if not self._rows or getattr(error.__cause__, "code", None) is not None:
                raise
            self._silent_since = self._silent_since or time.monotonic()
            return None
        self._silent_since = None
        now = time.time()
        self._rates = {key: self._rates.get(key) or ProgressRate() for key in map(_key, found)}
        self._rows = in_view([top_row(job, now, self._seen_rate(job), self.everywhere) for job in found])
        return found

    def _seen_rate(self, job: StoredJob) -> float | None:
        world = job.status.world if job.status is not None else None
        return self._rates[_key(job)].steps_per_second(time.monotonic(), world.epoch if world else 0, job.step or 0)

    def _note(self) -> str:
        seconds = 0.0 if self._silent_since is None else time.monotonic() - self._silent_since
        return f"the API server has not answered for {seconds:.0f} s; what is shown is older"


def _key(job: StoredJob) -> str:
    return job.uid or str(job)


class TableTop:
    """Draws a table in place."""

    def __init__(self, console: Console | None = None) -> None:
        self._live = Live(console=console or Console(), auto_refresh=False)

    def show(self, rows: Sequence[TopRow], note: str) -> None:
        self._live.update(drawn_top(rows, note), refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


def drawn_top(rows: Sequence[TopRow], note: str) -> Group:
    """Renders rows and the operator's sentences.

    Of jobs that train no sentence is shown.
    """
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, no_wrap=True, justify="right" if name in ("RATE", "LEFT") else "left")
    for row in rows:
        style = _STYLES.get(row.state, "yellow")
        table.add_row(*(Text(plain(cell), style=style if cell == row.state else "") for cell in row.cells))
    told = [row for row in rows if row.message and not row.well][:_MOST_MESSAGES]
    parts: list[RenderableType] = [table if rows else Text("no TrainingJobs")]
    parts += [Text(plain(f"{row.job}: {shorten(row.message, 300)}"), style="dim") for row in told]
    return Group(*parts, *([Text(note, style="yellow")] if note else []))


class LineTop:
    """Prints a line for each job that changed."""

    def __init__(self) -> None:
        self._shown: dict[str, tuple[str, ...]] = {}
        self._note = ""

    def show(self, rows: Sequence[TopRow], note: str) -> None:
        for row in rows:
            known = (row.state, row.cells[3], row.message)  # ages change at every look
            if self._shown.get(row.job) != known:
                say(f"{clock()} {plain_line(row)}")
            self._shown[row.job] = known
        for gone in self._shown.keys() - {row.job for row in rows}:
            del self._shown[gone]
            say(f"{clock()} {gone} is gone")
        if bool(note) != bool(self._note):
            say(f"{clock()} {note or 'the API server answers again'}")
        self._note = note

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return
