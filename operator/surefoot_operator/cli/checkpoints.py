"""Implements `surefoot checkpoints list|verify|export|import|delete`.

Called by `main`. The persistent tier is given as WHERE (a folder or s3://bucket/prefix) or as the file of a
TrainingJob. A child process (`surefoot.tools`) reads and writes checkpoints, because the operator must not import the
runtime.
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
from surefoot_operator.cli.job_files import add_file, read_job
from surefoot_operator.optional_dependencies import missing_module

# ---- tools -----------------------------------------------------------------------------------------------------------
# Runs a `surefoot.tools` module in a child process. The last line of its output is the result in JSON; its stderr
# reports progress, shown as a bar on a terminal.

_TOOL_SECONDS = 600.0
_MAX_ERROR_LINES = 20


def run_tool(
    name: str,
    tier: PersistentTierSpec,
    arguments: Sequence[str],
    seconds: float = _TOOL_SECONDS,
    job: str | None = None,
    bar: str | None = None,
) -> dict[str, Any]:
    """Runs a tool on a tier and returns its JSON result, or {"problem": REASON} if there is none.

    Args:
        name: Module in `surefoot.tools`.
        tier: Persistent tier, passed in the environment.
        arguments: Command line of the tool.
        seconds: Timeout, after which the tool is killed.
        job: Uid of the job, passed in the environment; None: not passed.
        bar: Label of the progress bar; None: no bar.
    """
    if (missing := missing_module("runtime")) is not None:
        return {"problem": missing}
    command = [sys.executable, "-m", f"surefoot.tools.{name}", *arguments]
    deadline = time.monotonic() + seconds
    error_lines: list[str] = []
    columns = (TextColumn(bar or ""), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    # Write its output to a file: it is read only after the end, and a full pipe would block the tool.
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output,
        Progress(*columns, console=console, transient=True, disable=bar is None or not console.is_terminal) as progress,
        subprocess.Popen(
            command, env=_environment(tier, job), stdout=output, stderr=subprocess.PIPE, text=True, errors="replace"
        ) as process,
    ):
        task = progress.add_task("", total=None)
        # Lines of stderr that are progress in JSON move the bar; the last other lines are kept for an error message.
        kill_timer = threading.Timer(seconds, process.kill)
        kill_timer.start()
        try:
            for line in process.stderr or ():
                try:
                    record = json.loads(line)
                    progress.update(task, completed=int(record["done"]), total=int(record["total"]))
                except (ValueError, KeyError, TypeError):
                    error_lines = [*error_lines[1 - _MAX_ERROR_LINES :], line.strip()]
            exit_code = process.wait()
        except BaseException:
            process.kill()
            raise
        finally:
            kill_timer.cancel()
        output.seek(0)
        if time.monotonic() >= deadline and exit_code < 0:
            return {"problem": f"surefoot.tools.{name} did not finish within {seconds:g} s and was killed"}
        return _parse_result(name, exit_code, output.read(), error_lines)


def _parse_result(name: str, exit_code: int, output: str, error_lines: list[str]) -> dict[str, Any]:
    """Returns the tool's JSON result, or its last line of error output as the problem."""
    lines = output.strip().splitlines()
    try:
        result = json.loads(lines[-1]) if lines else None
    except ValueError:
        result = None
    if isinstance(result, dict):
        return result
    last_error = next((line for line in reversed(error_lines) if line), "it printed no error")
    return {"problem": f"surefoot.tools.{name} exited with code {exit_code}: {last_error}"}


def _environment(tier: PersistentTierSpec, job: str | None) -> dict[str, str]:
    settings = {
        "SUREFOOT_PERSISTENT_URI": tier.uri,
        "SUREFOOT_PERSISTENT_ENDPOINT": tier.endpoint or "",
        "SUREFOOT_PERSISTENT_REGION": tier.region or "",
        "SUREFOOT_PERSISTENT_CA_BUNDLE": tier.ca_bundle or "",
        "SUREFOOT_TOOL_PROGRESS": "1",
        **({} if job is None else {"SUREFOOT_JOB_UID": job}),
    }
    return {name: value for name, value in {**os.environ, **settings}.items() if value}


# ---- checkpoints -----------------------------------------------------------------------------------------------------

COPY_SECONDS = 24 * 3600.0
"""Timeout for reading or copying complete checkpoints."""
LIBRARY_JOB = "default"
"""Job uid of scripts that run without an operator and do not set one."""

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
    for name, (help_text, act, add_own_arguments) in _ACTIONS.items():
        action = actions.add_parser(
            name,
            help=help_text,
            description=f"{help_text[0].upper()}{help_text[1:]}.",
            epilog=f"examples:\n{_EXAMPLES[name]}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        action.add_argument("where", nargs="?", metavar="WHERE", help="a folder, file:///… or s3://bucket/prefix")
        add_file(action, "or the TrainingJob that names it; - reads standard input")
        action.add_argument(
            "--job",
            metavar="UID",
            help=f"the job's uid (default: the file's; of a folder {LIBRARY_JOB}, or its only one)",
        )
        action.add_argument("--endpoint", metavar="URL", help="of an S3 service other than AWS (with WHERE)")
        action.add_argument("--region", metavar="NAME", help="the bucket's region (with WHERE)")
        add_own_arguments(action)
        action.set_defaults(act=act)


def run_checkpoints(args: argparse.Namespace) -> int:
    """Determines tier and job from the arguments and runs the action. Raises UsageError, RunError."""
    act: Callable[[argparse.Namespace, PersistentTierSpec, str], int] = args.act
    if (args.where is None) == (args.file is None):
        raise UsageError(f"checkpoints {args.action} needs either a folder or URI, or -f JOB.yaml")
    if args.file is None:
        tier = tier_at(args.where, args.endpoint, args.region, there=args.action != "import")
        return act(args, tier, args.job or _only_job(tier))
    job = read_job(args.file)
    persistent = job.spec.checkpoint.persistent
    if persistent is None:
        raise UsageError(f"{args.file} has no spec.checkpoint.persistent: no checkpoint outlives a run of it")
    return act(args, persistent, args.job or job.uid)


def tier_at(
    where: str, endpoint: str | None = None, region: str | None = None, there: bool = True
) -> PersistentTierSpec:
    """Returns the persistent tier at a folder or URI.

    Args:
        where: A folder, file:///folder or s3://bucket/prefix.
        endpoint: Of an S3 service; None: from the environment.
        region: Of the bucket; None: from the environment.
        there: Whether a folder must exist.

    Raises:
        UsageError: `where` is of another form, or the folder does not exist.
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
    """Returns the job to use without --job: the default one, or the only one in the folder.

    Raises:
        UsageError: The folder contains several jobs and not the default one, so any choice would be a guess.
    """
    if not tier.uri.startswith("file://"):
        return LIBRARY_JOB
    folder = Path(unquote(urlsplit(tier.uri).path))
    jobs = (
        sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        if folder.is_dir()
        else []
    )
    if LIBRARY_JOB in jobs or not jobs:
        return LIBRARY_JOB
    if len(jobs) > 1:
        job_names = ", ".join(jobs[:8]) + (", …" if len(jobs) > 8 else "")
        raise UsageError(f"{folder} holds {len(jobs)} jobs; give --job, one of {job_names}")
    return jobs[0]


def _run_list_or_verify(args: argparse.Namespace, tier: PersistentTierSpec, uid: str) -> int:
    """Prints each checkpoint with its damage; fails if one is damaged or, for `verify`, none is complete."""
    is_verification = args.action == "verify"
    arguments = ["--job", uid, *([] if is_verification else ["--list"]), *_step_arguments(args)]
    result = _ran("verify", tier, arguments, bar="verifying" if is_verification else None)
    for entry in result["checkpoints"]:
        say(
            f"step {entry['step']} of generation {entry['generation']}: {entry['state']}, {entry['ranks']} of {entry['world_size']} ranks,"
            f" {format_bytes(entry['bytes'])}"
        )
        for damage in entry["damaged"]:
            say(f"    {damage}")
    for name in result.get("unreadable_manifests", ()):
        say(f"    the manifest {name} cannot be read")
    if not result["checkpoints"]:
        step = "" if args.step is None else f" of step {args.step}"
        say(f"job {uid} has no checkpoint{step} in {tier.uri}")
    is_bad = any(entry["damaged"] for entry in result["checkpoints"])
    if is_verification:  # a checkpoint that is missing or incomplete was not verified
        any_verified = any(entry["state"] == "verified" for entry in result["checkpoints"])
        is_bad = is_bad or not any_verified or bool(result.get("unreadable_manifests"))
    return EXIT_FAILED if is_bad else EXIT_OK


def _run_export(args: argparse.Namespace, tier: PersistentTierSpec, uid: str) -> int:
    """Writes one checkpoint as safetensors or DCP."""
    if args.to is None:
        raise UsageError("export needs --to FOLDER")
    if args.kind == "dcp" and (args.dtype or args.file_size):
        raise UsageError("--dtype and --file-size are for --as safetensors; DCP converts when it loads")
    arguments = ["--job", uid, *_step_arguments(args), "--to", str(args.to), "--as", args.kind, "--name", args.name]
    if args.dtype:
        arguments += ["--dtype", args.dtype]
    if args.file_size:
        arguments += ["--file-bytes", str(parse_quantity(args.file_size, "--file-size"))]
    result = _ran("exporting", tier, arguments, bar="exporting")
    say(
        f"step {result['step']} of job {uid}: {result['tensors']} tensors, {format_bytes(result['bytes'])}, in {args.to}"
    )
    return EXIT_OK


def _run_import(args: argparse.Namespace, tier: PersistentTierSpec, uid: str) -> int:
    """Stores a foreign checkpoint as a step of the job."""
    if args.source is None or args.step is None:
        raise UsageError("import needs --from PATH, and --step N: the number of steps its state was trained for")
    arguments = [
        "--job",
        uid,
        *_step_arguments(args),
        "--from",
        str(args.source),
        "--as",
        args.kind,
        "--name",
        args.name,
    ]
    result = _ran("importing", tier, arguments, bar="importing")
    say(
        f"imported {args.source} as step {result['step']} of job {uid}: {result['tensors']} tensors,"
        f" {format_bytes(result['bytes'])}. To start a job from it, set checkpoint.restoreFrom: {{uid: {uid}}}"
    )
    return EXIT_OK


def _run_delete(args: argparse.Namespace, tier: PersistentTierSpec, uid: str) -> int:
    """Deletes everything that the job has stored, or without --yes only lists its checkpoints."""
    if args.job is None and args.file is None:
        raise UsageError("delete needs --job UID: the job to delete is never guessed")
    result = _ran("delete", tier, [] if args.yes else ["--dry"], job=uid)
    steps = ", ".join(str(entry["step"]) for entry in result["checkpoints"]) or "none"
    if args.yes:
        say(f"deleted job {uid} from {tier.uri}; it had checkpoints of steps {steps}")
    else:
        say(
            f"job {uid} has checkpoints of steps {steps} in {tier.uri}; nothing was deleted: stop the job, then give --yes"
        )
    return EXIT_OK


def _add_step_argument(action: argparse.ArgumentParser) -> None:
    action.add_argument("--step", type=int, metavar="N", help="this step only")


def _add_export_arguments(action: argparse.ArgumentParser) -> None:
    action.add_argument("--step", type=int, metavar="N", help="which step (default: the newest that is complete)")
    action.add_argument("--to", type=Path, metavar="FOLDER", help="where to write")
    action.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="what floating point weights become"
    )
    action.add_argument("--file-size", metavar="SIZE", help="the most of one safetensors file, as 2G (default: 5G)")
    _add_format_arguments(action)


def _add_import_arguments(action: argparse.ArgumentParser) -> None:
    action.add_argument("--step", type=int, metavar="N", help="the step to import it as")
    action.add_argument("--from", dest="source", type=Path, metavar="PATH", help="a folder, or a safetensors file")
    _add_format_arguments(action)


def _add_format_arguments(action: argparse.ArgumentParser) -> None:
    help_text = "a folder of torch.distributed.checkpoint, or one model's weights as safetensors"
    action.add_argument("--as", dest="kind", choices=("dcp", "safetensors"), default="dcp", help=help_text)
    action.add_argument("--name", default="model", metavar="OBJECT", help="whose weights (default: model)")


def _add_delete_arguments(action: argparse.ArgumentParser) -> None:
    action.add_argument("--yes", action="store_true", help="delete; without it, list what would be deleted")


_ACTIONS: dict[str, tuple[str, Callable[..., int], Callable[[argparse.ArgumentParser], None]]] = {
    "list": ("list the checkpoints of a job", _run_list_or_verify, _add_step_argument),
    "verify": ("read every byte and compare it with its digest", _run_list_or_verify, _add_step_argument),
    "export": ("write a checkpoint in another format", _run_export, _add_export_arguments),
    "import": ("make a checkpoint of a new job from another format", _run_import, _add_import_arguments),
    "delete": ("delete everything that a job has stored", _run_delete, _add_delete_arguments),
}


def _step_arguments(args: argparse.Namespace) -> list[str]:
    return [] if args.step is None else ["--step", str(args.step)]


def _ran(
    name: str, tier: PersistentTierSpec, arguments: list[str], job: str | None = None, bar: str | None = None
) -> dict[str, Any]:
    result = run_tool(name, tier, arguments, COPY_SECONDS, job, bar)
    if result.get("problem"):
        raise RunError(str(result["problem"]))
    return result


# ---- output paths ----------------------------------------------------------------------------------------------------
# Checks that output files and folders are writable before a run. A run of hours must not fail at its end because its
# report cannot be written. Leaves the file system as it was.


def try_file(option: str, path: Path) -> None:
    """Checks that the file `path` can be written, without changing its content. Raises UsageError."""
    try:
        path.resolve().parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        if path.is_dir():
            raise UsageError(f"{option} {path} is a folder; name a file")
        with open(path, "ab"):
            pass
        if not existed:
            path.unlink()
    except (OSError, ValueError) as error:
        raise UsageError(f"{option} {path} cannot be written: {_error_reason(error)}; name another file") from error


def try_folder(option: str, path: Path) -> None:
    """Creates a writable folder, or checks an existing one. Raises UsageError."""
    try:
        if path.exists() and not path.is_dir():
            raise UsageError(f"{option} {path} is a file; name a folder, new or of a former run")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{option} {path} cannot be written to: {_error_reason(error)}; name another folder"
        ) from error


def _error_reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
