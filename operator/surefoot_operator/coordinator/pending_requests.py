"""Holds requests to agents and what came of them.

Pure; changed by `order_requests` and `request_replies`, read for each agent's messages. Soft state: a new coordinator starts with
none and asks again what still matters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from surefoot.protocol.plain import shorten
from surefoot.protocol.sighting_messages import LookAtHolders
from surefoot_operator.coordinator.listing_pages import PartialListing
from surefoot_operator.job_snapshot import HoldSeen, PairSeen
from surefoot_operator.observed_tiers import PersistentSeen, SightSeen

MOST_REFUSED = 8
"""Sentences on records that broke a bound."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request that its worker's agent has not answered yet."""

    worker: WorkerId
    message: ListPersistent | RepairSave | DropPersistent | LookAtHolders
    epoch: int
    asked_seconds: float
    gathered: PartialListing = field(default_factory=PartialListing)
    """Of a listing, until all of it has come."""
    known: frozenset[str] = frozenset()
    """Digests of layouts that need not be told."""


@dataclass(frozen=True, slots=True)
class HoldProposal:
    """A planned change, and who must still accept it."""

    seen: HoldSeen
    awaited: frozenset[WorkerId]


@dataclass(frozen=True, slots=True)
class Orders:
    next_request: int
    """Grows; begins where no earlier coordinator has been, so that an answer to one of its requests fits none of ours."""
    outstanding: Mapping[int, Request] = field(default_factory=dict)
    promotions: Mapping[WorkerId, PromoteSave] = field(default_factory=dict)
    promotion_round: int = 0
    """The newest round of any of them."""
    retired: Mapping[WorkerId, Retire] = field(default_factory=dict)
    hold: HoldProposal | None = None
    persistent: PersistentSeen = field(default_factory=PersistentSeen)
    layouts: Mapping[str, str] = field(default_factory=dict)
    """Layout records that the last listing brought, by digest."""
    older: PersistentSeen = field(default_factory=PersistentSeen)
    older_layouts: Mapping[str, str] = field(default_factory=dict)
    promoted: Mapping[Checkpoint, frozenset[RankSave]] = field(default_factory=dict)
    stumbled: Mapping[RankSave, int] = field(default_factory=dict)
    """How often the upload of a save failed since it last began; of the newest few checkpoints."""
    unreadable: frozenset[RankSave] = frozenset()
    """Saves of which an upload found every copy in memory damaged; of the newest few checkpoints."""
    promotion_times: Mapping[Checkpoint, Mapping[WorkerId, float]] = field(default_factory=dict)
    """Seconds that each worker spent on uploading its share; of the newest few checkpoints."""
    sights: Mapping[HolderId, SightSeen] = field(default_factory=dict)
    """What agents see of holders that the operator does not reach, as of the newest epoch that asked."""
    sighted_layouts: Mapping[str, str] = field(default_factory=dict)
    """Layout records that agents read of holders in the operator's place, by digest."""
    read_seconds: float = float("-inf")
    """When an agent last told such a reading: a listing from before it may lack what that holder had."""
    copied: Mapping[tuple[RankSave, HolderId], float] = field(default_factory=dict)
    """When agents said that they had copied a save to a holder, lately: its index is read again in a moment."""
    pairs: Mapping[int, PairSeen] = field(default_factory=dict)
    """All-reduces between two agents, by request; see `pair_orders`."""
    refused: tuple[str, ...] = ()
    """Records of the last listing that broke a bound: a sentence each."""
    max_records: int = field(default_factory=lambda: max_records(0))
    """Manifests of one listing, and of one reading, that are kept: by what the job runs."""
    failures: tuple[str, ...] = ()
    """Sentences of what agents could not do; taken by whoever logs them."""
    _asked: dict[WorkerId, list[ToAgent]] = field(default_factory=dict, init=False, repr=False, compare=False)

    _paired: dict[WorkerId, list[PairSeen]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def pairs_of(self, worker: WorkerId) -> Sequence[PairSeen]:
        """Lists the pairs that this worker has not answered, oldest first."""
        if self.pairs and not self._paired:
            for _, pair in sorted(self.pairs.items()):
                for side in pair.sides:
                    if not side.verdict:
                        self._paired.setdefault(side.worker, []).append(pair)
        return self._paired.get(worker, ())

    def requests_of(self, worker: WorkerId) -> Sequence[ToAgent]:
        """Lists this worker's requests, oldest first; sorted by worker once."""
        if not self._asked:
            for _, request in sorted(self.outstanding.items()):
                self._asked.setdefault(request.worker, []).append(request.message)
        return self._asked.get(worker, ())


def with_failure(orders: Orders, sentence: str) -> Orders:
    """Adds what an agent could not do, keeping the newest."""
    return replace(orders, failures=(*orders.failures, shorten(sentence, MAX_CAUSE_CHARACTERS))[-32:])


def with_refused(orders: Orders, sentences: Iterable[str]) -> Orders:
    """Adds records that broke a bound, once each, keeping the first few."""
    refused = dict.fromkeys((*orders.refused, *(shorten(one, MAX_CAUSE_CHARACTERS) for one in sentences)))
    kept = tuple(refused)[:MOST_REFUSED]
    return orders if kept == orders.refused else replace(orders, refused=kept)


def with_listing(orders: Orders, seen: PersistentSeen) -> Orders:
    """Stores what is known of one job's listing.

    What is being deleted from this job's own stays so: another request for a listing, or one that failed, tells nothing of it.
    """
    if seen.older_job is not None:
        return replace(orders, older=seen)
    return replace(orders, persistent=replace(seen, deleting=orders.persistent.deleting))


def is_listing(order: Request, older: bool) -> bool:
    """Whether this asks for a listing, `older`: of an older job."""
    message = order.message
    return isinstance(message, ListPersistent) and (message.older_job is not None) == older


def moved(orders: Orders, epoch: int, committed: bool) -> Orders:
    """Voids requests of another epoch than the present world's."""
    kept = {n: o for n, o in orders.outstanding.items() if o.epoch == epoch}
    hold = orders.hold if orders.hold is not None and orders.hold.seen.epoch == epoch and committed else None
    promotions = {w: p for w, p in orders.promotions.items() if p.epoch == epoch}
    if (len(kept), hold, len(promotions)) == (len(orders.outstanding), orders.hold, len(orders.promotions)):
        return orders
    return replace(orders, outstanding=kept, hold=hold, promotions=promotions, older=_older_without(orders, kept))


def left(orders: Orders, worker: WorkerId) -> Orders:
    """Drops the requests of an agent that is gone for good."""
    kept = {n: o for n, o in orders.outstanding.items() if o.worker != worker}
    promotions = {w: p for w, p in orders.promotions.items() if w != worker}
    if (len(kept), len(promotions)) == (len(orders.outstanding), len(orders.promotions)):
        return orders
    lost_listing = any(is_listing(o, older=False) for n, o in orders.outstanding.items() if n not in kept)
    lost_listing = lost_listing and not any(is_listing(o, older=False) for o in kept.values())
    persistent = replace(orders.persistent, asked_seconds=None) if lost_listing else orders.persistent
    older = _older_without(orders, kept)
    return replace(orders, outstanding=kept, promotions=promotions, persistent=persistent, older=older)


def _older_without(orders: Orders, kept: Mapping[int, Request]) -> PersistentSeen:
    """An older job's listing that nobody will answer any more was never asked for."""
    lost = any(is_listing(o, older=True) for n, o in orders.outstanding.items() if n not in kept)
    return replace(orders.older, asked_seconds=None) if lost else orders.older
