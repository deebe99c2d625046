"""Applies agents' answers to the requests that they match.

Pure; called by `coordinator.sessions`. An answer that matches no request is ignored: it was meant for another coordinator, or
came twice.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.errors import OutOfBounds
from surefoot.protocol import bounds
from surefoot.protocol.identities import Checkpoint, RankSave, WorkerId
from surefoot.protocol.messages import (
    BarrierReply,
    DropPersistent,
    FromAgent,
    HolderReading,
    Listing,
    ListPersistent,
    LookAtHolders,
    Persisted,
    PersistentDropped,
    Repaired,
    RepairSave,
    Sighting,
)
from surefoot.protocol.text import listed
from surefoot_operator.coordinator import barrier, pending_requests
from surefoot_operator.coordinator.pending_requests import (
    COPIED_SECONDS,
    Orders,
    PartialListing,
    Request,
    SightingRequest,
    lacking,
    read_manifests,
    taken,
    void_listing,
    with_failure,
    with_listing,
    with_refused,
)
from surefoot_operator.job_snapshot import PersistentSeen

# ---- requests as messages --------------------------------------------------------------------------------------------
# Describes a request in words, for sentences about requests that failed. Pure.


def request_words(message: ListPersistent | RepairSave | DropPersistent | LookAtHolders) -> str:
    """Describes a request by its verb and what it is about."""
    if isinstance(message, RepairSave):
        return f"copy {message.save} from {message.source} to {message.target}"
    if isinstance(message, ListPersistent):
        return f"list {message.older_job or 'the persistent tier'}"
    if isinstance(message, LookAtHolders):
        return f"look at {listed([e.holder for e in message.holders])}"
    return "delete from the persistent tier"


# ---- request replies -------------------------------------------------------------------------------------------------

MOST_TOLD = 5
"""Records that a listing left out and that are told by name."""

MOST_PROMOTED = 8
"""Checkpoints whose uploads are remembered; only the pinned one matters, the rest is history."""
MOST_UNTOLD_FAILURES = 5
"""Failed uploads of one save, each after several tries of its agent, before its silence on the cause is taken for damage."""


def apply_reply(orders: Orders, worker: WorkerId, message: FromAgent, now: float = 0.0) -> Orders:
    """Applies an agent's answer; one that matches no request is ignored."""
    if isinstance(message, BarrierReply):
        return pending_requests.with_barrier(orders, barrier.apply_reply(orders.barrier, worker, message))
    if isinstance(message, Persisted):
        return _persisted(orders, worker, message)
    if not isinstance(message, Listing | Repaired | PersistentDropped | HolderReading | Sighting):
        return orders
    order = orders.outstanding.get(message.request)
    if order is None or order.worker != worker:
        return orders
    if isinstance(message, Listing):
        return _told(orders, order, message)
    if isinstance(message, HolderReading):
        return _read(orders, order, message, now)
    orders = replace(orders, outstanding={n: o for n, o in orders.outstanding.items() if n != message.request})
    if isinstance(message, Sighting):
        asked = SightingRequest(order.epoch, order.asked_seconds, order.message.holders)  # type: ignore[union-attr]
        return replace(orders, sights=pending_requests.merge_reply(orders.sights, asked, message, now))
    if message.error is not None:
        orders = with_failure(orders, f"{worker} could not {request_words(order.message)}: {message.error}")
    if isinstance(order.message, DropPersistent) and message.error is None:
        deleting = orders.persistent.deleting - frozenset(order.message.checkpoints)
        return replace(orders, persistent=replace(orders.persistent, deleting=deleting))
    if isinstance(order.message, RepairSave) and message.error is None:
        lately = {copy: at for copy, at in orders.copied.items() if now - at < COPIED_SECONDS}
        return replace(orders, copied={**lately, (order.message.save, order.message.target): now})
    return orders


def _read(orders: Orders, order: Request, answer: HolderReading, now: float) -> Orders:
    """A holder's index as an agent read it; a listing that was asked for before counts no more, as behind a read of our own."""
    asked = order.message
    if not isinstance(asked, LookAtHolders) or answer.holder not in {e.holder for e in asked.holders}:
        return orders
    if len(answer.manifests) > bounds.MAX_INDEX_ENTRIES:
        why = f"{answer.holder}: {len(answer.manifests)} index entries, more than any job has"
        return replace(
            orders, sights=pending_requests.record_index(orders.sights, order.epoch, answer.holder, None, (why,))
        )
    page = read_manifests(answer.manifests)
    for why in page.unreadable:
        orders = with_failure(orders, f"{order.worker} sent an unreadable index entry of {answer.holder}: {why}")
    named = {m.layout for m in page.entries}
    layouts = {d: text for d, text in answer.layouts.items() if d in named and d not in orders.sighted_layouts}
    if layouts:
        orders = replace(orders, sighted_layouts={**orders.sighted_layouts, **layouts})
    sights = pending_requests.record_index(orders.sights, order.epoch, answer.holder, page.entries, page.refused)
    if sights is orders.sights:
        return orders
    orders = replace(orders, sights=sights, read_seconds=now)
    return void_listing(orders) if orders.persistent.read_epoch is not None else orders


def _told(orders: Orders, order: Request, page: Listing) -> Orders:
    """One page. After the last the layouts that nobody knows are asked for, a few at a time; then the listing counts."""
    asked = order.message
    if not isinstance(asked, ListPersistent):
        return orders
    error, gathered = page.error, None
    try:
        gathered = taken(order.gathered, page, asked, orders.max_records)
    except OutOfBounds as refusal:
        error = str(refusal)
        orders = with_refused(orders, (error,))
    if error is None and gathered is None and not page.more:
        missing = len(order.gathered.pages) + 1
        error = f"page {missing} of {page.page + 1} of the listing was not received"
    if error is None and page.more:
        waits = order if gathered is None else replace(order, gathered=gathered)
        return replace(orders, outstanding={**orders.outstanding, page.request: waits})
    rest = {n: o for n, o in orders.outstanding.items() if n != page.request}
    if error is not None or gathered is None:
        orders = with_failure(
            replace(orders, outstanding=rest), f"{order.worker} could not {request_words(order.message)}: {error}"
        )
        seen = PersistentSeen(asked_seconds=order.asked_seconds, error=error, older_job=asked.older_job)
        return with_listing(orders, seen)
    gathered = gathered.answered(asked.layouts or ())
    wanted = lacking(gathered.whole(), order.known)
    if wanted:
        number = orders.next_request
        more = ListPersistent(number, asked.older_job, manifests=False, layouts=wanted, begin=asked.begin)
        order = replace(order, message=more, gathered=gathered.asked_anew())
        return replace(orders, next_request=number + 1, outstanding={**rest, number: order})
    # what others were asked for the same is answered with this
    rest = {n: o for n, o in rest.items() if not _same_listing(o, order)}
    return _listed(replace(orders, outstanding=rest), order, gathered)


def _listed(orders: Orders, order: Request, gathered: PartialListing) -> Orders:
    older = order.message.older_job if isinstance(order.message, ListPersistent) else None
    found, entries = gathered.whole(), gathered.whole().entries
    # an agent of ours leaves out what breaks a bound, and says so in the words of the error
    left_out = tuple(one.why for one in found.left_out if OutOfBounds.MARK in one.why)
    orders = with_refused(replace(orders, refused=()), (*found.refused, *left_out))
    for why in found.unreadable[:MOST_TOLD]:
        orders = with_failure(orders, f"{older or 'the persistent tier'} has a manifest that cannot be read: {why}")
    if older is not None:
        entries = tuple(replace(m, save=replace(m.save, epoch=-m.save.epoch)) for m in entries)
    if older is None and _is_past(order, orders):
        # asked for again once, and not for each holder that was read meanwhile
        return void_listing(orders)
    seen = PersistentSeen(order.epoch, entries, order.asked_seconds, older_job=older, left_out=found.left_out)
    seen = replace(seen, newest_epoch=found.newest_epoch)
    seen = replace(seen, unjudged=seen.unreadable_checkpoints(older is not None))
    named = {m.layout for m in entries}
    known = orders.layouts if older is None else orders.older_layouts
    layouts = {digest: text for digest, text in {**known, **found.layouts}.items() if digest in named}
    for one in found.left_out[:MOST_TOLD]:
        orders = with_failure(orders, f"left out of the listing of {older or 'the persistent tier'}: {one}")
    if len(found.left_out) > MOST_TOLD:
        orders = with_failure(orders, f"{len(found.left_out) - MOST_TOLD} more records could not be read")
    if older is not None:
        return replace(orders, older=seen, older_layouts=layouts)
    still = orders.persistent.deleting & {m.save.checkpoint for m in entries}
    return replace(orders, persistent=seen.without(still), layouts=layouts)


def _is_past(order: Request, orders: Orders) -> bool:
    """Whether a holder was read since this was asked: data moves from memory to the persistent tier."""
    return order.asked_seconds <= orders.read_seconds


def _same_listing(order: Request, other: Request) -> bool:
    one, two = order.message, other.message
    return isinstance(one, ListPersistent) and isinstance(two, ListPersistent) and one.older_job == two.older_job


def _persisted(orders: Orders, worker: WorkerId, message: Persisted) -> Orders:
    if message.error is not None:
        orders = _stumbled(_again(orders, worker, message.save), message.save)
        bad = _seems_unreadable(orders, message.save) if message.unreadable is None else message.unreadable
        return with_failure(
            _known_unreadable(orders, message.save) if bad else orders,
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


def _seems_unreadable(orders: Orders, save: RankSave) -> bool:
    """Whether only this save's own copies explain that its uploads fail.

    For agents of a former version, which do not say why: the tier took other saves of the same checkpoint. Without this
    a finished job would ask them for an hour, and fail.
    """
    others = orders.promoted.get(save.checkpoint, frozenset()) - {save}
    return bool(others) and orders.stumbled.get(save, 0) >= MOST_UNTOLD_FAILURES


def _known_unreadable(orders: Orders, save: RankSave) -> Orders:
    found = orders.unreadable | {save}
    newest = sorted({s.checkpoint for s in found}, key=lambda c: (c.step, c.epoch))[-MOST_PROMOTED:]
    return replace(orders, unreadable=frozenset(s for s in found if s.checkpoint in newest))


def _stumbled(orders: Orders, save: RankSave) -> Orders:
    counts = {**orders.stumbled, save: orders.stumbled.get(save, 0) + 1}
    newest = sorted({s.checkpoint for s in counts}, key=lambda c: (c.step, c.epoch))[-MOST_PROMOTED:]
    return replace(orders, stumbled={s: n for s, n in counts.items() if s.checkpoint in newest})


def _again(orders: Orders, worker: WorkerId, save: RankSave) -> Orders:
    """The same wish in a new round: said again, since the agent has tried for as long as it does by itself."""
    share = orders.promotions.get(worker)
    if share is None or save not in share.saves:
        return orders
    number = orders.promotion_round + 1
    promotions = {**orders.promotions, worker: replace(share, round=number)}
    return replace(orders, promotions=promotions, promotion_round=number)
