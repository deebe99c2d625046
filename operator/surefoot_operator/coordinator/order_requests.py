"""Adds the reconciler's requests to agents, each asked once.

Pure; called by `reconcile.apply_plan`. A request that is under way is not made again, so that a round a second asks nothing
twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from surefoot.protocol.identities import Checkpoint, HolderEndpoint, OlderJob, WorkerId
from surefoot.protocol.messages import (
    DropPersistent,
    ListPersistent,
    PromoteSave,
    RepairSave,
    Retire,
)
from surefoot.protocol.sighting_messages import LookAtHolders
from surefoot_operator.api.status import JobStatus
from surefoot_operator.coordinator import holder_sightings
from surefoot_operator.coordinator.holder_sightings import SightingRequest
from surefoot_operator.coordinator.pending_requests import HoldProposal, Orders, Request, is_listing, with_listing
from surefoot_operator.job_snapshot import HoldSeen
from surefoot_operator.observed_tiers import PersistentSeen

MOST_LISTINGS = 8
"""Of one kind that may be under way at once; each is asked for a minute after the one before, and any may answer."""


@dataclass(frozen=True, slots=True)
class ListingRights:
    """Tells an agent what it may do in the persistent tier before it lists it."""

    begin: bool = True
    """It may make a folder that is not there."""
    claim: tuple[int, str] = (0, "")
    """The epoch that it claims there, and the claim's ticket; 0: none."""


ANY_RIGHTS = ListingRights()


def listing_rights(status: JobStatus) -> ListingRights:
    """Derives an agent's access from status.

    A folder that is missing is made only while no checkpoint was ever complete in it: later it is one that went away.
    The ticket is the moment of the claim, which no claim after a restored backup has.
    """
    world = status.world
    is_claim = world is not None and world.state == "Claimed"
    claim = (world.epoch, f"{world.changed_seconds:.3f}") if world is not None and is_claim else (0, "")
    return ListingRights(begin=status.floor is None, claim=claim)


COPIED_SECONDS = 2.0
"""Within so long after an agent has copied a save to a holder that holder's index is read anew."""


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
    listed_as: ListingRights = ANY_RIGHTS,
) -> Orders:
    """Asks one agent for a listing.

    Agents asked before, for the same reading, may answer too: otherwise a listing slower than its timeout would never
    end.
    """
    same = {
        n: o
        for n, o in orders.outstanding.items()
        if is_listing(o, older is not None) and o.epoch == epoch and o.message.older_job == older  # type: ignore[union-attr]
    }
    oldest = sorted(same)[: max(0, len(same) - MOST_LISTINGS)]
    others = {n: o for n, o in orders.outstanding.items() if not is_listing(o, older is not None) or n in same}
    kept = {n: o for n, o in others.items() if n not in oldest}
    number = orders.next_request
    kept_layouts = orders.layouts if older is None else orders.older_layouts
    epoch_claimed, ticket = listed_as.claim if older is None else (0, "")
    message = ListPersistent(
        number, older, layouts=(), begin=listed_as.begin, claim_epoch=epoch_claimed, claim_ticket=ticket
    )
    order = Request(worker, message, epoch, now, known=known | kept_layouts.keys())
    orders = replace(orders, next_request=number + 1, outstanding={**kept, number: order})
    asked_of = frozenset(o.worker for n, o in same.items() if n in kept) | {worker}
    return with_listing(orders, PersistentSeen(asked_seconds=now, older_job=older, asked_of=asked_of))


def look(
    orders: Orders,
    worker: WorkerId,
    epoch: int,
    holders: tuple[HolderEndpoint, ...],
    now: float,
    known: frozenset[str] = frozenset(),
) -> Orders:
    """Asks one agent to seal and read holders, replacing its former question.

    `known`: digests of layout records that it need not tell.
    """
    others = {
        n: o
        for n, o in orders.outstanding.items()
        if not isinstance(o.message, LookAtHolders) or (o.worker != worker and o.epoch == epoch)
    }
    number = orders.next_request
    layouts = orders.sighted_layouts if holder_sightings.of_epoch(orders.sights, epoch) else {}
    known = known | orders.layouts.keys() | layouts.keys()
    order = Request(worker, LookAtHolders(number, holders, epoch, tuple(sorted(known))), epoch, now)
    seen = holder_sightings.asked(orders.sights, SightingRequest(epoch, now, holders))
    outstanding = {**others, number: order}
    return replace(orders, next_request=number + 1, outstanding=outstanding, sights=seen, sighted_layouts=layouts)


def void_listing(orders: Orders) -> Orders:
    """Discards a listing asked for before a holder was read."""
    others = {n: o for n, o in orders.outstanding.items() if not is_listing(o, older=False)}
    seen = replace(orders.persistent, read_epoch=None, asked_seconds=None)
    return replace(orders, outstanding=others, persistent=seen)


def repair(orders: Orders, copies: Iterable[tuple[WorkerId, RepairSave]], now: float) -> Orders:
    """Asks agents to copy rank saves that none of them copies yet.

    All of a round at once: a holder that came back empty lacks thousands, and one by one each looks through all others.
    One that was made is not asked for again before its target's index was read: each plan until then would have the same
    bytes sent once more. The requests are numbered here.
    """
    messages = (order.message for order in orders.outstanding.values())
    asked = {(m.save, m.target, m.epoch) for m in messages if isinstance(m, RepairSave)}
    new: dict[int, Request] = {}
    for worker, copy in copies:
        made = now - orders.copied.get((copy.save, copy.target), -math.inf) < COPIED_SECONDS
        if not made and (copy.save, copy.target, copy.epoch) not in asked:
            asked.add((copy.save, copy.target, copy.epoch))
            number = orders.next_request + len(new)
            new[number] = Request(worker, replace(copy, request=number), copy.epoch, now)
    if not new:
        return orders
    return replace(orders, next_request=orders.next_request + len(new), outstanding={**orders.outstanding, **new})


def promote(orders: Orders, shares: Mapping[WorkerId, PromoteSave]) -> Orders:
    """Sets what each worker uploads; a worker not named stops.

    A share that comes back after a while is of a new round. It would else be the message that the agent has had, and
    be said never again, though the upload failed meanwhile.
    """
    fresh = orders.promotion_round + 1
    wanted = {
        worker: replace(share, round=old.round if (old := orders.promotions.get(worker)) is not None else fresh)
        for worker, share in shares.items()
    }
    if orders.promotions == wanted:
        return orders
    newest = max((share.round for share in wanted.values()), default=0)
    return replace(orders, promotions=wanted, promotion_round=max(newest, orders.promotion_round))


def drop_persistent(
    orders: Orders, worker: WorkerId, epoch: int, checkpoints: tuple[Checkpoint, ...], now: float
) -> Orders:
    """Asks one agent to delete; one such request at a time.

    From now on they count as gone: what is proven, restored or taken for the floor meanwhile would be gone a moment later.
    """
    if any(isinstance(order.message, DropPersistent) for order in orders.outstanding.values()):
        return orders
    number = orders.next_request
    order = Request(worker, DropPersistent(number, checkpoints), epoch, now)
    return replace(
        orders,
        next_request=number + 1,
        outstanding={**orders.outstanding, number: order},
        persistent=orders.persistent.without(frozenset(checkpoints)),
        promoted={c: saves for c, saves in orders.promoted.items() if c not in checkpoints},
    )


def retire(orders: Orders, workers: Iterable[WorkerId], message: Retire) -> Orders:
    """Tells exactly these attempts of workers to leave."""
    wanted = {**orders.retired, **dict.fromkeys(workers, message)}
    return orders if wanted == orders.retired else replace(orders, retired=wanted)
