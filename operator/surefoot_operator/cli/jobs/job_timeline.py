"""Implements `surefoot timeline`: what happened to a job, in order.

Called by `main`. `timeline_of` and `timeline_lines` are pure. Events say what the operator decided, incidents where each second of a
recovery went: read apart, neither explains a pause.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from datetime import UTC, datetime

from surefoot_operator.api.status import Incident
from surefoot_operator.cli.cli_errors import EXIT_OK
from surefoot_operator.cli.jobs.job_source import add_job, view_of
from surefoot_operator.cli.jobs.job_view import JobView
from surefoot_operator.cli.local import run_report
from surefoot_operator.cli.structured_output import add_output, emit


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One thing that happened; of an incident also its phases."""

    at_seconds: float
    kind: str
    text: str
    warning: bool = False
    phases: tuple[str, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("--incidents", action="store_true", help="incidents alone, without events")
    add_output(parser, ("json", "yaml"))


def run(given: argparse.Namespace) -> int:
    view = view_of(given)
    found = timeline_of(view, events=not given.incidents)
    emit(found, given.output, lambda wide: [*timeline_lines(found), *view.stored.problems, *view.unread])
    return EXIT_OK


def timeline_of(view: JobView, events: bool = True) -> list[TimelineEntry]:
    """Joins events, incidents and the job's own beginning and end, oldest first."""
    status = view.stored.status
    found = []
    if events:
        found += [TimelineEntry(e.at_seconds, e.reason, e.message, e.warning) for e in view.events]
    if status is not None:
        if status.start_seconds is not None:
            found.append(TimelineEntry(status.start_seconds, "start", "the job starts"))
        found += [_of_incident(one) for one in status.incidents]
        if status.completion_seconds is not None:
            found.append(TimelineEntry(status.completion_seconds, "end", f"{status.phase}: {status.message}"))
    return sorted(found, key=lambda one: one.at_seconds)


def _of_incident(incident: Incident) -> TimelineEntry:
    found = run_report.incident_report(incident, ())
    _, *phases = run_report.timeline({"incidents": [found]})
    return TimelineEntry(
        incident.detected_seconds,
        "incident",
        f"{incident.kind}: {incident.reason}",
        incident.kind != "planned",
        tuple(phases),
    )


def timeline_lines(found: list[TimelineEntry]) -> list[str]:
    """Renders entries with the clock (UTC) and the seconds since the first."""
    if not found:
        return ["nothing is known to have happened: the cluster keeps events for an hour, and the status ten incidents"]
    lines, first = [], found[0].at_seconds
    for one in found:
        clock = datetime.fromtimestamp(one.at_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
        mark = "!" if one.warning else " "
        lines.append(f"{clock} {one.at_seconds - first:+9.1f} s {mark} {one.kind}: {one.text}")
        lines += [f"{'':30}{phase}" for phase in one.phases]
    return lines
