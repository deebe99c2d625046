"""Chooses between a cluster and a run folder for a command.

Touches the network or files through `cluster_reads` and `run_folder_reads`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from surefoot_operator.cli.cli_errors import UsageError
from surefoot_operator.cli.cluster_access import NoCluster, OpenCluster, add_cluster, cluster_choice, opened
from surefoot_operator.cli.jobs.cluster_reads import read_view
from surefoot_operator.cli.jobs.job_view import JobView
from surefoot_operator.cli.jobs.run_folder_reads import read_run

T = TypeVar("T")


def add_job(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name one job."""
    parser.add_argument("job", nargs="?", metavar="JOB", help="the TrainingJob's name; with --run-folder none")
    add_run_folder(parser)
    add_cluster(parser)


def add_run_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run-folder", type=Path, metavar="DIR", help="a run of surefoot local instead of a cluster")


def view_of(given: argparse.Namespace) -> JobView:
    """Looks at the job that was named. Raises UsageError, RunError, OperatorError."""
    check_named(given)
    if given.run_folder is not None:
        return read_run(given.run_folder)
    return on_cluster(given, lambda cluster: read_view(cluster, given.job))


def check_named(given: argparse.Namespace) -> None:
    """Raises UsageError unless exactly one job is named."""
    if (given.job is None) == (given.run_folder is None):
        raise UsageError(
            f"{given.command} needs the name of a TrainingJob, or --run-folder DIR; surefoot list has names"
        )


def on_cluster(given: argparse.Namespace, ask: Callable[[OpenCluster], Awaitable[T]]) -> T:
    """Runs one conversation with the chosen cluster.

    Raises:
        UsageError: None is configured; it names the other way that the command has.
    """

    async def asked() -> T:
        async with opened(cluster_choice(given)) as cluster:
            return await ask(cluster)

    try:
        return asyncio.run(asked())
    except NoCluster as error:
        if not hasattr(given, "run_folder"):
            raise
        raise UsageError(f"{error}, or --run-folder DIR for a run of surefoot local") from error
