"""Holds the unanswered requests to the agents of one job, and what they replied.

Pure. Nothing of it is stored: a new coordinator starts with none and asks again for what it still needs. `barrier`,
`uploads` and `listings` each make their requests and apply the replies to them; `conversations` passes each reply to the
module that made its request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from surefoot.protocol.bounds import MAX_CAUSE_CHARACTERS, max_records
from surefoot.protocol.identities import Checkpoint, HolderId, RankSave, WorkerId
from surefoot.protocol.messages import (
    DropPersistent,
    ListPersistent,
    PromoteSave,
    RepairSave,
    Retire,
    ToAgent,
)
from surefoot.protocol.text import shorten
from surefoot_operator.job_snapshot import ObservedBarrier, PersistentSeen

RequestMessage = ListPersistent | RepairSave | DropPersistent


@dataclass(frozen=True, slots=True)
class Request:
    """A request that its worker's agent has not answered yet."""

    worker: WorkerId
    message: RequestMessage
    epoch: int
    asked_seconds: float


@dataclass(frozen=True, slots=True)
class PendingRequests:
    """The requests that agents have not answered yet, and what the coordinator learned from earlier answers.

    The fields below stand under the name of the module that alone changes them: `barrier`, `uploads`, `listings`.
    """

    next_request: int
    """The next request's number. It only grows, and starts above every number of earlier coordinators, so that an answer to
    one of theirs matches no request of this one."""
    outstanding: Mapping[int, Request] = field(default_factory=dict)
    """Unanswered listings, repairs and deletions, by the number that the answer repeats."""
    retired: Mapping[WorkerId, Retire] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    """A sentence for each request that an agent could not fulfil; the reconciler takes them and records events."""

    # barrier
    barrier: ObservedBarrier | None = None

    # uploads and repairs
    promotions: Mapping[WorkerId, PromoteSave] = field(default_factory=dict)
    promotion_round: int = 0
    """The newest round of any of them."""
    promoted: Mapping[Checkpoint, frozenset[RankSave]] = field(default_factory=dict)
    stumbled: Mapping[RankSave, int] = field(default_factory=dict)
    """How often the upload of a save failed since it last began; of the newest few checkpoints."""
    unreadable: frozenset[RankSave] = frozenset()
    """Saves of which an upload found every copy in memory damaged; of the newest few checkpoints."""
    promotion_times: Mapping[Checkpoint, Mapping[WorkerId, float]] = field(default_factory=dict)
    """Seconds that each worker spent on uploading its share; of the newest few checkpoints."""
    copied: Mapping[tuple[RankSave, HolderId], float] = field(default_factory=dict)
    """When agents said that they had copied a save to a holder, lately: its index is read again in a moment."""

    # listings
    persistent: PersistentSeen = field(default_factory=PersistentSeen)
    layouts: Mapping[str, str] = field(default_factory=dict)
    """Layout records that the last listing brought, by digest."""
    older: PersistentSeen = field(default_factory=PersistentSeen)
    older_layouts: Mapping[str, str] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    """Records of the last listing that broke a bound: a sentence each."""
    max_records: int = field(default_factory=lambda: max_records(0))
    """How many manifests one listing, or one reading of a memory server, may have; derived from the job's size."""

    _asked: dict[WorkerId, list[ToAgent]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def requests_of(self, worker: WorkerId) -> Sequence[ToAgent]:
        """Lists this worker's requests, oldest first; sorted by worker once."""
        if not self._asked:
            for _, request in sorted(self.outstanding.items()):
                self._asked.setdefault(request.worker, []).append(request.message)
        return self._asked.get(worker, ())


def describe_request(message: RequestMessage) -> str:
    """Describes a request by its verb and what it is about."""
    if isinstance(message, RepairSave):
        return f"copy {message.save} from {message.source} to {message.target}"
    if isinstance(message, ListPersistent):
        return f"list {message.older_job or 'the persistent tier'}"
    return "delete from the persistent tier"


def with_failure(orders: PendingRequests, sentence: str) -> PendingRequests:
    """Adds what an agent could not do, keeping the newest."""
    return replace(orders, failures=(*orders.failures, shorten(sentence, MAX_CAUSE_CHARACTERS))[-32:])


def with_barrier(orders: PendingRequests, barrier: ObservedBarrier | None) -> PendingRequests:
    """Stores the barrier; the same orders where it did not change, so that nothing is planned or sent for it."""
    return orders if barrier is orders.barrier else replace(orders, barrier=barrier)
