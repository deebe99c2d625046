"""Implements `surefoot report`: a job's history as one HTML page.

Called by `main`. Of a cluster's job it says what the other commands can read; of a run of `surefoot local` also every step.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from surefoot import __version__
from surefoot.protocol.plain import amount
from surefoot_operator.cli.cli_errors import EXIT_OK, UsageError
from surefoot_operator.cli.command_base import say
from surefoot_operator.cli.jobs.job_source import add_job, check_named, view_of
from surefoot_operator.cli.report.command import report_of_run
from surefoot_operator.cli.report.page import page
from surefoot_operator.cli.report.report_data import facts_of_view
from surefoot_operator.cli.writable import try_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("--to", type=Path, metavar="FILE.html", help="where to write it (default: JOB.html)")


def run(given: argparse.Namespace) -> int:
    """Writes the page and says where. Raises UsageError, RunError, OperatorError."""
    check_named(given)
    if given.run_folder is not None:
        facts = report_of_run(given.run_folder)
    else:
        facts = facts_of_view(view_of(given), "what the cluster keeps of the job")
    path = given.to or Path(f"{facts.job.rpartition('/')[2]}.html")
    if path.suffix.lower() == ".json":
        raise UsageError(f"--to {path}: the report is a page of HTML; surefoot describe JOB -o json prints JSON")
    try_file("--to", path)
    text = page(facts, __version__)
    write_page(path, text)
    say(f"{path}: {amount(len(text.encode()))}")
    return EXIT_OK


def write_page(path: Path, text: str) -> None:
    """Replaces the file whole.

    Who looks at it while the job runs never sees half a page.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
