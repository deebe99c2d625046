"""Lays out the sections of the report page.

Pure; called by `page`. A section without facts says why it has none: an empty one would read as "nothing happened".
"""

from __future__ import annotations

from surefoot.protocol.plain import amount, listed
from surefoot_operator.api.status import Interval
from surefoot_operator.cli.report.charts import Chart, ChartMark, Curve, XBand, drawn_chart
from surefoot_operator.cli.report.markup import Child, Markup, element, joined
from surefoot_operator.cli.report.page_parts import (
    MOST_ROWS,
    NOT_KNOWN,
    caption,
    clock,
    duration,
    key,
    pairs,
    ranks_of,
    section,
    table,
)
from surefoot_operator.cli.report.phase_bars import COLOURS, category_colour, durations, phase_bar, seconds_bar
from surefoot_operator.cli.report.report_facts import IncidentFacts, LossFacts, Placement, ReportFacts

MOST_INCIDENTS = 50

_CATEGORIES = {
    "training": "steps that count",
    "redone": "steps that a failure took back: they were run again",
    "detecting": "from the last step to the decision that something failed",
    "recovering": "from there to the first new step, without waiting for workers",
    "resizing": "planned changes: nodes left, growth, what a suspension stops",
    "starting": "from a world's begin without a failure to its first step",
    "waiting": "for enough workers",
    "suspended": "as somebody wished",
    "finishing": "from the end of all trainers until the last checkpoint is where it belongs",
    "unknown": "before an operator counted",
}


def loss_section(facts: ReportFacts) -> Markup:
    """The loss by step, with epochs and incidents."""
    loss = facts.loss
    if loss is None:
        text = "A cluster keeps no loss of each step; Prometheus has it as surefoot_loss, if it scrapes the workers."
        return section("Loss, epochs and incidents", caption(text), _epochs(facts))
    if not (loss.kept or loss.discarded):
        many = f"{loss.not_finite} steps had a loss that is no finite number. " if loss.not_finite else ""
        text = f"{many}No step has a loss to be drawn: give it to Checkpointer.step(loss=…)."
        return section("Loss, epochs and incidents", caption(text), _epochs(facts))
    lines = [("kept", "the loss of the steps that count")]
    curves = [Curve("kept", loss.kept), *(Curve("discarded", one) for one in loss.discarded)]
    if loss.discarded:
        lines.append(("discarded", "steps that a failure undid: they were run again"))
    if loss.undisturbed:
        curves.insert(0, Curve("undisturbed", loss.undisturbed))
        lines.append(("undisturbed", "the same job without faults"))
    chart = Chart(
        name="loss",
        title=f"Loss of {facts.job} by step",
        description=_described(facts, loss),
        x_label="step",
        y_label="loss",
        curves=tuple(curves),
        bands=_bands(facts, loss),
        marks=tuple(
            ChartMark(one.last_step, str(one.number), f"{one.number}: {one.kind}: {one.reason}", one.planned)
            for one in facts.incidents
        ),
    )
    marks = "Numbers are the incidents below: round a failure, square a planned change." if facts.incidents else ""
    odd = f" {loss.not_finite} steps had a loss that is no finite number; they are left out." if loss.not_finite else ""
    return section("Loss, epochs and incidents", drawn_chart(chart), key(lines), caption(marks + odd), _epochs(facts))


def _described(facts: ReportFacts, loss: LossFacts) -> str:
    points = loss.kept or loss.discarded[0]
    (first, begin), (last, end) = points[0], points[-1]
    steps = listed([one.last_step for one in facts.incidents])
    happened = f"; incidents after steps {steps}" if facts.incidents else "; no incident"
    beside = "; the undisturbed run is drawn beneath" if loss.undisturbed else ""
    return f"from {begin:.4g} at step {first:g} to {end:.4g} at step {last:g}{happened}{beside}"


def _bands(facts: ReportFacts, loss: LossFacts) -> tuple[XBand, ...]:
    last = max((curve[-1][0] for curve in (loss.kept, *loss.discarded) if curve), default=0.0)
    begins = [float(one.from_step) for one in facts.epochs]
    ends = [*begins[1:], last]
    return tuple(
        XBand(begin, end, f"epoch {one.epoch}, {ranks_of(one.ranks)}")
        for one, begin, end in zip(facts.epochs, begins, ends, strict=True)
    )


def _epochs(facts: ReportFacts) -> Markup | None:
    if not facts.epochs:
        return caption("No world was committed yet: there is no epoch.")
    rows = [
        (
            str(one.epoch),
            str(one.ranks),
            str(one.from_step),
            one.restored_from or ("the beginning" if one.from_step == 0 else NOT_KNOWN),
        )
        for one in facts.epochs
    ]
    found = table(("epoch", "ranks", "from step", "state restored from"), rows, (0, 1, 2), "table tight")
    return element("details", element("summary", f"Epochs ({len(rows)})"), found, open="" if len(rows) <= 6 else None)


# ---- incidents --------------------------------------------------------------------------------------------------------


def incidents_section(facts: ReportFacts) -> Markup:
    """Each incident, and where its recovery's seconds went."""
    title = "Where each recovery's seconds went"
    if not facts.incidents:
        return section(title, element("p", "Nothing happened: no failure, and no change of the world."))
    shown = facts.incidents[-MOST_INCIDENTS:]
    longest = max((one.phases[-1].at_seconds for one in shown if one.phases), default=0.0)
    left_out = len(facts.incidents) - len(shown)
    return section(
        title,
        caption("Bars are on one scale. Seconds count from the injected fault, else from the first sign."),
        caption(f"The {left_out} oldest incidents are left out.") if left_out else None,
        *(_incident(one, longest) for one in shown),
    )


def _incident(one: IncidentFacts, longest_seconds: float) -> Markup:
    took = one.took_seconds
    title = f"Incident {one.number}: " + ("still recovering" if took is None else f"{took:.3f} s to the first new step")
    rows: list[tuple[Child, ...]] = [
        (
            element("span", str(COLOURS[phase.name]), class_=f"swatch c{COLOURS[phase.name]}"),
            phase.said,
            f"{phase.at_seconds:.3f} s",
            f"{seconds:.3f} s",
        )
        for phase, seconds in durations(one.phases)
    ]
    kind = "number planned" if one.planned else "number"
    return element(
        "div",
        element("header", element("span", str(one.number), class_=kind), element("h3", f"{one.kind}: {one.reason}")),
        element("p", " · ".join(_about(one)), class_="caption"),
        phase_bar(one.phases, longest_seconds, title) if one.phases else None,
        table(("", "phase", "at", "took"), rows, (2, 3)) if rows else None,
        element("details", element("summary", "what workers said"), element("pre", one.detail)) if one.detail else None,
        class_="incident",
    )


def _about(one: IncidentFacts) -> list[str]:
    whose = [f"{name} {value}" for name, value in (("rank", one.rank), ("worker", one.worker)) if value is not None]
    world = NOT_KNOWN if one.world_after is None else str(one.world_after)
    return [
        clock(one.at_seconds),
        f"after step {one.last_step} of epoch {one.epoch}",
        *([" of ".join(whose) + (f" on {one.node}" if one.node else "")] if whose else [one.node] if one.node else []),
        f"world {one.world_before} → {world} ranks",
        *([] if one.steps_lost is None else [f"{one.steps_lost} steps lost"]),
        *([f"restored from {one.restored_from}"] if one.restored_from else []),
        *([f"injected: {one.fault}"] if one.fault else []),
        "still recovering" if one.took_seconds is None else f"{one.took_seconds:.3f} s in all",
    ]


# ---- time, checkpoints, samples ------------------------------------------------------------------------------------------


def time_section(facts: ReportFacts) -> Markup:
    """What the job's seconds were spent on, by the operator's own account."""
    title = "Where the job's seconds went"
    total = sum(facts.seconds.values())
    if total <= 0:
        return section(title, caption("The job has not started, or its operator does not count seconds yet."))
    rows: list[tuple[Child, ...]] = [
        (
            element("span", str(category_colour(name)), class_=f"swatch c{category_colour(name)}"),
            joined(element("b", name), f": {_CATEGORIES[name]}" if name in _CATEGORIES else ""),
            duration(spent),
            f"{100 * spent / total:.1f} %",
        )
        for name, spent in facts.seconds.items()
    ]
    said = f"{duration(total)} since the job's start, each second counted once, by the operator"
    good = (
        "" if facts.goodput is None else f". Goodput, the share of training that was not run again: {facts.goodput:.1%}"
    )
    bar = seconds_bar(facts.seconds, f"The job's seconds by category: {said}")
    return section(title, caption(f"{said}{good}."), bar, table(("", "category", "time", "share"), rows, (2, 3)))


def checkpoints_section(facts: ReportFacts) -> Markup:
    """Checkpoints, how long saves stopped training, and latencies."""
    stalls, stored = facts.stalls, facts.checkpoints
    rows: list[tuple[str, str]] = []
    if stored is not None:
        size = f", {amount(stored.bytes)} each" if stored.bytes else ""
        rows.append(("seen complete", f"{stored.complete}{size}"))
    rows.append(("newest complete", facts.newest_checkpoint or "none is known"))
    rows.append(
        ("persistent tier", "none is known" if facts.persistent_step is None else f"step {facts.persistent_step}")
    )
    rows += [("stored", facts.stored)] if facts.stored else []
    if stalls.median_seconds is not None:
        said = f"median {duration(stalls.median_seconds)}, 95 % within {duration(stalls.p95_seconds)}, most {duration(stalls.most_seconds)}"
        rows.append(("stall of a save", f"{said} (of each save its slowest rank)"))
    rows += _latencies("memory tier", facts.memory_interval) + _latencies("persistent tier", facts.persistent_interval)
    drawn = None
    if len(stalls.by_step) > 1:
        chart = Chart(
            name="stalls",
            title="Stall of each save by step",
            description=f"milliseconds that a save stopped training; {len(stalls.by_step)} saves",
            x_label="step",
            y_label="stall, ms",
            curves=(Curve("stall", tuple((step, 1000 * seconds) for step, seconds in stalls.by_step)),),
            from_zero=True,
        )
        drawn = joined(drawn_chart(chart), caption("How long each save stopped the training, in milliseconds."))
    return section("Checkpoints", pairs(rows), drawn)


def _latencies(tier: str, chosen: Interval | None) -> list[tuple[str, str]]:
    if chosen is None:
        return []
    told = (
        ("a save costs training", chosen.cost_seconds),
        ("from staged to stored", chosen.drain_seconds),
        ("a step", chosen.step_seconds),
    )
    words = [
        f"every {chosen.steps} steps",
        *(f"{name} {duration(seconds)}" for name, seconds in told if seconds is not None),
    ]
    return [(f"{tier}, as measured", f"{', '.join(words)} ({chosen.reason})")]


def samples_section(facts: ReportFacts) -> Markup:
    """Samples lost and repeated, and the differences from the undisturbed run."""
    counted, compared = facts.account, facts.comparison
    rows: list[tuple[str, str]] = []
    if counted is not None:
        rows += [
            ("samples lost", str(counted.lost)),
            ("samples repeated", str(counted.repeated)),
            ("samples a step", str(counted.batch)),
        ]
        if counted.unknown:
            rows.append(
                (
                    "samples unknown",
                    f"{counted.unknown}: their steps were not written into the ledger (was the disk full?)",
                )
            )
        if counted.skipped:
            spans = ", ".join(f"{start} to {stop}" for start, stop in counted.skipped)
            total = sum(stop - start for start, stop in counted.skipped)
            rows.append(("samples skipped", f"{total}, as rollbacks say: positions {spans}"))
        if counted.missing_steps:
            rows.append(("steps without a line", listed(counted.missing_steps)))
    if compared is not None:
        rows += [
            ("largest difference of the loss", _measure(compared.max_loss_difference)),
            (
                "largest difference of a parameter",
                _parameters(compared.max_parameter_difference, compared.bit_exact, compared.step),
            ),
        ]
        if compared.problem:
            rows.append(("not compared", compared.problem))
    if facts.data is not None:
        rate = facts.data.samples_per_second
        rows.append(("passes over the data", f"{facts.data.passes:.3g}"))
        rows += [] if rate is None else [("samples a second", f"{rate:.4g}, at the pace of the last steps")]
    if facts.loss is None:  # of a cluster
        text = "A cluster keeps no samples of each step; surefoot local --compare counts what is lost or repeated."
        return section("Samples", caption(text), pairs(rows) if rows else None)
    if not rows:
        return section("Samples", caption("No loader has told which samples it gave: nothing can be said of samples."))
    note = (
        None
        if compared is not None
        else caption("There is no undisturbed run to compare with (surefoot local --compare).")
    )
    return section("Samples, and the undisturbed run", pairs(rows), note)


def _measure(value: float | None) -> str:
    return "not compared" if value is None else f"{value:.3g}"


def _parameters(difference: float | None, exact: bool | None, step: int | None) -> str:
    if difference is None:
        return "not compared"
    return f"{difference:.3g}{', bit-exact' if exact else ''} (checkpoint of step {step})"


# ---- where it ran -------------------------------------------------------------------------------------------------------


def places_section(facts: ReportFacts) -> Markup:
    """Workers by attempt, and nodes."""
    stepped = facts.loss is not None  # a cluster tells who is a member, and no steps
    rows = [
        (
            one.worker,
            one.node or NOT_KNOWN,
            one.state,
            listed(one.epochs) or "none",
            *((listed(one.ranks) or "none", _steps_of(one)) if stepped else ()),
        )
        for one in facts.placements
    ]
    columns = ("worker, attempt", "node", "state", "epochs", *(("ranks", "steps") if stepped else ()))
    nodes = [(one.name, one.state, one.holder) for one in facts.nodes]
    return section(
        "Workers and nodes",
        table(columns, rows, kind="table tight") if rows else caption("No worker is known."),
        element("h3", "Nodes, when this page was made") if nodes else None,
        table(("node", "state", "holder"), nodes, kind="table tight") if nodes else None,
    )


def _steps_of(one: Placement) -> str:
    return "none" if one.first_step is None else f"{one.first_step} to {one.last_step}"


def events_section(facts: ReportFacts) -> Markup | None:
    """The newest events, folded."""
    if not facts.events:
        return None
    newest = list(reversed(facts.events))
    rows = [(clock(one.at_seconds), f"{'! ' if one.warning else ''}{one.reason}", one.message) for one in newest]
    found = table(("when", "reason", "message"), rows)
    return section("Events", element("details", element("summary", f"{len(rows)} events, newest first"), found))


def unread_section(facts: ReportFacts) -> Markup | None:
    """What could not be read, and why."""
    if not facts.unread:
        return None
    return section("Could not be read", element("ul", *(element("li", one) for one in facts.unread[:MOST_ROWS])))
