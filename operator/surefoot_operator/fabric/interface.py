"""Defines the Fabric protocol: workers, nodes, holders, job and status.

Touches nothing itself. Implemented by `fabric.processes` (one machine) and by the Kubernetes fabric; called by
`reconcile` alone. A fabric decides nothing about the world: it shows, and it does as told.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.api.status import JobStatus
from surefoot_operator.memory.holder_place import HolderPlace as HolderPlace
from surefoot_operator.memory.holder_place import TierAccess as TierAccess
from surefoot_operator.observed import NodeSeen, PurgeSeen, WorkerSeen
from surefoot_operator.policy.actions import CreateWorker, DeleteWorker, Event


@dataclass(frozen=True, slots=True)
class FabricSeen:
    """One consistent look at everything a fabric knows of one job."""

    job: TrainingJob
    status: JobStatus
    workers: tuple[WorkerSeen, ...] = ()
    """Every worker that exists, finished ones included until they are deleted."""
    nodes: tuple[NodeSeen, ...] = ()
    holders: tuple[HolderPlace, ...] = ()
    purges: tuple[PurgeSeen, ...] = ()
    """Tries at deleting what a deleted job has in its persistent tier."""
    refusal: str = ""
    """Why a newer spec than `job` cannot be acted upon: then `job` is the last one that could."""
    free_nodes: int | None = None
    """Nodes that could take another worker now; None where only a scheduler knows."""


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """What an agent must be told to find its job. Nothing of `secret` may be logged or stand on a command line.

    The fabric adds what only the place knows: SUREFOOT_NODE, SUREFOOT_HOST, SUREFOOT_RUN_FOLDER, the template's own
    env, and the persistent tier's credentials (`secret_ref`).
    """

    plain: Mapping[str, str]
    secret: Mapping[str, str] = field(repr=False)


class Fabric(Protocol):
    """Every call returns within seconds or raises FabricError; all are safe to repeat."""

    async def observe(self) -> FabricSeen:
        """Looks now. Raises FabricError if it cannot: then nothing is planned, an empty answer is never invented.

        Raises JobRefused if what is stored can be looked at and not be carried.
        """
        ...

    async def create_worker(self, worker: CreateWorker, environment: WorkerEnvironment) -> None:
        """Creates worker (index, attempt); one of this job that exists already is success. Raises FabricError.

        Returns once the worker is recorded, not once it runs; it may stay Pending until a node is free.
        `avoid_nodes` is a wish: a worker on an avoided node is better than none.
        """
        ...

    async def delete_worker(self, worker: DeleteWorker) -> None:
        """Deletes the worker of that name if its uid is still `uid`; one that is gone is success. Raises FabricError.

        Gently by default (SIGTERM, the grace period, SIGKILL), without waiting for its end; `force` forgets it at
        once and kills it if its node can be reached.
        """
        ...

    async def patch_status(self, new: JobStatus, old: JobStatus) -> JobStatus:
        """Writes the whole status over `old`, as it was observed; returns it as it stands now, its serial one on.

        Raises WorldMoved if what is stored has another serial, or a world of another epoch or state: nothing is
        written, for `new` was decided from something that is past. Raises FabricError if it is unknown whether it was
        written. Every write tests, also those that leave the world alone: a status is written whole, and of two
        leaders of one world neither may undo what the other counted.
        """
        ...

    async def hold_job(self, held: bool) -> None:
        """Lets the job's deletion wait until it is let go again; what is so already is success. Raises FabricError."""
        ...

    async def purge(self, attempt: int, environment: WorkerEnvironment) -> None:
        """Begins to delete what the job has in its persistent tier, with the job's own identity. Raises FabricError.

        An attempt that was begun already is success; how it goes is seen.
        """
        ...

    async def delete_job(self) -> None:
        """Deletes the job itself, as a person would; one that is gone is success. Raises FabricError."""
        ...

    async def record(self, events: Sequence[Event]) -> None:
        """Tells people, in order; called after the status write that they speak of. Raises FabricError."""
        ...

    def changes(self) -> AsyncIterator[None]:
        """Yields whenever something that `observe` shows may have changed, many changes as one; ends on `close`.

        One consumer. Yielding for nothing is allowed (it costs one observation), missing a change is not.
        """
        ...

    async def close(self) -> None:
        """Ends `changes` and lets go of everything of the operator's own. Workers and holders stay as they are."""
        ...
