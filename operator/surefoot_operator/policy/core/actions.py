"""Defines the idempotent actions that plans and maintenance ask for.

Order: first the patch of the world (the fence), then the memory tier and messages to agents; creates and deletes of
workers each on their own, and a pod group before its workers. Telling agents of a world is no action: the coordinator derives it from the patched status.
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
    """Create one attempt of a worker; one that exists is success."""

    index: int
    attempt: int
    avoid_nodes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"create worker {self.index} (attempt {self.attempt})"


@dataclass(frozen=True, slots=True)
class DeleteWorker:
    """Delete exactly this incarnation of a worker.

    `force` only when its node is unreachable: the fence makes that safe.
    """

    name: str
    uid: str
    force: bool
    reason: str

    def __str__(self) -> str:
        return f"{'force-delete' if self.force else 'delete'} {self.name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class ApplyPodGroup:
    """Create the job's pod group, or change it to this."""

    group: PodGroup

    def __str__(self) -> str:
        return f"keep a pod group for {self.group.gang} of at least {self.group.min_members} workers"


@dataclass(frozen=True, slots=True)
class DeletePodGroup:
    """Delete exactly this pod group; one that is gone is success."""

    gang: Gang
    uid: str
    reason: str

    def __str__(self) -> str:
        return f"remove the pod group for {self.gang}: {self.reason}"


@dataclass(frozen=True, slots=True)
class ShutDownWorkers:
    """Tell agents to flush and leave with `exit_code` (job over, or scaled down)."""

    indexes: tuple[int, ...]
    exit_code: int
    reason: str

    def __str__(self) -> str:
        return f"retire workers {join_names(self.indexes)}: {self.reason}"


@dataclass(frozen=True, slots=True)
class FenceMemoryServer:
    """Seal this holder at the claimed epoch, then read its index."""

    server: MemoryServerInstance
    generation: int

    def __str__(self) -> str:
        return f"seal {self.server} at epoch {self.generation} and read its index"


@dataclass(frozen=True, slots=True)
class ListPersistentTier:
    """Have one connected agent list the persistent tier.

    After the last index was read; with `older_job`, that job's folder.
    """

    generation: int
    index: int
    source_job: SourceJob | None = None

    def __str__(self) -> str:
        return f"list {self.source_job or 'the persistent tier'} through worker {self.index}"


@dataclass(frozen=True, slots=True)
class ClearJobMemory:
    """Delete an ended job's saves and users from the holders."""

    reason: str

    def __str__(self) -> str:
        return f"clean the memory tier: {self.reason}"


@dataclass(frozen=True, slots=True)
class SetFinalizer:
    """Add or remove the finalizer for data that is deleted first."""

    present: bool

    def __str__(self) -> str:
        return "hold the job's deletion back until its persistent data is deleted" if self.present else "let the job go"


@dataclass(frozen=True, slots=True)
class PurgePersistent:
    """Create a pod that deletes the job's persistent data.

    It has the job's identity; one that exists is success.
    """

    attempt: int

    def __str__(self) -> str:
        return f"delete the job's persistent data (attempt {self.attempt})"


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the job: its time to live after the end is over."""

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
    """Delete rank saves from exactly this holder instance, index first.

    Void after `expires_seconds`: it must not reach a holder that returns later.
    """

    server: MemoryServerInstance
    generation: int
    saves: tuple[RankSave, ...]
    expires_seconds: float

    def __str__(self) -> str:
        return f"drop {len(self.saves)} rank saves of steps {_steps(s.step for s in self.saves)} from {self.server}"


@dataclass(frozen=True, slots=True)
class RequestRepair:
    """Have an agent copy one rank save between holders.

    It verifies, writes, and commits with `epoch`.
    """

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

    Those of one round are complete: a worker that is not named stops promoting.
    """

    worker: WorkerId
    generation: int
    saves: tuple[RankSave, ...]

    def __str__(self) -> str:
        return (
            f"promote {len(self.saves)} rank saves of step {_steps(s.step for s in self.saves)} through {self.worker}"
        )


@dataclass(frozen=True, slots=True)
class DeleteUploaded:
    """Have an agent delete checkpoints from the persistent tier, manifests first."""

    worker: WorkerId
    generation: int
    checkpoints: tuple[Checkpoint, ...]

    def __str__(self) -> str:
        return f"delete steps {_steps(c.step for c in self.checkpoints)} from the persistent tier through {self.worker}"


MaintenanceAction = FenceMemoryServer | ListPersistentTier | DropSaves | RequestRepair | UploadSaves | DeleteUploaded
"""What maintenance may ask for. Each carries the epoch it was decided in: holders and agents refuse it in any other."""


@dataclass(frozen=True, slots=True)
class Event:
    """Published to people once, after the status write succeeded."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """One decision: the whole new status, actions and their reason.

    A plan whose status equals the observed one and that has no actions is a fixed point.
    """

    actions: tuple[Action, ...]
    status: JobStatus
    reason: str
    events: tuple[Event, ...] = ()
    wake_after_seconds: float | None = None
    """Plan again after so long even if nothing changes; None: nothing is being waited for."""
    uploads: bool = False
    """The newest complete checkpoint goes to the persistent tier now, whatever the interval, also of a claimed world."""


def _steps(steps: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(steps))))
