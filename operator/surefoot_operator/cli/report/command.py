"""Reads what a report says from the run folder of `surefoot local`.

Touches files, changes nothing; works while the run goes on and after it. What a former report has seen and a folder does not keep, as
injected faults, is given by `surefoot local` itself.
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
"""The folder of the run that `--compare` made, in that of the run itself."""


def report_of_run(
    root: Path,
    progress: RunProgress | None = None,
    struck: tuple[InjectedFault, ...] = (),
    comparison: Comparison | None = None,
) -> ReportFacts:
    """Gathers a run's facts. Raises UsageError and FabricError as `read_run`.

    Args:
        root: the run's folder.
        progress: the follower of the run, which has seen more than its status keeps; None: the folder is read now.
        struck: the faults that were injected, where they are known.
        comparison: with the undisturbed run, where it was made; else the losses alone are compared.
    """
    view = read_run(root)
    if progress is None:
        progress = RunProgress(RunFolder(root.resolve()))
        progress.poll()
    run = read_records(progress, struck)
    undisturbed = _undisturbed(root / UNDISTURBED, view.stored.status)
    if comparison is None and undisturbed is not None:
        losses = mean_loss_by_step(counted_lines_of(run))
        comparison = Comparison(largest_difference(losses, undisturbed))
    # who reads the status afterwards knows the newest checkpoint alone: one is no count
    has_count = progress.checkpoint_bytes is not None or len(progress.completed) > 1
    checkpoints = run.checkpoints if has_count else None
    run = dataclasses.replace(run, checkpoints=checkpoints, reference=undisturbed, comparison=comparison)
    # nobody writes the end of a run that was broken off: it went on until its last step
    is_abandoned = bool(view.nodes) and not any(node.ready for node in view.nodes or ())
    until_seconds = max((line.at_seconds for _, line in run.lines), default=None) if is_abandoned else None
    return gather_facts(view, f"the run folder {root}", run, until_seconds)


def _undisturbed(root: Path, status: JobStatus | None) -> dict[int, float] | None:
    """The losses of the run without faults; None without one, or where a former run left it: it begins after its own."""
    folder = RunFolder(root.resolve())
    if not folder.job_file.exists():
        return None
    progress = RunProgress(folder)
    progress.poll()
    begin_seconds = progress.status.start_seconds
    if begin_seconds is None or status is None or begin_seconds < (status.start_seconds or begin_seconds):
        return None
    return read_losses(progress)


# ---- report job ------------------------------------------------------------------------------------------------------
# Implements `surefoot report`: a job's history as one HTML page. Of a cluster's job it says what the other commands can
# read; of a run of `surefoot local` also every step.


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("--to", type=Path, metavar="FILE.html", help="where to write it (default: JOB.html)")


def run_report(given: argparse.Namespace) -> int:
    """Writes the page and says where. Raises UsageError, RunError, OperatorError."""
    check_named(given)
    if given.run_folder is not None:
        facts = report_of_run(given.run_folder)
    else:
        facts = gather_facts(view_of(given), "what the cluster keeps of the job")
    path = given.to or Path(f"{facts.view.stored.name.rpartition('/')[2]}.html")
    if path.suffix.lower() == ".json":
        raise UsageError(f"--to {path}: the report is a page of HTML; surefoot describe JOB -o json prints JSON")
    try_file("--to", path)
    text = render_page(facts, __version__)
    write_page(path, text)
    say(f"{path}: {format_bytes(len(text.encode()))}")
    return EXIT_OK


def write_page(path: Path, text: str) -> None:
    """Replaces the file whole.

    Who looks at it while the job runs never sees half a page.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
