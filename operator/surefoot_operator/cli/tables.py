"""Renders tables and amounts as text, with colours only on a terminal.

Only `print_lines` and `emit` write; the rest is pure. Columns are aligned as in kubectl, so that scripts for its tables
can read these. rich turns colours off for NO_COLOR and for terminals without colours.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import yaml
from rich.console import Console
from rich.text import Text

from surefoot.protocol.text import escape_control_characters
from surefoot_operator.cli.command_base import say

T = TypeVar("T")

UNKNOWN = "-"
"""Text for a value that is not known; a known zero is printed as 0."""
_COLUMN_GAP = 3
_STYLES = {
    "green": ("Running", "Complete", "Succeeded", "Ready", "ok"),
    "yellow": ("Recovering", "Resizing", "Starting", "Pending", "Suspended", "warning", "doubted", "cordoned"),
    "red": ("Failed", "failed", "NotReady", "gone"),
}
_STYLE_PATTERNS = {style: re.compile(rf"\b(?:{'|'.join(words)})\b") for style, words in _STYLES.items()}


def table_lines(items: Iterable[T], columns: Mapping[str, Callable[[T], str]]) -> list[str]:
    """Renders a table with one row per item, aligned columns, no borders and no trailing spaces.

    Args:
        items: The rows.
        columns: Name of each column -> function that renders its cell for an item.
    """
    rows = [list(columns), *([cell(item) for cell in columns.values()] for item in items)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "".join(cell.ljust(width + _COLUMN_GAP) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def print_lines(lines: Iterable[str]) -> None:
    """Prints lines; on a terminal, words for states are coloured."""
    console = Console(highlight=False) if sys.stdout.isatty() else None
    for line in lines:
        if console is None:
            say(line)
            continue
        colored_line = Text(escape_control_characters(line))
        for style, pattern in _STYLE_PATTERNS.items():
            colored_line.highlight_regex(pattern, style)
        console.print(colored_line, soft_wrap=True)


def age(seconds: float | None) -> str:
    """Renders seconds as `12s`, `4m36s`, `2h10m` or `3d4h`, and None as a dash."""
    if seconds is None:
        return UNKNOWN
    whole_seconds = max(0, int(seconds))
    if whole_seconds < 120:
        return f"{whole_seconds}s"
    if whole_seconds < 7200:
        return f"{whole_seconds // 60}m{whole_seconds % 60}s" if whole_seconds < 600 else f"{whole_seconds // 60}m"
    if whole_seconds < 48 * 3600:
        return f"{whole_seconds // 3600}h{whole_seconds % 3600 // 60}m"
    return f"{whole_seconds // 86400}d{whole_seconds % 86400 // 3600}h"


def number(value: float | None) -> str:
    """Renders an integer as it is, a float with three digits, and None as a dash."""
    if value is None:
        return UNKNOWN
    return str(value) if isinstance(value, int) else f"{value:.3g}"


# ---- structured output -----------------------------------------------------------------------------------------------
# Prints the result of a command as a table, JSON or YAML. JSON and YAML contain the same values from which the tables
# are rendered, so a script reads the same numbers as the user, by field name and with their unit.

FORMATS = ("wide", "json", "yaml")


def add_output(parser: argparse.ArgumentParser, formats: Sequence[str] = FORMATS) -> None:
    parser.add_argument("-o", "--output", choices=formats, metavar="FORMAT", help=f"one of {', '.join(formats)}")


def emit(finding: Any, output: str | None, render: Callable[[bool], Sequence[str]]) -> None:
    """Prints `finding` as JSON, YAML or lines.

    Args:
        finding: Value to print, of dataclasses and builtin types.
        output: Chosen format; None or `wide` prints lines.
        render: Returns the lines; its argument is True for `wide`.
    """
    if output not in ("json", "yaml"):
        print_lines(render(output == "wide"))
        return
    values = msgspec.to_builtins(finding, str_keys=True)
    if output == "json":
        say(json.dumps(values, indent=2))
    else:
        say(yaml.safe_dump(values, sort_keys=False, allow_unicode=True).rstrip())
