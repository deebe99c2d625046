"""Lays a job's history out as one HTML page.

Pure: facts to text. The page asks no server for anything and runs no script, so that it can be mailed and kept; its policy forbids both
also where a text should have got through.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import UTC, datetime

from surefoot.protocol.text import amount, listed
from surefoot_operator.api.status import Interval
from surefoot_operator.cli.report.charts import (
    COLOURS,
    Chart,
    ChartMark,
    Child,
    Curve,
    Markup,
    XBand,
    category_colour,
    drawn_chart,
    durations,
    element,
    joined,
    phase_bar,
    seconds_bar,
)
from surefoot_operator.cli.report.report_data import IncidentFacts, LossFacts, Placement, ReportFacts

# ---- page parts ------------------------------------------------------------------------------------------------------
# Builds the parts of the report page's sections. Pure: tables of a bounded length, keys of charts, moments and seconds
# in words.

NOT_KNOWN = "not known"
_KEY = {
    "kept": '<svg viewBox="0 0 30 14" aria-hidden="true"><path class="curve kept" d="M2 7L28 7"/></svg>',
    "undisturbed": '<svg viewBox="0 0 30 14" aria-hidden="true"><path class="curve undisturbed" d="M5 7L25 7"/></svg>',
    "discarded": '<svg viewBox="0 0 30 14" aria-hidden="true"><path class="curve discarded" d="M3 7L28 7"/></svg>',
}


def section(title: str, *children: Child) -> Markup:
    return element("section", element("h2", title), *children)


def caption(text: str) -> Markup:
    return element("p", text, class_="caption")


MOST_ROWS = 200
"""Of one table."""


def table(
    columns: Sequence[str], rows: Sequence[Sequence[Child]], numbers: Sequence[int] = (), kind: str = "table"
) -> Markup:
    """Builds a table of a bounded length.

    Rows that are left out are counted beneath.

    Args:
        columns: their names.
        rows: as many cells each.
        numbers: places of the columns that are aligned to the right.
        kind: class of the table; "table tight" breaks no cell.
    """
    kinds = ["n" if place in numbers else None for place in range(len(columns))]
    head = (element("th", name, scope="col", class_=kind) for name, kind in zip(columns, kinds, strict=True))
    body = (
        element("tr", *(element("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)))
        for row in rows[:MOST_ROWS]
    )
    left_out = len(rows) - MOST_ROWS
    return joined(
        element(
            "div",
            element("table", element("thead", element("tr", *head)), element("tbody", *body)),
            class_=kind,
            tabindex="0",
            role="region",
            aria_label=", ".join(columns),
        ),
        caption(f"{left_out} further rows are left out") if left_out > 0 else None,
    )


def pairs(rows: Sequence[tuple[str, str]]) -> Markup:
    """Builds a table of names and values."""
    body = (element("tr", element("th", name, scope="row"), element("td", value)) for name, value in rows)
    return element("div", element("table", element("tbody", *body)), class_="table pairs")


def key(entries: Sequence[tuple[str, str]]) -> Markup:
    """Explains a chart's lines: the class of each, and what it is."""
    return element("ul", *(element("li", Markup(_KEY[kind]), said) for kind, said in entries), class_="key")


def figure(name: str, value: str, said: str = "") -> Markup:
    return element("div", element("dt", name), element("dd", value, element("small", said) if said else None))


def ranks_of(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"


def clock(seconds: float | None) -> str:
    """A moment in UTC, to the second."""
    if seconds is None:
        return NOT_KNOWN
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):  # a status edited by hand may name any number
        return NOT_KNOWN


def duration(seconds: float | None) -> str:
    """Words seconds: `12 ms`, `1.62 s`, `4 min 36 s`, `2 h 10 min`."""
    if seconds is None:
        return NOT_KNOWN
    if seconds < 0.0995:
        return f"{seconds * 1000:.3g} ms" if seconds else "0 s"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


# ---- page sections ---------------------------------------------------------------------------------------------------
# Lays out the sections of the report page. A section without facts says why it has none: an empty one would read as
# "nothing happened".

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


# ---- page style ------------------------------------------------------------------------------------------------------
# Contains the report page's style: light and dark, phone and desktop. A constant in the page itself: the file is mailed
# and kept, and must not ask a server how it looks.

STYLE = Markup(
    """
:root{color-scheme:light dark;--ground:#f6f7f9;--card:#fff;--ink:#1b2430;--soft:#586474;--rule:#dde2e9;--band:#eef2f8;--band-odd:#e0e8f3;
--kept:#0b5cad;--undisturbed:#e8b25a;--discarded:#b3261e;--stall:#0b5cad;--mark:#b3261e;--planned:#4d5b6b;--good:#146c43;--bad:#b3261e;
--c1:#8a94a3;--c2:#5b8def;--c3:#e39b2f;--c4:#2f9e77;--c5:#b86fb0;--c6:#d9662b;--c7:#9fb3c8;--c8:#cfd6df;--c9:#c9b458;--c10:#b0b7c1;--on:#10151c}
@media (prefers-color-scheme:dark){:root{--ground:#11151b;--card:#1a2029;--ink:#e6eaf0;--soft:#a3aebd;--rule:#2e3743;--band:#1f2733;
--band-odd:#27313f;--kept:#7fb8ff;--undisturbed:#8a6420;--discarded:#ff9c93;--stall:#7fb8ff;--mark:#ff9c93;--planned:#aab6c5;--good:#6fd3a0;
--bad:#ff9c93;--c1:#8a94a3;--c2:#7aa5f5;--c3:#e6ad55;--c4:#55bd98;--c5:#cc92c5;--c6:#e88a5a;--c7:#7d94ad;--c8:#66727f;--c9:#d3c06b;--c10:#8b949f}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif}
main{max-width:1080px;margin:0 auto;padding:24px 20px 48px}
header h1{font-size:26px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
header p{margin:2px 0;color:var(--soft);overflow-wrap:anywhere}
.outcome{display:inline-block;margin-left:10px;padding:2px 12px;border-radius:99px;border:1.5px solid currentColor;font-size:14px;font-weight:600;
vertical-align:middle;color:var(--soft)}
.outcome.good{color:var(--good)}.outcome.bad{color:var(--bad)}
section{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:18px 20px;margin-top:18px}
h2{font-size:18px;margin:0 0 10px}h3{font-size:15px;margin:0;overflow-wrap:anywhere}
p{margin:6px 0}.soft,.caption{color:var(--soft)}.caption{font-size:13.5px}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:12px;margin:18px 0 0;padding:0}
.figures div{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:12px 14px}
.figures dt{color:var(--soft);font-size:13px}.figures dd{margin:2px 0 0;font-size:20px;font-weight:600;line-height:1.25;overflow-wrap:anywhere}
.figures dd small{display:block;font-size:12.5px;font-weight:400;color:var(--soft)}
.chart{width:100%;height:auto;display:block}.narrow{display:none}
.chart text{fill:var(--soft);font-size:12px}.end{text-anchor:end}.middle,.band-label{text-anchor:middle}
.grid{stroke:var(--rule);stroke-width:1}.band{fill:var(--band)}.band.odd{fill:var(--band-odd)}
.curve{fill:none;stroke-linejoin:round;stroke-linecap:round}
.curve.kept{stroke:var(--kept);stroke-width:1.8}.curve.undisturbed{stroke:var(--undisturbed);stroke-width:7}
.curve.discarded{stroke:var(--discarded);stroke-width:4;stroke-dasharray:.1 6.5}.curve.stall{stroke:var(--stall);stroke-width:1.8}
.dot{fill:var(--kept)}.dot.undisturbed{fill:var(--undisturbed)}.dot.discarded{fill:var(--discarded)}
.mark line{stroke:var(--mark);stroke-width:1.5;stroke-dasharray:5 4}.mark rect{fill:var(--mark)}.mark text{fill:var(--card);font-weight:700;text-anchor:middle}
.mark.planned line{stroke:var(--planned)}.mark.planned rect{fill:var(--planned)}
.key{display:flex;flex-wrap:wrap;gap:4px 18px;list-style:none;padding:0;margin:8px 0 0;font-size:13.5px;color:var(--soft)}
.key li{display:flex;align-items:center;gap:7px}.key svg{width:30px;height:14px;flex:none}
.incident{border-top:1px solid var(--rule);padding:14px 0}.incident:first-of-type{border-top:0}
.incident header{display:flex;gap:10px;align-items:flex-start}
.number{flex:none;min-width:26px;height:26px;padding:0 6px;border-radius:13px;background:var(--mark);color:var(--card);font-weight:700;text-align:center;line-height:26px}
.number.planned{background:var(--planned);border-radius:4px}
.bar{width:100%;height:26px;display:block;margin:10px 0 8px}
.bar text{font-size:12px;font-weight:700;fill:var(--on);text-anchor:middle}
.c1{fill:var(--c1);background:var(--c1)}.c2{fill:var(--c2);background:var(--c2)}.c3{fill:var(--c3);background:var(--c3)}
.c4{fill:var(--c4);background:var(--c4)}.c5{fill:var(--c5);background:var(--c5)}.c6{fill:var(--c6);background:var(--c6)}.c7{fill:var(--c7);background:var(--c7)}.c8{fill:var(--c8);background:var(--c8)}
.c9{fill:var(--c9);background:var(--c9)}.c10{fill:var(--c10);background:var(--c10)}
.swatch{display:inline-block;min-width:20px;border-radius:3px;color:var(--on);font-weight:700;font-size:12px;text-align:center}
.bar rect{stroke:var(--card);stroke-width:1}
.table{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:14px}
th{text-align:left;color:var(--soft);font-weight:500;font-size:13px}th,td{padding:5px 14px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top}
tr:last-child td,tr:last-child th[scope=row]{border-bottom:0}.tight table{width:auto}.tight td,.tight th{white-space:nowrap;padding-right:26px}.pairs th{width:220px;padding-right:18px}h3+.table{margin-top:4px}.table+h3{margin-top:16px}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:12.5px;background:var(--ground);padding:10px;border-radius:6px;max-height:320px;overflow:auto}
details summary{cursor:pointer;color:var(--soft)}
footer{color:var(--soft);font-size:13px;margin-top:18px;overflow-wrap:anywhere}
@media (max-width:640px){main{padding:14px 10px 32px}section{padding:14px 12px}.wide{display:none}.narrow{display:block}header h1{font-size:21px}
.figures{grid-template-columns:repeat(2,1fr);gap:8px}.figures dd{font-size:17px}th,td{padding-right:10px}.tight td,.tight th{padding-right:16px}.pairs th{width:38%}}
@media print{body{background:#fff}section{break-inside:avoid}}
"""
)


# ---- page ------------------------------------------------------------------------------------------------------------

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_KINDS = {"Complete": "outcome good", "Failed": "outcome bad"}


def page(facts: ReportFacts, version: str) -> str:
    """Renders the whole page; `version` is the program's."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{facts.job}: {facts.outcome}"),
        element("style", STYLE),
    )
    main = element(
        "main",
        _heading(facts),
        _figures(facts),
        loss_section(facts),
        incidents_section(facts),
        time_section(facts),
        checkpoints_section(facts),
        samples_section(facts),
        places_section(facts),
        events_section(facts),
        unread_section(facts),
        element(
            "footer",
            f"Made by surefoot {version} at {clock(facts.made_seconds)} from {facts.source}; job uid {facts.uid or NOT_KNOWN}.",
        ),
    )
    return f"<!doctype html>\n{element('html', head, element('body', main), lang='en').text}\n"


def _heading(facts: ReportFacts) -> Markup:
    kind = _KINDS.get(facts.outcome, "outcome")
    until = f" to {clock(facts.end_seconds)}" if facts.end_seconds is not None else ""
    return element(
        "header",
        element("h1", joined(facts.job, element("span", facts.outcome, class_=kind))),
        element("p", facts.message) if facts.message else None,
        element("p", f"{clock(facts.start_seconds)}{until}") if facts.start_seconds is not None else None,
    )


def _figures(facts: ReportFacts) -> Markup:
    found = [figure("Steps", _steps(facts), _worlds(facts))]
    if facts.seconds:
        said = "" if facts.goodput is None else f"goodput {facts.goodput:.1%}"
        found.append(figure("Elapsed", duration(sum(facts.seconds.values())), said))
    failures = [one for one in facts.incidents if not one.planned]
    took = [one.took_seconds for one in failures if one.took_seconds is not None]
    recovered = f"median {duration(statistics.median(took))} to the first new step" if took else ""
    found.append(figure("Failures", str(len(failures)), recovered))
    if len(facts.incidents) > len(failures):
        found.append(figure("Planned changes", str(len(facts.incidents) - len(failures))))
    lost = [one.steps_lost for one in facts.incidents if one.steps_lost is not None]
    if lost:
        found.append(figure("Steps lost", str(sum(lost)), "run again after failures and changes"))
    if facts.account is not None:
        found.append(figure("Samples", f"{facts.account.lost} lost", f"{facts.account.repeated} repeated"))
    if facts.comparison is not None and facts.comparison.max_loss_difference is not None:
        said = "largest difference of the loss to the undisturbed run"
        found.append(figure("Undisturbed run", f"{facts.comparison.max_loss_difference:.2g}", said))
    if facts.checkpoints is not None:
        size = f"{amount(facts.checkpoints.bytes)} each" if facts.checkpoints.bytes else ""
        found.append(figure("Checkpoints", str(facts.checkpoints.complete), size))
    if facts.stalls.median_seconds is not None:
        found.append(figure("Stall of a save", duration(facts.stalls.median_seconds), "median of the slowest rank"))
    return element("dl", *found, class_="figures")


def _steps(facts: ReportFacts) -> str:
    if facts.step is None:
        return NOT_KNOWN
    return str(facts.step) if facts.total_steps is None else f"{facts.step} of {facts.total_steps}"


def _worlds(facts: ReportFacts) -> str:
    sizes = [str(one.ranks) for one in facts.epochs]
    if not sizes:
        return "no world yet"
    shown = sizes if len(sizes) <= 6 else [*sizes[:2], "…", *sizes[-3:]]
    return ranks_of(facts.epochs[0].ranks) if len(sizes) == 1 else f"{' → '.join(shown)} ranks"
