"""Implements `surefoot describe`: everything about one job, in the order people ask.

Called by `main`. `described` and `description_lines` are pure.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from surefoot.protocol.plain import amount
from surefoot_operator.api.status import (
    Condition,
    DataRead,
    ExcludedNode,
    Incident,
    Rollback,
    StoredCheckpoints,
    TierContents,
    TimeSpent,
    slow_nodes,
)
from surefoot_operator.cli.cli_errors import EXIT_OK
from surefoot_operator.cli.jobs.job_source import add_job, view_of
from surefoot_operator.cli.jobs.job_summary import JobSummary, exposed, lasting, progressed, saved, summary
from surefoot_operator.cli.jobs.job_view import JobView
from surefoot_operator.cli.local.progress import Happened
from surefoot_operator.cli.structured_output import add_output, emit
from surefoot_operator.cli.tables import UNKNOWN, TextTable, age, indented, number, text_lines
from surefoot_operator.job_snapshot import WorkerSeen
from surefoot_operator.policy.report.time_spent import goodput, seconds_spent

_MOST_EVENTS = 8
_MOST_WORKERS = 64
"""Of more only those that are not well are shown."""


@dataclass(frozen=True, slots=True)
class JobDescription:
    """What `describe` shows of one job."""

    summary: JobSummary
    uid: str
    world_reason: str
    began_step: int | None
    """The step that the present world restored."""
    persistent_step: int | None
    """Newest step complete in the persistent tier."""
    good_step: int | None
    """Of the newest checkpoint that is proven to be good, where the job asks for that."""
    rollback: Rollback | None
    workers: tuple[WorkerSeen, ...]
    conditions: tuple[Condition, ...]
    incidents: tuple[Incident, ...]
    excluded_nodes: tuple[ExcludedNode, ...]
    events: tuple[Happened, ...]
    unread: tuple[str, ...]
    now: float
    seconds: dict[str, float]
    """Where the job's seconds went, by category; those that took none are left out."""
    goodput: float | None
    data: DataRead | None
    """As the loader told; None: it tells nothing."""
    loss: float | None
    checkpoints: StoredCheckpoints
    """What each tier has, with its bytes; of a job that is over, what stays."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    add_output(parser)


def run(given: argparse.Namespace) -> int:
    found = described(view_of(given))
    emit(found, given.output, lambda wide: description_lines(found, wide))
    return EXIT_OK


def described(view: JobView) -> JobDescription:
    """Gathers what is shown of one look at a job."""
    status = view.stored.status
    world = status.world if status is not None else None
    seconds = seconds_spent(TimeSpent() if status is None else status.time_spent, view.now)
    return JobDescription(
        summary=summary(view.stored, view.now),
        uid=view.stored.uid,
        world_reason="" if world is None else world.reason,
        began_step=None if world is None else (world.parent.step if world.parent is not None else 0),
        persistent_step=None if status is None or status.floor is None else status.floor.step,
        good_step=None if status is None or status.last_good is None else status.last_good.step,
        rollback=None if status is None else status.rollback,
        workers=view.workers,
        conditions=() if status is None else status.conditions,
        incidents=() if status is None else status.incidents,
        excluded_nodes=() if status is None else (*status.excluded_nodes, *slow_nodes(status, view.now)),
        events=view.events,
        unread=(*view.stored.problems, *view.unread),
        now=view.now,
        seconds={category: spent for category, spent in seconds.items() if spent},
        goodput=goodput(seconds),
        data=None if status is None else status.data,
        loss=None if status is None else status.loss,
        checkpoints=StoredCheckpoints() if status is None else lasting(status),
    )


def description_lines(found: JobDescription, wide: bool = False) -> list[str]:
    """Renders the description; `wide`: every worker and event."""
    return [
        *_head(found),
        *_section("Workers", _workers(found, wide)),
        *_section("Conditions", _conditions(found)),
        *_section("Incidents", [incident_line(one, found.now) for one in found.incidents]),
        *_section("Avoided nodes", [f"{one.name}: {one.reason}" for one in found.excluded_nodes]),
        *_section("Events", [event_line(one, found.now) for one in _newest(found.events, wide)]),
        *_section("Could not be read", list(found.unread)),
    ]


def _head(found: JobDescription) -> list[str]:
    one, pace = found.summary, found.summary.pace
    rate = "" if pace.steps_per_second is None else f", {pace.steps_per_second:.3g} steps/s"
    left = "" if pace.left_seconds is None else f", about {age(pace.left_seconds)} left"
    world = UNKNOWN
    if one.world_ranks is not None:
        world = f"epoch {one.epoch}, {one.world_ranks} ranks, began at step {number(found.began_step)}: {found.world_reason}"
    newest = "none yet" if pace.checkpoint_step is None else f"step {saved(pace)}"
    kept = "" if found.persistent_step is None else f"; persistent tier: {found.persistent_step}"
    kept += "" if found.good_step is None else f"; proven good: {found.good_step}"
    rows = (
        ("Job", f"{one.namespace}/{one.name}   uid {found.uid or UNKNOWN}   age {age(one.age_seconds)}"),
        ("State", f"{one.state}   workers {one.ready or UNKNOWN}   restarts {number(one.restarts)}"),
        ("Message", one.message or UNKNOWN),
        ("Step", f"{progressed(pace)}{rate}{left}{'' if found.loss is None else f', loss {found.loss:.4g}'}"),
        *([] if found.data is None else [("Data", _data(found.data))]),
        ("World", world),
        ("Checkpoint", f"{newest}{kept}"),
        *((("Stored", stored),) if (stored := stored_words(found.checkpoints)) else ()),
        ("At risk", _at_risk(found)),
        ("Time", _time(found)),
        *((("Rolled back", _rolled_back(found.rollback)),) if found.rollback is not None else ()),
    )
    return [f"{name + ':':<12} {text}" for name, text in rows]


def stored_words(stored: StoredCheckpoints) -> str:
    """Words what each tier has: `memory 1.20 GB in 2 checkpoints, 2 copies of the newest`."""
    copies = "" if stored.copies is None else f", {_counted(stored.copies, 'copy', 'copies')} of the newest"
    tiers = (("memory", stored.memory, copies), ("persistent tier", stored.persistent, ""))
    return "; ".join(f"{name} {_contents(there)}{more}" for name, there, more in tiers if there is not None)


def _contents(there: TierContents) -> str:
    return f"{amount(there.bytes)} in {_counted(there.checkpoints, 'checkpoint', 'checkpoints')}"


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _data(data: DataRead) -> str:
    rate = "" if data.samples_per_second is None else f", {data.samples_per_second:.4g} samples/s"
    return f"{data.passes:.3g} passes{rate}"


def _rolled_back(back: Rollback) -> str:
    left_out = f", the batches of {back.skipped_steps} steps left out" if back.skipped_steps else ""
    return f"from step {back.reached_step} to {back.to_step}{left_out}: {back.reason}"


def _at_risk(found: JobDescription) -> str:
    if found.summary.state in ("Complete", "Failed"):
        return "nothing: the job is over"
    if found.summary.pace.exposed_steps is None:
        return "every step: no checkpoint is known to be complete yet"
    return f"{exposed(found.summary.pace)} would be run again after a failure now"


def _time(found: JobDescription) -> str:
    if found.goodput is None:
        return UNKNOWN
    parts = sorted(found.seconds.items(), key=lambda one: -one[1])
    return f"{found.goodput:.1%} of it training ({', '.join(f'{category} {age(spent)}' for category, spent in parts)})"


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", f"{title}:", *indented(lines)] if lines else []


def _workers(found: JobDescription, wide: bool) -> list[str]:
    shown = found.workers
    if len(shown) > _MOST_WORKERS and not wide:
        shown = tuple(one for one in shown if one.phase != "Running" or one.deleting or one.message)
    rows = tuple(
        (str(one.index), str(one.attempt), one.name, one.node or UNKNOWN, worker_state(one), one.message)
        for one in shown
    )
    left_out = len(found.workers) - len(shown)
    more = [f"and {left_out} that run; -o wide shows them"] if left_out else []
    table = TextTable(("WORKER", "ATTEMPT", "POD", "NODE", "STATE", "MESSAGE"), rows)
    return [*(text_lines(table) if rows else ()), *more]


def worker_state(one: WorkerSeen) -> str:
    """Words one worker's state: leaving before running, with its exit code."""
    if one.deleting or one.disrupted:
        return f"{one.phase}, leaving"
    return one.phase if one.exit_code is None else f"{one.phase} ({one.exit_code})"


def _conditions(found: JobDescription) -> list[str]:
    if not found.conditions:
        return []
    rows = tuple(
        (one.type, one.status, one.reason, age(found.now - one.last_transition_seconds), one.message)
        for one in found.conditions
        if one.status != "False" or one.message
    )
    return text_lines(TextTable(("TYPE", "STATUS", "REASON", "SINCE", "MESSAGE"), rows))


def incident_line(one: Incident, now: float) -> str:
    """Words one incident: when, what, and what it cost."""
    took = "still recovering"
    if one.first_step_seconds is not None:
        took = f"{one.first_step_seconds - one.detected_seconds:.1f} s to the first new step"
    lost = "" if one.steps_lost is None else f", {one.steps_lost} steps lost"
    return f"{age(now - one.detected_seconds)} ago, {one.kind}: {one.reason} ({took}{lost})"


def event_line(one: Happened, now: float) -> str:
    return f"{age(now - one.at_seconds)} ago   {'Warning ' if one.warning else ''}{one.reason}: {one.message}"


def _newest(events: tuple[Happened, ...], wide: bool) -> tuple[Happened, ...]:
    return events if wide else events[-_MOST_EVENTS:]
