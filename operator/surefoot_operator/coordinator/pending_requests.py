"""Defines the requests to the agents of one job that are not answered yet, and the results of answered ones.

Pure and not durable: a new coordinator starts without requests and repeats those that still matter. `barrier`,
`uploads` and `listings` each create their own requests and apply the replies to them; `conversations` passes each
reply to one of these three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from surefoot.protocol.bounds import MAX_CAUSE_CHARACTERS, max_manifests_per_tier
from surefoot.protocol.identities import Checkpoint, MemoryServerInstance, RankSave, WorkerId
from surefoot.protocol.messages import (
    DeletePersistent,
    ListPersistent,
    RepairSave,
    Shutdown,
    ToAgent,
    UploadSave,
)
from surefoot.protocol.text import shorten
from surefoot_operator.job_snapshot import ObservedBarrier, PersistentListing

RequestMessage = ListPersistent | RepairSave | DeletePersistent


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request that its worker's agent has not answered yet."""

    worker: WorkerId
    """The worker whose agent must answer."""
    message: RequestMessage
    """The request as it was sent, with its number."""
    generation: int
    """The generation for which it was made; a newer generation drops it."""
    requested_seconds: float
    """Unix time at which it was made."""


@dataclass(frozen=True, slots=True)
class PendingRequests:
    """The requests that agents have not answered, and the results of answered ones.

    `barrier`, `uploads` and `listings` each change their own group of fields.
    """

    next_request: int
    """Number of the next request. Starts above those of earlier coordinators, whose late replies match nothing."""
    by_id: Mapping[int, PendingRequest] = field(default_factory=dict)
    """Unanswered requests by their number."""
    shutdowns: Mapping[WorkerId, Shutdown] = field(default_factory=dict)
    """The workers that must flush and exit, with the message for each."""
    failures: tuple[str, ...] = ()
    """Error messages of agents that the reconciler has not logged yet, oldest first."""

    # barrier
    barrier: ObservedBarrier | None = None
    """The newest barrier; None: none was proposed in this generation."""

    # uploads and repairs
    uploads: Mapping[WorkerId, UploadSave] = field(default_factory=dict)
    """The saves that each worker must upload now; a worker that is missing here uploads nothing."""
    upload_round: int = 0
    """The highest `round` of any message in `uploads` so far."""
    uploaded_saves: Mapping[Checkpoint, frozenset[RankSave]] = field(default_factory=dict)
    """Saves that agents reported as uploaded; of the newest few checkpoints."""
    failed_uploads: Mapping[RankSave, int] = field(default_factory=dict)
    """Number of failed uploads of each save; of the newest few checkpoints."""
    unreadable_saves: frozenset[RankSave] = frozenset()
    """Saves that could not be uploaded because every copy in memory is corrupt; of the newest few checkpoints."""
    upload_seconds: Mapping[Checkpoint, Mapping[WorkerId, float]] = field(default_factory=dict)
    """Seconds that each worker spent on uploading its share; of the newest few checkpoints."""
    repair_seconds_by_copy: Mapping[tuple[RankSave, MemoryServerInstance], float] = field(default_factory=dict)
    """Unix time at which a save was copied to a memory server, for copies that the server's index may not show yet."""

    # listings
    persistent_listing: PersistentListing = field(default_factory=PersistentListing)
    """The last listing of the job's persistent tier."""
    persistent_layouts: Mapping[str, str] = field(default_factory=dict)
    """Layout records of `persistent_listing`, by digest."""
    source_listing: PersistentListing = field(default_factory=PersistentListing)
    """The last listing of the source job's folder."""
    source_layouts: Mapping[str, str] = field(default_factory=dict)
    """Layout records of `source_listing`, by digest."""
    rejected_records: tuple[str, ...] = ()
    """Error messages about records of the last listing that exceed a limit."""
    max_records: int = field(default_factory=lambda: max_manifests_per_tier(0))
    """Manifests that one listing may have; follows from the number of ranks that the job may run."""

    _messages_by_worker: dict[WorkerId, list[ToAgent]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Cache of `requests_of`: `by_id` grouped by worker."""

    def requests_of(self, worker: WorkerId) -> Sequence[ToAgent]:
        """Lists this worker's requests, oldest first."""
        if not self._messages_by_worker:
            for _, request in sorted(self.by_id.items()):
                self._messages_by_worker.setdefault(request.worker, []).append(request.message)
        return self._messages_by_worker.get(worker, ())


def describe_request(message: RequestMessage) -> str:
    """Describes a request as an infinitive that follows "could not" in an error message."""
    if isinstance(message, RepairSave):
        return f"copy {message.save} from {message.source} to {message.target}"
    if isinstance(message, ListPersistent):
        return f"list {message.source_job or 'the persistent tier'}"
    return "delete from the persistent tier"


def with_failure(requests: PendingRequests, error_message: str) -> PendingRequests:
    """Adds an error message of an agent, keeping the newest 32."""
    return replace(requests, failures=(*requests.failures, shorten(error_message, MAX_CAUSE_CHARACTERS))[-32:])


def with_barrier(requests: PendingRequests, barrier: ObservedBarrier | None) -> PendingRequests:
    """Stores the barrier; returns the same object if it did not change, so that nothing is planned or sent for it."""
    return requests if barrier is requests.barrier else replace(requests, barrier=barrier)
