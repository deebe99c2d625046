"""Implements `surefoot rollback`: goes back to an earlier step.

Called by `main`. With `--to` within the job (`roll_back`); with `--step` it prints a new job with `checkpoint.restoreFrom`, and
changes nothing. `rolled_back` is pure.
"""

from __future__ import annotations

import argparse
import copy
import re
from typing import Any

import yaml

from surefoot_operator.api.parse import parse_job
from surefoot_operator.cli.cli_errors import EXIT_OK, UsageError
from surefoot_operator.cli.command_base import say
from surefoot_operator.cli.jobs.job_source import add_job, on_cluster, view_of
from surefoot_operator.cli.jobs.roll_back import roll_back
from surefoot_operator.cli.jobs.stored_job import StoredJob
from surefoot_operator.errors import SpecError

_KEPT = ("labels", "annotations")
_SERVERS = ("kubectl.kubernetes.io/last-applied-configuration", "surefoot.dev/accept-loss")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--to", type=int, metavar="STEP", help="go back within the job, to a step that is complete")
    where.add_argument(
        "--step", type=int, metavar="N", help="print a new job that goes on from a step in the persistent tier"
    )
    parser.add_argument(
        "--keep-data", action="store_true", help="with --to: train on the same batches again, instead of those behind"
    )
    parser.add_argument("--name", metavar="NEW", help="the new job's name (default: JOB-from-N)")


def run(given: argparse.Namespace) -> int:
    if given.to is None and given.keep_data:
        raise UsageError("--keep-data goes with --to: a new job trains on the same batches again in any case")
    if given.to is not None and given.name is not None:
        raise UsageError("--name goes with --step: --to goes back within the job and makes none")
    if given.to is not None:
        if given.run_folder is not None:
            raise UsageError(
                "--to asks the operator of a cluster; a run of surefoot local goes back by healthPolicy.numerics"
            )
        say(on_cluster(given, lambda cluster: roll_back(cluster, given.job, given.to, given.keep_data)))
        return EXIT_OK
    stored = view_of(given).stored
    made = rolled_back(stored, given.step, given.name)
    say(
        f"# {stored} goes on from step {given.step} as a job of its own. First suspend or delete the old one; whether the step is\n"
        f"# there: surefoot checkpoints list WHERE --job {stored.uid} --step {given.step}\n"
        + yaml.safe_dump(made, sort_keys=False).rstrip()
    )
    return EXIT_OK


def rolled_back(stored: StoredJob, step: int, name: str | None = None) -> dict[str, Any]:
    """Builds the document of the new job.

    Raises:
        UsageError: The job keeps nothing in a persistent tier, the step is none of its own, or the name is not allowed.
    """
    if stored.job is None:
        raise UsageError(f"{stored} cannot be rolled back: {'; '.join(stored.problems)}")
    persistent = stored.job.spec.checkpoint.persistent
    if persistent is None:
        raise UsageError(
            f"{stored} has no spec.checkpoint.persistent: only its newest checkpoints are in memory, and a new job"
            " cannot take them up. Give it a persistent tier first"
        )
    reached = stored.status.step if stored.status is not None else 0
    if not 0 < step <= max(reached, stored.step or 0):
        raise UsageError(f"--step {step} is not allowed; {stored} has finished step {reached}: a step before that is")
    document = copy.deepcopy(stored.document)
    metadata = {key: document["metadata"][key] for key in _KEPT if document["metadata"].get(key)}
    annotations = {key: value for key, value in metadata.pop("annotations", {}).items() if key not in _SERVERS}
    made = {
        "apiVersion": document["apiVersion"],
        "kind": document["kind"],
        "metadata": {
            "name": name or _name(stored.name, step),
            "namespace": stored.namespace,
            **metadata,
            **({"annotations": annotations} if annotations else {}),
        },
        "spec": {**document["spec"], "suspend": False},
    }
    made["spec"]["checkpoint"] = {**made["spec"]["checkpoint"], "restoreFrom": {"uid": stored.uid, "step": step}}
    try:
        parse_job(made)
    except SpecError as error:
        raise UsageError(f"the new job would be refused: {error}") from error
    return made


def _name(former: str, step: int) -> str:
    """JOB-from-N, within the 52 characters of a name; a former -from-M is replaced."""
    end = f"-from-{step}"
    return re.sub(r"-from-\d+$", "", former)[: 52 - len(end)].rstrip("-") + end
