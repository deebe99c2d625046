"""Implements `surefoot report`: gathers a job's facts and writes them as one HTML page.

Reads a cluster or the run folder of `surefoot local`, during the run or after it, and changes nothing there. Facts that
the folder does not contain, such as injected faults, are passed in by `surefoot local` itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path

from surefoot import __version__
from surefoot.protocol.text import format_bytes
from surefoot_operator.api.status import JobStatus
from surefoot_operator.cli.checkpoints import try_file
from surefoot_operator.cli.command_base import EXIT_OK, UsageError, say
from surefoot_operator.cli.jobs.read_jobs import add_job, check_named, read_run, view_of
from surefoot_operator.cli.local.faults import InjectedFault
from surefoot_operator.cli.local.progress import RunProgress, largest_difference, mean_loss_by_step
from surefoot_operator.cli.local.run_report import Comparison, counted_lines_of, read_losses, read_records
from surefoot_operator.cli.report.page import render_page
from surefoot_operator.cli.report.report_data import ReportFacts, gather_facts
from surefoot_operator.platforms.local.run_folder import RunFolder

UNDISTURBED = "undisturbed"
"""Name of the subfolder, in the run's folder, of the fault-free run that `--compare` makes."""


def report_of_run(
    root: Path,
    progress: RunProgress | None = None,
    struck: tuple[InjectedFault, ...] = (),
    comparison: Comparison | None = None,
) -> ReportFacts:
    """Gathers the facts of a local run. Raises UsageError and PlatformError as `read_run` does.

    Args:
        root: The run's folder.
        progress: History collected while the run was followed, which is more than its status keeps. None: read the
            folder now.
        struck: Faults that were injected, if they are known.
        comparison: Comparison with the undisturbed run. None: compare only the losses, if there is such a run.
    """
    view = read_run(root)
    if progress is None:
        progress = RunProgress(RunFolder(root.resolve()))
        progress.poll()
    run = read_records(progress, struck)
    reference_losses = _read_reference_losses(root / UNDISTURBED, view.stored.status)
    if comparison is None and reference_losses is not None:
        losses = mean_loss_by_step(counted_lines_of(run))
        comparison = Comparison(largest_difference(losses, reference_losses))
    # A status that is read after the run names only the newest checkpoint, so one checkpoint is not a count.
    has_count = progress.checkpoint_bytes is not None or len(progress.completed) > 1
    checkpoints = run.checkpoints if has_count else None
    run = dataclasses.replace(run, checkpoints=checkpoints, reference=reference_losses, comparison=comparison)
    # A run that was broken off has no recorded end: count its time until its last step.
    is_abandoned = bool(view.nodes) and not any(node.ready for node in view.nodes or ())
    end_seconds = max((line.at_seconds for _, line in run.lines), default=None) if is_abandoned else None
    return gather_facts(view, f"the run folder {root}", run, end_seconds)


def _read_reference_losses(root: Path, status: JobStatus | None) -> dict[int, float] | None:
    """Returns the losses of the undisturbed run in `root`.

    None if there is no such run, or it is older than this run and so belongs to an earlier one in the same folder.
    """
    folder = RunFolder(root.resolve())
    if not folder.job_file.exists():
        return None
    progress = RunProgress(folder)
    progress.poll()
    reference_start_seconds = progress.status.start_seconds
    if (
        reference_start_seconds is None
        or status is None
        or reference_start_seconds < (status.start_seconds or reference_start_seconds)
    ):
        return None
    return read_losses(progress)


# ---- report job ------------------------------------------------------------------------------------------------------
# Runs `surefoot report`. For a job in a cluster the page shows the same data as the other commands; for a run of
# `surefoot local` it also shows every step.


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("--to", type=Path, metavar="FILE.html", help="where to write it (default: JOB.html)")


def run_report(args: argparse.Namespace) -> int:
    """Writes the page and prints its path. Raises UsageError, RunError, OperatorError."""
    check_named(args)
    if args.run_folder is not None:
        facts = report_of_run(args.run_folder)
    else:
        facts = gather_facts(view_of(args), "state of the job in the cluster")
    path = args.to or Path(f"{facts.view.stored.name.rpartition('/')[2]}.html")
    if path.suffix.lower() == ".json":
        raise UsageError(f"--to {path}: the report is a page of HTML; surefoot describe JOB -o json prints JSON")
    try_file("--to", path)
    page = render_page(facts, __version__)
    write_page(path, page)
    say(f"{path}: {format_bytes(len(page.encode()))}")
    return EXIT_OK


def write_page(path: Path, text: str) -> None:
    """Replaces the file in one step, so that a browser never loads half a page."""
    temporary_path = path.with_name(f".{path.name}.{os.getpid()}")
    temporary_path.write_text(text, encoding="utf-8")
    temporary_path.replace(path)
