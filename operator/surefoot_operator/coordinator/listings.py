"""Has agents list the persistent tier, or an older job's folder, and delete from it; assembles what they send.

Pure. Several agents may be asked for the same listing, and the first that answers whole counts. A listing counts only if
no memory server was read after it was asked for: data moves from memory to the persistent tier.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from surefoot.errors import OutOfBounds, ProtocolError
from surefoot.protocol import bounds
from surefoot.protocol.checkpoints.completeness import LeftOut
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, OlderJob, WorkerId
from surefoot.protocol.messages import (
    DropPersistent,
    Listing,
    ListPersistent,
)
from surefoot.protocol.text import shorten
from surefoot_operator.api.status import JobStatus
from surefoot_operator.coordinator.pending_requests import (
    PendingRequests,
    Request,
    describe_request,
    with_failure,
)
from surefoot_operator.job_snapshot import PersistentSeen

# ---- listing pages ---------------------------------------------------------------------------------------------------
# Assembles the pages of a listing. An agent first sends the manifests, which name their layouts by digest; then the
# coordinator requests the layouts that it lacks, a few at a time. The layouts of thousands of ranks are hundreds of
# megabytes: sent unasked they delayed heartbeats on the same connection. Each page is parsed as it comes, so that none
# holds up the operator for long.

LAYOUTS_AT_ONCE = 128
"""Asked for in one request: tens of megabytes at most, in the agent and on the line."""
MOST_LEFT_OUT = 1000
"""Records that one page leaves out by name, as agents of ours bound it."""
MOST_SENTENCES = 8
"""On manifests that could not be read."""


@dataclass(frozen=True, slots=True)
class ListingPage:
    """The content of one or more pages."""

    entries: tuple[RankManifest, ...] = ()
    layouts: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[LeftOut, ...] = ()
    unreadable: tuple[str, ...] = ()
    """Why manifests in it could not be read, the first few."""
    refused: tuple[str, ...] = ()
    """Those among them that break a bound."""
    newest_epoch: int = 0
    """That the tier names, beside the claim that was asked for."""


@dataclass(frozen=True, slots=True)
class PartialListing:
    """A listing under way: earlier requests' content, and this one's pages."""

    before: ListingPage = field(default_factory=ListingPage)
    pages: tuple[ListingPage, ...] = ()
    heard: int = 0
    """Pages of all requests, those included that came again."""

    def whole(self, asked: Collection[str]) -> ListingPage:
        """Joins everything received so far, after the last page.

        Layouts that were `asked` for and not sent count as left out. Otherwise they would be asked for without end.
        """
        joined = _joined((self.before, *self.pages))
        withheld = set(asked) - joined.layouts.keys() - {one.digest for one in joined.left_out}
        unsent = tuple(LeftOut(f"layout {d} was not sent by the agent", True, digest=d) for d in sorted(withheld))
        return replace(joined, left_out=(*joined.left_out, *unsent))


def _with_page(
    gathered: PartialListing, page: Listing, asked: ListPersistent, max_entries: int
) -> PartialListing | None:
    """Adds a page; None where pages before it are missing.

    A page that came before starts the answer anew. Only what was asked for is kept.

    Raises:
        OutOfBounds: the listing would have more than `max_entries` manifests, or has no end.
    """
    if not 0 <= page.page <= len(gathered.pages):
        return None
    listing = "the listing of the persistent tier"
    bounds.check(listing, "the number of pages", gathered.heard + 1, bounds.MAX_PAGES)
    earlier = (gathered.before, *gathered.pages[: page.page])
    if asked.manifests:
        total = len(page.manifests) + sum(len(one.entries) for one in earlier)
        bounds.check(listing, "the number of manifests", total, max_entries)
    size = sum(len(text) for layouts in (page.layouts, *(one.layouts for one in earlier)) for text in layouts.values())
    bounds.check(listing, "the bytes of layouts", size, bounds.max_layout_bytes(max_entries))
    layouts = page.layouts
    if asked.layouts is not None and not asked.manifests:
        layouts = {digest: text for digest, text in layouts.items() if digest in asked.layouts}
    read = _read_manifests(page.manifests) if asked.manifests else ListingPage()
    bounds.check(listing, "the newest epoch", page.newest_epoch, bounds.MAX_COUNT)
    read = replace(read, layouts=layouts, left_out=page.left_out[:MOST_LEFT_OUT], newest_epoch=page.newest_epoch)
    return PartialListing(gathered.before, (*earlier[1:], read), gathered.heard + 1)


def _missing_layouts(page: ListingPage, known: Collection[str]) -> tuple[str, ...]:
    """Digests of missing layouts that the next request asks for."""
    left_out = {one.digest for one in page.left_out}
    named_layouts = {m.layout for m in page.entries}
    return tuple(sorted(named_layouts - left_out - set(known) - page.layouts.keys())[:LAYOUTS_AT_ONCE])


def _read_manifests(manifests: Iterable[str]) -> ListingPage:
    """Reads those that can be, and says why the first few others cannot."""
    entries: list[RankManifest] = []
    unreadable: list[str] = []
    refused: list[str] = []
    for text in manifests:
        try:
            entries.append(RankManifest.from_json(text))
        except ProtocolError as error:
            sentences = refused if isinstance(error, OutOfBounds) else unreadable
            if len(sentences) < MOST_SENTENCES:
                sentences.append(str(error))
    return ListingPage(tuple(entries), unreadable=(*refused, *unreadable), refused=tuple(refused))


def _joined(pages: Collection[ListingPage]) -> ListingPage:
    return ListingPage(
        tuple(m for page in pages for m in page.entries),
        {digest: text for page in pages for digest, text in page.layouts.items()},
        tuple(one for page in pages for one in page.left_out),
        tuple(islice((why for page in pages for why in page.unreadable), MOST_SENTENCES)),
        tuple(islice((why for page in pages for why in page.refused), MOST_SENTENCES)),
        max((page.newest_epoch for page in pages), default=0),
    )


# ---- requests --------------------------------------------------------------------------------------------------------

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


@dataclass(frozen=True, slots=True)
class ListingRequest(Request):
    """A request for a listing, with what has come of it."""

    gathered: PartialListing = field(default_factory=PartialListing)
    """Its pages, until all have come."""
    known: frozenset[str] = frozenset()
    """Digests of layouts that need not be sent."""


def is_listing(order: Request, older: bool) -> bool:
    """Whether this asks for a listing, `older`: of an older job."""
    message = order.message
    return isinstance(message, ListPersistent) and (message.older_job is not None) == older


def list_persistent(
    orders: PendingRequests,
    worker: WorkerId,
    epoch: int,
    now: float,
    older: OlderJob | None = None,
    known: frozenset[str] = frozenset(),
    listed_as: ListingRights = ANY_RIGHTS,
) -> PendingRequests:
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
    still_asked = {n: o for n, o in others.items() if n not in oldest}
    number = orders.next_request
    kept_layouts = orders.layouts if older is None else orders.older_layouts
    epoch_claimed, ticket = listed_as.claim if older is None else (0, "")
    message = ListPersistent(
        number, older, layouts=(), begin=listed_as.begin, claim_epoch=epoch_claimed, claim_ticket=ticket
    )
    order = ListingRequest(worker, message, epoch, now, known=known | kept_layouts.keys())
    orders = replace(orders, next_request=number + 1, outstanding={**still_asked, number: order})
    asked_of = frozenset(o.worker for n, o in same.items() if n in still_asked) | {worker}
    return _with_listing(orders, PersistentSeen(asked_seconds=now, older_job=older, asked_of=asked_of))


def void_listing(orders: PendingRequests) -> PendingRequests:
    """Discards a listing asked for before a holder was read."""
    others = {n: o for n, o in orders.outstanding.items() if not is_listing(o, older=False)}
    seen = replace(orders.persistent, read_epoch=None, asked_seconds=None)
    return replace(orders, outstanding=others, persistent=seen)


def drop_persistent(
    orders: PendingRequests, worker: WorkerId, epoch: int, checkpoints: tuple[Checkpoint, ...], now: float
) -> PendingRequests:
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


def persistent_without(orders: PendingRequests, kept: Mapping[int, Request]) -> PersistentSeen:
    """Counts this job's listing as never asked for if none of the requests for it is `kept`."""
    lost = any(is_listing(o, older=False) for n, o in orders.outstanding.items() if n not in kept)
    lost = lost and not any(is_listing(o, older=False) for o in kept.values())
    return replace(orders.persistent, asked_seconds=None) if lost else orders.persistent


def older_without(orders: PendingRequests, kept: Mapping[int, Request]) -> PersistentSeen:
    """Counts an older job's listing as never asked for if a request for it is not `kept`."""
    lost = any(is_listing(o, older=True) for n, o in orders.outstanding.items() if n not in kept)
    return replace(orders.older, asked_seconds=None) if lost else orders.older


# ---- replies ---------------------------------------------------------------------------------------------------------

MOST_TOLD = 5
"""Records that a listing left out and that are told by name."""
MOST_REFUSED = 8
"""Sentences on records that broke a bound."""


def apply_page(orders: PendingRequests, order: Request, page: Listing) -> PendingRequests:
    """One page. After the last the layouts that nobody knows are asked for, a few at a time; then the listing counts."""
    asked = order.message
    if not isinstance(asked, ListPersistent) or not isinstance(order, ListingRequest):
        return orders
    error, gathered = page.error, None
    try:
        gathered = _with_page(order.gathered, page, asked, orders.max_records)
    except OutOfBounds as refusal:
        error = str(refusal)
        orders = _with_refused(orders, (error,))
    if error is None and gathered is None and not page.more:
        missing = len(order.gathered.pages) + 1
        error = f"page {missing} of {page.page + 1} of the listing was not received"
    if error is None and page.more:
        waits = order if gathered is None else replace(order, gathered=gathered)
        return replace(orders, outstanding={**orders.outstanding, page.request: waits})
    rest = {n: o for n, o in orders.outstanding.items() if n != page.request}
    if error is not None or gathered is None:
        orders = with_failure(
            replace(orders, outstanding=rest), f"{order.worker} could not {describe_request(order.message)}: {error}"
        )
        seen = PersistentSeen(asked_seconds=order.asked_seconds, error=error, older_job=asked.older_job)
        return _with_listing(orders, seen)
    listing = gathered.whole(asked.layouts or ())
    wanted = _missing_layouts(listing, order.known)
    if wanted:
        number = orders.next_request
        more = ListPersistent(number, asked.older_job, manifests=False, layouts=wanted, begin=asked.begin)
        order = replace(order, message=more, gathered=PartialListing(listing, heard=gathered.heard))
        return replace(orders, next_request=number + 1, outstanding={**rest, number: order})
    # what others were asked for the same is answered with this
    rest = {n: o for n, o in rest.items() if not _same_listing(o, order)}
    return _listed(replace(orders, outstanding=rest), order, listing)


def _listed(orders: PendingRequests, order: Request, listing: ListingPage) -> PendingRequests:
    older = order.message.older_job if isinstance(order.message, ListPersistent) else None
    entries = listing.entries
    # an agent of ours leaves out what breaks a bound, and says so in the words of the error
    left_out = tuple(one.why for one in listing.left_out if OutOfBounds.MARK in one.why)
    orders = _with_refused(replace(orders, refused=()), (*listing.refused, *left_out))
    for why in listing.unreadable[:MOST_TOLD]:
        orders = with_failure(orders, f"{older or 'the persistent tier'} has a manifest that cannot be read: {why}")
    if older is not None:
        entries = tuple(replace(m, save=replace(m.save, epoch=-m.save.epoch)) for m in entries)
    seen = PersistentSeen(order.epoch, entries, order.asked_seconds, older_job=older, left_out=listing.left_out)
    seen = replace(seen, newest_epoch=listing.newest_epoch)
    seen = replace(seen, unjudged=seen.unreadable_checkpoints(older is not None))
    named_layouts = {m.layout for m in entries}
    known = orders.layouts if older is None else orders.older_layouts
    layouts = {digest: text for digest, text in {**known, **listing.layouts}.items() if digest in named_layouts}
    for one in listing.left_out[:MOST_TOLD]:
        orders = with_failure(orders, f"left out of the listing of {older or 'the persistent tier'}: {one}")
    if len(listing.left_out) > MOST_TOLD:
        orders = with_failure(orders, f"{len(listing.left_out) - MOST_TOLD} more records could not be read")
    if older is not None:
        return replace(orders, older=seen, older_layouts=layouts)
    still = orders.persistent.deleting & {m.save.checkpoint for m in entries}
    return replace(orders, persistent=seen.without(still), layouts=layouts)


def _same_listing(order: Request, other: Request) -> bool:
    one, two = order.message, other.message
    return isinstance(one, ListPersistent) and isinstance(two, ListPersistent) and one.older_job == two.older_job


def confirm_deletion(orders: PendingRequests, deleted: DropPersistent) -> PendingRequests:
    """Records that these checkpoints are deleted."""
    deleting = orders.persistent.deleting - frozenset(deleted.checkpoints)
    return replace(orders, persistent=replace(orders.persistent, deleting=deleting))


def _with_listing(orders: PendingRequests, seen: PersistentSeen) -> PendingRequests:
    """Stores what is known of one job's listing.

    What is being deleted from this job's own stays so: another request for a listing, or one that failed, tells nothing of it.
    """
    if seen.older_job is not None:
        return replace(orders, older=seen)
    return replace(orders, persistent=replace(seen, deleting=orders.persistent.deleting))


def _with_refused(orders: PendingRequests, sentences: Iterable[str]) -> PendingRequests:
    """Adds records that broke a bound, once each, keeping the first few."""
    refused = dict.fromkeys((*orders.refused, *(shorten(one, bounds.MAX_CAUSE_CHARACTERS) for one in sentences)))
    kept = tuple(refused)[:MOST_REFUSED]
    return orders if kept == orders.refused else replace(orders, refused=kept)
