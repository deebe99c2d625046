"""`surefoot checkpoints list|verify`: what a job has in its persistent tier, and whether its bytes are the saved ones.

Called by `main`. Reading is done by a process of its own (`surefoot.tools`), which may know the formats.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from surefoot_operator.cli.comparison import run_tool
from surefoot_operator.cli.errors import EXIT_FAILED, EXIT_OK, RunError, UsageError
from surefoot_operator.cli.validate import read_job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "verify"))
    parser.add_argument("-f", "--file", type=Path, required=True, metavar="JOB.yaml", help="the TrainingJob")
    parser.add_argument("--job", metavar="UID", help="the job's uid (default: every job in that tier, or the file's)")
    parser.add_argument("--step", type=int, metavar="N", help="verify this step only (default: every one)")


def run(given: argparse.Namespace) -> int:
    job = read_job(given.file)
    tier = job.spec.checkpoint.persistent
    if tier is None:
        raise UsageError(f"{given.file} has no spec.checkpoint.persistent: there is nothing to look at after a run")
    uid = given.job or job.uid
    arguments = ["--job", uid, "--list"] if given.action == "list" else ["--job", uid]
    if given.step is not None:
        arguments += ["--step", str(given.step)]
    found = run_tool("verify", tier, arguments)
    if found.get("problem"):
        raise RunError(str(found["problem"]))
    for entry in found["checkpoints"]:
        print(
            f"step {entry['step']} of epoch {entry['epoch']}: {entry['state']}, {entry['ranks']} of {entry['world']} ranks,"
            f" {entry['bytes'] / 1e6:.1f} MB"
        )
        for damage in entry["damaged"]:
            print(f"    {damage}")
    if not found["checkpoints"]:
        print(f"job {uid} has no checkpoint in {tier.uri}")
    return EXIT_FAILED if any(entry["damaged"] for entry in found["checkpoints"]) else EXIT_OK
