"""Builds the parts of the report page's sections.

Pure: tables of a bounded length, keys of charts, moments and seconds in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from surefoot_operator.cli.report.markup import Child, Markup, element, joined

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
