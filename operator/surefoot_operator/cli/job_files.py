"""Implements `surefoot validate`: checks a job and lists what is ignored.

Called by `main`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from surefoot_operator.api.content import MOST_CHARACTERS
from surefoot_operator.api.loading import load_yaml
from surefoot_operator.api.parse import parse_job
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.api.spec_limits import allowed_sizes
from surefoot_operator.cli.cli_errors import EXIT_OK, UsageError
from surefoot_operator.cli.command_base import say
from surefoot_operator.errors import SpecError
from surefoot_operator.platforms.local.ignored_template import ignored_parts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-f", "--file", type=Path, required=True, metavar="JOB.yaml", help="the TrainingJob")


def run(given: argparse.Namespace) -> int:
    job = read_job(given.file)
    sizes = ", ".join(map(str, allowed_sizes(job.spec)))
    say(f"{given.file} is valid: {job.name}, worlds of {sizes} workers × {job.spec.nproc_per_node} ranks")
    for name in ignored_parts(job.spec):
        say(f"`surefoot local` ignores: {name}")
    return EXIT_OK


def read_job(path: Path) -> TrainingJob:
    """Reads and checks the job in a file. Raises UsageError."""
    return read_document(path)[1]


def read_document(path: Path) -> tuple[dict[str, Any], TrainingJob]:
    """Reads a job's file: the document and the job parsed from it."""
    try:
        with open(path, "rb") as file:
            content = file.read(4 * MOST_CHARACTERS + 1)  # no more of /dev/zero than shows that it is too long
        document = load_yaml(content.decode("utf-8", "strict" if len(content) <= 4 * MOST_CHARACTERS else "replace"))
        return document, parse_job(document)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    except SpecError as error:
        raise UsageError(f"{path}: {error}") from error
