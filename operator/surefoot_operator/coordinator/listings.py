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
from surefoot.protocol.checkpoints.completeness import UnreadRecord
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, SourceJob, WorkerId
from surefoot.protocol.messages import (
    DeletePersistent,
    ListPersistent,
    PersistentPage,
)
from surefoot_operator.api.status import JobStatus
from surefoot_operator.coordinator.pending_requests import (
    PendingRequest,
    PendingRequests,
    describe_request,
    with_failure,
    with_refused,
)
from surefoot_operator.job_snapshot import PersistentListing

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
    left_out: tuple[UnreadRecord, ...] = ()
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

    def whole(self) -> ListingPage:
        """Joins everything received so far."""
        return _joined((self.before, *self.pages))

    def asked_anew(self) -> PartialListing:
        """Starts the next request, once the present one is answered."""
        return PartialListing(self.whole(), heard=self.heard)

    def answered(self, asked: Collection[str]) -> PartialListing:
        """Marks layouts that were asked for and not sent as withheld.

        Otherwise they would be asked for without end.
        """
        found = self.whole()
        withheld = set(asked) - found.layouts.keys() - {one.digest for one in found.left_out}
        told = tuple(UnreadRecord(f"layout {d} was not sent by the agent", True, digest=d) for d in sorted(withheld))
        return replace(self, before=replace(self.before, left_out=(*self.before.left_out, *told)))


def taken(
    gathered: PartialListing, page: PersistentPage, asked: ListPersistent, max_entries: int
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
    kept = (gathered.before, *gathered.pages[: page.page])
    if asked.manifests:
        total = len(page.manifests) + sum(len(one.entries) for one in kept)
        bounds.check(listing, "the number of manifests", total, max_entries)
    size = sum(len(text) for layouts in (page.layouts, *(one.layouts for one in kept)) for text in layouts.values())
    bounds.check(listing, "the bytes of layouts", size, bounds.max_layout_bytes(max_entries))
    layouts = page.layouts
    if asked.layouts is not None and not asked.manifests:
        layouts = {digest: text for digest, text in layouts.items() if digest in asked.layouts}
    read = read_manifests(page.manifests) if asked.manifests else ListingPage()
    bounds.check(listing, "the newest epoch", page.newest_epoch, bounds.MAX_COUNT)
    read = replace(read, layouts=layouts, left_out=page.unread_records[:MOST_LEFT_OUT], newest_epoch=page.newest_epoch)
    return PartialListing(gathered.before, (*kept[1:], read), gathered.heard + 1)


def lacking(found: ListingPage, known: Collection[str]) -> tuple[str, ...]:
    """Digests of missing layouts that the next request asks for."""
    told = {one.digest for one in found.left_out}
    named = {m.layout for m in found.entries}
    return tuple(sorted(named - told - set(known) - found.layouts.keys())[:LAYOUTS_AT_ONCE])


def read_manifests(manifests: Iterable[str]) -> ListingPage:
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
    world = status.membership
    is_claim = world is not None and world.state == "Claimed"
    claim = (world.generation, f"{world.changed_seconds:.3f}") if world is not None and is_claim else (0, "")
    return ListingRights(begin=status.last_uploaded is None, claim=claim)


@dataclass(frozen=True, slots=True)
class ListingRequest(PendingRequest):
    """A request for a listing, with what has come of it."""

    gathered: PartialListing = field(default_factory=PartialListing)
    """Its pages, until all have come."""
    known: frozenset[str] = frozenset()
    """Digests of layouts that need not be sent."""


def is_listing(order: PendingRequest, older: bool) -> bool:
    """Whether this asks for a listing, `older`: of an older job."""
    message = order.message
    return isinstance(message, ListPersistent) and (message.source_job is not None) == older


def list_persistent(
    orders: PendingRequests,
    worker: WorkerId,
    epoch: int,
    now: float,
    older: SourceJob | None = None,
    known: frozenset[str] = frozenset(),
    listed_as: ListingRights = ANY_RIGHTS,
) -> PendingRequests:
    """Asks one agent for a listing.

    Agents asked before, for the same reading, may answer too: otherwise a listing slower than its timeout would never
    end.
    """
    same = {
        n: o
        for n, o in orders.pending.items()
        if is_listing(o, older is not None) and o.generation == epoch and o.message.source_job == older  # type: ignore[union-attr]
    }
    oldest = sorted(same)[: max(0, len(same) - MOST_LISTINGS)]
    others = {n: o for n, o in orders.pending.items() if not is_listing(o, older is not None) or n in same}
    kept = {n: o for n, o in others.items() if n not in oldest}
    number = orders.next_request
    kept_layouts = orders.layouts if older is None else orders.source_layouts
    epoch_claimed, ticket = listed_as.claim if older is None else (0, "")
    message = ListPersistent(
        number, older, layouts=(), begin=listed_as.begin, claim_epoch=epoch_claimed, claim_ticket=ticket
    )
    order = ListingRequest(worker, message, epoch, now, known=known | kept_layouts.keys())
    orders = replace(orders, next_request=number + 1, pending={**kept, number: order})
    asked_of = frozenset(o.worker for n, o in same.items() if n in kept) | {worker}
    return with_listing(orders, PersistentListing(requested_seconds=now, source_job=older, requested_from=asked_of))


def void_listing(orders: PendingRequests) -> PendingRequests:
    """Discards a listing asked for before a holder was read."""
    others = {n: o for n, o in orders.pending.items() if not is_listing(o, older=False)}
    seen = replace(orders.persistent, read_generation=None, requested_seconds=None)
    return replace(orders, pending=others, persistent=seen)


def drop_persistent(
    orders: PendingRequests, worker: WorkerId, epoch: int, checkpoints: tuple[Checkpoint, ...], now: float
) -> PendingRequests:
    """Asks one agent to delete; one such request at a time.

    From now on they count as gone: what is proven, restored or taken for the floor meanwhile would be gone a moment later.
    """
    if any(isinstance(order.message, DeletePersistent) for order in orders.pending.values()):
        return orders
    number = orders.next_request
    order = PendingRequest(worker, DeletePersistent(number, checkpoints), epoch, now)
    return replace(
        orders,
        next_request=number + 1,
        pending={**orders.pending, number: order},
        persistent=orders.persistent.without_checkpoints(frozenset(checkpoints)),
        uploaded={c: saves for c, saves in orders.uploaded.items() if c not in checkpoints},
    )


def older_without(orders: PendingRequests, kept: Mapping[int, PendingRequest]) -> PersistentListing:
    """An older job's listing that nobody will answer any more was never asked for."""
    lost = any(is_listing(o, older=True) for n, o in orders.pending.items() if n not in kept)
    return replace(orders.source_listing, requested_seconds=None) if lost else orders.source_listing


# ---- replies ---------------------------------------------------------------------------------------------------------

MOST_TOLD = 5
"""Records that a listing left out and that are told by name."""


def apply_page(orders: PendingRequests, order: PendingRequest, page: PersistentPage) -> PendingRequests:
    """One page. After the last the layouts that nobody knows are asked for, a few at a time; then the listing counts."""
    asked = order.message
    if not isinstance(asked, ListPersistent) or not isinstance(order, ListingRequest):
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
        return replace(orders, pending={**orders.pending, page.request: waits})
    rest = {n: o for n, o in orders.pending.items() if n != page.request}
    if error is not None or gathered is None:
        orders = with_failure(
            replace(orders, pending=rest), f"{order.worker} could not {describe_request(order.message)}: {error}"
        )
        seen = PersistentListing(requested_seconds=order.requested_seconds, error=error, source_job=asked.source_job)
        return with_listing(orders, seen)
    gathered = gathered.answered(asked.layouts or ())
    wanted = lacking(gathered.whole(), order.known)
    if wanted:
        number = orders.next_request
        more = ListPersistent(number, asked.source_job, manifests=False, layouts=wanted, begin=asked.begin)
        order = replace(order, message=more, gathered=gathered.asked_anew())
        return replace(orders, next_request=number + 1, pending={**rest, number: order})
    # what others were asked for the same is answered with this
    rest = {n: o for n, o in rest.items() if not _same_listing(o, order)}
    return _listed(replace(orders, pending=rest), order, gathered)


def _listed(orders: PendingRequests, order: PendingRequest, gathered: PartialListing) -> PendingRequests:
    older = order.message.source_job if isinstance(order.message, ListPersistent) else None
    found, entries = gathered.whole(), gathered.whole().entries
    # an agent of ours leaves out what breaks a bound, and says so in the words of the error
    left_out = tuple(one.reason for one in found.left_out if OutOfBounds.MARK in one.reason)
    orders = with_refused(replace(orders, refused=()), (*found.refused, *left_out))
    for why in found.unreadable[:MOST_TOLD]:
        orders = with_failure(orders, f"{older or 'the persistent tier'} has a manifest that cannot be read: {why}")
    if older is not None:
        entries = tuple(replace(m, save=replace(m.save, generation=-m.save.generation)) for m in entries)
    seen = PersistentListing(
        order.generation, entries, order.requested_seconds, source_job=older, unread_records=found.left_out
    )
    seen = replace(seen, newest_epoch=found.newest_epoch)
    seen = replace(seen, undecidable=seen.unreadable_checkpoints(older is not None))
    named = {m.layout for m in entries}
    known = orders.layouts if older is None else orders.source_layouts
    layouts = {digest: text for digest, text in {**known, **found.layouts}.items() if digest in named}
    for one in found.left_out[:MOST_TOLD]:
        orders = with_failure(orders, f"left out of the listing of {older or 'the persistent tier'}: {one}")
    if len(found.left_out) > MOST_TOLD:
        orders = with_failure(orders, f"{len(found.left_out) - MOST_TOLD} more records could not be read")
    if older is not None:
        return replace(orders, source_listing=seen, source_layouts=layouts)
    still = orders.persistent.deleting & {m.save.checkpoint for m in entries}
    return replace(orders, persistent=seen.without_checkpoints(still), layouts=layouts)


def _same_listing(order: PendingRequest, other: PendingRequest) -> bool:
    one, two = order.message, other.message
    return isinstance(one, ListPersistent) and isinstance(two, ListPersistent) and one.source_job == two.source_job


def confirm_deletion(orders: PendingRequests, deleted: DeletePersistent) -> PendingRequests:
    """Records that these checkpoints are deleted."""
    deleting = orders.persistent.deleting - frozenset(deleted.checkpoints)
    return replace(orders, persistent=replace(orders.persistent, deleting=deleting))


def with_listing(orders: PendingRequests, seen: PersistentListing) -> PendingRequests:
    """Stores what is known of one job's listing.

    What is being deleted from this job's own stays so: another request for a listing, or one that failed, tells nothing of it.
    """
    if seen.source_job is not None:
        return replace(orders, source_listing=seen)
    return replace(orders, persistent=replace(seen, deleting=orders.persistent.deleting))
