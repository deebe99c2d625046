"""Dispatches the `surefoot` command and turns errors into exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from surefoot import __version__
from surefoot_operator.cli.cli_errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, RunError, UsageError
from surefoot_operator.cli.output import say, warn
from surefoot_operator.errors import OperatorError
from surefoot_operator.extras import needing


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 1 failed, 2 cannot be, 3 samples or comparison wrong, 130 interrupted."""
    if list(sys.argv[1:] if arguments is None else arguments) == ["--version"]:
        say(f"surefoot {__version__}")  # also where nothing else of it can run
        return EXIT_OK
    parser = argparse.ArgumentParser(prog="surefoot", description="Training that goes on when nodes die.")
    parser.add_argument("--version", action="store_true", help="say which version this is")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, said) in _commands().items():
        command = commands.add_parser(name, help=said, description=said)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    given = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = given.run
    try:
        return run(given)
    except UsageError as error:
        return _say(str(error), EXIT_USAGE)
    except (RunError, OperatorError) as error:
        return _say(str(error), EXIT_FAILED)
    except BrokenPipeError:
        # whoever read us has left; without this the interpreter says so once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        return _say(f"{error}; everything that was started has been ended", EXIT_FAILED)
    except KeyboardInterrupt:
        return _say("interrupted; everything that was started has been ended", EXIT_INTERRUPTED)


def _commands() -> dict[str, tuple[ModuleType, str]]:
    with needing("surefoot", "cli"):
        from surefoot_operator.cli import checkpoints, data, local, validate
    return {
        "local": (local, "run a TrainingJob on this machine, each node a group of processes"),
        "validate": (validate, "check a TrainingJob without running it"),
        "checkpoints": (checkpoints, "list, verify, export, import or delete what a job has in its persistent tier"),
        "data": (data, "check whether samples in files can be read at any world size"),
    }


def _say(message: str, code: int) -> int:
    warn(f"surefoot: {message}")
    return code


if __name__ == "__main__":
    sys.exit(main())
