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

_PROGRAM_NAMES = {"kubectl-surefoot": "kubectl surefoot"}
"""File name of the program -> the command as the help shows it. kubectl finds plugins by the file name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code (0, 1, 2, 3 or 130)."""
    if list(sys.argv[1:] if arguments is None else arguments) == ["--version"]:
        say(
            f"surefoot {__version__}"
        )  # before the imports of commands, so that it works even if a dependency is missing
        return EXIT_OK
    args = build_parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = args.run
    stopped_text = "; all processes of the run were stopped" if args.command == "local" else ""
    try:
        return run(args)
    except UsageError as error:
        return _print_error(str(error), EXIT_USAGE)
    except (RunError, OperatorError) as error:
        return _print_error(str(error), EXIT_FAILED)
    except BrokenPipeError:
        # The reader closed the pipe. Without this the interpreter prints a second error when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        return _print_error(f"{error}{stopped_text}", EXIT_FAILED)
    except KeyboardInterrupt:
        return _print_error(f"interrupted{stopped_text}", EXIT_INTERRUPTED)


def build_parser(program: str | None = None) -> argparse.ArgumentParser:
    """Builds the parser of all commands. `program`: name shown in the help; None: from the name of this program."""
    program = program or _PROGRAM_NAMES.get(Path(sys.argv[0]).name, "surefoot")
    parser = argparse.ArgumentParser(prog=program, description="Training that continues when nodes die.")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (add_arguments, run, help_text) in _commands().items():
        command = commands.add_parser(name, help=help_text, description=f"{help_text[0].upper()}{help_text[1:]}.")
        add_arguments(command)
        command.set_defaults(run=run)
    return parser


Command = tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int], str]
"""Function that adds a command's arguments, function that runs it, and its help text."""


def _commands() -> dict[str, Command]:
    """Maps each command's name to `add_NAME_arguments` and `run_NAME` of its module, and its help text."""
    with require_extra("surefoot", "cli"):
        from surefoot_operator.cli import checkpoints, doctor, job_files, logs, run_local
        from surefoot_operator.cli.jobs import describe, suspend_and_rollback
        from surefoot_operator.cli.report import command as report
    this_module = sys.modules[__name__]
    modules = (
        ("list", describe, "list TrainingJobs: state, progress, newest checkpoint"),
        ("describe", describe, "show everything about one job"),
        ("timeline", describe, "show what happened to a job, and where each recovery's seconds went"),
        ("report", report, "write a job's history as one page of HTML"),
        ("nodes", describe, "show a job's nodes, what runs there, and why they are left"),
        ("logs", logs, "show one log of a job: of whom the newest failure blames, or another"),
        ("suspend", suspend_and_rollback, "save a job, stop it and give its workers back"),
        ("resume", suspend_and_rollback, "continue a suspended job"),
        ("rollback", suspend_and_rollback, "go back to an earlier step, within the job or as a new one"),
        ("local", run_local, "run a TrainingJob on this machine, each node a group of processes"),
        ("validate", job_files, "check a TrainingJob without running it"),
        (
            "convert",
            job_files,
            "make a TrainingJob of another system's job: PyTorchJob, TrainJob, JobSet, torchrun …",
        ),
        (
            "checkpoints",
            checkpoints,
            "list, verify, export, import or delete a job's checkpoints in the persistent tier",
        ),
        ("data", this_module, "check whether samples in files can be read at any world size"),
        ("doctor", doctor, "check versions, rights, CRD, operator, tiers and memory, each with its remedy"),
        ("completion", this_module, "print a shell's completion script"),
    )
    return {
        name: (getattr(module, f"add_{name}_arguments"), getattr(module, f"run_{name}"), help_text)
        for name, module, help_text in modules
    }


def _print_error(message: str, exit_code: int) -> int:
    warn(f"surefoot: {message}")
    return exit_code


# ---- shell completion ------------------------------------------------------------------------------------------------
# Implements `surefoot completion`: prints a shell's completion script. shtab generates it from the parser, so it
# contains every command and option.

SHELLS = ("bash", "zsh", "fish", "tcsh")


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="whose script to print")


def run_completion(args: argparse.Namespace) -> int:
    with require_extra("surefoot", "cli"):
        import shtab

    # Not with `say`, which would escape control characters that the script needs.
    print(shtab.complete(build_parser("surefoot"), args.shell))
    return EXIT_OK


# ---- data check ------------------------------------------------------------------------------------------------------
# Implements `surefoot data check`: checks whether files can be read at any world size. `surefoot.tools.check_data` does
# so in a child process, because it imports the runtime, which the operator must not import.


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    help_text = "read some shards, and print the world sizes at which all can be read"
    check = actions.add_parser("check", help=help_text, description=help_text)
    check.add_argument("paths", nargs="+", metavar="PATH", help="a file, a folder, a URL, or a pattern of them")
    kinds = ("text", "jsonl", "parquet", "tar", "tokens", "megatron", "mds")
    check.add_argument("--kind", choices=kinds, help="format of the files; default: by their extension")
    check.add_argument("--global-batch-size", default="8", metavar="N", help="samples a step (default 8)")
    check.add_argument("--lanes", metavar="N", help="as ElasticStream has it")
    check.add_argument("--lane-groups", metavar="N", help="as ElasticStream has it")
    check.add_argument("--sequence-length", default="1024", metavar="N", help="tokens a window (default 1024)")
    check.add_argument("--dtype", default="uint16", metavar="NAME", help="of tokens (default uint16)")
    check.add_argument("--all", action="store_true", help="read every shard, not three")


def run_data(args: argparse.Namespace) -> int:
    """Runs the check in a child process; only its exit code is used here, as it prints its own output."""
    if (missing := missing_module("runtime")) is not None:
        raise RunError(missing)
    options = {
        name: getattr(args, name)
        for name in ("kind", "global_batch_size", "lanes", "lane_groups", "sequence_length", "dtype")
    }
    option_arguments = [
        part for name, value in options.items() if value for part in (f"--{name.replace('_', '-')}", value)
    ]
    command = [sys.executable, "-m", "surefoot.tools.check_data", *option_arguments, *(["--all"] if args.all else [])]
    return EXIT_OK if subprocess.run([*command, "--", *args.paths], check=False).returncode == 0 else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
