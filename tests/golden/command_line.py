"""Copies of the command line: each parser with its arguments, exit codes, and what commands print of sample jobs."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from chart.helm import PROJECT
from golden import sources
from golden.records import statuses
from golden.schemas import text
from golden.sources import Event, JobStatus
from support.stored import stored_document

NOW = 5000.0
_ATTRIBUTES = ("metavar", "nargs", "const", "default", "required", "choices", "help")
_LOOKS = ("describe", "timeline", "nodes", "list", "logs", "describe -o json")


def copies() -> dict[str, str]:
    return {
        "command_line.txt": text((*_parsers(sources.build_parser("surefoot")), *_exit_codes())),
        "command_outputs.txt": text(_outputs()),
    }


def _parsers(parser: argparse.ArgumentParser) -> Iterator[str]:
    """What `--help` tells of a command and its subcommands. The help page itself differs between Python versions."""
    yield f"{parser.prog}: {parser.description!r} {parser.epilog or ''!r}"
    children: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions[1:]:  # the first is --help
        if isinstance(action, argparse._SubParsersAction):
            children = dict(action.choices)
            yield from (f"  {choice.dest}: {choice.help}" for choice in action._choices_actions)
            continue
        values = {name: getattr(action, name) for name in _ATTRIBUTES}
        given = " ".join(f"{name}={value!r}" for name, value in values.items() if value not in (None, False))
        yield f"  {' '.join(action.option_strings) or action.dest} {given}"
    for child in children.values():
        yield from _parsers(child)


def _exit_codes() -> Iterator[str]:
    yield from sorted(
        f"{name} {value}" for name, value in vars(sources.command_base).items() if name.startswith("EXIT_")
    )


def _outputs() -> Iterator[str]:
    """What each command prints, and its exit code."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        theirs = str(Path(__file__).with_name("pytorch_job.yaml"))
        commands = [["--version"], ["list", "--run-folder", "nowhere"], ["convert", "-f", theirs]]
        commands += [["validate", "-f", str(path)] for path in sorted((PROJECT / "examples").rglob("*.yaml"))]
        for number, (name, status) in enumerate(statuses().items()):
            run = f"run{number}"
            _make_run(Path(run), status)
            yield f"# {run} is of the status “{name}”"
            commands += [[*look.split(), "--run-folder", run] for look in (*_LOOKS, f"report --to {run}.html")]
        for command in commands:
            yield from _printed(command, folder)
        for page in sorted(Path(folder).glob("*.html")):
            yield f"{page.name}: sha256 {hashlib.sha256(page.read_bytes()).hexdigest()}"


def _make_run(root: Path, status: JobStatus) -> None:
    """A run folder with a status, two events and the ledgers of two ranks."""
    folder = sources.RunFolder(root)
    folder.create_folders()
    store = sources.RunFolderStore(folder)
    store.write_job(stored_document(), "uid-1")
    store.patch_status(replace(status, serial=0), JobStatus())
    with mock.patch("time.time", return_value=NOW - 60):
        store.record_events(
            [Event("GenerationClaimed", "epoch 1"), Event("WorkerLost", "worker 1 is lost", warning=True)]
        )
    line = '{"generation": 1, "step": %d, "rank": %d, "loss": 2.5, "samples": null, "at": %d, "seconds": 0.5, "stall_seconds": null}\n'
    for rank in range(2):
        ledger = "".join(line % (step, rank, NOW - 50 + step) for step in range(1, 4))
        (folder.ledger_folder / f"worker-{rank}-1.jsonl").write_text(ledger, encoding="utf-8")


def _printed(command: list[str], folder: str) -> Iterator[str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch("time.time", return_value=NOW):
        try:
            code: Any = sources.main(command)
        except SystemExit as ended:
            code = ended.code
    lines = [f"$ surefoot {' '.join(command)}", *(f"  {line}" for line in out.getvalue().splitlines())]
    lines += [f"  ! {line}" for line in err.getvalue().splitlines()]
    for line in (*lines, f"  exit code {code}"):
        yield line.rstrip().replace(str(PROJECT), "ROOT").replace(folder, "FOLDER")
