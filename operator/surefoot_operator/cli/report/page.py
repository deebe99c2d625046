"""Renders a job's history as one HTML page from `report.html`.

Pure, except that it reads the template. Names, messages and exceptions come from programs and are not trusted:
autoescape keeps them from becoming HTML elements, and `write_value` shortens each text and escapes its control
characters.
"""

from __future__ import annotations

import functools
import statistics
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from surefoot.protocol.text import count_of, escape_control_characters, format_bytes, join_names, shorten
from surefoot_operator.api.status import SaveInterval
from surefoot_operator.api.time_spent import CATEGORIES
from surefoot_operator.cli.jobs.describe import describe_tiers
from surefoot_operator.cli.jobs.list_jobs import persistent_contents
from surefoot_operator.cli.local.run_report import Comparison
from surefoot_operator.cli.report import charts
from surefoot_operator.cli.report.charts import BarPart, Chart, ChartMark, Curve, XBand
from surefoot_operator.cli.report.report_data import IncidentFacts, ReportFacts, StallFacts

MAX_TEXT_CHARACTERS = 2000
"""Limit of each text from a program; the stacks of a hang would fill a page."""
MAX_ROWS = 200
"""Limit of the rows of each table."""
MAX_INCIDENTS = 50
MAX_ROUNDING_DIFFERENCE = 1e-5
"""Two runs differ by more than this only if something else than the order of sums differs."""
NOT_KNOWN = "not known"

PHASE_NUMBERS = {
    "detected": 1,
    "claimed": 2,
    "stopped": 3,
    "fenced": 4,
    "committed": 5,
    "attached": 6,
    "connected": 7,
    "restored": 9,
    "first_step": 10,
}
"""Number and colour of each phase, the same in every bar and table."""


def render_page(facts: ReportFacts, version: str) -> str:
    """Renders the complete page. `version`: the version of surefoot, for the footer."""
    return _environment().get_template("report.html").render(facts=facts, version=version).lstrip()


@functools.cache
def _environment() -> Environment:
    """Returns the template environment, with the functions that the template calls."""
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
        amount=format_bytes,
        clock=clock,
        duration=duration,
        listed=join_names,
        median=statistics.median,
        count_of=count_of,
    )
    names = (
        loss_chart,
        stall_chart,
        phase_parts,
        category_parts,
        longest_seconds,
        generation_rows,
        placement_rows,
        event_rows,
    )
    environment.globals.update(
        {function.__name__: function for function in (*names, describe_incident, describe_interval)},
        lasting=persistent_contents,
        stored_words=describe_tiers,
        charts=charts,
        verdict=verdict,
        shows_reference=shows_reference,
        MAX_INCIDENTS=MAX_INCIDENTS,
        MAX_ROWS=MAX_ROWS,
        NOT_KNOWN=NOT_KNOWN,
    )
    return environment


def write_value(value: Any) -> Any:
    """Shortens and escapes text, and writes a float with at most two decimals; other values stay as they are."""
    if isinstance(value, float):
        text = f"{value:.2f}".rstrip("0").rstrip(".")
        return "0" if text == "-0" else text
    # Text with `__html__` is the template's own markup and already escaped.
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return escape_control_characters(shorten(value, MAX_TEXT_CHARACTERS))
    return value


# ---- words -----------------------------------------------------------------------------------------------------------


def clock(seconds: float) -> str:
    """Renders a Unix time in UTC, to the second."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):  # a status edited by hand may name any number
        return NOT_KNOWN


def duration(seconds: float) -> str:
    """Renders seconds as `12 ms`, `1.62 s`, `4 min 36 s` or `2 h 10 min`."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.3g} ms" if seconds else "0 s"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole_seconds = round(seconds)
    if whole_seconds < 3600:
        return f"{whole_seconds // 60} min {whole_seconds % 60} s"
    return f"{whole_seconds // 3600} h {whole_seconds % 3600 // 60} min"


def describe_incident(fact: IncidentFacts) -> str:
    """Describes the time, place and cost of an incident in one line."""
    incident = fact.incident
    location = " of ".join(
        f"{name} {number}"
        for name, number in (("rank", incident.rank), ("worker", incident.worker))
        if number is not None
    )
    location = f"{location} on {incident.node}" if location and incident.node else location or incident.node or ""
    parts = (
        clock(fact.at_seconds),
        f"after step {incident.last_step} of generation {incident.generation}",
        location,
        f"{incident.world_size_before} → {NOT_KNOWN if incident.world_size_after is None else incident.world_size_after} ranks",
        "" if incident.steps_lost is None else f"{incident.steps_lost} steps lost",
        f"restored from {incident.restored_from}" if incident.restored_from else "",
        f"injected: {fact.fault}" if fact.fault else "",
        "still recovering" if fact.took_seconds is None else f"{fact.took_seconds:.3f} s in all",
    )
    return " · ".join(filter(None, parts))


def verdict(facts: ReportFacts) -> str:
    """Describes in one sentence the failures, the time until training continued, and the samples lost."""
    parts = [*_incident_counts(facts), _recovery_words(facts)]
    ledger, phase = facts.ledger, facts.view.stored.phase
    if ledger is not None and ledger.account is not None:
        account = ledger.account
        parts.append(f"{_count(account.lost, 'sample')} lost")
        parts += [f"{_count(account.repeated, 'sample')} repeated"] if account.repeated else []
    parts.append("" if ledger is None or ledger.comparison is None else _result_words(ledger.comparison))
    parts.append("the job failed" if phase == "Failed" else "")
    sentence = ", ".join(filter(None, parts))
    return f"{sentence[0].upper()}{sentence[1:]}."


def _incident_counts(facts: ReportFacts) -> list[str]:
    """Counts the incidents by kind: `1 node lost`, `2 trainers failed`, `1 planned change`."""
    counts = Counter("planned" if fact.planned else fact.incident.kind for fact in facts.incidents)
    if not counts:
        return ["no failure"]
    words = [_KIND_WORDS.get(kind, ("failure", f"of kind {kind}")) for kind in counts]
    return [
        f"{_count(count, noun)} {verb}".rstrip() for (noun, verb), count in zip(words, counts.values(), strict=True)
    ]


_KIND_WORDS = {
    "node-lost": ("node", "lost"),
    "agent-lost": ("agent", "lost"),
    "worker-silent": ("worker", "silent"),
    "trainer-failed": ("trainer", "failed"),
    "checkpoint-lost": ("checkpoint", "lost"),
    "unreadable": ("checkpoint", "unreadable"),
    "startup": ("start", "failed"),
    "hang": ("hang", ""),
    "numerics": ("loss anomaly", ""),
    "planned": ("planned change", ""),
}
"""Noun and verb for each kind of incident, as they follow a count."""


def _recovery_words(facts: ReportFacts) -> str:
    durations = [fact.took_seconds for fact in facts.incidents]
    if not durations:
        return ""
    if durations[-1] is None:
        return "training has not continued yet" if facts.view.stored.phase not in ("Complete", "Failed") else ""
    longest = max(seconds for seconds in durations if seconds is not None)
    return f"training continued after {'' if len(durations) == 1 else 'at most '}{duration(longest)}"


def _result_words(comparison: Comparison) -> str:
    """Compares the result with the undisturbed run, by its parameters if they were compared, else by its losses."""
    if comparison.bit_exact:
        return "result identical bit for bit"
    differences = (comparison.max_parameter_difference, comparison.max_loss_difference)
    measured = [difference for difference in differences if difference is not None]
    if not measured:
        return ""
    if max(measured) <= MAX_ROUNDING_DIFFERENCE:
        return f"result identical to {max(measured):.0e}" if max(measured) else "result identical"
    return f"result differs from the undisturbed run by up to {max(measured):.2g}"


def _count(count: int, noun: str) -> str:
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def describe_interval(interval: SaveInterval) -> str:
    """Describes a save interval, with the measurements and the reason from which it was chosen."""
    measurements = (
        ("a save costs training", interval.cost_seconds),
        ("from staged to stored", interval.flush_seconds),
        ("a step", interval.step_seconds),
    )
    measurement_texts = [f"{name} {duration(seconds)}" for name, seconds in measurements if seconds is not None]
    return f"{', '.join([f'every {interval.steps} steps', *measurement_texts])} ({interval.reason})"


# ---- rows of tables and parts of bars --------------------------------------------------------------------------------


def generation_rows(facts: ReportFacts) -> list[tuple[object, ...]]:
    """Returns a row per generation: number, world size, restored step and source of the state."""
    rows: list[tuple[object, ...]] = []
    for entry in facts.lineage:
        step = entry.parent.step if entry.parent else 0
        source = facts.restored_from.get(entry.generation) or (NOT_KNOWN if step else "the beginning")
        rows.append((entry.generation, entry.world_size, step, source))
    return rows


def placement_rows(facts: ReportFacts) -> list[tuple[object, ...]]:
    """Returns a row per worker attempt; ranks and steps are included only if there is a ledger."""
    rows: list[tuple[object, ...]] = []
    for worker in facts.placements:
        row = (worker.worker, worker.node or NOT_KNOWN, worker.state, join_names(worker.generations) or "none")
        steps = "none" if worker.first_step is None else f"{worker.first_step} to {worker.last_step}"
        rows.append((*row, join_names(worker.ranks) or "none", steps) if facts.ledger else row)
    return rows


def event_rows(facts: ReportFacts) -> list[tuple[str, str, str]]:
    """Returns a row per event, newest first: time, reason and message."""
    newest_first = reversed(facts.view.events)
    return [
        (clock(event.at_seconds), f"{'! ' if event.warning else ''}{event.reason}", event.message)
        for event in newest_first
    ]


def phase_parts(fact: IncidentFacts) -> list[BarPart]:
    """Returns a bar part for each phase of an incident, from the end of the previous phase to its own."""
    parts, previous_end_seconds = [], 0.0
    for name, end_seconds, text in fact.phases:
        seconds = max(0.0, end_seconds - previous_end_seconds)
        parts.append(BarPart(PHASE_NUMBERS[name], seconds, text.replace("->", "→")))
        previous_end_seconds = max(previous_end_seconds, end_seconds)
    return parts


def longest_seconds(incidents: Sequence[IncidentFacts]) -> float:
    """Returns the seconds of the longest recovery, which sets the scale of all recovery bars."""
    return max((fact.phases[-1][1] for fact in incidents if fact.phases), default=0.0)


def category_parts(facts: ReportFacts) -> list[BarPart]:
    """Returns a bar part for each category of the job's time; an unknown category gets the last colour."""
    numbers = {name: number for number, name in enumerate(CATEGORIES, 1)}
    return [BarPart(numbers.get(name, len(CATEGORIES)), seconds, name) for name, seconds in facts.seconds.items()]


# ---- charts ----------------------------------------------------------------------------------------------------------


def loss_chart(facts: ReportFacts) -> Chart | None:
    """Builds the chart of the loss by step, with generations and incidents; None if no step has a loss."""
    if facts.ledger is None or not (facts.ledger.loss.counted or facts.ledger.loss.discarded):
        return None
    loss, job = facts.ledger.loss, facts.view.stored
    points = loss.counted or loss.discarded[0]
    (first_step, first_loss), (final_step, last_loss) = points[0], points[-1]
    incident_steps = join_names([fact.incident.last_step for fact in facts.incidents])
    last_step = max(curve[-1][0] for curve in (loss.counted, *loss.discarded) if curve)
    begin_steps = [float(entry.parent.step if entry.parent else 0) for entry in facts.lineage]
    return Chart(
        name="loss",
        title=f"Loss of {job} by step",
        description=f"from {first_loss:.4g} at step {first_step:g} to {last_loss:.4g} at step {final_step:g}"
        + (f"; incidents after steps {incident_steps}" if incident_steps else "; no incident")
        + ("; the undisturbed run is drawn beneath" if shows_reference(facts) else ""),
        x_label="step",
        y_label="loss",
        curves=(
            *([Curve("undisturbed", loss.reference)] if shows_reference(facts) else []),
            Curve("kept", loss.counted),
            *(Curve("discarded", points) for points in loss.discarded),
        ),
        bands=tuple(
            XBand(begin_step, end_step, f"generation {entry.generation}, {count_of(entry.world_size, 'rank')}")
            for entry, begin_step, end_step in zip(
                facts.lineage, begin_steps, [*begin_steps[1:], last_step], strict=True
            )
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


def shows_reference(facts: ReportFacts) -> bool:
    """Returns whether the undisturbed run needs a curve of its own: two equal curves would look like one muddy line."""
    if facts.ledger is None or not facts.ledger.loss.reference:
        return False
    comparison = facts.ledger.comparison
    difference = None if comparison is None else comparison.max_loss_difference
    return difference is None or difference > MAX_ROUNDING_DIFFERENCE


def stall_chart(stalls: StallFacts) -> Chart:
    """Builds the chart of the milliseconds for which each save blocked training."""
    return Chart(
        name="stalls",
        title="Stall of each save by step",
        description=f"milliseconds that a save stopped training; {len(stalls.by_step)} saves",
        x_label="step",
        y_label="stall, ms",
        curves=(Curve("stall", tuple((step, 1000 * seconds) for step, seconds in stalls.by_step)),),
        from_zero=True,
    )
