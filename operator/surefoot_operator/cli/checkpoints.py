"""Implements `surefoot checkpoints list|verify|export|import|delete`.

Called by `main`. WHERE is a folder or s3://bucket/prefix, as a script without an operator has it, or a TrainingJob's
file. A child process (`surefoot.tools`) reads and writes: the operator must not import the formats.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from surefoot.protocol.text import format_bytes
from surefoot_operator.api.fields import parse_quantity
from surefoot_operator.api.spec import PersistentTierSpec
from surefoot_operator.cli.command_base import EXIT_FAILED, EXIT_OK, RunError, UsageError, say
from surefoot_operator.cli.job_files import read_job
from surefoot_operator.optional_dependencies import missing_module

# ---- tools -----------------------------------------------------------------------------------------------------------
# Runs a `surefoot.tools` module in a child process. The last line of its output is the result in JSON; its stderr
# reports progress, shown as a bar on a terminal.

_TOOL_SECONDS = 600.0
_WORDS_LINES = 20


def run_tool(
    name: str,
    tier: PersistentTierSpec,
    arguments: Sequence[str],
    seconds: float = _TOOL_SECONDS,
    job: str | None = None,
    bar: str | None = None,
) -> dict[str, Any]:
    """Runs one tool on a tier and returns its JSON result.

    `job` reaches it through its environment, `bar` labels the progress bar. {"problem": …} says why there is no result.
    """
    if (missing := missing_module("runtime")) is not None:
        return {"problem": missing}
    command = [sys.executable, "-m", f"surefoot.tools.{name}", *arguments]
    until = time.monotonic() + seconds
    words: list[str] = []
    columns = (TextColumn(bar or ""), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    # its output goes to a file: a pipe that nobody reads would fill and stop it
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output,
        Progress(*columns, console=console, transient=True, disable=bar is None or not console.is_terminal) as shown,
        subprocess.Popen(
            command, env=_environment(tier, job), stdout=output, stderr=subprocess.PIPE, text=True, errors="replace"
        ) as process,
    ):
        task = shown.add_task("", total=None)
        ending = threading.Timer(seconds, process.kill)
        ending.start()
        try:
            for line in process.stderr or ():
                try:
                    body = json.loads(line)
                    shown.update(task, completed=int(body["done"]), total=int(body["total"]))
                except (ValueError, KeyError, TypeError):
                    words = [*words[1 - _WORDS_LINES :], line.strip()]
            code = process.wait()
        except BaseException:
            process.kill()
            raise
        finally:
            ending.cancel()
        output.seek(0)
        if time.monotonic() >= until and code < 0:
            return {"problem": f"surefoot.tools.{name} did not finish within {seconds:g} s and was killed"}
        return _answer(name, code, output.read(), words)


def _answer(name: str, code: int, output: str, words: list[str]) -> dict[str, Any]:
    lines = output.strip().splitlines()
    try:
        body = json.loads(lines[-1]) if lines else None
    except ValueError:
        body = None
    if isinstance(body, dict):
        return body
    said = next((line for line in reversed(words) if line), "it printed no error")
    return {"problem": f"surefoot.tools.{name} exited with code {code}: {said}"}


def _environment(tier: PersistentTierSpec, job: str | None) -> dict[str, str]:
    told = {
        "SUREFOOT_PERSISTENT_URI": tier.uri,
        "SUREFOOT_PERSISTENT_ENDPOINT": tier.endpoint or "",
        "SUREFOOT_PERSISTENT_REGION": tier.region or "",
        "SUREFOOT_PERSISTENT_CA_BUNDLE": tier.ca_bundle or "",
        "SUREFOOT_TOOL_PROGRESS": "1",
        **({} if job is None else {"SUREFOOT_JOB_UID": job}),
    }
    return {name: value for name, value in {**os.environ, **told}.items() if value}


# ---- checkpoints -----------------------------------------------------------------------------------------------------

COPY_SECONDS = 24 * 3600.0
"""How long a copy of a whole checkpoint may take, or its reading."""
LIBRARY_JOB = "default"
"""The job of scripts that run without an operator and name none."""

_EXAMPLES = {
    "list": "surefoot checkpoints list checkpoints/\nsurefoot checkpoints list -f job.yaml --job UID",
    "verify": "surefoot checkpoints verify checkpoints/ --step 100\nsurefoot checkpoints verify s3://bucket/prefix --job UID",
    "export": "surefoot checkpoints export checkpoints/ --to weights --as safetensors --dtype bfloat16 --file-size 2G\n"
    "surefoot checkpoints export -f job.yaml --job UID --step 100 --to out --as dcp",
    "import": "surefoot checkpoints import s3://bucket/prefix --job NEW-UID --step 100 --from out --as dcp",
    "delete": "surefoot checkpoints delete checkpoints/ --job UID          # lists what would be deleted\n"
    "surefoot checkpoints delete checkpoints/ --job UID --yes",
}


def add_checkpoints_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (said, act, own) in _ACTIONS.items():
        action = actions.add_parser(
            name,
            help=said,
            description=f"{said[0].upper()}{said[1:]}.",
            epilog=f"examples:\n{_EXAMPLES[name]}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        action.add_argument("where", nargs="?", metavar="WHERE", help="a folder, file:///… or s3://bucket/prefix")
        action.add_argument("-f", "--file", type=Path, metavar="JOB.yaml", help="or the TrainingJob that names it")
        action.add_argument(
            "--job",
            metavar="UID",
            help=f"the job's uid (default: the file's; of a folder {LIBRARY_JOB}, or its only one)",
        )
        action.add_argument("--endpoint", metavar="URL", help="of an S3 service other than AWS (beside WHERE)")
        action.add_argument("--region", metavar="NAME", help="the bucket's region (beside WHERE)")
        own(action)
        action.set_defaults(act=act)


def run_checkpoints(given: argparse.Namespace) -> int:
    act: Callable[[argparse.Namespace, PersistentTierSpec, str], int] = given.act
    if (given.where is None) == (given.file is None):
        raise UsageError(f"checkpoints {given.action} needs either a folder or URI, or -f JOB.yaml")
    if given.file is None:
        tier = tier_at(given.where, given.endpoint, given.region, there=given.action != "import")
        return act(given, tier, given.job or _only_job(tier))
    job = read_job(given.file)
    persistent = job.spec.checkpoint.persistent
    if persistent is None:
        raise UsageError(f"{given.file} has no spec.checkpoint.persistent: no checkpoint outlives a run of it")
    return act(given, persistent, given.job or job.uid)


def tier_at(
    where: str, endpoint: str | None = None, region: str | None = None, there: bool = True
) -> PersistentTierSpec:
    """Names the tier at a folder or URI; with `there` a folder must exist.

    Without an endpoint and a region those of the environment are taken. Raises UsageError.
    """
    if "://" not in where:
        folder = Path(where)
        if there and not folder.is_dir():
            raise UsageError(f"{where} is not a folder: name the one that Checkpointer(folder=…) was given, or a URI")
        where = folder.resolve().as_uri()
    elif not where.startswith(("file:///", "s3://")):
        raise UsageError(f"{where}: a folder, file:///folder or s3://bucket/prefix is allowed")
    return PersistentTierSpec(
        where,
        endpoint=endpoint or os.environ.get("SUREFOOT_PERSISTENT_ENDPOINT"),
        region=region or os.environ.get("SUREFOOT_PERSISTENT_REGION"),
    )


def _only_job(tier: PersistentTierSpec) -> str:
    """The folder's only job, where --job is missing; of several none is guessed, the guess could be wrong."""
    if not tier.uri.startswith("file://"):
        return LIBRARY_JOB
    folder = Path(unquote(urlsplit(tier.uri).path))
    jobs = (
        sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")) if folder.is_dir() else []
    )
    if LIBRARY_JOB in jobs or not jobs:
        return LIBRARY_JOB
    if len(jobs) > 1:
        shown = ", ".join(jobs[:8]) + (", …" if len(jobs) > 8 else "")
        raise UsageError(f"{folder} holds {len(jobs)} jobs; give --job, one of {shown}")
    return jobs[0]


def _list_and_verify(given: argparse.Namespace, tier: PersistentTierSpec, uid: str) -> int:
    verify = given.action == "verify"
    arguments = ["--job", uid, *([] if verify else ["--list"]), *_step(given)]
    found = _ran("verify", tier, arguments, bar="verifying" if verify else None)
    for entry in found["checkpoints"]:
        say(
            f"step {entry['step']} of generation {entry['generation']}: {entry['state']}, {entry['ranks']} of {entry['world_size']} ranks,"
            f" {format_bytes(entry['bytes'])}"
        )
        for damage in entry["damaged"]:
            say(f"    {damage}")
    for name in found.get("unreadable_manifests", ()):
        say(f"    the manifest {name} cannot be read")
    if not found["checkpoints"]:
        step = "" if given.step is None else f" of step {given.step}"
        say(f"job {uid} has no checkpoint{step} in {tier.uri}")
    bad = any(entry["damaged"] for entry in found["checkpoints"])
    if verify:  # what was not found, or lacks a rank, was not verified
        whole = any(entry["state"] == "verified" for entry in found["checkpoints"])
        bad = bad or not whole or bool(found.get("unreadable_manifests"))
    return EXIT_FAILED if bad else EXIT_OK


def _export(given: argparse.Namespace, tier: PersistentTierSpec, uid: str) -> int:
    if given.to is None:
        raise UsageError("export needs --to FOLDER")
    if given.kind == "dcp" and (given.dtype or given.file_size):
        raise UsageError("--dtype and --file-size are for --as safetensors; DCP converts when it loads")
    arguments = ["--job", uid, *_step(given), "--to", str(given.to), "--as", given.kind, "--name", given.name]
    if given.dtype:
        arguments += ["--dtype", given.dtype]
    if given.file_size:
        arguments += ["--file-bytes", str(parse_quantity(given.file_size, "--file-size"))]
    found = _ran("exporting", tier, arguments, bar="exporting")
    say(f"step {found['step']} of job {uid}: {found['tensors']} tensors, {format_bytes(found['bytes'])}, in {given.to}")
    return EXIT_OK


def _import(given: argparse.Namespace, tier: PersistentTierSpec, uid: str) -> int:
    if given.source is None or given.step is None:
        raise UsageError("import needs --from PATH, and --step N: the number of steps its state was trained for")
    arguments = ["--job", uid, *_step(given), "--from", str(given.source), "--as", given.kind, "--name", given.name]
    found = _ran("importing", tier, arguments, bar="importing")
    say(
        f"imported {given.source} as step {found['step']} of job {uid}: {found['tensors']} tensors,"
        f" {format_bytes(found['bytes'])}. To start a job from it, set checkpoint.restoreFrom: {{uid: {uid}}}"
    )
    return EXIT_OK


def _delete(given: argparse.Namespace, tier: PersistentTierSpec, uid: str) -> int:
    if given.job is None and given.file is None:
        raise UsageError("delete needs --job UID: the job to delete is never guessed")
    found = _ran("delete", tier, [] if given.yes else ["--dry"], job=uid)
    steps = ", ".join(str(entry["step"]) for entry in found["checkpoints"]) or "none"
    if given.yes:
        say(f"deleted job {uid} from {tier.uri}; it had checkpoints of steps {steps}")
    else:
        say(
            f"job {uid} has checkpoints of steps {steps} in {tier.uri}; nothing was deleted: stop the job, then give --yes"
        )
    return EXIT_OK


def _one_step(action: argparse.ArgumentParser) -> None:
    action.add_argument("--step", type=int, metavar="N", help="this step only")


def _export_options(action: argparse.ArgumentParser) -> None:
    action.add_argument("--step", type=int, metavar="N", help="which step (default: the newest that is complete)")
    action.add_argument("--to", type=Path, metavar="FOLDER", help="where to write")
    action.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="what floating point weights become"
    )
    action.add_argument("--file-size", metavar="SIZE", help="the most of one safetensors file, as 2G (default: 5G)")
    _formats(action)


def _import_options(action: argparse.ArgumentParser) -> None:
    action.add_argument("--step", type=int, metavar="N", help="the step to import it as")
    action.add_argument("--from", dest="source", type=Path, metavar="PATH", help="a folder, or a safetensors file")
    _formats(action)


def _formats(action: argparse.ArgumentParser) -> None:
    said = "a folder of torch.distributed.checkpoint, or one model's weights as safetensors"
    action.add_argument("--as", dest="kind", choices=("dcp", "safetensors"), default="dcp", help=said)
    action.add_argument("--name", default="model", metavar="OBJECT", help="whose weights (default: model)")


def _delete_options(action: argparse.ArgumentParser) -> None:
    action.add_argument("--yes", action="store_true", help="delete; without it, list what would be deleted")


_ACTIONS: dict[str, tuple[str, Callable[..., int], Callable[[argparse.ArgumentParser], None]]] = {
    "list": ("list the checkpoints of a job", _list_and_verify, _one_step),
    "verify": ("read every byte and compare it with its digest", _list_and_verify, _one_step),
    "export": ("write a checkpoint in another format", _export, _export_options),
    "import": ("make a checkpoint of a new job from another format", _import, _import_options),
    "delete": ("delete everything that a job has stored", _delete, _delete_options),
}


def _step(given: argparse.Namespace) -> list[str]:
    return [] if given.step is None else ["--step", str(given.step)]


def _ran(
    name: str, tier: PersistentTierSpec, arguments: list[str], job: str | None = None, bar: str | None = None
) -> dict[str, Any]:
    found = run_tool(name, tier, arguments, COPY_SECONDS, job, bar)
    if found.get("problem"):
        raise RunError(str(found["problem"]))
    return found


# ---- trial of what is written at the end -----------------------------------------------------------------------------
# Checks that output files and folders are writable before a run. A run of hours must not fail at its end because its
# report cannot be written. Leaves the file system as it was.


def try_file(option: str, path: Path) -> None:
    """Checks that `path` can be written, keeping its content. Raises UsageError."""
    try:
        path.resolve().parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        if path.is_dir():
            raise UsageError(f"{option} {path} is a folder; name a file")
        with open(path, "ab"):
            pass
        if not there:
            path.unlink()
    except (OSError, ValueError) as error:
        raise UsageError(f"{option} {path} cannot be written: {_why(error)}; name another file") from error


def try_folder(option: str, path: Path) -> None:
    """Creates a writable folder, or checks an existing one. Raises UsageError."""
    try:
        if path.exists() and not path.is_dir():
            raise UsageError(f"{option} {path} is a file; name a folder, new or of a former run")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, ValueError) as error:
        raise UsageError(f"{option} {path} cannot be written to: {_why(error)}; name another folder") from error


def _why(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
