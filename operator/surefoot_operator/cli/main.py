"""Dispatches the `surefoot` command and turns errors into exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from surefoot import __version__
from surefoot_operator.cli.cli_errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, RunError, UsageError
from surefoot_operator.cli.output import say, warn
from surefoot_operator.errors import OperatorError
from surefoot_operator.extras import needing

_PROGRAMS = {"kubectl-surefoot": "kubectl surefoot"}
"""kubectl finds its plugins by this name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code (0, 1, 2, 3 or 130)."""
    if list(sys.argv[1:] if arguments is None else arguments) == ["--version"]:
        say(f"surefoot {__version__}")  # also where nothing else of it can run
        return EXIT_OK
    given = build_parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = given.run
    stopped = "; all processes of the run were stopped" if given.command == "local" else ""
    try:
        return run(given)
    except UsageError as error:
        return _say(str(error), EXIT_USAGE)
    except (RunError, OperatorError) as error:
        return _say(str(error), EXIT_FAILED)
    except BrokenPipeError:
        # the reader of the pipe is gone; without this the interpreter prints a second error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        return _say(f"{error}{stopped}", EXIT_FAILED)
    except KeyboardInterrupt:
        return _say(f"interrupted{stopped}", EXIT_INTERRUPTED)


def build_parser(program: str | None = None) -> argparse.ArgumentParser:
    """Builds the parser of all commands; `program` is how it was called."""
    program = program or _PROGRAMS.get(Path(sys.argv[0]).name, "surefoot")
    parser = argparse.ArgumentParser(prog=program, description="Training that goes on when nodes die.")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, said) in _commands().items():
        command = commands.add_parser(name, help=said, description=f"{said[0].upper()}{said[1:]}.")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _commands() -> dict[str, tuple[ModuleType, str]]:
    with needing("surefoot", "cli"):
        from surefoot_operator.cli import checkpoints, convert, data, shell_completion, validate
        from surefoot_operator.cli.cluster import suspend_job
        from surefoot_operator.cli.doctor import run_checks
        from surefoot_operator.cli.jobs import (
            describe_job,
            explain_job,
            job_timeline,
            list_jobs,
            list_nodes,
            rollback_job,
            top_jobs,
        )
        from surefoot_operator.cli.local import run_local
        from surefoot_operator.cli.logs import job_logs
        from surefoot_operator.cli.report import report_job
    return {
        "list": (list_jobs, "list TrainingJobs: state, progress, newest checkpoint"),
        "top": (top_jobs, "show jobs as they go: step, rate, exposure, copies, incidents"),
        "describe": (describe_job, "show everything about one job, in the order people ask"),
        "timeline": (job_timeline, "show what happened to a job, and where each recovery's seconds went"),
        "report": (report_job, "write a job's history as one page of HTML"),
        "explain": (explain_job, "say what the operator would do now, and what the next fault would cost"),
        "nodes": (list_nodes, "show a job's nodes, what runs there, and why they are left"),
        "logs": (job_logs, "show a job's logs by rank and attempt, the blamed rank first"),
        "suspend": (suspend_job, "save a job, stop it and give its workers back"),
        "resume": (suspend_job, "let a suspended job go on"),
        "rollback": (rollback_job, "go back to an earlier step, within the job or as a new one"),
        "local": (run_local, "run a TrainingJob on this machine, each node a group of processes"),
        "validate": (validate, "check a TrainingJob without running it"),
        "convert": (convert, "make a TrainingJob of another system's job: PyTorchJob, TrainJob, JobSet, torchrun …"),
        "checkpoints": (checkpoints, "list, verify, export, import or delete what a job has in its persistent tier"),
        "data": (data, "check whether samples in files can be read at any world size"),
        "doctor": (run_checks, "check versions, rights, CRD, operator, tiers and memory, each with its remedy"),
        "completion": (shell_completion, "print a shell's completion script"),
    }


def _say(message: str, code: int) -> int:
    warn(f"surefoot: {message}")
    return code


if __name__ == "__main__":
    sys.exit(main())
