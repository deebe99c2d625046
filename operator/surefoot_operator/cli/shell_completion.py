"""Implements `surefoot completion`: prints a shell's completion script.

Called by `main`. shtab makes it of the parser, so that it knows every command and option.
"""

from __future__ import annotations

import argparse

from surefoot_operator.cli.cli_errors import EXIT_OK
from surefoot_operator.optional_dependencies import needing

SHELLS = ("bash", "zsh", "fish", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="whose script to print")


def run(given: argparse.Namespace) -> int:
    with needing("surefoot", "cli"):
        import shtab
    from surefoot_operator.cli.main import build_parser  # it imports this module

    # not by `say`: a script is no line of words, and has characters that words may not have
    print(shtab.complete(build_parser("surefoot"), given.shell))
    return EXIT_OK
