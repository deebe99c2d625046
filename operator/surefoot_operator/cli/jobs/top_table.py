"""Lays out what `surefoot top` shows of each job.

Pure. Jobs that do not train come first: in a list of hundreds, sorted by name, the one that is recovering is on no screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from surefoot_operator.api.status import JobStatus
from surefoot_operator.cli.jobs.job_summary import exposed, progressed, saved
from surefoot_operator.cli.jobs.read_jobs import Pace, pace_of
from surefoot_operator.cli.jobs.stored_job import StoredJob
from surefoot_operator.cli.tables import UNKNOWN, age
from surefoot_operator.reasons import CHECKPOINT_PROTECTED

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
