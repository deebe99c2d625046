"""Implements `surefoot local`, which runs a TrainingJob on this machine.

Called by `main`. Everything that can be checked is checked before the first process starts. Every process has ended
when the command returns, also after an error.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast
from urllib.parse import unquote, urlsplit

from surefoot import __version__
from surefoot.errors import ConfigurationError
from surefoot.memory_server.server_process import find_server_program
from surefoot.memory_server.sidecar.sidecar_settings import MAX_SERVERS
from surefoot.protocol.text import format_bytes, short_repr
from surefoot_operator.api.parse import parse_job
from surefoot_operator.api.spec import TOTAL_STEPS, PersistentTierSpec, TrainingJob, allowed_sizes
from surefoot_operator.cli.checkpoints import run_tool, try_file, try_folder
from surefoot_operator.cli.command_base import (
    EXIT_DIFFERS,
    EXIT_FAILED,
    EXIT_OK,
    LastingOutput,
    StopRequest,
    UsageError,
    say,
    signals_ignored,
    stop_requests,
    warn,
)
from surefoot_operator.cli.job_files import add_file, job_of_command, read_document
from surefoot_operator.cli.local import run_report
from surefoot_operator.cli.local.faults import KINDS, Fault, FaultError, check_faults, parse_faults
from surefoot_operator.cli.local.progress import RunProgress
from surefoot_operator.cli.local.supervise import RunContext, Supervisor
from surefoot_operator.cli.local.view import RANK_0, RunView
from surefoot_operator.cli.report.command import UNDISTURBED, report_of_run
from surefoot_operator.cli.report.page import render_page
from surefoot_operator.optional_dependencies import missing_module
from surefoot_operator.platforms.local.local_nodes import LocalNodes
from surefoot_operator.platforms.local.platform import RunFolderStore, list_ignored_fields
from surefoot_operator.platforms.local.run_folder import RunFolder, read_json

_PAGE_SUFFIXES = (".html", ".htm")
_COMMAND_NODES = 2
"""Number of nodes for a command without --nodes: the fewest of which one may die."""
_MIN_TIER_BYTES = 1 << 20
_PROBE_SECONDS = 60.0
MOST_NODES, MOST_RANKS = 64, 512
"""Limits for one machine. A node runs Redis, an agent and a fork server; a rank is a process that imports torch."""


def add_local_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("command_line", nargs="*", metavar="-- COMMAND", help="a program to run without a job's file")
    add_file(parser, "or the TrainingJob to run; - reads standard input")
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="how many nodes (default: spec.replicas and spec.spares; of a COMMAND 2)"
    )
    parser.add_argument("--total-steps", type=int, metavar="N", help="steps of the program, for progress and time left")
    parser.add_argument("--logs", choices=("all", "none"), help="show every rank's output, or none (default: rank 0's)")
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="FAULT",
        help=f"KIND:NODE@step=N[,for=S], KIND one of {', '.join(list(KINDS)[:-1])}; or coordinator@step=N; S seconds until it is"
        " over, where that can be (without: it lasts; freeze 5, coordinator 2)",
    )
    parser.add_argument("--compare", action="store_true", help="run the undisturbed job too and compare the results")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what happened: FILE.html a page, else JSON")
    parser.add_argument("--run-folder", type=Path, metavar="DIR", help="keep logs, ledgers and checkpoints here")
    parser.add_argument(
        "--continue",
        dest="continues",
        action="store_true",
        help="continue the run in --run-folder that was killed, from its newest checkpoint in the persistent tier",
    )
    parser.add_argument(
        "--metrics",
        action="store_true",
        help="serve Prometheus metrics of operator and workers; RUN-FOLDER/metrics/*.json lists the targets (file_sd_configs)",
    )
    parser.add_argument(
        "--servers",
        type=int,
        default=1,
        metavar="N",
        help=f"Redis servers of each node, 1 to {MAX_SERVERS} (default: 1)",
    )
    parser.add_argument("--plain", action="store_true", help="plain lines instead of the live view")


@dataclass(frozen=True, slots=True)
class LocalRequest:
    """The checked arguments of `surefoot local`."""

    args: argparse.Namespace
    document: dict[str, Any]
    job: TrainingJob
    nodes: tuple[str, ...]
    faults: tuple[Fault, ...]
    total_steps: int | None
    """Number of steps that the job intends to run; None if it does not declare one."""


def run_local(args: argparse.Namespace) -> int:
    """Runs the job and returns the exit code."""
    request = check(args)
    # A run outlives the reader of its output: hours of training must not end with a pager or a closed terminal.
    with stop_requests() as stop, contextlib.redirect_stdout(cast(TextIO, LastingOutput(sys.stdout))):
        if args.run_folder is not None:
            return _run_in_folder(request, args.run_folder, stop)
        # Delete a temporary folder after a clean run only: after any other, the user needs its logs.
        root = Path(tempfile.mkdtemp(prefix="surefoot-"))
        code = EXIT_FAILED
        try:
            code = _run_in_folder(request, root, stop)
        finally:
            if code == EXIT_OK:
                shutil.rmtree(root)
                say("logs: deleted with the run's files; --run-folder DIR keeps them")
            else:
                warn(f"the run's folder is kept: {root}")
        return code


def check(args: argparse.Namespace) -> LocalRequest:
    """Checks the arguments and the machine before anything starts. Raises UsageError."""
    document, job = _requested_job(args)
    source = args.file or "the job"
    if job.spec.suspend:
        raise UsageError(f"{source}: spec.suspend is true, nothing would run; set it to false")
    # Check the number of nodes and ranks against the job and this machine.
    node_count = args.nodes or job.spec.replicas + job.spec.spares
    min_nodes = min(allowed_sizes(job.spec))
    if node_count < min_nodes:
        raise UsageError(
            f"--nodes {node_count} is too few: the smallest world that {source} allows has {min_nodes} workers, one on each"
            f" node; give --nodes {min_nodes} or more, or lower spec.elasticPolicy.minReplicas"
        )
    rank_count = node_count * job.spec.nproc_per_node
    if node_count > MOST_NODES or rank_count > MOST_RANKS:
        raise UsageError(
            f"{node_count} nodes of {job.spec.nproc_per_node} ranks are too many for one machine: at most {MOST_NODES} nodes"
            f" and {MOST_RANKS} ranks are allowed; give --nodes (the elasticPolicy must allow so few), or use a cluster"
        )
    if not 1 <= args.servers <= MAX_SERVERS:
        raise UsageError(f"--servers {args.servers} is not allowed: a node runs 1 to {MAX_SERVERS} Redis servers")
    total_steps = args.total_steps or _total_steps(source, document)
    nodes = tuple(f"node-{number}" for number in range(node_count))
    # Check what the run needs on this machine: the runtime, valid faults and Redis.
    if (missing := missing_module("runtime")) is not None:
        raise UsageError(f"local runs trainers and agents on this machine: {missing}")
    try:
        faults = parse_faults(args.fault, nodes)
        check_faults(faults, job.spec.health_policy)
        find_server_program()
    except (FaultError, ConfigurationError) as error:
        raise UsageError(str(error)) from error
    # Check the output paths: a run of hours must not fail at its end because its report cannot be written.
    if args.report is not None:
        try_file("--report", args.report)
    if args.run_folder is not None:
        try_folder("--run-folder", args.run_folder)
    if job.spec.checkpoint.persistent is not None:
        check_persistent_tier(job.spec.checkpoint.persistent)
    return LocalRequest(args, document, job, nodes, faults, total_steps)


def _requested_job(args: argparse.Namespace) -> tuple[dict[str, Any], TrainingJob]:
    """Returns the job of the file, the command line or the run to continue. Raises UsageError."""
    if [args.file is not None, bool(args.command_line), args.continues].count(True) != 1:
        raise UsageError("local needs one of -f JOB.yaml, -- COMMAND, or --continue with --run-folder")
    if args.nodes is not None and args.nodes < 1:
        raise UsageError(f"--nodes {args.nodes} is not allowed; give 1 or more")
    if args.continues:
        return _job_to_continue(args)
    if args.file is not None:
        return read_document(args.file)
    document = job_of_command(args.command_line, args.nodes or _COMMAND_NODES)
    return document, parse_job(document)


def _job_to_continue(args: argparse.Namespace) -> tuple[dict[str, Any], TrainingJob]:
    """Returns the job of a run that was killed. Raises UsageError if there is none, or nothing to continue from."""
    if args.run_folder is None:
        raise UsageError("--continue needs --run-folder: the folder of the run to continue")
    folder = RunFolder(args.run_folder.resolve())
    document = read_json(folder.job_file)
    if document is None:
        raise UsageError(f"{args.run_folder} has no run to continue: start one there with -f JOB.yaml or -- COMMAND")
    phase = RunFolderStore(folder).read_status().phase
    if phase in ("Complete", "Failed"):
        raise UsageError(f"the run in {args.run_folder} is {phase}: there is nothing to continue; start another")
    job = parse_job(document)
    if job.spec.checkpoint.persistent is None:
        raise UsageError(
            f"the run in {args.run_folder} kept its checkpoints only in the memory of its processes, which have ended:"
            " start another, with spec.checkpoint.persistent"
        )
    return document, job


def check_persistent_tier(tier: PersistentTierSpec) -> None:
    """Tries the tier before anything starts: training would continue without it to its end. Raises UsageError."""
    problem = ""
    if tier.uri.startswith("file://"):
        folder = Path(unquote(urlsplit(tier.uri).path))
        try_folder("spec.checkpoint.persistent.uri", folder)
        if shutil.disk_usage(folder).free < _MIN_TIER_BYTES:
            problem = f"{tier.uri}: no space is left there"
    elif problem := run_tool("check_tier", tier, [], _PROBE_SECONDS).get("problem", ""):
        problem = f"{tier.uri}: {problem}"
    if problem:
        raise UsageError(
            f"the persistent tier cannot be used: {problem}. Check the address and the credentials in this shell"
            f" (surefoot doctor {tier.uri}), or for a try leave spec.checkpoint.persistent out or use file:///FOLDER"
        )


def _total_steps(path: Path | str, document: dict[str, Any]) -> int | None:
    """Returns the job's declared number of steps; None if it has none. Raises UsageError if it is no such number."""
    steps_text = (document["metadata"].get("annotations") or {}).get(TOTAL_STEPS)
    if steps_text is None:
        return None
    if not (steps_text.isascii() and steps_text.isdigit() and len(steps_text) < 16 and int(steps_text) > 0):
        sentence = "give the number of steps that the program makes, in quotes"
        raise UsageError(
            f"{path}: metadata.annotations {TOTAL_STEPS}: {short_repr(steps_text)} is not allowed; {sentence}"
        )
    return int(steps_text)


def _run_in_folder(request: LocalRequest, root: Path, stop: StopRequest) -> int:
    """Runs the job, and the undisturbed run if it is requested; prints and writes the report; returns the exit code."""
    args = request.args
    # Prepare the job: the comparison needs checkpoints that outlive the run.
    if args.compare:
        document = run_report.with_persistent_tier(request.document, request.job, root)
        request = dataclasses.replace(request, document=document, job=parse_job(document))
    for name in list_ignored_fields(request.job.spec):
        warn(f"ignored by `surefoot local`: {name}")
    # Run it with its faults, then without any if the results are to be compared.
    finished = run_job(request, root, request.faults, stop)
    reference = None
    if args.compare and finished.outcome == "Complete" and not stop.requested:
        say("reference run without faults:")
        reference = run_job(request, root / UNDISTURBED, (), stop)
    # Report before a requested stop is raised, so that an interrupted run is reported too.
    conclusion = run_report.build_conclusion(finished, reference)
    for line in conclusion.lines:
        say(line)
    is_written = args.report is None or _write_report(
        args.report, _report_text(args.report, root, finished, conclusion)
    )
    for line in _whereabouts(args, request.job):
        say(line)
    stop.raise_if_requested()
    if finished.outcome != "Complete" or not is_written:
        return EXIT_FAILED
    return EXIT_OK if conclusion.sound else EXIT_DIFFERS


def _whereabouts(args: argparse.Namespace, job: TrainingJob) -> Iterator[str]:
    """Yields the last lines of a run: where its logs, report and checkpoints are."""
    if args.run_folder is not None:
        yield f"logs: surefoot logs --run-folder {args.run_folder}, files in {args.run_folder / 'logs'}"
    if args.report is not None and args.report.exists():
        yield f"report: {args.report}, {format_bytes(args.report.stat().st_size)}"
    tier = job.spec.checkpoint.persistent
    if tier is None or (args.run_folder is None and args.compare):
        yield "checkpoints: none outlive the run; spec.checkpoint.persistent keeps them"
    else:
        yield f"checkpoints: surefoot checkpoints list {tier.uri}"


def _report_text(path: Path, root: Path, finished: run_report.FinishedRun, conclusion: run_report.Conclusion) -> str:
    if path.suffix.lower() not in _PAGE_SUFFIXES:
        return json.dumps(conclusion.report, indent=2)
    return render_page(report_of_run(root, finished.progress, finished.struck, conclusion.comparison), __version__)


def _write_report(path: Path, text: str) -> bool:
    """Writes the report and returns whether that succeeded; if not, prints it instead, so that it is not lost."""
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        say(text)
        warn(f"surefoot: the report {path} could not be written ({error.strerror or error}); it is printed above")
        return False
    return True


def run_job(request: LocalRequest, root: Path, faults: tuple[Fault, ...], stop: StopRequest) -> run_report.FinishedRun:
    """Runs the job once under a new uid and ends its processes.

    A stop request ends the run in order too, so that its progress is still reported.
    """
    folder = RunFolder(root.resolve())
    args, memory = request.args, request.job.spec.checkpoint.memory
    machine = LocalNodes(folder, memory.size_limit_bytes, args.metrics, args.servers)
    interrupted = False
    try:
        store, progress = RunFolderStore(folder), RunProgress(folder)
        machine.lock_run_folder(keeps_files=args.continues)
        if args.continues:
            job = store.read_job()
            progress.poll()  # its events were printed when they happened
        else:
            job = store.write_job(request.document, str(uuid.uuid4()))
        context = RunContext(progress, machine, request.nodes, job, request.total_steps)
        with RunView(context, args.plain, args.logs or RANK_0) as view:
            supervisor = Supervisor(context, faults, view.show, view.tell, stop)
            try:
                supervisor.run()
            except KeyboardInterrupt:
                interrupted = True
    finally:
        with signals_ignored():
            machine.close()
    progress.poll()  # read the lines written since the last tick
    injector = supervisor.faults
    return run_report.FinishedRun(job, progress, tuple(injector.struck), tuple(injector.pending), interrupted)
