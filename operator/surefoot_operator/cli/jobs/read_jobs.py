"""Estimates a job's rate and what a failure now would repeat.

Pure; called by `describe`. A rate that is not known is None: a job that has just begun has none, and 0 would be an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from surefoot_operator.api.known_node_signals import KNOWN_SIGNALS
from surefoot_operator.api.parse import parse_job
from surefoot_operator.api.spec import GROUP, TOTAL_STEPS, TrainingJob
from surefoot_operator.api.status import JobStatus, parse_rfc3339
from surefoot_operator.api.status_json import status_from_json, status_to_json
from surefoot_operator.cli.cluster_access import (
    ClusterConnection,
    ClusterNotConfigured,
    ClusterRequestFailed,
    Permission,
    add_cluster,
    describe_api_error,
    jobs_right,
    open_cluster,
)
from surefoot_operator.cli.command_base import UsageError
from surefoot_operator.cli.local.progress import RunEvent, RunProgress
from surefoot_operator.errors import InvariantViolation, PlatformError, SpecError
from surefoot_operator.job_snapshot import MIN_STEPS, ObservedNode, ObservedWorker
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.views import observations
from surefoot_operator.platforms.kubernetes.views.observations import KubeletLiveness
from surefoot_operator.platforms.local.platform import as_platform_error, read_folder
from surefoot_operator.platforms.local.run_folder import RunFolder, read_json

# ---- stored job ------------------------------------------------------------------------------------------------------
# Reads a TrainingJob as it is stored, also one of another version. A person looks at a job most of all when something
# is wrong with it: a spec or a status that cannot be read is named beside what can, instead of an error in place of
# everything.

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredJob:
    """One stored job, as far as it can be read."""

    namespace: str
    name: str
    uid: str
    job: TrainingJob | None
    """None: its spec cannot be read."""
    status: JobStatus | None
    """None: its status cannot be read."""
    problems: tuple[str, ...] = ()
    """Why either is None."""
    phase: str = ""
    """As the column shows it, whatever version wrote it; empty: no operator has looked at the job yet."""
    ready: str = ""
    step: int | None = None
    restarts: int | None = None
    total_steps: int | None = None
    """What the job's annotation says that the program makes."""
    created_seconds: float | None = None
    checkpoint_seconds: float | None = None
    """When the newest complete checkpoint was first seen."""
    document: Object = field(default_factory=dict, compare=False, hash=False, repr=False)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def stored_job(document: Mapping[str, Any]) -> StoredJob:
    """Reads a stored object; never raises for what is in it."""
    metadata = _mapping(document.get("metadata"))
    columns = _mapping(document.get("status"))
    problems: list[str] = []
    job: TrainingJob | None = None
    status: JobStatus | None = None
    try:
        job = parse_job(document)
    except SpecError as error:
        problems.append(f"its spec cannot be read: {error}")
    try:
        status = status_from_json(columns)
    except InvariantViolation as error:
        problems.append(f"its status cannot be read by this version of surefoot: {error}")
    said = str(_mapping(metadata.get("annotations")).get(TOTAL_STEPS, ""))
    return StoredJob(
        namespace=str(metadata.get("namespace", "default")),
        name=str(metadata.get("name", "?")),
        uid=str(metadata.get("uid", "")),
        job=job,
        status=status,
        problems=tuple(problems),
        phase=str(columns.get("phase", "") or (status.phase if status is not None and columns else "")),
        ready=str(columns.get("ready", "")),
        step=_count(columns.get("step")) if columns else None,
        restarts=_count(columns.get("restarts", 0)) if columns else None,
        total_steps=int(said) if said.isascii() and said.isdigit() and 0 < len(said) < 16 else None,
        created_seconds=parse_rfc3339(metadata.get("creationTimestamp")),
        checkpoint_seconds=parse_rfc3339(columns.get("checkpointTime")),
        document=dict(document),
    )


def _mapping(value: object) -> Object:
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# ---- read jobs -------------------------------------------------------------------------------------------------------

_STATUS_SECONDS = 8.0
"""So old may a status' step be while trainers go on: the operator writes it no oftener. An older one says that they do not."""


@dataclass(frozen=True, slots=True)
class JobProgress:
    """Progress of one job and its rate; None: not known."""

    step: int | None = None
    total_steps: int | None = None
    steps_per_second: float | None = None
    remaining_seconds: float | None = None
    checkpoint_step: int | None = None
    """Of the newest complete checkpoint."""
    checkpoint_age_seconds: float | None = None
    exposed_steps: int | None = None
    """Steps since then, up to now: what a failure would have to repeat."""
    exposed_seconds: float | None = None


def pace_of(stored: StoredJob, now: float) -> JobProgress:
    """Estimates a job's pace at Unix time `now`."""
    status = stored.status
    if status is None or not stored.phase:
        return JobProgress(step=stored.step, total_steps=stored.total_steps)
    rate, saved, total = _steps_per_second(status), status.last_complete, stored.total_steps
    over = status.phase in ("Complete", "Failed")
    step = finished_step(status)
    exposed = None if over or saved is None else max(0, step_at(status, rate, now) - saved.step)
    left = None if total is None or rate is None or over else max(0, total - step) / rate
    aged = stored.checkpoint_seconds
    return JobProgress(
        step=step,
        total_steps=total,
        steps_per_second=rate,
        remaining_seconds=left,
        checkpoint_step=None if saved is None else saved.step,
        checkpoint_age_seconds=None if aged is None else max(0.0, now - aged),
        exposed_steps=exposed,
        exposed_seconds=None if exposed is None or rate is None else exposed / rate,
    )


def finished_step(status: JobStatus) -> int:
    """Returns the newest step known to be finished.

    A status may have heard of its checkpoint first.
    """
    return max(status.step, 0 if status.last_complete is None else status.last_complete.step)


def step_at(status: JobStatus, steps_per_second: float | None, now: float) -> int:
    """Estimates the step that trainers have come to at Unix time `now`.

    A status is seconds old: of a job that saves often, all that a failure would repeat was made since.
    """
    known = finished_step(status)
    if steps_per_second is None or status.phase != "Running" or status.progress_seconds is None:
        return known
    since = min(max(0.0, now - status.progress_seconds), _STATUS_SECONDS)
    return max(known, int(status.step + steps_per_second * since))


def _steps_per_second(status: JobStatus) -> float | None:
    """Over the present world since it was committed, else as the operator measured it for its intervals."""
    world = status.membership
    if world is None or world.state != "Committed" or not world.members:
        return None
    made = status.step - (world.parent.step if world.parent is not None else 0)
    seconds = (status.progress_seconds or 0.0) - world.changed_seconds
    measured = status.memory_interval.step_seconds if status.memory_interval is not None else None
    if measured:
        return 1 / measured
    return made / seconds if made >= MIN_STEPS and seconds > 0 else None


# ---- one job, from a cluster or a run folder -------------------------------------------------------------------------
# Defines everything one look at a job has found. What could not be read is part of the look: a table without nodes says
# why instead of showing none.


@dataclass(frozen=True, slots=True)
class JobView:
    """One job and its surroundings at one moment."""

    now: float
    stored: StoredJob
    workers: tuple[ObservedWorker, ...] = ()
    nodes: tuple[ObservedNode, ...] | None = ()
    """None: they may not be read."""
    servers: Mapping[str, bool] | None = field(default_factory=dict)
    """Node -> whether all of its holders run; None: they may not be read."""
    events: tuple[RunEvent, ...] = ()
    """Oldest first."""
    unread: tuple[str, ...] = ()
    """What could not be read, and why: a sentence each."""


# ---- run folder reads ------------------------------------------------------------------------------------------------
# Reads the run folder of `surefoot local` into a `JobView`. Touches files and /proc, changes nothing, and works while
# the run goes on and after it.


def read_run(root: Path) -> JobView:
    """Reads the run in `root`. Raises UsageError where there is none, FabricError where a file is damaged."""
    folder = RunFolder(root.resolve())
    if not folder.job_file.exists():
        raise UsageError(f"{root} is no run folder: give the one that surefoot local --run-folder was given")
    seen = read_folder(folder)
    progress = RunProgress(folder)
    events = progress.poll()
    running: dict[str, bool] = {}
    for place in seen.servers:  # one of each node, as a cluster's pod has all of its servers
        running[place.node] = running.get(place.node, True) and place.running
    document = as_platform_error(read_json, folder.job_file) or {}
    ready = sum(worker.phase == "Running" and not worker.deleting for worker in seen.workers)
    # the status' file has no columns, which a cluster's fabric adds: they are made here of the same values
    status = {
        **status_to_json(seen.status),
        "phase": seen.status.phase,
        "ready": f"{ready}/{seen.job.spec.replicas}",
        "step": progress.reached_step or seen.status.step,
        "restarts": seen.status.restarts,
    }
    return JobView(
        now=time.time(),
        stored=stored_job({**document, "status": status}),
        workers=tuple(sorted(seen.workers, key=lambda one: (one.index, one.attempt))),
        nodes=seen.nodes,
        servers=running,
        events=tuple(events),
    )


# ---- cluster reads ---------------------------------------------------------------------------------------------------
# Reads jobs and what surrounds them from a cluster. Touches the network. The job itself must be readable; of pods,
# nodes, holders and events each that may not be read is a sentence in the look, since many people may see their jobs
# and no node.

_PAGE = 500
_MAX_PAGES = 200
"""A server that hands out pages for ever is not followed; 100,000 objects are more than any cluster's nodes or a job's pods."""


async def read_jobs(cluster: ClusterConnection) -> list[StoredJob]:
    """Lists the TrainingJobs of the namespace meant, or of all. Raises ClusterRefused."""
    namespace = f"/namespaces/{cluster.namespace}" if cluster.namespace else ""
    path, needed = f"{api_objects.JOBS_API_PATH}{namespace}/trainingjobs", jobs_right("list", cluster.namespace)
    missing = (
        f"{cluster.server} knows no TrainingJobs: the CRD trainingjobs.{GROUP} is not installed there, or this is another"
        " cluster; docs/install.md says how to install it"
    )
    return [stored_job(one) for one in await listed_objects(cluster, path, needed, missing=missing)]


async def read_job(cluster: ClusterConnection, name: str) -> StoredJob:
    """Reads one TrainingJob. Raises ClusterRefused."""
    try:
        found = await cluster.api.get(api_objects.jobs_path(cluster.namespace, name))
    except PlatformError as error:
        missing = (
            f"there is no TrainingJob {name} in namespace {cluster.namespace} of {cluster.server};"
            " surefoot list -A shows all that you may see"
        )
        raise describe_api_error(error, jobs_right("get", cluster.namespace), cluster.server, missing) from error
    return stored_job(found)


async def read_view(cluster: ClusterConnection, name: str) -> JobView:
    """Reads a job, its pods, events, nodes and holders. Raises ClusterRefused."""
    stored = await read_job(cluster, name)
    namespace, unread = stored.namespace, list[str]()
    events = api_objects.core_path(namespace, "events")
    of_job, of_holders = f"involvedObject.uid={stored.uid}", api_objects.MEMORY_SERVER_SELECTOR
    calls = (
        read_worker_pods(cluster, stored),
        listed_objects(cluster, "/api/v1/nodes", Permission("list", "nodes")),
        listed_objects(cluster, "/api/v1/pods", Permission("list", "pods"), {"labelSelector": of_holders}),
        listed_objects(cluster, events, Permission("list", "events", namespace), {"fieldSelector": of_job}),
    )
    pods, around, holders, told = await asyncio.gather(*(_optional(unread, call) for call in calls))
    return JobView(
        now=time.time(),
        stored=stored,
        workers=workers_of(pods or (), unread),
        nodes=None if around is None else nodes_of(around, stored),
        servers=None if holders is None else servers_of(holders),
        events=events_of(told or ()),
        unread=tuple(unread),
    )


async def listed_objects(
    cluster: ClusterConnection, path: str, needed: Permission, query: Mapping[str, str] | None = None, missing: str = ""
) -> list[Object]:
    """Lists objects, page by page. Raises ClusterRefused, also without an end."""
    found: list[Object] = []
    further = ""
    for _ in range(_MAX_PAGES):
        asked: dict[str, str | int] = {**(query or {}), "limit": _PAGE, **({"continue": further} if further else {})}
        try:
            page = await cluster.api.get(path, asked)
        except PlatformError as error:
            raise describe_api_error(error, needed, cluster.server, missing) from error
        found += page.get("items", ())
        further = str(page.get("metadata", {}).get("continue") or "")
        if not further:
            return found
    # part of a list would be taken for the whole: a job that is not in it for one that is not there
    raise ClusterRequestFailed(
        f"{cluster.server} handed out {_MAX_PAGES} pages of {path}, {len(found)} objects, and named a further one; nothing"
        " of them is shown, as what was not read would be missing: give -n NAMESPACE, and see what fills the list"
    )


async def read_worker_pods(cluster: ClusterConnection, stored: StoredJob) -> list[Object]:
    """Lists a job's own worker pods. Raises ClusterRefused."""
    path = api_objects.core_path(stored.namespace, "pods")
    needed = Permission("list", "pods", stored.namespace)
    found = await listed_objects(cluster, path, needed, {"labelSelector": api_objects.job_selector(stored.uid)})
    me = api_objects.JobIdentity(stored.namespace, stored.name, stored.uid)
    return [
        pod for pod in found if api_objects.is_controlled_by(pod, me) and api_objects.role_of(pod) == api_objects.WORKER
    ]


async def _optional(unread: list[str], call: Awaitable[list[Object]]) -> list[Object] | None:
    try:
        return await call
    except ClusterRequestFailed as error:
        unread.append(str(error))
        return None


# ---- pure -----------------------------------------------------------------------------------------------------------


def workers_of(pods: Sequence[Object], unread: list[str]) -> tuple[ObservedWorker, ...]:
    """Translates worker pods; one that is none of the operator's is named."""
    found = []
    for pod in pods:
        try:
            found.append(observations.observe_worker(pod))
        except PlatformError as error:
            unread.append(str(error))
    return tuple(sorted(found, key=lambda one: (one.index, one.attempt)))


def nodes_of(found: Sequence[Object], stored: StoredJob) -> tuple[ObservedNode, ...]:
    """Translates nodes as the operator does, but without leases."""
    spec = stored.job.spec if stored.job is not None else None
    key = spec.checkpoint.memory.topology_key if spec is not None else api_objects.HOSTNAME_LABEL
    signals = (spec.health_policy.node_signals if spec is not None else None) or KNOWN_SIGNALS
    seen = [observations.observe_node(one, KubeletLiveness(), key, signals) for one in found]
    return observations.confirm_node_failures(sorted(seen, key=lambda one: one.name))


def servers_of(pods: Sequence[Object]) -> dict[str, bool]:
    """Translates holders' pods: those that have a node."""
    return {node: observations.is_ready(pod) for pod in pods if (node := observations.node_of(pod))}


def events_of(found: Sequence[Object]) -> tuple[RunEvent, ...]:
    """Translates core/v1 events, oldest first."""
    told = []
    for event in found:
        at = parse_rfc3339(event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp"))
        reason, message = str(event.get("reason", "")), str(event.get("message", ""))
        told.append(RunEvent(at or 0.0, reason, message, event.get("type") == "Warning"))
    return tuple(sorted(told, key=lambda one: one.at_seconds))


# ---- where a command's job is ----------------------------------------------------------------------------------------
# Chooses whether a command reads its job from a cluster or from a run folder. Touches the network or files.

T = TypeVar("T")


def add_job(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name one job."""
    parser.add_argument("job", nargs="?", metavar="JOB", help="the TrainingJob's name; with --run-folder none")
    add_run_folder(parser)
    add_cluster(parser)


def add_run_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run-folder", type=Path, metavar="DIR", help="a run of surefoot local instead of a cluster")


def view_of(given: argparse.Namespace) -> JobView:
    """Looks at the job that was named. Raises UsageError, RunError, OperatorError."""
    check_named(given)
    if given.run_folder is not None:
        return read_run(given.run_folder)
    return on_cluster(given, lambda cluster: read_view(cluster, given.job))


def check_named(given: argparse.Namespace) -> None:
    """Raises UsageError unless exactly one job is named."""
    if (given.job is None) == (given.run_folder is None):
        raise UsageError(
            f"{given.command} needs the name of a TrainingJob, or --run-folder DIR; surefoot list has names"
        )


def on_cluster(given: argparse.Namespace, ask: Callable[[ClusterConnection], Awaitable[T]]) -> T:
    """Runs one conversation with the chosen cluster. Raises UsageError where none is configured."""

    async def asked() -> T:
        async with open_cluster(given) as cluster:
            return await ask(cluster)

    try:
        return asyncio.run(asked())
    except ClusterNotConfigured as error:
        if not hasattr(given, "run_folder"):
            raise
        raise UsageError(f"{error}, or --run-folder DIR for a run of surefoot local") from error
