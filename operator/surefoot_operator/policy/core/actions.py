"""Defines the idempotent actions that plans and maintenance request.

They are carried out in this order: first the patch of the membership (the fence), then the memory tier and messages to agents;
creates and deletes of workers each on their own, and a pod group before its workers. Sending a membership to agents is no
action: the coordinator derives it from the patched status.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from surefoot.protocol.identities import Checkpoint, MemoryServerInstance, RankSave, SourceJob, WorkerId
from surefoot.protocol.messages import Barrier
from surefoot.protocol.text import join_names
from surefoot_operator.api.spec import Gang
from surefoot_operator.api.status import JobStatus
from surefoot_operator.job_snapshot import PodGroup


@dataclass(frozen=True, slots=True)
class CreateWorker:
    """Create one attempt of a worker; if it exists already, that is success."""

    index: int
    attempt: int
    avoid_nodes: tuple[str, ...] = ()
    """Names of nodes that the worker must not be placed on."""

    def __str__(self) -> str:
        return f"create worker {self.index} (attempt {self.attempt})"


@dataclass(frozen=True, slots=True)
class DeleteWorker:
    """Delete exactly this incarnation of a worker.

    `force` is used only when its node is unreachable: the fence makes that safe.
    """

    name: str
    uid: str
    force: bool
    reason: str

    def __str__(self) -> str:
        return f"{'force-delete' if self.force else 'delete'} {self.name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class ApplyPodGroup:
    """Create the job's pod group, or update it to this one."""

    group: PodGroup

    def __str__(self) -> str:
        return f"keep a pod group for {self.group.gang} of at least {self.group.min_members} workers"


@dataclass(frozen=True, slots=True)
class DeletePodGroup:
    """Delete exactly this pod group; if it is gone already, that is success."""

    gang: Gang
    uid: str
    reason: str

    def __str__(self) -> str:
        return f"remove the pod group for {self.gang}: {self.reason}"


@dataclass(frozen=True, slots=True)
class ShutDownWorkers:
    """Order agents to flush and exit with `exit_code`, because the job ended or was scaled down."""

    indexes: tuple[int, ...]
    exit_code: int
    reason: str

    def __str__(self) -> str:
        return f"shut down workers {join_names(self.indexes)}: {self.reason}"


@dataclass(frozen=True, slots=True)
class FenceMemoryServer:
    """Fence this memory server at the claimed generation, then read its index."""

    server: MemoryServerInstance
    generation: int

    def __str__(self) -> str:
        return f"fence {self.server} at generation {self.generation} and read its index"


@dataclass(frozen=True, slots=True)
class ListPersistentTier:
    """Have one connected agent list the persistent tier, after the last index was read."""

    generation: int
    index: int
    """Index of the worker whose agent lists."""
    source_job: SourceJob | None = None
    """List this job's folder instead; None: this job's own."""

    def __str__(self) -> str:
        return f"list {self.source_job or 'the persistent tier'} through worker {self.index}"


@dataclass(frozen=True, slots=True)
class ClearJobMemory:
    """Delete an ended job's saves and users from the memory servers."""

    reason: str

    def __str__(self) -> str:
        return f"clear the job's data from the memory tier: {self.reason}"


@dataclass(frozen=True, slots=True)
class SetFinalizer:
    """Add or remove the finalizer that delays the job's deletion until its persistent data is deleted."""

    present: bool

    def __str__(self) -> str:
        return (
            "delay the job's deletion until its persistent data is deleted"
            if self.present
            else "allow the job's deletion"
        )


@dataclass(frozen=True, slots=True)
class PurgePersistent:
    """Create a pod, with the job's identity, that deletes the job's persistent data; if it exists already, that is success."""

    attempt: int

    def __str__(self) -> str:
        return f"delete the job's persistent data (attempt {self.attempt})"


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the job, because `ttlSecondsAfterFinished` has passed since its end."""

    reason: str

    def __str__(self) -> str:
        return f"delete the job: {self.reason}"


Action = (
    CreateWorker
    | DeleteWorker
    | ApplyPodGroup
    | DeletePodGroup
    | ShutDownWorkers
    | FenceMemoryServer
    | ListPersistentTier
    | Barrier
    | ClearJobMemory
    | SetFinalizer
    | PurgePersistent
    | DeleteJob
)


@dataclass(frozen=True, slots=True)
class DropSaves:
    """Delete rank saves from exactly this instance of a memory server, index entries first.

    Void after `expires_seconds` (Unix time): it must not reach a server that returns later.
    """

    server: MemoryServerInstance
    generation: int
    saves: tuple[RankSave, ...]
    expires_seconds: float

    def __str__(self) -> str:
        return (
            f"drop {len(self.saves)} rank saves of steps {_format_steps(s.step for s in self.saves)} from {self.server}"
        )


@dataclass(frozen=True, slots=True)
class RequestRepair:
    """Have an agent copy one rank save between memory servers: it verifies, writes, and commits with `generation`."""

    worker: WorkerId
    generation: int
    save: RankSave
    source: MemoryServerInstance
    target: MemoryServerInstance

    def __str__(self) -> str:
        return f"copy {self.save} from {self.source} to {self.target} through {self.worker}"


@dataclass(frozen=True, slots=True)
class UploadSaves:
    """Have an agent copy rank saves to the persistent tier.

    The requests of one maintenance are complete: a worker without one stops uploading.
    """

    worker: WorkerId
    generation: int
    saves: tuple[RankSave, ...]

    def __str__(self) -> str:
        return f"upload {len(self.saves)} rank saves of step {_format_steps(s.step for s in self.saves)} through {self.worker}"


@dataclass(frozen=True, slots=True)
class DeleteUploaded:
    """Have an agent delete checkpoints from the persistent tier, manifests first."""

    worker: WorkerId
    generation: int
    checkpoints: tuple[Checkpoint, ...]

    def __str__(self) -> str:
        return f"delete steps {_format_steps(c.step for c in self.checkpoints)} from the persistent tier through {self.worker}"


MaintenanceAction = FenceMemoryServer | ListPersistentTier | DropSaves | RequestRepair | UploadSaves | DeleteUploaded
"""Actions of maintenance. Each carries the generation it was decided in: servers and agents reject it in any other."""


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes event of the job, published once, after the status write succeeded."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A decision: the whole next status, actions and their reason.

    A plan without actions whose status equals the observed one is a fixed point.
    """

    actions: tuple[Action, ...]
    status: JobStatus
    reason: str
    events: tuple[Event, ...] = ()
    wake_after_seconds: float | None = None
    """Time after which to plan again even if nothing changes; None: nothing is being waited for."""
    uploads: bool = False
    """True: upload the newest complete checkpoint now, whatever the interval, also of a claimed generation."""


def _format_steps(steps: Iterable[int]) -> str:
    """Formats the distinct steps, sorted."""
    return ", ".join(map(str, sorted(set(steps))))
