"""Dispatches the `surefoot` command and turns errors into exit codes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from surefoot import __version__
from surefoot_operator.cli.command_base import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    RunError,
    UsageError,
    say,
    warn,
)
from surefoot_operator.errors import OperatorError
from surefoot_operator.optional_dependencies import missing_module, require_extra

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
        return _print(str(error), EXIT_USAGE)
    except (RunError, OperatorError) as error:
        return _print(str(error), EXIT_FAILED)
    except BrokenPipeError:
        # the reader of the pipe is gone; without this the interpreter prints a second error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        return _print(f"{error}{stopped}", EXIT_FAILED)
    except KeyboardInterrupt:
        return _print(f"interrupted{stopped}", EXIT_INTERRUPTED)


def build_parser(program: str | None = None) -> argparse.ArgumentParser:
    """Builds the parser of all commands; `program` is how it was called."""
    program = program or _PROGRAMS.get(Path(sys.argv[0]).name, "surefoot")
    parser = argparse.ArgumentParser(prog=program, description="Training that goes on when nodes die.")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (add_arguments, run, said) in _commands().items():
        command = commands.add_parser(name, help=said, description=f"{said[0].upper()}{said[1:]}.")
        add_arguments(command)
        command.set_defaults(run=run)
    return parser


Command = tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int], str]
"""What adds a command's arguments, what runs it, and what it does."""


def _commands() -> dict[str, Command]:
    """Finds `add_NAME_arguments` and `run_NAME` of each command in its module."""
    with require_extra("surefoot", "cli"):
        from surefoot_operator.cli import checkpoints, doctor, job_files, logs, run_local
        from surefoot_operator.cli.jobs import describe, suspend_and_rollback
        from surefoot_operator.cli.report import command as report
    here = sys.modules[__name__]
    modules = (
        ("list", describe, "list TrainingJobs: state, progress, newest checkpoint"),
        ("describe", describe, "show everything about one job, in the order people ask"),
        ("timeline", describe, "show what happened to a job, and where each recovery's seconds went"),
        ("report", report, "write a job's history as one page of HTML"),
        ("nodes", describe, "show a job's nodes, what runs there, and why they are left"),
        ("logs", logs, "show one log of a job: of whom the newest failure blames, or another"),
        ("suspend", suspend_and_rollback, "save a job, stop it and give its workers back"),
        ("resume", suspend_and_rollback, "let a suspended job go on"),
        ("rollback", suspend_and_rollback, "go back to an earlier step, within the job or as a new one"),
        ("local", run_local, "run a TrainingJob on this machine, each node a group of processes"),
        ("validate", job_files, "check a TrainingJob without running it"),
        (
            "convert",
            job_files,
            "make a TrainingJob of another system's job: PyTorchJob, TrainJob, JobSet, torchrun …",
        ),
        ("checkpoints", checkpoints, "list, verify, export, import or delete what a job has in its persistent tier"),
        ("data", here, "check whether samples in files can be read at any world size"),
        ("doctor", doctor, "check versions, rights, CRD, operator, tiers and memory, each with its remedy"),
        ("completion", here, "print a shell's completion script"),
    )
    return {
        name: (getattr(module, f"add_{name}_arguments"), getattr(module, f"run_{name}"), said)
        for name, module, said in modules
    }


def _print(message: str, code: int) -> int:
    warn(f"surefoot: {message}")
    return code


# ---- shell completion ------------------------------------------------------------------------------------------------
# Implements `surefoot completion`: prints a shell's completion script. shtab makes it of the parser, so that it knows
# every command and option.

SHELLS = ("bash", "zsh", "fish", "tcsh")


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="whose script to print")


def run_completion(given: argparse.Namespace) -> int:
    with require_extra("surefoot", "cli"):
        import shtab

    # not by `say`: a script is no line of words, and has characters that words may not have
    print(shtab.complete(build_parser("surefoot"), given.shell))
    return EXIT_OK


# ---- data check ------------------------------------------------------------------------------------------------------
# Implements `surefoot data check`: whether files can be read at any world size. The check is
# `surefoot.tools.check_data` in a child process: it imports what no operator may.


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    said = "read some shards, and say at which world sizes all can be read"
    check = actions.add_parser("check", help=said, description=said)
    check.add_argument("paths", nargs="+", metavar="PATH", help="a file, a folder, a URL, or a pattern of them")
    kinds = ("text", "jsonl", "parquet", "tar", "tokens", "megatron", "mds")
    check.add_argument("--kind", choices=kinds, help="what they are; by default their ending says it")
    check.add_argument("--global-batch-size", default="8", metavar="N", help="samples a step (default 8)")
    check.add_argument("--lanes", metavar="N", help="as ElasticStream has it")
    check.add_argument("--lane-groups", metavar="N", help="as ElasticStream has it")
    check.add_argument("--sequence-length", default="1024", metavar="N", help="tokens a window (default 1024)")
    check.add_argument("--dtype", default="uint16", metavar="NAME", help="of tokens (default uint16)")
    check.add_argument("--all", action="store_true", help="read every shard, not three")


def run_data(given: argparse.Namespace) -> int:
    if (missing := missing_module("runtime")) is not None:
        raise RunError(missing)
    options = {
        name: getattr(given, name)
        for name in ("kind", "global_batch_size", "lanes", "lane_groups", "sequence_length", "dtype")
    }
    told = [part for name, value in options.items() if value for part in (f"--{name.replace('_', '-')}", value)]
    command = [sys.executable, "-m", "surefoot.tools.check_data", *told, *(["--all"] if given.all else [])]
    return EXIT_OK if subprocess.run([*command, "--", *given.paths], check=False).returncode == 0 else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
