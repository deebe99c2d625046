"""Implements `surefoot data check`: whether files can be read at any world size.

Called by `main`. The check is `surefoot.tools.check_data` in a child process: it imports what no operator may.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from surefoot_operator.cli.cli_errors import EXIT_FAILED, EXIT_OK, RunError
from surefoot_operator.optional_dependencies import lacking


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    said = "read some shards, and say at which world sizes all can be read"
    check = actions.add_parser("check", help=said, description=said)
    check.add_argument("paths", nargs="+", metavar="PATH", help="a file, a folder, a URL, or a pattern of them")
    kinds = ("text", "jsonl", "parquet", "tar", "tokens", "megatron", "mds")
    check.add_argument("--kind", choices=kinds, help="what they are; by default their ending says it")
    check.add_argument("--global-batch", default="8", metavar="N", help="samples a step (default 8)")
    check.add_argument("--lanes", metavar="N", help="as ElasticStream has it")
    check.add_argument("--stripes", metavar="N", help="as ElasticStream has it")
    check.add_argument("--length", default="1024", metavar="N", help="tokens a window (default 1024)")
    check.add_argument("--dtype", default="uint16", metavar="NAME", help="of tokens (default uint16)")
    check.add_argument("--all", action="store_true", help="read every shard, not three")


def run(given: argparse.Namespace) -> int:
    if (missing := lacking("runtime")) is not None:
        raise RunError(missing)
    options = {name: getattr(given, name) for name in ("kind", "global_batch", "lanes", "stripes", "length", "dtype")}
    told = [part for name, value in options.items() if value for part in (f"--{name.replace('_', '-')}", value)]
    command = [sys.executable, "-m", "surefoot.tools.check_data", *told, *(["--all"] if given.all else [])]
    return EXIT_OK if subprocess.run([*command, "--", *given.paths], check=False).returncode == 0 else EXIT_FAILED
