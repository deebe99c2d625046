"""Reads the run folder of `surefoot local` into a `JobView`.

Touches files and /proc, changes nothing, and works while the run goes on and after it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from surefoot_operator.api.status_json import status_to_json
from surefoot_operator.cli.cli_errors import UsageError
from surefoot_operator.cli.jobs.job_view import HolderLook, JobView
from surefoot_operator.cli.jobs.stored_job import StoredJob, stored_job
from surefoot_operator.cli.local.progress import RunProgress
from surefoot_operator.memory.holder_place import HolderPlace
from surefoot_operator.platforms.interface import FabricSeen
from surefoot_operator.platforms.local.folder_look import as_fabric_error, look
from surefoot_operator.platforms.local.run_folder import RunFolder, read_json


def read_run(root: Path) -> JobView:
    """Reads the run in `root`.

    Raises:
        UsageError: There is no run.
        FabricError: A file of it is damaged.
    """
    folder = RunFolder(root.resolve())
    if not folder.job.exists():
        raise UsageError(f"{root} is no run folder: give the one that surefoot local --run-folder was given")
    seen = look(folder)
    progress = RunProgress(folder)
    events = progress.look()
    return JobView(
        now=time.time(),
        stored=_stored(folder, seen, progress),
        workers=tuple(sorted(seen.workers, key=lambda one: (one.index, one.attempt))),
        nodes=seen.nodes,
        holders=_looks(seen.holders),
        events=tuple(events),
        free_nodes=seen.free_nodes,
    )


def _looks(places: Iterable[HolderPlace]) -> tuple[HolderLook, ...]:
    """One of each node, as a cluster's pod has all of its servers."""
    running: dict[str, bool] = {}
    for place in places:
        running[place.node] = running.get(place.node, True) and place.running
    return tuple(HolderLook(node, runs) for node, runs in running.items())


def _stored(folder: RunFolder, seen: FabricSeen, progress: RunProgress) -> StoredJob:
    """The status' file has no columns, which a cluster's fabric adds: they are made here of the same values."""
    document = as_fabric_error(read_json, folder.job) or {}
    ready = sum(worker.phase == "Running" and not worker.deleting for worker in seen.workers)
    status = {
        **status_to_json(seen.status),
        "phase": seen.status.phase,
        "ready": f"{ready}/{seen.job.spec.replicas}",
        "step": progress.reached_step or seen.status.step,
        "restarts": seen.status.restarts,
    }
    return stored_job({**document, "status": status})
