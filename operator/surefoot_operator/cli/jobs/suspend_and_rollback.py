"""Implements `surefoot suspend`, `resume`, `rollback` and `fork`.

Called by `main`. `rollback` asks the operator to take the job itself back to an earlier step. `fork` changes nothing: it
prints the manifest of a new job with `checkpoint.restoreFrom`.
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
    """Raises UsageError if a change would have no effect: the job is over, or another controller manages it.

    Args:
        what_is_over: End of the sentence "a job that is over ...", for the message.
    """
    if stored.phase in ("Complete", "Failed"):
        raise UsageError(f"{stored} is {stored.phase}: a job that is over {what_is_over}")
    manager = stored.document.get("spec", {}).get("managedBy", MANAGER)
    if manager != MANAGER:
        raise UsageError(f"{stored} is managed by {manager} (spec.managedBy): change it there")


def _build_patch(stored: StoredJob, path: str, value: Any) -> list[dict[str, Any]]:
    """Builds a JSON patch that fails on any other job of the same name, by testing the UID."""
    test = {"op": "test", "path": "/metadata/uid", "value": stored.uid}
    return [test, {"op": "add", "path": path, "value": value}]


async def _apply_patch(cluster: ClusterConnection, name: str, operations: list[dict[str, Any]]) -> None:
    try:
        await cluster.api.patch(api_objects.jobs_path(cluster.namespace, name), operations)
    except PlatformError as error:
        raise describe_api_error(error, jobs_right("patch", cluster.namespace), cluster.server) from error


# ---- roll back -------------------------------------------------------------------------------------------------------
# Implements `surefoot rollback JOB --to STEP`. It writes one annotation and nothing else; the operator acts on it.


def rollback_patch(stored: StoredJob, step: int, keep_data: bool) -> list[dict[str, Any]]:
    """Builds the patch that requests a rollback to `step`.

    Args:
        keep_data: Train on the same batches again, instead of skipping them.

    Raises:
        UsageError: The job cannot go back to that step, or has no committed generation now.
    """
    status = stored.status
    _check_changeable(stored, "cannot go back; surefoot fork prints a job that continues from there")
    if status is None or status.membership is None or status.membership.state != "Committed":
        raise UsageError(f"{stored} is just changing its world, or has none yet: try again once it trains")
    if not 0 < step <= max(status.step, stored.step or 0):
        raise UsageError(f"--to {step} is not allowed; {stored} has finished step {status.step}: a step before that is")
    rollback_value = f"{status.membership.generation}/{step}{'/keep-data' if keep_data else ''}"
    # A JSON patch cannot add a key to a map that does not exist: create the map with it.
    if not stored.document["metadata"].get("annotations"):
        return _build_patch(stored, "/metadata/annotations", {ROLLBACK: rollback_value})
    return _build_patch(stored, f"/metadata/annotations/{ROLLBACK.replace('/', '~1')}", rollback_value)


async def roll_back(cluster: ClusterConnection, name: str, step: int, keep_data: bool) -> str:
    """Requests a rollback and returns the text for the user, with the command that shows its progress."""
    stored = await read_job(cluster, name)
    await _apply_patch(cluster, name, rollback_patch(stored, step, keep_data))
    return (
        f"{stored} will go back to step {step}; surefoot describe {name} shows that it does, or, in its condition"
        " RollbackRejected, which steps it could go back to"
    )


# ---- suspend and rollback --------------------------------------------------------------------------------------------

_COPIED_METADATA = ("labels", "annotations")
_DROPPED_ANNOTATIONS = ("kubectl.kubernetes.io/last-applied-configuration", "surefoot.dev/accept-loss")


def add_rollback_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="the TrainingJob's name")
    parser.add_argument("--to", type=int, metavar="STEP", required=True, help="a step whose checkpoint is complete")
    parser.add_argument(
        "--keep-data", action="store_true", help="train on the same batches again instead of the following ones"
    )
    add_cluster(parser)


def run_rollback(args: argparse.Namespace) -> int:
    say(on_cluster(args, lambda cluster: roll_back(cluster, args.job, args.to, args.keep_data)))
    return EXIT_OK


def add_fork_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("--step", type=int, metavar="N", required=True, help="a step in the persistent tier")
    parser.add_argument("--name", metavar="NEW", help="the new job's name (default: JOB-from-N)")


def run_fork(args: argparse.Namespace) -> int:
    """Prints the manifest of a new job, for `kubectl create -f -` or `surefoot local -f -`."""
    stored = view_of(args).stored
    manifest = forked_manifest(stored, args.step, args.name)
    say(
        f"# {stored} continues from step {args.step} as a job of its own. First suspend or delete the old one; whether the step is\n"
        f"# there: surefoot checkpoints list WHERE --job {stored.uid} --step {args.step}\n"
        + yaml.safe_dump(manifest, sort_keys=False).rstrip()
    )
    return EXIT_OK


def forked_manifest(stored: StoredJob, step: int, name: str | None = None) -> dict[str, Any]:
    """Builds the manifest of a new job that starts from `step` of the stored job.

    Raises:
        UsageError: The step cannot be restored, or the operator would reject the new job.
    """
    if stored.job is None:
        raise UsageError(f"{stored} cannot be forked: {'; '.join(stored.problems)}")
    persistent = stored.job.spec.checkpoint.persistent
    if persistent is None:
        raise UsageError(
            f"{stored} has no spec.checkpoint.persistent: only its newest checkpoints are in memory, and a new job"
            " cannot take them up. Give it a persistent tier first"
        )
    reached_step = stored.status.step if stored.status is not None else 0
    if not 0 < step <= max(reached_step, stored.step or 0):
        raise UsageError(
            f"--step {step} is not allowed; {stored} has finished step {reached_step}: a step before that is"
        )
    document = stored.document
    metadata = {key: document["metadata"][key] for key in _COPIED_METADATA if document["metadata"].get(key)}
    annotations = {
        key: value for key, value in metadata.pop("annotations", {}).items() if key not in _DROPPED_ANNOTATIONS
    }
    manifest = {
        "apiVersion": document["apiVersion"],
        "kind": document["kind"],
        "metadata": {
            "name": name or _new_job_name(stored.name, step),
            "namespace": stored.namespace,
            **metadata,
            **({"annotations": annotations} if annotations else {}),
        },
        "spec": {**document["spec"], "suspend": False},
    }
    manifest["spec"]["checkpoint"] = {
        **manifest["spec"]["checkpoint"],
        "restoreFrom": {"uid": stored.uid, "step": step},
    }
    try:
        parse_job(manifest)
    except SpecError as error:
        raise UsageError(f"the new job would be refused: {error}") from error
    return manifest


def _new_job_name(old_name: str, step: int) -> str:
    """Returns `JOB-from-N`, cut to the 52 characters of a job name; replaces an earlier `-from-M`."""
    suffix = f"-from-{step}"
    return re.sub(r"-from-\d+$", "", old_name)[: 52 - len(suffix)].rstrip("-") + suffix


# ---- suspend job -----------------------------------------------------------------------------------------------------
# Implements `surefoot suspend` and `surefoot resume`. Both change `spec.suspend` and nothing else; the operator acts on
# it.

_POLL_SECONDS = 1.0


def add_suspend_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="the TrainingJob's name")
    parser.add_argument(
        "--wait", type=float, default=0.0, metavar="SECONDS", help="wait until it is so, at most so long (default: 0)"
    )
    add_cluster(parser)


def run_suspend(args: argparse.Namespace) -> int:
    """Runs `suspend` or `resume`, whichever `args.command` names."""
    suspend = args.command == "suspend"
    is_done, text = on_cluster(args, lambda cluster: _set_suspend(cluster, args.job, suspend, args.wait))
    say(text)
    return EXIT_OK if is_done else EXIT_FAILED


add_resume_arguments, run_resume = add_suspend_arguments, run_suspend


def suspend_patch(stored: StoredJob, suspend: bool) -> list[dict[str, Any]]:
    """Builds the patch that suspends or resumes the job; empty if the spec has that value already.

    Raises:
        UsageError: The change would have no effect.
    """
    _check_changeable(stored, "cannot be suspended or resumed")
    if bool(stored.document.get("spec", {}).get("suspend", False)) == suspend:
        return []
    return _build_patch(stored, "/spec/suspend", suspend)


def is_so(stored: StoredJob, suspend: bool) -> bool:
    """Returns whether the job has reached the requested state."""
    return stored.phase == "Suspended" if suspend else stored.phase in ("Running", "Complete")


def describe_state(stored: StoredJob, suspend: bool, waited_seconds: float) -> str:
    """Describes the job's progress to the requested state. `waited_seconds`: 0 if the user did not wait."""
    message = stored.status.message if stored.status is not None else ""
    if is_so(stored, suspend):
        return f"{stored} is {stored.phase}: {message}"
    if waited_seconds:
        return f"{stored} is {stored.phase or 'Unseen'} after {waited_seconds:g} s: {message}"
    if suspend:
        return f"{stored} will be suspended: it saves, stops its trainers and deletes its workers; surefoot resume continues it"
    return f"{stored} will continue; surefoot describe {stored.name} shows from which step"


async def _set_suspend(cluster: ClusterConnection, name: str, suspend: bool, wait_seconds: float) -> tuple[bool, str]:
    """Sets `spec.suspend` and waits for the state; returns whether it was reached or not waited for, and a text."""
    stored = await read_job(cluster, name)
    if operations := suspend_patch(stored, suspend):
        await _apply_patch(cluster, name, operations)
    deadline = time.monotonic() + wait_seconds
    while not is_so(stored, suspend) and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
        stored = await read_job(cluster, name)
    return not wait_seconds or is_so(stored, suspend), describe_state(stored, suspend, wait_seconds)
