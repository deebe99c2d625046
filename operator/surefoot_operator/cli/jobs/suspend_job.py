"""Implements `surefoot suspend` and `surefoot resume`.

Called by `main`. Both change `spec.suspend` and nothing else; what follows is the operator's. `change` and `standing` are pure.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from surefoot_operator.api.spec import MANAGER
from surefoot_operator.cli.cli_errors import EXIT_FAILED, EXIT_OK, UsageError
from surefoot_operator.cli.cluster_access import OpenCluster, add_cluster
from surefoot_operator.cli.cluster_refusals import jobs_right, refused
from surefoot_operator.cli.command_base import say
from surefoot_operator.cli.jobs.cluster_reads import read_job
from surefoot_operator.cli.jobs.job_source import on_cluster
from surefoot_operator.cli.jobs.stored_job import StoredJob
from surefoot_operator.errors import FabricError
from surefoot_operator.platforms.kubernetes import api_objects

_LOOK_SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="the TrainingJob's name")
    parser.add_argument(
        "--wait", type=float, default=0.0, metavar="SECONDS", help="wait until it is so, at most so long (default: 0)"
    )
    add_cluster(parser)


def run(given: argparse.Namespace) -> int:
    """Both commands: which one it is stands in `given.command`."""
    suspend = given.command == "suspend"
    done, text = on_cluster(given, lambda cluster: _switched(cluster, given.job, suspend, given.wait))
    say(text)
    return EXIT_OK if done else EXIT_FAILED


def change(stored: StoredJob, suspend: bool) -> list[dict[str, Any]]:
    """Builds the patch; empty where the job is so already.

    Raises:
        UsageError: It would do nothing: the job is over, or somebody else looks after it.
    """
    if stored.phase in ("Complete", "Failed"):
        raise UsageError(f"{stored} is {stored.phase}: a job that is over cannot be suspended or resumed")
    manager = stored.document.get("spec", {}).get("managedBy", MANAGER)
    if manager != MANAGER:
        raise UsageError(f"{stored} is looked after by {manager} (spec.managedBy): suspend it there")
    if bool(stored.document.get("spec", {}).get("suspend", False)) == suspend:
        return []
    test = {"op": "test", "path": "/metadata/uid", "value": stored.uid}
    return [test, {"op": "add", "path": "/spec/suspend", "value": suspend}]


def is_so(stored: StoredJob, suspend: bool) -> bool:
    """Whether the job has come to where it was told to go."""
    return stored.phase == "Suspended" if suspend else stored.phase in ("Running", "Complete")


def standing(stored: StoredJob, suspend: bool, waited_seconds: float) -> str:
    """Words how far it is."""
    message = stored.status.message if stored.status is not None else ""
    if is_so(stored, suspend):
        return f"{stored} is {stored.phase}: {message}"
    if waited_seconds:
        return f"{stored} is {stored.phase or 'Unseen'} after {waited_seconds:g} s: {message}"
    if suspend:
        return f"{stored} is told to suspend: it saves, stops its trainers and gives its workers back; surefoot resume ends that"
    return f"{stored} is told to go on; surefoot describe {stored.name} shows from which step"


async def _switched(cluster: OpenCluster, name: str, suspend: bool, wait_seconds: float) -> tuple[bool, str]:
    stored = await read_job(cluster, name)
    operations = change(stored, suspend)
    if operations:
        try:
            await cluster.api.patch(api_objects.jobs_path(cluster.namespace, name), operations)
        except FabricError as error:
            raise refused(error, jobs_right("patch", cluster.namespace), cluster.server) from error
    due = time.monotonic() + wait_seconds
    while not is_so(stored, suspend) and time.monotonic() < due:
        await asyncio.sleep(_LOOK_SECONDS)
        stored = await read_job(cluster, name)
    return not wait_seconds or is_so(stored, suspend), standing(stored, suspend, wait_seconds)
