"""Defines the Platform protocol: how the operator observes and changes workers, nodes, memory servers, job and status.

Implemented on Kubernetes (`platforms.kubernetes`) and on one machine (`platforms.local`); called only by `reconcile`. A
platform decides nothing: it reports the objects that exist, and carries out a plan's actions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.api.status import JobStatus
from surefoot_operator.job_snapshot import ObservedNode, ObservedPodGroups, ObservedPurge, ObservedWorker
from surefoot_operator.memory.connection_pool import MemoryServerAddress as MemoryServerAddress
from surefoot_operator.memory.connection_pool import MemoryTierCredentials as MemoryTierCredentials
from surefoot_operator.policy.core.actions import ApplyPodGroup, CreateWorker, DeletePodGroup, DeleteWorker, Event
from surefoot_operator.rejected_calls import RejectedCall


@dataclass(frozen=True, slots=True)
class PlatformSnapshot:
    """A consistent observation of a job and of everything on the platform that concerns it."""

    job: TrainingJob
    """The newest valid spec of the job."""
    status: JobStatus
    """The stored status."""
    workers: tuple[ObservedWorker, ...] = ()
    """Every worker that exists; a finished one until it is deleted."""
    nodes: tuple[ObservedNode, ...] = ()
    """All nodes of the cluster, or the simulated nodes of the local platform."""
    servers: tuple[MemoryServerAddress, ...] = ()
    """Addresses of all memory servers."""
    purges: tuple[ObservedPurge, ...] = ()
    """Attempts to delete the job's checkpoints from its persistent tier, once the job is being deleted."""
    spec_rejection: str = ""
    """Why the newest spec is invalid; `job` then has the last valid one. Empty: `job` has the newest spec."""
    free_nodes: int | None = None
    """Number of nodes that could take another worker now; None: only a scheduler knows."""
    rejected_calls: tuple[RejectedCall, ...] = ()
    """The same as `Platform.rejected_calls` returns."""
    pod_groups: ObservedPodGroups | None = None
    """The job's pod groups; None: the platform has no gang scheduler."""


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """Environment variables that an agent needs to find its job.

    The platform adds SUREFOOT_NODE, SUREFOOT_HOST, SUREFOOT_RUN_FOLDER, the template's own env, and the credentials of
    the persistent tier (`secret_ref`).
    """

    plain: Mapping[str, str]
    """Variables by name that may be stored and logged."""
    secret: Mapping[str, str] = field(repr=False)
    """Variables by name that must never be logged or appear on a command line."""


class Platform(Protocol):
    """Observes and changes the workers of one job and the objects around them.

    Every call returns within seconds and is safe to repeat.

    Raises:
        PlatformError: Any method may raise it; the call may have taken effect nevertheless.
    """

    async def observe(self) -> PlatformSnapshot:
        """Observes the job and its surroundings now; never returns empty lists because of an error.

        Raises:
            PlatformError: The platform cannot be observed; then nothing may be planned.
            ViewRefused: The operator lacks the permission to observe it.
            JobRejected: The stored job can be read, but no spec of it is valid.
        """
        ...

    def rejected_calls(self) -> tuple[RejectedCall, ...]:
        """Returns the API calls for this job, or for all jobs, that are rejected repeatedly; makes no call itself."""
        ...

    async def create_worker(self, worker: CreateWorker, environment: WorkerEnvironment) -> None:
        """Creates a worker; succeeds if it already exists and belongs to this job.

        Returns once the worker is recorded, not once it runs; it may stay Pending until a node is free.

        Args:
            worker: Index and attempt. Its `avoid_nodes` is a preference: a worker on such a node is better than none.
            environment: Environment variables of its agent.
        """
        ...

    async def delete_worker(self, worker: DeleteWorker) -> None:
        """Deletes a worker without waiting for its end; succeeds if it no longer exists.

        Args:
            worker: Its name and `uid`, which must match. By default the worker gets SIGTERM and, after the grace
                period, SIGKILL. `force` removes it at once, and kills it if its node can be reached.
        """
        ...

    async def apply_pod_group(self, action: ApplyPodGroup) -> None:
        """Creates the job's pod group, or changes the existing one.

        Called only if `observe` returns pod groups.

        Raises:
            PlatformError: A group of that name belongs to another owner, among other reasons.
        """
        ...

    async def delete_pod_group(self, action: DeletePodGroup) -> None:
        """Deletes exactly this pod group; succeeds if it no longer exists."""
        ...

    async def patch_status(self, new: JobStatus, old: JobStatus) -> JobStatus:
        """Replaces the stored status by compare-and-swap.

        Every write compares, even one that does not change the membership: the status is written as a whole, and of two
        leaders neither may overwrite the changes of the other.

        Args:
            new: The complete new status.
            old: The observed status from which `new` was decided.

        Returns:
            The status as it is stored now, with its serial increased by one.

        Raises:
            StatusConflict: The stored status has another serial, generation or membership state than `old`. Nothing was
                written, because `new` was decided from an outdated status.
            PlatformError: It is unknown whether the status was written.
        """
        ...

    async def set_finalizer(self, is_present: bool) -> None:
        """Adds or removes the job's finalizer; succeeds if that is already so.

        Args:
            is_present: Whether the job must have the finalizer, so that its deletion waits until it is removed.
        """
        ...

    async def start_purge(self, attempt: int, environment: WorkerEnvironment) -> None:
        """Starts to delete the job's persistent checkpoints, under the job's own identity.

        Args:
            attempt: Number of the attempt. Succeeds if it was started before; `observe` returns its progress.
            environment: Environment variables, the same as for a worker.
        """
        ...

    async def delete_job(self) -> None:
        """Deletes the job object, as a user would; succeeds if it no longer exists."""
        ...

    async def record_events(self, events: Sequence[Event]) -> None:
        """Records events for users, after the status write that they describe.

        Args:
            events: The events, oldest first.
        """
        ...

    def watch_changes(self) -> AsyncIterator[None]:
        """Yields whenever something that `observe` returns may have changed, until `close`.

        Has one consumer, and joins several changes into one. May yield without a change, which costs one observation,
        but never misses a change.
        """
        ...

    async def close(self) -> None:
        """Ends `watch_changes` and closes the operator's connections. Workers and memory servers keep running."""
        ...
