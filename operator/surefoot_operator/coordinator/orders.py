"""Tracks requests to agents and their answers.

Pure. Called by `coordinator.sessions` with the agents' answers and by `reconcile.apply_plan` with the reconciler's
requests. Soft state: a new coordinator starts with none and asks again what still matters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from surefoot.protocol.identities import Checkpoint, HolderEndpoint, HolderId, OlderJob, RankSave, WorkerId
from surefoot.protocol.messages import (
    DropPersistent,
    FromAgent,
    HoldAnswer,
    Listing,
    ListPersistent,
    LookAtHolders,
    Persisted,
    PersistentDropped,
    PromoteSave,
    Repaired,
    RepairSave,
    Retire,
    Sighting,
    ToAgent,
)
from surefoot_operator.coordinator import holder_sightings
from surefoot_operator.coordinator.holder_sightings import SightingRequest
from surefoot_operator.coordinator.listing_pages import PartialListing, lacking, taken
from surefoot_operator.coordinator.request_words import request_words
from surefoot_operator.observed import HoldSeen, PersistentSeen, SightSeen

MOST_TOLD = 5
"""Records that a listing left out and that are told by name."""

MOST_LISTINGS = 8
"""Of one kind that may be under way at once; each is asked for a minute after the one before, and any may answer."""

MOST_PROMOTED = 8
"""Checkpoints whose uploads are remembered; only the pinned one matters, the rest is history."""


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
    promotion_times: Mapping[Checkpoint, Mapping[WorkerId, float]] = field(default_factory=dict)
    """Seconds that each worker spent on uploading its share; of the newest few checkpoints."""
    sights: Mapping[HolderId, SightSeen] = field(default_factory=dict)
    """What agents see of holders that the operator does not reach, as of the newest epoch that asked."""
    failures: tuple[str, ...] = ()
    """Sentences of what agents could not do; taken by whoever logs them."""
    _asked: dict[WorkerId, list[ToAgent]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def requests_of(self, worker: WorkerId) -> Sequence[ToAgent]:
        """Lists this worker's requests, oldest first; sorted by worker once."""
        if not self._asked:
            for _, request in sorted(self.outstanding.items()):
                self._asked.setdefault(request.worker, []).append(request.message)
        return self._asked.get(worker, ())


# ---- asking --------------------------------------------------------------------------------------------------------


def propose_hold(
    orders: Orders,
    epoch: int,
    step: int,
    verb: Literal["propose", "bind", "cancel"],
    members: Iterable[WorkerId],
    now: float,
) -> Orders:
    """Proposes a hold to every member, or cancels it.

    It binds once all have accepted, and is refused once one has not. `cancel` refuses a pending one; `bind` changes
    nothing: nobody may bind before every agent acknowledged.
    """
    hold = orders.hold
    if verb == "cancel":
        if hold is None or hold.seen.epoch != epoch:
            return orders
        return replace(orders, hold=HoldProposal(replace(hold.seen, state="Refused"), frozenset()))
    known = hold is not None and (hold.seen.epoch, hold.seen.step) == (epoch, step) and hold.seen.state != "Refused"
    if known or verb == "bind":
        return orders
    return replace(orders, hold=HoldProposal(HoldSeen(epoch, step, "Proposed", now), frozenset(members)))


def list_persistent(
    orders: Orders,
    worker: WorkerId,
    epoch: int,
    now: float,
    older: OlderJob | None = None,
    known: frozenset[str] = frozenset(),
) -> Orders:
    """Asks one agent for a listing.

    Agents asked before, for the same reading, may answer too: otherwise a listing slower than its timeout would never
    end.
    """
    same = {
        n: o
        for n, o in orders.outstanding.items()
        if _lists(o, older is not None) and o.epoch == epoch and o.message.older_job == older  # type: ignore[union-attr]
    }
    oldest = sorted(same)[:-MOST_LISTINGS]
    others = {n: o for n, o in orders.outstanding.items() if not _lists(o, older is not None) or n in same}
    kept = {n: o for n, o in others.items() if n not in oldest}
    number = orders.next_request
    kept_layouts = orders.layouts if older is None else orders.older_layouts
    message = ListPersistent(number, older, layouts=())
    order = Request(worker, message, epoch, now, known=known | kept_layouts.keys())
    orders = replace(orders, next_request=number + 1, outstanding={**kept, number: order})
    asked_of = frozenset(o.worker.index for n, o in same.items() if n in kept) | {worker.index}
    seen = PersistentSeen(asked_seconds=now, older_job=older, asked_of=asked_of)
    return replace(orders, persistent=seen) if older is None else replace(orders, older=seen)


def look(orders: Orders, worker: WorkerId, epoch: int, holders: tuple[HolderEndpoint, ...], now: float) -> Orders:
    """Asks one agent which holders it sees, replacing its former question."""
    others = {
        n: o
        for n, o in orders.outstanding.items()
        if not isinstance(o.message, LookAtHolders) or (o.worker != worker and o.epoch == epoch)
    }
    number = orders.next_request
    order = Request(worker, LookAtHolders(number, holders), epoch, now)
    seen = holder_sightings.asked(orders.sights, SightingRequest(epoch, now, holders))
    return replace(orders, next_request=number + 1, outstanding={**others, number: order}, sights=seen)


def void_listing(orders: Orders) -> Orders:
    """Discards a listing asked for before a holder was read."""
    others = {n: o for n, o in orders.outstanding.items() if not _lists(o, older=False)}
    seen = replace(orders.persistent, read_epoch=None, asked_seconds=None)
    return replace(orders, outstanding=others, persistent=seen)


def repair(orders: Orders, copies: Iterable[tuple[WorkerId, RepairSave]], now: float) -> Orders:
    """Asks agents to copy rank saves that none of them copies yet.

    All of a round at once: a holder that came back empty lacks thousands, and one by one each looks through all others.
    The requests are numbered here.
    """
    messages = (order.message for order in orders.outstanding.values())
    asked = {(m.save, m.target, m.epoch) for m in messages if isinstance(m, RepairSave)}
    new: dict[int, Request] = {}
    for worker, copy in copies:
        if (copy.save, copy.target, copy.epoch) not in asked:
            asked.add((copy.save, copy.target, copy.epoch))
            number = orders.next_request + len(new)
            new[number] = Request(worker, replace(copy, request=number), copy.epoch, now)
    if not new:
        return orders
    return replace(orders, next_request=orders.next_request + len(new), outstanding={**orders.outstanding, **new})


def promote(orders: Orders, shares: Mapping[WorkerId, PromoteSave]) -> Orders:
    """Sets what each worker uploads; a worker not named stops."""
    wanted = {
        worker: replace(share, round=old.round) if (old := orders.promotions.get(worker)) is not None else share
        for worker, share in shares.items()
    }
    return orders if orders.promotions == wanted else replace(orders, promotions=wanted)


def drop_persistent(
    orders: Orders, worker: WorkerId, epoch: int, checkpoints: tuple[Checkpoint, ...], now: float
) -> Orders:
    """Asks one agent to delete; one such request at a time."""
    if any(isinstance(order.message, DropPersistent) for order in orders.outstanding.values()):
        return orders
    number = orders.next_request
    order = Request(worker, DropPersistent(number, checkpoints), epoch, now)
    return replace(orders, next_request=number + 1, outstanding={**orders.outstanding, number: order})


def retire(orders: Orders, workers: Iterable[WorkerId], message: Retire) -> Orders:
    """Tells exactly these attempts of workers to leave."""
    wanted = {**orders.retired, **dict.fromkeys(workers, message)}
    return orders if wanted == orders.retired else replace(orders, retired=wanted)


# ---- hearing -------------------------------------------------------------------------------------------------------


def answered(orders: Orders, worker: WorkerId, message: FromAgent, now: float = 0.0) -> Orders:
    """Applies an agent's answer; one that matches no request is ignored."""
    if isinstance(message, HoldAnswer):
        return _hold_answered(orders, worker, message)
    if isinstance(message, Persisted):
        return _persisted(orders, worker, message)
    if not isinstance(message, Listing | Repaired | PersistentDropped | Sighting):
        return orders
    order = orders.outstanding.get(message.request)
    if order is None or order.worker != worker:
        return orders
    if isinstance(message, Listing):
        return _told(orders, order, message)
    orders = replace(orders, outstanding={n: o for n, o in orders.outstanding.items() if n != message.request})
    if isinstance(message, Sighting):
        asked = SightingRequest(order.epoch, order.asked_seconds, order.message.holders)  # type: ignore[union-attr]
        return replace(orders, sights=holder_sightings.answered(orders.sights, asked, message, now))
    if message.error is not None:
        orders = _failed(orders, f"{worker} could not {request_words(order.message)}: {message.error}")
    if isinstance(order.message, DropPersistent) and message.error is None and orders.persistent.entries is not None:
        gone = set(order.message.checkpoints)
        entries = tuple(m for m in orders.persistent.entries if m.save.checkpoint not in gone)
        return replace(orders, persistent=replace(orders.persistent, entries=entries))
    return orders


def _hold_answered(orders: Orders, worker: WorkerId, answer: HoldAnswer) -> Orders:
    hold = orders.hold
    if hold is None or (hold.seen.epoch, hold.seen.step) != (answer.epoch, answer.step):
        return orders
    if hold.seen.state != "Proposed":
        return orders
    if not answer.accepted:
        return replace(orders, hold=HoldProposal(replace(hold.seen, state="Refused"), frozenset()))
    awaited = hold.awaited - {worker}
    state: Literal["Proposed", "Bound"] = "Proposed" if awaited else "Bound"
    return replace(orders, hold=HoldProposal(replace(hold.seen, state=state), awaited))


def _told(orders: Orders, order: Request, page: Listing) -> Orders:
    """One page. After the last the layouts that nobody knows are asked for, a few at a time; then the listing counts."""
    asked = order.message
    if not isinstance(asked, ListPersistent):
        return orders
    error, gathered = page.error, taken(order.gathered, page, asked.manifests)
    if error is None and gathered is None and not page.more:
        missing = len(order.gathered.pages) + 1
        error = f"page {missing} of {page.page + 1} of the listing was not received"
    if error is None and page.more:
        waits = order if gathered is None else replace(order, gathered=gathered)
        return replace(orders, outstanding={**orders.outstanding, page.request: waits})
    rest = {n: o for n, o in orders.outstanding.items() if n != page.request}
    if error is not None or gathered is None:
        orders = _failed(
            replace(orders, outstanding=rest), f"{order.worker} could not {request_words(order.message)}: {error}"
        )
        seen = PersistentSeen(asked_seconds=order.asked_seconds, error=error, older_job=asked.older_job)
        return replace(orders, persistent=seen) if asked.older_job is None else replace(orders, older=seen)
    gathered = gathered.answered(asked.layouts or ())
    wanted = lacking(gathered.whole(), order.known)
    if wanted:
        number = orders.next_request
        more = ListPersistent(number, asked.older_job, manifests=False, layouts=wanted)
        order = replace(order, message=more, gathered=gathered.asked_anew())
        return replace(orders, next_request=number + 1, outstanding={**rest, number: order})
    # what others were asked for the same is answered with this
    rest = {n: o for n, o in rest.items() if not _same_listing(o, order)}
    return _listed(replace(orders, outstanding=rest), order, gathered)


def _listed(orders: Orders, order: Request, gathered: PartialListing) -> Orders:
    older = order.message.older_job if isinstance(order.message, ListPersistent) else None
    found, entries = gathered.whole(), gathered.whole().entries
    for why in found.unreadable[:MOST_TOLD]:
        orders = _failed(orders, f"{older or 'the persistent tier'} has a manifest that cannot be read: {why}")
    if older is not None:
        entries = tuple(replace(m, save=replace(m.save, epoch=-m.save.epoch)) for m in entries)
    seen = PersistentSeen(order.epoch, entries, order.asked_seconds, older_job=older, left_out=found.left_out)
    seen = replace(seen, unjudged=seen.unreadable_checkpoints(older is not None))
    named = {m.layout for m in entries}
    known = orders.layouts if older is None else orders.older_layouts
    layouts = {digest: text for digest, text in {**known, **found.layouts}.items() if digest in named}
    for one in found.left_out[:MOST_TOLD]:
        orders = _failed(orders, f"left out of the listing of {older or 'the persistent tier'}: {one}")
    if len(found.left_out) > MOST_TOLD:
        orders = _failed(orders, f"{len(found.left_out) - MOST_TOLD} more records could not be read")
    if older is not None:
        return replace(orders, older=seen, older_layouts=layouts)
    return replace(orders, persistent=seen, layouts=layouts)


def _same_listing(order: Request, other: Request) -> bool:
    one, two = order.message, other.message
    return isinstance(one, ListPersistent) and isinstance(two, ListPersistent) and one.older_job == two.older_job


def _persisted(orders: Orders, worker: WorkerId, message: Persisted) -> Orders:
    if message.error is not None:
        return _failed(
            _stumbled(_again(orders, worker, message.save), message.save),
            f"{worker} could not upload {message.save}: {message.error}",
        )
    checkpoint = message.save.checkpoint
    saves = orders.promoted.get(checkpoint, frozenset()) | {message.save}
    promoted = {**orders.promoted, checkpoint: saves}
    spent = dict(orders.promotion_times.get(checkpoint, {}))
    if message.save not in orders.promoted.get(checkpoint, frozenset()):
        spent[worker] = spent.get(worker, 0.0) + message.seconds
    times = {**orders.promotion_times, checkpoint: spent}
    for oldest in sorted(promoted, key=lambda c: (c.step, c.epoch))[:-MOST_PROMOTED]:
        del promoted[oldest]
        times.pop(oldest, None)
    return replace(orders, promoted=promoted, promotion_times=times)


def promotion_seconds(orders: Orders, checkpoint: Checkpoint | None) -> float | None:
    """The slowest worker's seconds for a checkpoint's upload; None: not seen here."""
    spent = orders.promotion_times.get(checkpoint) if checkpoint is not None else None
    return max(spent.values()) if spent else None


def _stumbled(orders: Orders, save: RankSave) -> Orders:
    counts = {**orders.stumbled, save: orders.stumbled.get(save, 0) + 1}
    newest = sorted({s.checkpoint for s in counts}, key=lambda c: (c.step, c.epoch))[-MOST_PROMOTED:]
    return replace(orders, stumbled={s: n for s, n in counts.items() if s.checkpoint in newest})


def _again(orders: Orders, worker: WorkerId, save: RankSave) -> Orders:
    """The same wish in a new round: said again, since the agent has tried for as long as it does by itself."""
    share = orders.promotions.get(worker)
    if share is None or save not in share.saves:
        return orders
    return replace(orders, promotions={**orders.promotions, worker: replace(share, round=share.round + 1)})


def _failed(orders: Orders, sentence: str) -> Orders:
    return replace(orders, failures=(*orders.failures, sentence)[-32:])


def _lists(order: Request, older: bool) -> bool:
    message = order.message
    return isinstance(message, ListPersistent) and (message.older_job is not None) == older


# ---- forgetting ----------------------------------------------------------------------------------------------------


def moved(orders: Orders, epoch: int, committed: bool) -> Orders:
    """Voids requests of another epoch than the present world's."""
    kept = {n: o for n, o in orders.outstanding.items() if o.epoch == epoch}
    hold = orders.hold if orders.hold is not None and orders.hold.seen.epoch == epoch and committed else None
    promotions = {w: p for w, p in orders.promotions.items() if p.epoch == epoch and committed}
    if (len(kept), hold, len(promotions)) == (len(orders.outstanding), orders.hold, len(orders.promotions)):
        return orders
    return replace(orders, outstanding=kept, hold=hold, promotions=promotions, older=_older_without(orders, kept))


def left(orders: Orders, worker: WorkerId) -> Orders:
    """Drops the requests of an agent that is gone for good."""
    kept = {n: o for n, o in orders.outstanding.items() if o.worker != worker}
    promotions = {w: p for w, p in orders.promotions.items() if w != worker}
    if (len(kept), len(promotions)) == (len(orders.outstanding), len(orders.promotions)):
        return orders
    lost_listing = any(_lists(o, older=False) for n, o in orders.outstanding.items() if n not in kept)
    lost_listing = lost_listing and not any(_lists(o, older=False) for o in kept.values())
    persistent = replace(orders.persistent, asked_seconds=None) if lost_listing else orders.persistent
    older = _older_without(orders, kept)
    return replace(orders, outstanding=kept, promotions=promotions, persistent=persistent, older=older)


def _older_without(orders: Orders, kept: Mapping[int, Request]) -> PersistentSeen:
    """An older job's listing that nobody will answer any more was never asked for."""
    lost = any(_lists(o, older=True) for n, o in orders.outstanding.items() if n not in kept)
    return replace(orders.older, asked_seconds=None) if lost else orders.older
