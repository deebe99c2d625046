"""Lays a job's history out as one HTML page.

Pure: facts to text. The page asks no server for anything and runs no script, so that it can be mailed and kept; its policy forbids both
also where a text should have got through.
"""

from __future__ import annotations

import statistics

from surefoot.protocol.plain import amount
from surefoot_operator.cli.report.markup import Markup, element, joined
from surefoot_operator.cli.report.page_parts import NOT_KNOWN, clock, duration, figure, ranks_of
from surefoot_operator.cli.report.page_sections import (
    checkpoints_section,
    events_section,
    incidents_section,
    loss_section,
    places_section,
    samples_section,
    time_section,
    unread_section,
)
from surefoot_operator.cli.report.page_style import STYLE
from surefoot_operator.cli.report.report_facts import ReportFacts

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
