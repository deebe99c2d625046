"""Dispatches the `surefoot` command and turns errors into exit codes.

Only the module of the chosen command is imported, so that `surefoot --help` and a shell's completion are fast and work
even if a dependency of another command is missing.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import surefoot
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


class Command(NamedTuple):
    """A command: the module in this package with its `add_NAME_arguments` and `run_NAME`, and its help text."""

    group: str
    module: str
    help_text: str


COMMANDS = {
    "list": Command("look", "jobs.list_jobs", "list TrainingJobs: state, progress, newest checkpoint"),
    "describe": Command("look", "jobs.describe", "show everything about one job"),
    "timeline": Command("look", "jobs.describe", "show what happened to a job, and the seconds of each recovery"),
    "nodes": Command("look", "jobs.describe", "show a job's nodes, what runs there, and why they are left"),
    "logs": Command("look", "logs", "show one log of a job: of whom the newest failure blames, or another"),
    "report": Command("look", "report.command", "write a job's history as one page of HTML"),
    "suspend": Command("act", "jobs.suspend_and_rollback", "save a job, stop it and give its workers back"),
    "resume": Command("act", "jobs.suspend_and_rollback", "continue a suspended job"),
    "rollback": Command("act", "jobs.suspend_and_rollback", "take a running job back to an earlier step"),
    "fork": Command("act", "jobs.suspend_and_rollback", "print a new job that continues from a step of another"),
    "checkpoints": Command(
        "act", "checkpoints", "list, verify, export, import or delete checkpoints in the persistent tier"
    ),
    "init": Command("try here", "job_files", "write a commented job.yaml that runs as it is"),
    "local": Command(
        "try here", "run_local", "run a program or a TrainingJob on this machine, with faults if you like"
    ),
    "validate": Command("check", "job_files", "check a TrainingJob without running it"),
    "convert": Command(
        "check", "job_files", "make a TrainingJob of a PyTorchJob, TrainJob, JobSet, torchrun command …"
    ),
    "data": Command("check", "main", "check whether samples in files can be read at any world size"),
    "doctor": Command("check", "doctor", "check versions, rights, CRD, operator, tiers and memory, with remedies"),
    "completion": Command("check", "main", "print a shell's completion script"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code (0, 1, 2, 3 or 130)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words in (["-V"], ["--version"], ["version"]):
        say(f"surefoot {surefoot.__version__}")
        return EXIT_OK
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if not words or words[0] in ("-h", "--help"):
        print(help_text(_program_name()))
        return EXIT_OK
    if words[0] not in COMMANDS:
        suggestion = _did_you_mean(words[0], COMMANDS) or "; surefoot help lists all commands"
        return _print_error(f"there is no command {words[0]}{suggestion}", EXIT_USAGE)
    args = build_parser(only=words[0]).parse_args(words)
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


class _Parser(argparse.ArgumentParser):
    """Parser that reports its own errors, with its own usage and the nearest word that is allowed.

    argparse reports an unknown option of a subcommand only at the top, with the usage of the top command.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def error(self, message: str) -> Any:
        wrong = re.search(r"(?:unrecognized arguments: |invalid choice: ')([^\s'=]+)", message)
        super().error(message + ("" if wrong is None else _did_you_mean(wrong[1], self._allowed_words())))

    def _allowed_words(self) -> Iterator[str]:
        for action in self._actions:
            yield from (*action.option_strings, *map(str, action.choices or ()))


def _did_you_mean(word: str, allowed_words: Iterable[str]) -> str:
    """Returns `; did you mean X?` for the allowed word that is nearest; empty if none is near."""
    near = get_close_matches(word, list(allowed_words), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _program_name() -> str:
    return _PROGRAM_NAMES.get(Path(sys.argv[0]).name, "surefoot")


def help_text(program: str) -> str:
    """Returns the help of the whole program: its commands, in groups."""
    lines = [f"usage: {program} COMMAND …", "", "Training that continues when nodes die."]
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        lines += ["", f"{group}:"]
        lines += [f"  {name:12} {about.help_text}" for name, about in COMMANDS.items() if about.group == group]
    lines += ["", f"{program} help COMMAND describes a command, {program} version prints the version."]
    return "\n".join(
        [*lines, "Exit codes: 0 success, 1 failure, 2 invalid request, 3 samples differ (local), 130 interrupted."]
    )


def build_parser(program: str | None = None, only: str | None = None) -> argparse.ArgumentParser:
    """Builds the parser.

    Args:
        program: Name shown in the help; None: from the name of this program.
        only: Command whose module is imported and whose arguments are added; None: all commands.
    """
    parser = _Parser(prog=program or _program_name(), description="Training that continues when nodes die.")
    parser.add_argument("-V", "--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS if only is None else (only,):
        about = COMMANDS[name]
        command = commands.add_parser(
            name, help=about.help_text, description=f"{about.help_text[0].upper()}{about.help_text[1:]}."
        )
        with require_extra("surefoot", "cli"):
            module = import_module(f"surefoot_operator.cli.{about.module}")
        getattr(module, f"add_{name}_arguments")(command)
        command.set_defaults(run=getattr(module, f"run_{name}"))
    return parser


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
