"""Implements `surefoot list`: one row a job.

Called by `main`.
"""

from __future__ import annotations

import argparse
import time

from surefoot_operator.cli.cli_errors import EXIT_OK
from surefoot_operator.cli.cluster_access import add_cluster
from surefoot_operator.cli.jobs.cluster_reads import read_jobs
from surefoot_operator.cli.jobs.job_source import add_run_folder, on_cluster
from surefoot_operator.cli.jobs.job_summary import JobSummary, summary, summary_table
from surefoot_operator.cli.jobs.run_folder_reads import read_run
from surefoot_operator.cli.structured_output import add_output, emit
from surefoot_operator.cli.tables import text_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="jobs of all namespaces")
    add_run_folder(parser)
    add_cluster(parser)
    add_output(parser)


def run(given: argparse.Namespace) -> int:
    if given.run_folder is not None:
        view = read_run(given.run_folder)
        found = [summary(view.stored, view.now)]
    else:
        stored, now = on_cluster(given, read_jobs), time.time()
        found = [summary(one, now) for one in sorted(stored, key=str)]
    emit(found, given.output, lambda wide: job_lines(found, wide, given.all_namespaces))
    return EXIT_OK


def job_lines(found: list[JobSummary], wide: bool, everywhere: bool) -> list[str]:
    """Renders the list, or says that there is none."""
    if not found:
        return [f"no TrainingJobs{'' if everywhere else ' in this namespace; -A looks in all'}"]
    return text_lines(summary_table(found, wide, everywhere))
