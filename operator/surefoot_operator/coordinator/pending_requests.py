"""Holds the unanswered requests to the agents of one job, and what they replied.

Pure, and soft: a new coordinator starts with none and asks again for what still matters. The conversations change it:
`barrier`, `uploads` and `listings` each have their requests, replies and messages in one file. `conversations`
gives each reply to the one that it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from surefoot.protocol.bounds import MAX_CAUSE_CHARACTERS, max_records
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

MOST_REFUSED = 8
"""Sentences on records that broke a bound."""


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request that its worker's agent has not answered yet."""

    worker: WorkerId
    message: RequestMessage
    generation: int
    requested_seconds: float


@dataclass(frozen=True, slots=True)
class PendingRequests:
    """What agents have not answered, with what earlier answers told.

    Each conversation has a file that alone changes its fields: `barrier`, `uploads`, `listings`.
    """

    next_request: int
    """Grows; begins where no earlier coordinator has been, so that an answer to one of its requests fits none of ours."""
    pending: Mapping[int, PendingRequest] = field(default_factory=dict)
    """Requests of all conversations that are answered by number."""
    shutdowns: Mapping[WorkerId, Shutdown] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    """Sentences of what agents could not do; taken by whoever logs them."""

    # barrier
    barrier: ObservedBarrier | None = None

    # uploads and repairs
    uploads: Mapping[WorkerId, UploadSave] = field(default_factory=dict)
    upload_round: int = 0
    """The newest round of any of them."""
    uploaded: Mapping[Checkpoint, frozenset[RankSave]] = field(default_factory=dict)
    failed_uploads: Mapping[RankSave, int] = field(default_factory=dict)
    """How often the upload of a save failed since it last began; of the newest few checkpoints."""
    unreadable: frozenset[RankSave] = frozenset()
    """Saves of which an upload found every copy in memory damaged; of the newest few checkpoints."""
    upload_times: Mapping[Checkpoint, Mapping[WorkerId, float]] = field(default_factory=dict)
    """Seconds that each worker spent on uploading its share; of the newest few checkpoints."""
    copied: Mapping[tuple[RankSave, MemoryServerInstance], float] = field(default_factory=dict)
    """When agents said that they had copied a save to a holder, lately: its index is read again in a moment."""

    # listings
    persistent: PersistentListing = field(default_factory=PersistentListing)
    layouts: Mapping[str, str] = field(default_factory=dict)
    """Layout records that the last listing brought, by digest."""
    source_listing: PersistentListing = field(default_factory=PersistentListing)
    source_layouts: Mapping[str, str] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    """Records of the last listing that broke a bound: a sentence each."""
    max_records: int = field(default_factory=lambda: max_records(0))
    """Manifests of one listing, and of one reading, that are kept: by what the job runs."""

    _asked: dict[WorkerId, list[ToAgent]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def requests_of(self, worker: WorkerId) -> Sequence[ToAgent]:
        """Lists this worker's requests, oldest first; sorted by worker once."""
        if not self._asked:
            for _, request in sorted(self.pending.items()):
                self._asked.setdefault(request.worker, []).append(request.message)
        return self._asked.get(worker, ())


def describe_request(message: RequestMessage) -> str:
    """Describes a request by its verb and what it is about."""
    if isinstance(message, RepairSave):
        return f"copy {message.save} from {message.source} to {message.target}"
    if isinstance(message, ListPersistent):
        return f"list {message.source_job or 'the persistent tier'}"
    return "delete from the persistent tier"


def with_failure(orders: PendingRequests, sentence: str) -> PendingRequests:
    """Adds what an agent could not do, keeping the newest."""
    return replace(orders, failures=(*orders.failures, shorten(sentence, MAX_CAUSE_CHARACTERS))[-32:])


def with_refused(orders: PendingRequests, sentences: Iterable[str]) -> PendingRequests:
    """Adds records that broke a bound, once each, keeping the first few."""
    refused = dict.fromkeys((*orders.refused, *(shorten(one, MAX_CAUSE_CHARACTERS) for one in sentences)))
    kept = tuple(refused)[:MOST_REFUSED]
    return orders if kept == orders.refused else replace(orders, refused=kept)


def with_barrier(orders: PendingRequests, barrier: ObservedBarrier | None) -> PendingRequests:
    """Stores the barrier; the same orders where it did not change, so that nothing is planned or sent for it."""
    return orders if barrier is orders.barrier else replace(orders, barrier=barrier)
