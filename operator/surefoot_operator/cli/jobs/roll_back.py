"""Implements `surefoot rollback JOB --to STEP`: asks the operator to go back.

Called by `suspend_and_rollback`. It writes one annotation and nothing else; what follows is the operator's. `asking` is pure.
"""

from __future__ import annotations

from typing import Any

from surefoot_operator.api.spec import MANAGER, ROLLBACK
from surefoot_operator.cli.cli_errors import UsageError
from surefoot_operator.cli.cluster_access import OpenCluster
from surefoot_operator.cli.cluster_refusals import jobs_right, refused
from surefoot_operator.cli.jobs.cluster_reads import read_job
from surefoot_operator.cli.jobs.stored_job import StoredJob
from surefoot_operator.errors import FabricError
from surefoot_operator.platforms.kubernetes import api_objects


def asking(stored: StoredJob, step: int, keep_data: bool) -> list[dict[str, Any]]:
    """Builds the patch that asks for it.

    Raises:
        UsageError: The job has no world that could go back, or the step is not before its present one.
    """
    status = stored.status
    if stored.phase in ("Complete", "Failed"):
        raise UsageError(
            f"{stored} is {stored.phase}: a job that is over does not go back; --step N makes one that goes on from there"
        )
    manager = stored.document.get("spec", {}).get("managedBy", MANAGER)
    if manager != MANAGER:
        raise UsageError(f"{stored} is looked after by {manager} (spec.managedBy)")
    if status is None or status.world is None or status.world.state != "Committed":
        raise UsageError(f"{stored} is just changing its world, or has none yet: try again once it trains")
    if not 0 < step <= max(status.step, stored.step or 0):
        raise UsageError(f"--to {step} is not allowed; {stored} has finished step {status.step}: a step before that is")
    word = f"{status.world.epoch}/{step}{'/keep-data' if keep_data else ''}"
    patch = [{"op": "test", "path": "/metadata/uid", "value": stored.uid}]
    if not stored.document["metadata"].get("annotations"):
        return [*patch, {"op": "add", "path": "/metadata/annotations", "value": {ROLLBACK: word}}]
    return [*patch, {"op": "add", "path": f"/metadata/annotations/{ROLLBACK.replace('/', '~1')}", "value": word}]


async def roll_back(cluster: OpenCluster, name: str, step: int, keep_data: bool) -> str:
    """Asks for it; says what to look at."""
    stored = await read_job(cluster, name)
    operations = asking(stored, step, keep_data)
    try:
        await cluster.api.patch(api_objects.jobs_path(cluster.namespace, name), operations)
    except FabricError as error:
        raise refused(error, jobs_right("patch", cluster.namespace), cluster.server) from error
    return (
        f"{stored} is told to go back to step {step}; surefoot describe {name} shows that it does, or, in its condition"
        " RollbackRefused, which steps it could go back to"
    )
