"""Renders tables and amounts as text, with colours on a terminal alone.

`table_lines` and the words are pure; `print_lines` writes. Columns are aligned as kubectl aligns them, so that what reads kubectl's
tables reads these. NO_COLOR and a terminal without colours are heeded by rich.
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
"""What is not known; a zero is a zero."""
_GAP = 3
_STYLES = {
    "green": ("Running", "Complete", "Succeeded", "Ready", "ok"),
    "yellow": ("Recovering", "Resizing", "Starting", "Pending", "Suspended", "warning", "doubted", "cordoned"),
    "red": ("Failed", "failed", "NotReady", "gone"),
}
_WORDS = {style: re.compile(rf"\b(?:{'|'.join(words)})\b") for style, words in _STYLES.items()}


def table_lines(items: Iterable[T], columns: Mapping[str, Callable[[T], str]]) -> list[str]:
    """Renders a table, one item a row: aligned columns, no lines, nothing trailing.

    `columns` has each column's name, and how its cell is made of an item.
    """
    rows = [list(columns), *([cell(item) for cell in columns.values()] for item in items)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["".join(cell.ljust(width + _GAP) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def print_lines(lines: Iterable[str]) -> None:
    """Prints lines; states are coloured on a terminal."""
    console = Console(highlight=False) if sys.stdout.isatty() else None
    for line in lines:
        if console is None:
            say(line)
            continue
        shown = Text(escape_control_characters(line))
        for style, words in _WORDS.items():
            shown.highlight_regex(words, style)
        console.print(shown, soft_wrap=True)


def age(seconds: float | None) -> str:
    """`12s`, `4m36s`, `2h10m`, `3d4h`; unknown is a dash."""
    if seconds is None:
        return UNKNOWN
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole}s"
    if whole < 7200:
        return f"{whole // 60}m{whole % 60}s" if whole < 600 else f"{whole // 60}m"
    if whole < 48 * 3600:
        return f"{whole // 3600}h{whole % 3600 // 60}m"
    return f"{whole // 86400}d{whole % 86400 // 3600}h"


def number(value: float | None) -> str:
    """Counts as they are, measures with three digits, unknown as a dash."""
    if value is None:
        return UNKNOWN
    return str(value) if isinstance(value, int) else f"{value:.3g}"


# ---- structured output -----------------------------------------------------------------------------------------------
# Prints one finding as a table, JSON or YAML. Called by every command that looks at jobs. What is printed as JSON are
# the frozen values that tables are made from: a script reads the same numbers as a person, by name and with their unit.

FORMATS = ("wide", "json", "yaml")


def add_output(parser: argparse.ArgumentParser, formats: Sequence[str] = FORMATS) -> None:
    parser.add_argument("-o", "--output", choices=formats, metavar="FORMAT", help=f"one of {', '.join(formats)}")


def emit(finding: Any, output: str | None, render: Callable[[bool], Sequence[str]]) -> None:
    """Prints `finding` in the format asked for; `render(wide)` makes its lines."""
    if output not in ("json", "yaml"):
        print_lines(render(output == "wide"))
        return
    values = msgspec.to_builtins(finding, str_keys=True)
    if output == "json":
        say(json.dumps(values, indent=2))
    else:
        say(yaml.safe_dump(values, sort_keys=False, allow_unicode=True).rstrip())
