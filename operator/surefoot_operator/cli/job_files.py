"""Implements `surefoot validate` and `surefoot convert`, and reads job files for other commands.

Called by `main`. `validate` checks a job and lists the fields that `surefoot local` ignores.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from surefoot_operator.api.loading import load_documents, load_yaml
from surefoot_operator.api.parse import MAX_DOCUMENT_CHARACTERS, parse_job
from surefoot_operator.api.spec import TrainingJob, allowed_sizes
from surefoot_operator.cli.command_base import EXIT_OK, UsageError, say, warn
from surefoot_operator.convert.conversion import KNOWN, convert_command, convert_documents
from surefoot_operator.convert.job_draft import render_yaml
from surefoot_operator.convert.manifest import NotConvertible
from surefoot_operator.errors import SpecError
from surefoot_operator.platforms.local.platform import list_ignored_fields


def add_validate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-f", "--file", type=Path, required=True, metavar="JOB.yaml", help="the TrainingJob")


def run_validate(args: argparse.Namespace) -> int:
    job = read_job(args.file)
    sizes = ", ".join(map(str, allowed_sizes(job.spec)))
    say(f"{args.file} is valid: {job.name}, worlds of {sizes} workers × {job.spec.nproc_per_node} ranks")
    for name in list_ignored_fields(job.spec):
        say(f"`surefoot local` ignores: {name}")
    return EXIT_OK


def read_job(path: Path) -> TrainingJob:
    """Reads and checks the job in a file. Raises UsageError if it cannot be read or is invalid."""
    return read_document(path)[1]


def read_document(path: Path) -> tuple[dict[str, Any], TrainingJob]:
    """Reads a job's file; returns the document and the job parsed from it. Raises UsageError."""
    try:
        with open(path, "rb") as file:
            content = file.read(4 * MAX_DOCUMENT_CHARACTERS + 1)  # limited, as the path may be /dev/zero
        document = load_yaml(
            content.decode("utf-8", "strict" if len(content) <= 4 * MAX_DOCUMENT_CHARACTERS else "replace")
        )
        return document, parse_job(document)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    except SpecError as error:
        raise UsageError(f"{path}: {error}") from error


# ---- convert ---------------------------------------------------------------------------------------------------------
# Implements `surefoot convert`: prints another system's training job as a TrainingJob with comments.


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("-f", "--file", metavar="FILE", help=f"{KNOWN}; - reads standard input")
    source.add_argument("command_line", nargs="*", default=[], metavar="-- torchrun …", help="a torchrun command line")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value of $NAME in the file, as for envsubst",
    )


def run_convert(args: argparse.Namespace) -> int:
    try:
        if args.file is None:
            conversions, others = [convert_command(args.command_line)], list[str]()
        else:
            conversions, others = convert_documents(
                load_documents(_substitute_variables(_read_text(args.file), args.set))
            )
    except (NotConvertible, SpecError) as error:
        raise UsageError(f"{args.file or 'the command line'}: {error}") from error
    sys.stdout.write("---\n".join(render_yaml(conversion) for conversion in conversions))
    sys.stdout.flush()
    for conversion in conversions:
        warn(
            f"{conversion.source}: {len(conversion.used_fields)} fields taken over, {len(conversion.skipped_fields)} left out, {len(conversion.to_do)} things to do"
        )
    if others:
        warn(f"not converted: {', '.join(others)}")
    return EXIT_OK


def _read_text(file: str) -> str:
    """Reads a file, or standard input for `-`, up to the size that a document may have. Raises UsageError."""
    try:
        if file == "-":
            return sys.stdin.read(MAX_DOCUMENT_CHARACTERS + 1)
        with open(Path(file), "rb") as opened_file:
            return opened_file.read(4 * MAX_DOCUMENT_CHARACTERS + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error


def _substitute_variables(content: str, settings: list[str]) -> str:
    """Replaces `$NAME` and `${NAME}` by the values of `--set NAME=VALUE`. Raises UsageError."""
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise UsageError(f"--set {setting!s:.60}: NAME=VALUE is needed")
        content = re.sub(rf"\$\{{{name}\}}|\${name}\b", lambda _, v=value: v, content)  # type: ignore[misc]
    return content
