"""Reads a job and its surroundings, from a cluster or a run folder, and estimates its progress.

Shared by all commands that show or change one job. Estimates that are not known yet are None, never 0.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from surefoot_operator.api.known_node_signals import KNOWN_SIGNALS
from surefoot_operator.api.parse import parse_job
from surefoot_operator.api.spec import GROUP, TOTAL_STEPS, TrainingJob
from surefoot_operator.api.status import MIN_STEPS, JobStatus, parse_rfc3339
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
from surefoot_operator.cli.local.run_event import RunEvent
from surefoot_operator.errors import InvariantViolation, PlatformError, SpecError
from surefoot_operator.platforms.kubernetes import api_objects

if TYPE_CHECKING:
    from surefoot_operator.job_snapshot import ObservedNode, ObservedWorker

# ---- stored job ------------------------------------------------------------------------------------------------------
# Parses a TrainingJob as it is stored, also one that another version wrote. Users inspect a job mostly when something
# is wrong with it. So if its spec or status cannot be read, the commands report that and show the rest.

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A TrainingJob as it is stored, parsed as far as possible."""

    namespace: str
    name: str
    uid: str
    job: TrainingJob | None
    """Parsed spec; None if it cannot be read."""
    status: JobStatus | None
    """Parsed status; None if it cannot be read."""
    problems: tuple[str, ...] = ()
    """Sentences that explain why the spec or the status cannot be read."""
    phase: str = ""
    """Value of the status' phase field, also if the status cannot be parsed; empty before an operator wrote one."""
    ready: str = ""
    step: int | None = None
    restarts: int | None = None
    total_steps: int | None = None
    """Number of steps that the program intends to run, from the job's annotation; None if it is missing or invalid."""
    created_seconds: float | None = None
    checkpoint_seconds: float | None = None
    """Unix time at which the newest complete checkpoint was first observed."""
    document: Object = field(default_factory=dict, compare=False, hash=False, repr=False)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def stored_job(document: Mapping[str, Any]) -> StoredJob:
    """Parses a stored object. Invalid content never raises; it is listed in `problems`."""
    metadata = _mapping_or_empty(document.get("metadata"))
    columns = _mapping_or_empty(document.get("status"))
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
    total_steps_text = str(_mapping_or_empty(metadata.get("annotations")).get(TOTAL_STEPS, ""))
    return StoredJob(
        namespace=str(metadata.get("namespace", "default")),
        name=str(metadata.get("name", "?")),
        uid=str(metadata.get("uid", "")),
        job=job,
        status=status,
        problems=tuple(problems),
        phase=str(columns.get("phase", "") or (status.phase if status is not None and columns else "")),
        ready=str(columns.get("ready", "")),
        step=_count_or_none(columns.get("step")) if columns else None,
        restarts=_count_or_none(columns.get("restarts", 0)) if columns else None,
        total_steps=int(total_steps_text)
        if total_steps_text.isascii() and total_steps_text.isdigit() and 0 < len(total_steps_text) < 16
        else None,
        created_seconds=parse_rfc3339(metadata.get("creationTimestamp")),
        checkpoint_seconds=parse_rfc3339(columns.get("checkpointTime")),
        document=dict(document),
    )


def _mapping_or_empty(value: object) -> Object:
    return value if isinstance(value, dict) else {}


def _count_or_none(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# ---- read jobs -------------------------------------------------------------------------------------------------------

_MAX_STATUS_AGE_SECONDS = 8.0
"""Limit for extrapolating a status' step. The operator writes a running job's status at least this often; an older step
means that the trainers have stopped."""


@dataclass(frozen=True, slots=True)
class JobProgress:
    """Progress of one job, its rate and its exposure to a failure; None where a value is not known."""

    step: int | None = None
    total_steps: int | None = None
    steps_per_second: float | None = None
    remaining_seconds: float | None = None
    checkpoint_step: int | None = None
    """Step of the newest complete checkpoint."""
    checkpoint_age_seconds: float | None = None
    exposed_steps: int | None = None
    """Steps made since the newest complete checkpoint, which a failure now would repeat."""
    exposed_seconds: float | None = None


def pace_of(stored: StoredJob, now: float) -> JobProgress:
    """Estimates a job's progress and rate at Unix time `now`."""
    status = stored.status
    if status is None or not stored.phase:
        return JobProgress(step=stored.step, total_steps=stored.total_steps)
    steps_per_second, checkpoint, total_steps = _steps_per_second(status), status.last_complete, stored.total_steps
    is_over = status.phase in ("Complete", "Failed")
    step = finished_step(status)
    exposed_steps = (
        None if is_over or checkpoint is None else max(0, step_at(status, steps_per_second, now) - checkpoint.step)
    )
    remaining_seconds = (
        None
        if total_steps is None or steps_per_second is None or is_over
        else max(0, total_steps - step) / steps_per_second
    )
    checkpoint_seconds = stored.checkpoint_seconds
    return JobProgress(
        step=step,
        total_steps=total_steps,
        steps_per_second=steps_per_second,
        remaining_seconds=remaining_seconds,
        checkpoint_step=None if checkpoint is None else checkpoint.step,
        checkpoint_age_seconds=None if checkpoint_seconds is None else max(0.0, now - checkpoint_seconds),
        exposed_steps=exposed_steps,
        exposed_seconds=None if exposed_steps is None or steps_per_second is None else exposed_steps / steps_per_second,
    )


def finished_step(status: JobStatus) -> int:
    """Returns the newest step known to be finished.

    The status may already name a checkpoint of a later step than its own `step`.
    """
    return max(status.step, 0 if status.last_complete is None else status.last_complete.step)


def step_at(status: JobStatus, steps_per_second: float | None, now: float) -> int:
    """Estimates the step that the trainers have reached at Unix time `now`.

    A status is seconds old. A job that saves often may have made all of its exposed steps since.
    """
    reported_step = finished_step(status)
    if steps_per_second is None or status.phase != "Running" or status.progress_seconds is None:
        return reported_step
    elapsed_seconds = min(max(0.0, now - status.progress_seconds), _MAX_STATUS_AGE_SECONDS)
    return max(reported_step, int(status.step + steps_per_second * elapsed_seconds))


def _steps_per_second(status: JobStatus) -> float | None:
    """Returns the operator's measured rate, else the average since the current generation was committed.

    None if no generation is committed, or it has not made enough steps for an average.
    """
    membership = status.membership
    if membership is None or membership.state != "Committed" or not membership.members:
        return None
    steps_in_generation = status.step - (membership.parent.step if membership.parent is not None else 0)
    training_seconds = (status.progress_seconds or 0.0) - membership.changed_seconds
    measured_step_seconds = status.memory_interval.step_seconds if status.memory_interval is not None else None
    if measured_step_seconds:
        return 1 / measured_step_seconds
    return steps_in_generation / training_seconds if steps_in_generation >= MIN_STEPS and training_seconds > 0 else None


# ---- one job, from a cluster or a run folder -------------------------------------------------------------------------
# Defines the input of all commands that show a job. It also lists the objects that could not be read, so that a table
# without nodes gives the reason instead of being empty.


@dataclass(frozen=True, slots=True)
class JobView:
    """A job, its workers and events, and the cluster around it, at one moment."""

    now: float
    stored: StoredJob
    workers: tuple[ObservedWorker, ...] = ()
    nodes: tuple[ObservedNode, ...] | None = ()
    """The cluster's nodes; None if the user may not read them."""
    servers: Mapping[str, bool] | None = field(default_factory=dict)
    """Node -> whether all of its memory servers run; None if the user may not read their pods."""
    events: tuple[RunEvent, ...] = ()
    """Events of the job, oldest first."""
    unread: tuple[str, ...] = ()
    """Objects that could not be read: one sentence each, with the reason."""


# ---- run folder reads ------------------------------------------------------------------------------------------------
# Reads the run folder of `surefoot local` into a `JobView`. Reads files and /proc, changes nothing, and works during
# the run and after it.


def read_run(root: Path) -> JobView:
    """Reads the run in folder `root`.

    Raises:
        UsageError: The folder contains no run.
        PlatformError: A file of the run is damaged.
    """
    # These import the whole local platform, which takes longer than to ask a cluster for its jobs.
    from surefoot_operator.cli.local.progress import RunProgress
    from surefoot_operator.platforms.local.platform import as_platform_error, read_folder
    from surefoot_operator.platforms.local.run_folder import RunFolder, read_json

    folder = RunFolder(root.resolve())
    if not folder.job_file.exists():
        raise UsageError(f"{root} is no run folder: give the one that surefoot local --run-folder was given")
    snapshot = read_folder(folder)
    progress = RunProgress(folder)
    events = progress.poll()
    servers_running: dict[str, bool] = {}
    for server in snapshot.servers:  # one entry per node, as one pod runs all servers of a node
        servers_running[server.node] = servers_running.get(server.node, True) and server.running
    document = as_platform_error(read_json, folder.job_file) or {}
    ready = sum(worker.phase == "Running" and not worker.deleting for worker in snapshot.workers)
    # The status file lacks the printed columns that the Kubernetes platform adds: derive them from the same values.
    status = {
        **status_to_json(snapshot.status),
        "phase": snapshot.status.phase,
        "ready": f"{ready}/{snapshot.job.spec.replicas}",
        "step": progress.reached_step or snapshot.status.step,
        "restarts": snapshot.status.restarts,
    }
    return JobView(
        now=time.time(),
        stored=stored_job({**document, "status": status}),
        workers=tuple(sorted(snapshot.workers, key=lambda worker: (worker.index, worker.attempt))),
        nodes=snapshot.nodes,
        servers=servers_running,
        events=tuple(events),
    )


# ---- cluster reads ---------------------------------------------------------------------------------------------------
# Reads jobs and their surroundings from a cluster, over the network. The job itself must be readable. Pods, nodes,
# memory servers and events that the user may not read are listed in the view instead, since many users may see their
# jobs but no node.

_PAGE_OBJECTS = 500
_MAX_PAGES = 200
"""Protects against a server that returns pages without end. 100,000 objects exceed any list of nodes or pods."""


async def read_jobs(cluster: ClusterConnection) -> list[StoredJob]:
    """Lists the TrainingJobs of the connection's namespace, or of all namespaces. Raises ClusterRequestFailed."""
    namespace = f"/namespaces/{cluster.namespace}" if cluster.namespace else ""
    path, permission = f"{api_objects.JOBS_API_PATH}{namespace}/trainingjobs", jobs_right("list", cluster.namespace)
    missing = (
        f"{cluster.server} serves no TrainingJobs: the CRD trainingjobs.{GROUP} is not installed there, or this is another"
        " cluster; docs/install.md describes how to install it"
    )
    return [stored_job(document) for document in await listed_objects(cluster, path, permission, missing=missing)]


async def read_job(cluster: ClusterConnection, name: str) -> StoredJob:
    """Reads one TrainingJob. Raises ClusterRequestFailed."""
    try:
        document = await cluster.api.get(api_objects.jobs_path(cluster.namespace, name))
    except PlatformError as error:
        missing = (
            f"there is no TrainingJob {name} in namespace {cluster.namespace} of {cluster.server};"
            " surefoot list -A shows all that you may see"
        )
        raise describe_api_error(error, jobs_right("get", cluster.namespace), cluster.server, missing) from error
    return stored_job(document)


async def read_view(cluster: ClusterConnection, name: str) -> JobView:
    """Reads a job, its pods and events, the nodes and the memory servers.

    Raises:
        ClusterRequestFailed: The job cannot be read. Other objects that cannot be read are listed in `unread`.
    """
    stored = await read_job(cluster, name)
    namespace, unread = stored.namespace, list[str]()
    events = api_objects.core_path(namespace, "events")
    of_job, of_servers = f"involvedObject.uid={stored.uid}", api_objects.MEMORY_SERVER_SELECTOR
    calls = (
        read_worker_pods(cluster, stored),
        listed_objects(cluster, "/api/v1/nodes", Permission("list", "nodes")),
        listed_objects(cluster, "/api/v1/pods", Permission("list", "pods"), {"labelSelector": of_servers}),
        listed_objects(cluster, events, Permission("list", "events", namespace), {"fieldSelector": of_job}),
    )
    pods, nodes, server_pods, job_events = await asyncio.gather(*(_list_or_report(unread, call) for call in calls))
    return JobView(
        now=time.time(),
        stored=stored,
        workers=workers_of(pods or (), unread),
        nodes=None if nodes is None else nodes_of(nodes, stored),
        servers=None if server_pods is None else servers_of(server_pods),
        events=events_of(job_events or ()),
        unread=tuple(unread),
    )


async def listed_objects(
    cluster: ClusterConnection,
    path: str,
    permission: Permission,
    query: Mapping[str, str] | None = None,
    missing: str = "",
) -> list[Object]:
    """Lists objects, page by page.

    Args:
        permission: Named in the error if the request is forbidden.
        missing: Error text for a path that does not exist.

    Raises:
        ClusterRequestFailed: A request failed, or the list has more than _MAX_PAGES pages.
    """
    objects: list[Object] = []
    continue_token = ""
    for _ in range(_MAX_PAGES):
        parameters: dict[str, str | int] = {
            **(query or {}),
            "limit": _PAGE_OBJECTS,
            **({"continue": continue_token} if continue_token else {}),
        }
        try:
            page = await cluster.api.get(path, parameters)
        except PlatformError as error:
            raise describe_api_error(error, permission, cluster.server, missing) from error
        objects += page.get("items", ())
        continue_token = str(page.get("metadata", {}).get("continue") or "")
        if not continue_token:
            return objects
    # Raise instead of returning a partial list: a job missing from it would seem not to exist.
    raise ClusterRequestFailed(
        f"{cluster.server} handed out {_MAX_PAGES} pages of {path}, {len(objects)} objects, and named a further one; nothing"
        " of them is shown, as what was not read would be missing: give -n NAMESPACE, and see what fills the list"
    )


async def read_worker_pods(cluster: ClusterConnection, stored: StoredJob) -> list[Object]:
    """Lists the job's worker pods, without those of another job of its name. Raises ClusterRequestFailed."""
    path = api_objects.core_path(stored.namespace, "pods")
    permission = Permission("list", "pods", stored.namespace)
    pods = await listed_objects(cluster, path, permission, {"labelSelector": api_objects.job_selector(stored.uid)})
    identity = api_objects.JobIdentity(stored.namespace, stored.name, stored.uid)
    return [
        pod
        for pod in pods
        if api_objects.is_controlled_by(pod, identity) and api_objects.role_of(pod) == api_objects.WORKER
    ]


async def _list_or_report(unread: list[str], call: Awaitable[list[Object]]) -> list[Object] | None:
    """Awaits a request; if it fails, adds the reason to `unread` and returns None."""
    try:
        return await call
    except ClusterRequestFailed as error:
        unread.append(str(error))
        return None


# ---- pure parsing ----------------------------------------------------------------------------------------------------
# `observations` is imported where it is used: it loads the client of memory servers, which `surefoot list` does not need.


def workers_of(pods: Sequence[Object], unread: list[str]) -> tuple[ObservedWorker, ...]:
    """Parses worker pods, sorted by index and attempt; adds an error to `unread` for each that cannot be parsed."""
    from surefoot_operator.platforms.kubernetes.views import observations

    workers = []
    for pod in pods:
        try:
            workers.append(observations.observe_worker(pod))
        except PlatformError as error:
            unread.append(str(error))
    return tuple(sorted(workers, key=lambda worker: (worker.index, worker.attempt)))


def nodes_of(documents: Sequence[Object], stored: StoredJob) -> tuple[ObservedNode, ...]:
    """Parses nodes as the operator does, but without their leases, and sorts them by name."""
    from surefoot_operator.platforms.kubernetes.views import observations

    spec = stored.job.spec if stored.job is not None else None
    topology_key = spec.checkpoint.memory.topology_key if spec is not None else api_objects.HOSTNAME_LABEL
    signals = (spec.health_policy.node_signals if spec is not None else None) or KNOWN_SIGNALS
    nodes = [
        observations.observe_node(document, observations.KubeletLiveness(), topology_key, signals)
        for document in documents
    ]
    return observations.confirm_node_failures(sorted(nodes, key=lambda node: node.name))


def servers_of(pods: Sequence[Object]) -> dict[str, bool]:
    """Maps the node of each memory server's pod to whether the pod is ready; unscheduled pods are omitted."""
    from surefoot_operator.platforms.kubernetes.views import observations

    return {node: observations.is_ready(pod) for pod in pods if (node := observations.node_of(pod))}


def events_of(documents: Sequence[Object]) -> tuple[RunEvent, ...]:
    """Parses core/v1 events, oldest first."""
    events = []
    for document in documents:
        at_seconds = parse_rfc3339(
            document.get("lastTimestamp") or document.get("eventTime") or document.get("firstTimestamp")
        )
        reason, message = str(document.get("reason", "")), str(document.get("message", ""))
        events.append(RunEvent(at_seconds or 0.0, reason, message, document.get("type") == "Warning"))
    return tuple(sorted(events, key=lambda event: event.at_seconds))


# ---- where a command's job is ----------------------------------------------------------------------------------------
# Chooses whether a command reads its job from a cluster, over the network, or from the files of a run folder.

T = TypeVar("T")


def add_job(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name one job."""
    parser.add_argument("job", nargs="?", metavar="JOB", help="the TrainingJob's name; with --run-folder none")
    add_run_folder(parser)
    add_cluster(parser)


def add_run_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run-folder", type=Path, metavar="DIR", help="a run of surefoot local instead of a cluster")


def view_of(args: argparse.Namespace) -> JobView:
    """Reads the job that the arguments name. Raises UsageError, RunError, OperatorError."""
    check_named(args)
    if args.run_folder is not None:
        return read_run(args.run_folder)
    return on_cluster(args, lambda cluster: read_view(cluster, args.job))


def check_named(args: argparse.Namespace) -> None:
    """Raises UsageError unless the arguments name a job or a run folder, and not both."""
    if (args.job is None) == (args.run_folder is None):
        raise UsageError(
            f"{args.command} needs the name of a TrainingJob, or --run-folder DIR; surefoot list has names"
        )


def on_cluster(args: argparse.Namespace, ask: Callable[[ClusterConnection], Awaitable[T]]) -> T:
    """Connects to the chosen cluster and returns the result of `ask`.

    Raises:
        UsageError: No cluster is configured, and a run folder could be given instead.
        ClusterNotConfigured: No cluster is configured, and the command works only on a cluster.
    """

    async def ask_cluster() -> T:
        async with open_cluster(args) as cluster:
            return await ask(cluster)

    try:
        return asyncio.run(ask_cluster())
    except ClusterNotConfigured as error:
        if not hasattr(args, "run_folder"):
            raise
        raise UsageError(f"{error}, or --run-folder DIR for a run of surefoot local") from error
