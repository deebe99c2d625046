"""Renders a job's history as one HTML page from `report.html`.

Pure but for reading the template. Names, messages and exceptions of programs are foreign text: autoescape lets none of it become
an element, and `write_value` cuts and cleans each piece before that.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from surefoot.protocol.text import escape_control_characters, format_bytes, join_names, shorten
from surefoot_operator.api.status import SaveInterval
from surefoot_operator.cli.jobs.describe import describe_tiers, persistent_contents
from surefoot_operator.cli.report import charts
from surefoot_operator.cli.report.charts import BarPart, Chart, ChartMark, Curve, XBand
from surefoot_operator.cli.report.report_data import IncidentFacts, ReportFacts, StallFacts
from surefoot_operator.policy.report.time_spent import CATEGORIES

MAX_TEXT_CHARACTERS = 2000
"""Of one piece of foreign text: a hang's stacks would fill a page."""
MAX_ROWS = 200
"""Of one table."""
MAX_INCIDENTS = 50
NOT_KNOWN = "not known"

PHASE_NUMBERS = {"detected": 1, "claimed": 2, "stopped": 3, "fenced": 4, "committed": 5, "first_step": 6}
"""Number and colour of each phase, the same in every bar and table."""


def render_page(facts: ReportFacts, version: str) -> str:
    """Renders the whole page; `version` is the program's."""
    return _environment().get_template("report.html").render(facts=facts, version=version).lstrip()


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("surefoot_operator.cli.report", ""),
        autoescape=True,
        finalize=write_value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        amount=format_bytes, clock=clock, duration=duration, listed=join_names, median=statistics.median, ranks=ranks_of
    )
    names = (
        loss_chart,
        stall_chart,
        phase_parts,
        category_parts,
        longest_seconds,
        epoch_rows,
        placement_rows,
        event_rows,
    )
    environment.globals.update(
        {function.__name__: function for function in (*names, describe_incident, describe_interval)},
        lasting=persistent_contents,
        stored_words=describe_tiers,
        charts=charts,
        MAX_INCIDENTS=MAX_INCIDENTS,
        MAX_ROWS=MAX_ROWS,
        NOT_KNOWN=NOT_KNOWN,
    )
    return environment


def write_value(value: Any) -> Any:
    """Cuts and cleans foreign text; writes a number with at most two decimals."""
    if isinstance(value, float):
        text = f"{value:.2f}".rstrip("0").rstrip(".")
        return "0" if text == "-0" else text
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return escape_control_characters(shorten(value, MAX_TEXT_CHARACTERS))
    return value


# ---- words -----------------------------------------------------------------------------------------------------------


def ranks_of(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"


def clock(seconds: float) -> str:
    """A moment in UTC, to the second."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):  # a status edited by hand may name any number
        return NOT_KNOWN


def duration(seconds: float) -> str:
    """Words seconds: `12 ms`, `1.62 s`, `4 min 36 s`, `2 h 10 min`."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.3g} ms" if seconds else "0 s"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def describe_incident(fact: IncidentFacts) -> str:
    """Words when and where an incident was, and what it cost."""
    incident = fact.incident
    place = " of ".join(
        f"{name} {number}"
        for name, number in (("rank", incident.rank), ("worker", incident.worker))
        if number is not None
    )
    place = f"{place} on {incident.node}" if place and incident.node else place or incident.node or ""
    parts = (
        clock(fact.at_seconds),
        f"after step {incident.last_step} of epoch {incident.generation}",
        place,
        f"world {incident.world_size_before} → {NOT_KNOWN if incident.world_size_after is None else incident.world_size_after} ranks",
        "" if incident.steps_lost is None else f"{incident.steps_lost} steps lost",
        f"restored from {incident.restored_from}" if incident.restored_from else "",
        f"injected: {fact.fault}" if fact.fault else "",
        "still recovering" if fact.took_seconds is None else f"{fact.took_seconds:.3f} s in all",
    )
    return " · ".join(filter(None, parts))


def describe_interval(interval: SaveInterval) -> str:
    """Words a save interval with what it was chosen from."""
    measured = (
        ("a save costs training", interval.cost_seconds),
        ("from staged to stored", interval.flush_seconds),
        ("a step", interval.step_seconds),
    )
    words = [f"{name} {duration(seconds)}" for name, seconds in measured if seconds is not None]
    return f"{', '.join([f'every {interval.steps} steps', *words])} ({interval.reason})"


# ---- rows of tables and parts of bars --------------------------------------------------------------------------------


def epoch_rows(facts: ReportFacts) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for entry in facts.lineage:
        step = entry.parent.step if entry.parent else 0
        source = facts.restored_from.get(entry.generation) or (NOT_KNOWN if step else "the beginning")
        rows.append((entry.generation, entry.world_size, step, source))
    return rows


def placement_rows(facts: ReportFacts) -> list[tuple[object, ...]]:
    """Rows of workers; without a ledger nobody knows ranks and steps."""
    rows: list[tuple[object, ...]] = []
    for worker in facts.placements:
        row = (worker.worker, worker.node or NOT_KNOWN, worker.state, join_names(worker.generations) or "none")
        steps = "none" if worker.first_step is None else f"{worker.first_step} to {worker.last_step}"
        rows.append((*row, join_names(worker.ranks) or "none", steps) if facts.ledger else row)
    return rows


def event_rows(facts: ReportFacts) -> list[tuple[str, str, str]]:
    newest = reversed(facts.view.events)
    return [(clock(e.at_seconds), f"{'! ' if e.warning else ''}{e.reason}", e.message) for e in newest]


def phase_parts(fact: IncidentFacts) -> list[BarPart]:
    """Gives each phase the seconds since the end of the one before it."""
    parts, before = [], 0.0
    for name, at, text in fact.phases:
        parts.append(BarPart(PHASE_NUMBERS[name], max(0.0, at - before), text))
        before = max(before, at)
    return parts


def longest_seconds(incidents: Sequence[IncidentFacts]) -> float:
    """The length of the longest recovery, which has the whole width of its bar."""
    return max((fact.phases[-1][1] for fact in incidents if fact.phases), default=0.0)


def category_parts(facts: ReportFacts) -> list[BarPart]:
    """Divides a job's whole time by category; one of a newer operator has the last colour."""
    numbers = {name: number for number, name in enumerate(CATEGORIES, 1)}
    return [BarPart(numbers.get(name, len(CATEGORIES)), seconds, name) for name, seconds in facts.seconds.items()]


# ---- charts ----------------------------------------------------------------------------------------------------------


def loss_chart(facts: ReportFacts) -> Chart | None:
    """The loss by step, with epochs and incidents; None where no step has a loss."""
    if facts.ledger is None or not (facts.ledger.loss.counted or facts.ledger.loss.discarded):
        return None
    loss, job = facts.ledger.loss, facts.view.stored
    points = loss.counted or loss.discarded[0]
    (first, first_loss), (last, last_loss) = points[0], points[-1]
    steps = join_names([fact.incident.last_step for fact in facts.incidents])
    end = max(curve[-1][0] for curve in (loss.counted, *loss.discarded) if curve)
    begins = [float(entry.parent.step if entry.parent else 0) for entry in facts.lineage]
    return Chart(
        name="loss",
        title=f"Loss of {job} by step",
        description=f"from {first_loss:.4g} at step {first:g} to {last_loss:.4g} at step {last:g}"
        + (f"; incidents after steps {steps}" if steps else "; no incident")
        + ("; the undisturbed run is drawn beneath" if loss.reference else ""),
        x_label="step",
        y_label="loss",
        curves=(
            *([Curve("undisturbed", loss.reference)] if loss.reference else []),
            Curve("kept", loss.counted),
            *(Curve("discarded", points) for points in loss.discarded),
        ),
        bands=tuple(
            XBand(begin, band_end, f"epoch {entry.generation}, {ranks_of(entry.world_size)}")
            for entry, begin, band_end in zip(facts.lineage, begins, [*begins[1:], end], strict=True)
        ),
        marks=tuple(
            ChartMark(
                fact.incident.last_step,
                str(fact.number),
                f"{fact.number}: {fact.incident.kind}: {fact.incident.reason}",
                fact.planned,
            )
            for fact in facts.incidents
        ),
    )


def stall_chart(stalls: StallFacts) -> Chart:
    """How long each save stopped the training, in milliseconds."""
    return Chart(
        name="stalls",
        title="Stall of each save by step",
        description=f"milliseconds that a save stopped training; {len(stalls.by_step)} saves",
        x_label="step",
        y_label="stall, ms",
        curves=(Curve("stall", tuple((step, 1000 * seconds) for step, seconds in stalls.by_step)),),
        from_zero=True,
    )
