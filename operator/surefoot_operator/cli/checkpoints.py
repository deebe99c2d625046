"""`surefoot checkpoints list|verify|export|import`: what a job has in its persistent tier, whether its bytes are the saved
ones, and its way into other formats and back.

Called by `main`. Reading and writing is done by a process of its own (`surefoot.tools`), which may know the formats.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from surefoot_operator.api.spec import PersistentTier
from surefoot_operator.cli.comparison import run_tool
from surefoot_operator.cli.errors import EXIT_FAILED, EXIT_OK, RunError, UsageError
from surefoot_operator.cli.saying import say
from surefoot_operator.cli.validate import read_job

COPY_SECONDS = 24 * 3600.0
"""How long an export or import may take: it copies a whole checkpoint."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "verify", "export", "import"))
    parser.add_argument("-f", "--file", type=Path, required=True, metavar="JOB.yaml", help="the TrainingJob")
    parser.add_argument("--job", metavar="UID", help="the job's uid (default: the file's)")
    parser.add_argument("--step", type=int, metavar="N", help="this step only (import: the step it shall be)")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="export: where to")
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="PATH", help="import: a folder, or a safetensors file"
    )
    parser.add_argument(
        "--as",
        dest="kind",
        choices=("dcp", "safetensors"),
        default="dcp",
        help="export, import: a folder of torch.distributed.checkpoint, or one model's weights as safetensors",
    )
    parser.add_argument("--name", default="model", metavar="OBJECT", help="whose weights (default: model)")


def run(given: argparse.Namespace) -> int:
    job = read_job(given.file)
    tier = job.spec.checkpoint.persistent
    if tier is None:
        raise UsageError(f"{given.file} has no spec.checkpoint.persistent: there is nothing to look at after a run")
    uid = given.job or job.uid
    if given.action == "export":
        return _export(given, tier, uid)
    if given.action == "import":
        return _import(given, tier, uid)
    arguments = ["--job", uid, "--list"] if given.action == "list" else ["--job", uid]
    found = _ran("verify", tier, arguments + _step(given))
    for entry in found["checkpoints"]:
        say(
            f"step {entry['step']} of epoch {entry['epoch']}: {entry['state']}, {entry['ranks']} of {entry['world']} ranks,"
            f" {entry['bytes'] / 1e6:.1f} MB"
        )
        for damage in entry["damaged"]:
            say(f"    {damage}")
    if not found["checkpoints"]:
        say(f"job {uid} has no checkpoint in {tier.uri}")
    return EXIT_FAILED if any(entry["damaged"] for entry in found["checkpoints"]) else EXIT_OK


def _export(given: argparse.Namespace, tier: PersistentTier, uid: str) -> int:
    if given.to is None:
        raise UsageError("export needs --to FOLDER")
    arguments = ["--job", uid, *_step(given), "--to", str(given.to), "--as", given.kind, "--name", given.name]
    found = _ran("exporting", tier, arguments, COPY_SECONDS)
    say(f"step {found['step']} of job {uid}: {found['tensors']} tensors, {found['bytes'] / 1e6:.1f} MB, in {given.to}")
    return EXIT_OK


def _import(given: argparse.Namespace, tier: PersistentTier, uid: str) -> int:
    if given.source is None or given.step is None:
        raise UsageError("import needs --from PATH, and --step N: how many steps the checkpoint stands for")
    arguments = ["--job", uid, *_step(given), "--from", str(given.source), "--as", given.kind, "--name", given.name]
    found = _ran("importing", tier, arguments, COPY_SECONDS)
    say(
        f"{given.source} is step {found['step']} of job {uid} now: {found['tensors']} tensors, {found['bytes'] / 1e6:.1f} MB."
        f" A job goes on from it with checkpoint.restoreFrom: {{jobUid: {uid}}}"
    )
    return EXIT_OK


def _step(given: argparse.Namespace) -> list[str]:
    return [] if given.step is None else ["--step", str(given.step)]


def _ran(name: str, tier: PersistentTier, arguments: list[str], seconds: float = 600.0) -> dict[str, Any]:
    found = run_tool(name, tier, arguments, seconds)
    if found.get("problem"):
        raise RunError(str(found["problem"]))
    return found
