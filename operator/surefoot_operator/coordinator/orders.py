"""Tracks requests to agents and their answers.

Pure. Called by `coordinator.sessions` with the agents' answers and by `reconcile.apply_plan` with the reconciler's
wishes. Soft state: a coordinator that returns starts with none, and asks again what still matters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
)
from surefoot.protocol.plain import listed
from surefoot_operator.coordinator import holder_sightings
from surefoot_operator.coordinator.holder_sightings import SightingRequest
from surefoot_operator.coordinator.listing_pages import PartialListing, lacking, taken
from surefoot_operator.observed import HoldSeen, PersistentSeen, SightSeen

MOST_TOLD = 5
"""Records that a listing left out and that are told by name."""

MOST_LISTINGS = 8
"""Of one kind that may be under way at once; each is asked for a minute after the one before, and any may answer."""

MOST_PROMOTED = 8
"""Checkpoints whose uploads are remembered; only the pinned one matters, the rest is history."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request to one worker that its agent has not answered yet."""

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
    """A planned change: who must still accept it."""

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


# ---- asking --------------------------------------------------------------------------------------------------------


def propose_hold(
    orders: Orders,
    epoch: int,
    step: int,
    verb: Literal["propose", "bind", "cancel"],
    members: Iterable[WorkerId],
    now: float,
) -> Orders:
    """A proposal asks every member; it binds by itself once all have accepted, and is refused once one has not.

    `cancel` refuses what stands; `bind` confirms what has bound already and binds nothing else: nobody may bind
    before every agent acknowledged.
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
    """Asks one agent. Whoever was asked before, in the same epoch and since the same reading, may still answer first:
    a listing that takes longer than the patience with it would otherwise never end. `known`: digests of layouts."""
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
    """Asks one agent what it sees of these holders; what it was asked before is asked no more."""
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
    """A holder was read after the listing was asked for: data may have moved past it, ask again."""
    others = {n: o for n, o in orders.outstanding.items() if not _lists(o, older=False)}
    seen = replace(orders.persistent, read_epoch=None, asked_seconds=None)
    return replace(orders, outstanding=others, persistent=seen)


def repair(
    orders: Orders, worker: WorkerId, epoch: int, save: RankSave, source: HolderId, target: HolderId, now: float
) -> Orders:
    """Asks one agent to copy a rank save; nothing new while the same copy is under way."""
    for order in orders.outstanding.values():
        message = order.message
        if isinstance(message, RepairSave) and (message.save, message.target, message.epoch) == (save, target, epoch):
            return orders
    number = orders.next_request
    order = Request(worker, RepairSave(number, epoch, save, source, target), epoch, now)
    return replace(orders, next_request=number + 1, outstanding={**orders.outstanding, number: order})


def promote(orders: Orders, shares: Mapping[WorkerId, PromoteSave]) -> Orders:
    """What each worker shall upload now; whoever is not named uploads nothing more."""
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
    """These very workers leave; a later attempt of the same index is another worker."""
    wanted = {**orders.retired, **dict.fromkeys(workers, message)}
    return orders if wanted == orders.retired else replace(orders, retired=wanted)


# ---- hearing -------------------------------------------------------------------------------------------------------


def answered(orders: Orders, worker: WorkerId, message: FromAgent, now: float = 0.0) -> Orders:
    """Takes an agent's answer; one that fits no request of ours changes nothing."""
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
        orders = _failed(orders, f"{worker} could not {_words(order)}: {message.error}")
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
        error = f"page {missing} of {page.page + 1} of the listing did not come"
    if error is None and page.more:
        waits = order if gathered is None else replace(order, gathered=gathered)
        return replace(orders, outstanding={**orders.outstanding, page.request: waits})
    rest = {n: o for n, o in orders.outstanding.items() if n != page.request}
    if error is not None or gathered is None:
        orders = _failed(replace(orders, outstanding=rest), f"{order.worker} could not {_words(order)}: {error}")
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
    seen = replace(seen, unjudged=_unjudged(seen, older is not None))
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


def _unjudged(seen: PersistentSeen, negated: bool) -> frozenset[Checkpoint]:
    """Those with a manifest that could not be read, and those that need a layout record which could not."""
    told = {one.checkpoint for one in seen.left_out if one.checkpoint is not None}
    told = {c.negated() for c in told} if negated else told
    return frozenset(told | {m.save.checkpoint for m in seen.entries or () if m.layout in seen.lost_layouts})


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
    """How long its upload took: workers go side by side, a worker's ranks one after another. None: not seen here."""
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


def _words(order: Request) -> str:
    message = order.message
    if isinstance(message, RepairSave):
        return f"copy {message.save} from {message.source} to {message.target}"
    if isinstance(message, ListPersistent):
        return f"list {message.older_job or 'the persistent tier'}"
    if isinstance(message, LookAtHolders):
        return f"look at {listed([str(e.holder) for e in message.holders])}"
    return "delete from the persistent tier"


def _lists(order: Request, older: bool) -> bool:
    message = order.message
    return isinstance(message, ListPersistent) and (message.older_job is not None) == older


# ---- forgetting ----------------------------------------------------------------------------------------------------


def moved(orders: Orders, epoch: int, committed: bool) -> Orders:
    """The world is now (epoch, Committed or not): what was asked of another one is void."""
    kept = {n: o for n, o in orders.outstanding.items() if o.epoch == epoch}
    hold = orders.hold if orders.hold is not None and orders.hold.seen.epoch == epoch and committed else None
    promotions = {w: p for w, p in orders.promotions.items() if p.epoch == epoch and committed}
    if (len(kept), hold, len(promotions)) == (len(orders.outstanding), orders.hold, len(orders.promotions)):
        return orders
    return replace(orders, outstanding=kept, hold=hold, promotions=promotions, older=_older_without(orders, kept))


def left(orders: Orders, worker: WorkerId) -> Orders:
    """This agent is gone for good (another incarnation came, or the worker was deleted): its requests end unanswered."""
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
