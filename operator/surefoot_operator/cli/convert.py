"""Implements `surefoot convert`: another system's training job as a TrainingJob, with comments.

Called by `main`.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from surefoot_operator.api.content import MOST_CHARACTERS
from surefoot_operator.api.loading import load_documents
from surefoot_operator.cli.cli_errors import EXIT_OK, UsageError
from surefoot_operator.cli.command_base import warn
from surefoot_operator.convert.conversion import KNOWN, converted, of_command
from surefoot_operator.convert.conversion_errors import NotConvertible
from surefoot_operator.convert.rendering import rendered
from surefoot_operator.errors import SpecError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("-f", "--file", metavar="FILE", help=f"{KNOWN}; - reads standard input")
    source.add_argument("command_line", nargs="*", default=[], metavar="-- torchrun …", help="a torchrun command line")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what $NAME in the file stands for, as envsubst has it",
    )


def run(given: argparse.Namespace) -> int:
    try:
        if given.file is None:
            conversions, others = [of_command(given.command_line)], list[str]()
        else:
            conversions, others = converted(load_documents(_substituted(_content(given.file), given.set)))
    except (NotConvertible, SpecError) as error:
        raise UsageError(f"{given.file or 'the command line'}: {error}") from error
    sys.stdout.write("---\n".join(rendered(one) for one in conversions))
    sys.stdout.flush()
    for one in conversions:
        warn(
            f"{one.source}: {len(one.taken)} fields taken over, {len(one.left)} left out, {len(one.to_do)} things to do"
        )
    if others:
        warn(f"not converted: {', '.join(others)}")
    return EXIT_OK


def _content(file: str) -> str:
    try:
        if file == "-":
            return sys.stdin.read(MOST_CHARACTERS + 1)
        with open(Path(file), "rb") as opened:
            return opened.read(4 * MOST_CHARACTERS + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error


def _substituted(content: str, settings: list[str]) -> str:
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise UsageError(f"--set {setting!s:.60}: NAME=VALUE is needed")
        content = re.sub(rf"\$\{{{name}\}}|\${name}\b", lambda _, v=value: v, content)  # type: ignore[misc]
    return content
