"""Has agents seal and read memory servers that the operator does not reach; merges what they read.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from surefoot.protocol import bounds
from surefoot.protocol.bounds import MAX_CAUSE_CHARACTERS
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import HolderEndpoint, HolderId, WorkerId
from surefoot.protocol.messages import (
    HolderReading,
    LookAtHolders,
    Sighting,
)
from surefoot.protocol.text import shorten
from surefoot_operator.api.status import World
from surefoot_operator.coordinator.listings import (
    read_manifests,
    void_listing,
)
from surefoot_operator.coordinator.pending_requests import (
    PendingRequests,
    Request,
    with_failure,
)
from surefoot_operator.job_snapshot import HolderSeen, SightSeen

Sightings = Mapping[HolderId, SightSeen]


@dataclass(frozen=True, slots=True)
class SightingRequest:
    """A question to one agent about holders."""

    epoch: int
    asked_seconds: float
    holders: tuple[HolderEndpoint, ...]


def record_request(sights: Sightings, question: SightingRequest) -> Sightings:
    """Records a question and drops what older epochs saw."""
    found = drop_older_generations(sights, question.epoch)
    for endpoint in question.holders:
        now = question.asked_seconds
        known = found.get(endpoint.holder, SightSeen(question.epoch, now, now))
        found[endpoint.holder] = replace(known, asked_seconds=now)
    return found


def drop_older_generations(sights: Sightings, epoch: int) -> dict[HolderId, SightSeen]:
    """Keeps what was seen in this epoch."""
    return {holder: sight for holder, sight in sights.items() if sight.epoch == epoch}


def request_probe(
    orders: PendingRequests,
    worker: WorkerId,
    epoch: int,
    holders: tuple[HolderEndpoint, ...],
    now: float,
    known: frozenset[str] = frozenset(),
) -> PendingRequests:
    """Asks one agent to seal and read holders, replacing its former question.

    `known`: digests of layout records that it need not tell.
    """
    others = {
        n: o
        for n, o in orders.outstanding.items()
        if not isinstance(o.message, LookAtHolders) or (o.worker != worker and o.epoch == epoch)
    }
    number = orders.next_request
    layouts = orders.sighted_layouts if drop_older_generations(orders.sights, epoch) else {}
    known = known | orders.layouts.keys() | layouts.keys()
    order = Request(worker, LookAtHolders(number, holders, epoch, tuple(sorted(known))), epoch, now)
    seen = record_request(orders.sights, SightingRequest(epoch, now, holders))
    outstanding = {**others, number: order}
    return replace(orders, next_request=number + 1, outstanding=outstanding, sights=seen, sighted_layouts=layouts)


def apply_index(orders: PendingRequests, order: Request, answer: HolderReading, now: float) -> PendingRequests:
    """A holder's index as an agent read it; a listing that was asked for before counts no more, as behind a read of our own."""
    asked = order.message
    if not isinstance(asked, LookAtHolders) or answer.holder not in {e.holder for e in asked.holders}:
        return orders
    if len(answer.manifests) > bounds.MAX_INDEX_ENTRIES:
        why = f"{answer.holder}: {len(answer.manifests)} index entries, more than any job has"
        return replace(orders, sights=record_index(orders.sights, order.epoch, answer.holder, None, (why,)))
    page = read_manifests(answer.manifests)
    for why in page.unreadable:
        orders = with_failure(orders, f"{order.worker} sent an unreadable index entry of {answer.holder}: {why}")
    named = {m.layout for m in page.entries}
    layouts = {d: text for d, text in answer.layouts.items() if d in named and d not in orders.sighted_layouts}
    if layouts:
        orders = replace(orders, sighted_layouts={**orders.sighted_layouts, **layouts})
    sights = record_index(orders.sights, order.epoch, answer.holder, page.entries, page.refused)
    if sights is orders.sights:
        return orders
    orders = replace(orders, sights=sights, read_seconds=now)
    return void_listing(orders) if orders.persistent.read_epoch is not None else orders


def apply_reply(orders: PendingRequests, order: Request, message: Sighting, now: float) -> PendingRequests:
    """Records which of the servers that it was asked for this agent reaches."""
    if not isinstance(order.message, LookAtHolders):
        return orders
    asked = SightingRequest(order.epoch, order.asked_seconds, order.message.holders)
    return replace(orders, sights=merge_reply(orders.sights, asked, message, now))


def merge_reply(sights: Sightings, question: SightingRequest, answer: Sighting, now: float) -> Sightings:
    """Merges an answer: seeing a holder outweighs not seeing it.

    An agent that does not see it may be cut off itself. An answer that does not match its question is ignored.
    """
    if len(answer.seen) != len(question.holders) or len(answer.trouble) != len(question.holders):
        return sights
    found = dict(sights)
    for endpoint, there, trouble in zip(question.holders, answer.seen, answer.trouble, strict=True):
        known = found.get(endpoint.holder)
        if known is None or known.epoch != question.epoch:
            continue
        beaten = known.there and not there and (known.answered_seconds or 0.0) >= question.asked_seconds
        if not beaten:
            found[endpoint.holder] = replace(known, answered_seconds=now, there=there, trouble=trouble)
    return found


def record_index(
    sights: Sightings,
    epoch: int,
    holder: HolderId,
    entries: tuple[RankManifest, ...] | None,
    refused: Iterable[str] = (),
) -> Sightings:
    """Records the index that an agent read of a sealed holder; None: it broke a bound as a whole.

    The first reading counts: a later one might lack what went to the persistent tier behind its listing.
    """
    known = sights.get(holder)
    if known is None or known.epoch != epoch or known.entries is not None:
        return sights
    sentences = tuple(shorten(sentence, MAX_CAUSE_CHARACTERS) for sentence in refused)
    return {**sights, holder: replace(known, entries=entries, refused=sentences)}


def refused_of(sights: Sightings, world: World | None) -> tuple[str, ...]:
    """Records that broke a bound, of the readings that this claim uses: a world that runs uses none."""
    if world is None or world.state != "Claimed":
        return ()
    return tuple(
        sentence for sight in drop_older_generations(sights, world.epoch).values() for sentence in sight.refused
    )


def proxied(holders: tuple[HolderSeen, ...], sights: Sightings, world: World | None) -> tuple[HolderSeen, ...]:
    """Puts what agents read into the place of silent holders.

    While a world is claimed, and of exactly the instances that were read for it: what such a holder takes later is not known.
    """
    if world is None or world.state != "Claimed" or not any(s.entries is not None for s in sights.values()):
        return holders
    return tuple(_proxied(holder, sights.get(holder.endpoint.holder), world.epoch) for holder in holders)


def _proxied(holder: HolderSeen, sight: SightSeen | None, epoch: int) -> HolderSeen:
    if holder.state != "Silent" or sight is None or sight.entries is None or sight.epoch != epoch:
        return holder
    return replace(holder, state="Proxied", fence=epoch, read_epoch=epoch, entries=sight.entries)
