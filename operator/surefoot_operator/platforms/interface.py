"""Defines the Fabric protocol: workers, nodes, holders, job and status.

Implemented on one machine (`platforms.local`) and on Kubernetes; called by `reconcile` alone. A fabric decides nothing
about the world: it reports what exists, and carries out what a plan says.
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
from surefoot_operator.rejected_calls import RefusedCall


@dataclass(frozen=True, slots=True)
class PlatformSnapshot:
    """One consistent observation of everything a fabric knows of a job."""

    job: TrainingJob
    status: JobStatus
    workers: tuple[ObservedWorker, ...] = ()
    """Every worker that exists, finished ones included until they are deleted."""
    nodes: tuple[ObservedNode, ...] = ()
    servers: tuple[MemoryServerAddress, ...] = ()
    purges: tuple[ObservedPurge, ...] = ()
    """Tries at deleting what a deleted job has in its persistent tier."""
    rejection: str = ""
    """Why a newer spec than `job` cannot be acted upon: then `job` is the last one that could."""
    free_nodes: int | None = None
    """Nodes that could take another worker now; None where only a scheduler knows."""
    refused_calls: tuple[RefusedCall, ...] = ()
    """As `Fabric.refused_calls` answers."""
    pod_groups: ObservedPodGroups | None = None
    """None: no scheduler here knows groups."""


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """The variables that an agent needs to find its job.

    Nothing of `secret` may be logged or appear on a command line. The fabric adds SUREFOOT_NODE, SUREFOOT_HOST,
    SUREFOOT_RUN_FOLDER, the template's own env, and the persistent tier's credentials (`secret_ref`).
    """

    plain: Mapping[str, str]
    secret: Mapping[str, str] = field(repr=False)


class Platform(Protocol):
    """Shows and changes what provides a job's workers.

    Every call returns within seconds; all are safe to repeat.

    Raises:
        FabricError: any method; the call may have happened.
    """

    async def observe(self) -> PlatformSnapshot:
        """Looks now; an empty answer is never invented.

        Raises:
            FabricError: It cannot look: then nothing is planned.
            ViewRefused: It may not look.
            SpecRejected: What is stored can be looked at and not be carried.
        """
        ...

    def refused_calls(self) -> tuple[RefusedCall, ...]:
        """What its API refuses this job again and again, and every job; answers without a call."""
        ...

    async def create_worker(self, worker: CreateWorker, environment: WorkerEnvironment) -> None:
        """Creates a worker; one of this job that exists already is success.

        Returns once the worker is recorded, not once it runs; it may stay Pending until a node is free.

        Args:
            worker: Index and attempt. Its `avoid_nodes` is a wish: a worker on an avoided node is better than none.
            environment: What its agent is told.
        """
        ...

    async def delete_worker(self, worker: DeleteWorker) -> None:
        """Deletes a worker, without waiting for its end; one gone is success.

        Args:
            worker: Its name and `uid`, which must still be its own. Gently by default (SIGTERM, the grace period,
                SIGKILL); `force` forgets it at once and kills it if its node can be reached.
        """
        ...

    async def apply_pod_group(self, wanted: ApplyPodGroup) -> None:
        """Creates the job's pod group, or changes the one that is there.

        Asked for only where `observe` shows pod groups. A group of that name that is somebody else's is an error.
        """
        ...

    async def remove_group(self, removed: DeletePodGroup) -> None:
        """Deletes exactly this pod group; one that is gone is success."""
        ...

    async def patch_status(self, new: JobStatus, old: JobStatus) -> JobStatus:
        """Writes the whole status over the one that was observed.

        Every write tests, also those that leave the world alone: a status is written whole, and of two leaders of one
        world neither may undo what the other counted.

        Args:
            new: What is written, whole.
            old: As it was observed.

        Returns:
            The status as it stands now, its serial one on.

        Raises:
            WorldMoved: What is stored has another serial, or a world of another epoch or state: nothing is written,
                for `new` was decided from something that is past.
            FabricError: It is unknown whether it was written.
        """
        ...

    async def set_finalizer(self, held: bool) -> None:
        """Adds or removes the job's finalizer.

        What is so already is success.

        Args:
            held: Whether the job's deletion is to wait until it is let go again.
        """
        ...

    async def start_purge(self, attempt: int, environment: WorkerEnvironment) -> None:
        """Begins to delete the job's persistent checkpoints, with its own identity.

        Args:
            attempt: One that was begun already is success; `observe` shows how it goes.
            environment: As for a worker.
        """
        ...

    async def delete_job(self) -> None:
        """Deletes the job itself, as a person would; one gone is success."""
        ...

    async def record(self, events: Sequence[Event]) -> None:
        """Tells people, in order, after the status write they speak of.

        Args:
            events: The oldest first.
        """
        ...

    def watch_changes(self) -> AsyncIterator[None]:
        """Yields whenever something that `observe` shows may have changed.

        One consumer. Many changes are one. Yielding for nothing is allowed (it costs one observation), missing a change
        is not. Ends on `close`.
        """
        ...

    async def close(self) -> None:
        """Ends `changes` and closes the operator's connections. Workers and holders stay."""
        ...
