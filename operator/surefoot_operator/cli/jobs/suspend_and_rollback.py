"""Implements `surefoot suspend`, `resume` and `rollback`: stops and starts a job, and takes it back to a step.

Called by `main`. With `rollback --to` the job itself goes back; with `--step` the command prints a new job with
`checkpoint.restoreFrom` and changes nothing. `rolled_back` is pure.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from typing import Any

import yaml

from surefoot_operator.api.parse import parse_job
from surefoot_operator.api.spec import MANAGER, ROLLBACK
from surefoot_operator.cli.cluster_access import ClusterConnection, add_cluster, describe_api_error, jobs_right
from surefoot_operator.cli.command_base import EXIT_FAILED, EXIT_OK, UsageError, say
from surefoot_operator.cli.jobs.read_jobs import StoredJob, add_job, on_cluster, read_job, view_of
from surefoot_operator.errors import PlatformError, SpecError
from surefoot_operator.platforms.kubernetes import api_objects

# ---- patches of a job ------------------------------------------------------------------------------------------------


def _check_changeable(stored: StoredJob, what_is_over: str) -> None:
    """Raises UsageError where a change would do nothing: the job is over, or somebody else looks after it."""
    if stored.phase in ("Complete", "Failed"):
        raise UsageError(f"{stored} is {stored.phase}: a job that is over {what_is_over}")
    manager = stored.document.get("spec", {}).get("managedBy", MANAGER)
    if manager != MANAGER:
        raise UsageError(f"{stored} is looked after by {manager} (spec.managedBy): change it there")


def _patch(stored: StoredJob, path: str, value: Any) -> list[dict[str, Any]]:
    """Builds a patch that takes effect on this very job alone, not on another one of its name."""
    test = {"op": "test", "path": "/metadata/uid", "value": stored.uid}
    return [test, {"op": "add", "path": path, "value": value}]


async def _apply(cluster: ClusterConnection, name: str, operations: list[dict[str, Any]]) -> None:
    try:
        await cluster.api.patch(api_objects.jobs_path(cluster.namespace, name), operations)
    except PlatformError as error:
        raise describe_api_error(error, jobs_right("patch", cluster.namespace), cluster.server) from error


# ---- roll back -------------------------------------------------------------------------------------------------------
# Implements `surefoot rollback JOB --to STEP`: asks the operator to go back. It writes one annotation and nothing else;
# what follows is the operator's. `asking` is pure.


def rollback_patch(stored: StoredJob, step: int, keep_data: bool) -> list[dict[str, Any]]:
    """Builds the patch that asks for it. Raises UsageError where the job cannot go back to that step."""
    status = stored.status
    _check_changeable(stored, "does not go back; --step N makes one that goes on from there")
    if status is None or status.membership is None or status.membership.state != "Committed":
        raise UsageError(f"{stored} is just changing its world, or has none yet: try again once it trains")
    if not 0 < step <= max(status.step, stored.step or 0):
        raise UsageError(f"--to {step} is not allowed; {stored} has finished step {status.step}: a step before that is")
    word = f"{status.membership.generation}/{step}{'/keep-data' if keep_data else ''}"
    if not stored.document["metadata"].get("annotations"):
        return _patch(stored, "/metadata/annotations", {ROLLBACK: word})
    return _patch(stored, f"/metadata/annotations/{ROLLBACK.replace('/', '~1')}", word)


async def roll_back(cluster: ClusterConnection, name: str, step: int, keep_data: bool) -> str:
    """Asks for it; says what to look at."""
    stored = await read_job(cluster, name)
    await _apply(cluster, name, rollback_patch(stored, step, keep_data))
    return (
        f"{stored} is told to go back to step {step}; surefoot describe {name} shows that it does, or, in its condition"
        " RollbackRejected, which steps it could go back to"
    )


# ---- suspend and rollback --------------------------------------------------------------------------------------------

_KEPT = ("labels", "annotations")
_SERVERS = ("kubectl.kubernetes.io/last-applied-configuration", "surefoot.dev/accept-loss")


def add_rollback_arguments(parser: argparse.ArgumentParser) -> None:
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


def run_rollback(given: argparse.Namespace) -> int:
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
    """Builds the document of the new job. Raises UsageError where that step of the job cannot be restored."""
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
    document = stored.document
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


# ---- suspend job -----------------------------------------------------------------------------------------------------
# Implements `surefoot suspend` and `surefoot resume`. Both change `spec.suspend` and nothing else; what follows is the
# operator's. `change` and `standing` are pure.

_POLL_SECONDS = 1.0


def add_suspend_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="the TrainingJob's name")
    parser.add_argument(
        "--wait", type=float, default=0.0, metavar="SECONDS", help="wait until it is so, at most so long (default: 0)"
    )
    add_cluster(parser)


def run_suspend(given: argparse.Namespace) -> int:
    """Both commands: which one it is stands in `given.command`."""
    suspend = given.command == "suspend"
    done, text = on_cluster(given, lambda cluster: _switched(cluster, given.job, suspend, given.wait))
    say(text)
    return EXIT_OK if done else EXIT_FAILED


add_resume_arguments, run_resume = add_suspend_arguments, run_suspend


def suspend_patch(stored: StoredJob, suspend: bool) -> list[dict[str, Any]]:
    """Builds the patch; empty where the job is so already. Raises UsageError where it would do nothing."""
    _check_changeable(stored, "cannot be suspended or resumed")
    if bool(stored.document.get("spec", {}).get("suspend", False)) == suspend:
        return []
    return _patch(stored, "/spec/suspend", suspend)


def is_so(stored: StoredJob, suspend: bool) -> bool:
    """Whether the job has come to where it was told to go."""
    return stored.phase == "Suspended" if suspend else stored.phase in ("Running", "Complete")


def describe_state(stored: StoredJob, suspend: bool, waited_seconds: float) -> str:
    """Words how far it is."""
    message = stored.status.message if stored.status is not None else ""
    if is_so(stored, suspend):
        return f"{stored} is {stored.phase}: {message}"
    if waited_seconds:
        return f"{stored} is {stored.phase or 'Unseen'} after {waited_seconds:g} s: {message}"
    if suspend:
        return f"{stored} is told to suspend: it saves, stops its trainers and gives its workers back; surefoot resume ends that"
    return f"{stored} is told to go on; surefoot describe {stored.name} shows from which step"


async def _switched(cluster: ClusterConnection, name: str, suspend: bool, wait_seconds: float) -> tuple[bool, str]:
    stored = await read_job(cluster, name)
    if operations := suspend_patch(stored, suspend):
        await _apply(cluster, name, operations)
    due = time.monotonic() + wait_seconds
    while not is_so(stored, suspend) and time.monotonic() < due:
        await asyncio.sleep(_POLL_SECONDS)
        stored = await read_job(cluster, name)
    return not wait_seconds or is_so(stored, suspend), describe_state(stored, suspend, wait_seconds)
