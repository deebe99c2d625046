"""Prints one finding as a table, JSON or YAML.

Called by every command that looks at jobs. What is printed as JSON are the frozen values that tables are made from: a script reads the
same numbers as a person, by name and with their unit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import yaml

from surefoot_operator.cli.command_base import say
from surefoot_operator.cli.tables import print_lines

FORMATS = ("wide", "json", "yaml")


def add_output(parser: argparse.ArgumentParser, formats: Sequence[str] = FORMATS) -> None:
    parser.add_argument("-o", "--output", choices=formats, metavar="FORMAT", help=f"one of {', '.join(formats)}")


def emit(finding: Any, output: str | None, render: Callable[[bool], Sequence[str]]) -> None:
    """Prints `finding` in the format asked for; `render(wide)` makes its lines."""
    if output == "json":
        say(json.dumps(plain_values(finding), indent=2))
    elif output == "yaml":
        say(yaml.safe_dump(plain_values(finding), sort_keys=False, allow_unicode=True).rstrip())
    else:
        print_lines(render(output == "wide"))


def plain_values(finding: Any) -> Any:
    """Converts frozen values to what JSON and YAML can hold."""
    return msgspec.to_builtins(finding, str_keys=True)
