"""Holds the unanswered requests to agents, and merges what agents answered.

Pure. The reconciler adds requests here, `request_replies` takes the answers, `desired_messages` reads what each agent
is still to be sent. Also kept here: pages of listings, and memory servers read by agents. Soft state: a
new coordinator starts with none and asks again for what still matters.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from surefoot.errors import OutOfBounds, ProtocolError
from surefoot.protocol import bounds
from surefoot.protocol.bounds import MAX_CAUSE_CHARACTERS, max_records
from surefoot.protocol.checkpoints.completeness import LeftOut
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, HolderEndpoint, HolderId, OlderJob, RankSave, WorkerId
from surefoot.protocol.messages import (
    DropPersistent,
    Listing,
    ListPersistent,
    LookAtHolders,
    PromoteSave,
    RepairSave,
    Retire,
    Sighting,
    ToAgent,
)
from surefoot.protocol.text import shorten
from surefoot_operator.api.status import JobStatus, World
from surefoot_operator.job_snapshot import HolderSeen, ObservedBarrier, PersistentSeen, SightSeen

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
        told = tuple(LeftOut(f"layout {d} was not sent by the agent", True, digest=d) for d in sorted(withheld))
        return replace(self, before=replace(self.before, left_out=(*self.before.left_out, *told)))


def taken(gathered: PartialListing, page: Listing, asked: ListPersistent, max_entries: int) -> PartialListing | None:
    """Adds a page; None where pages before it are missing.

    A page that came before starts the answer anew. Only what was asked for is kept: older agents send manifests with
    every answer.

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
    read = replace(read, layouts=layouts, left_out=page.left_out[:MOST_LEFT_OUT], newest_epoch=page.newest_epoch)
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


# ---- pending requests ------------------------------------------------------------------------------------------------
# Defines a request, and Orders: all requests that agents have not answered, with what earlier answers told.

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
class Orders:
    next_request: int
    """Grows; begins where no earlier coordinator has been, so that an answer to one of its requests fits none of ours."""
    outstanding: Mapping[int, Request] = field(default_factory=dict)
    promotions: Mapping[WorkerId, PromoteSave] = field(default_factory=dict)
    promotion_round: int = 0
    """The newest round of any of them."""
    retired: Mapping[WorkerId, Retire] = field(default_factory=dict)
    barrier: ObservedBarrier | None = None
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
    refused: tuple[str, ...] = ()
    """Records of the last listing that broke a bound: a sentence each."""
    max_records: int = field(default_factory=lambda: max_records(0))
    """Manifests of one listing, and of one reading, that are kept: by what the job runs."""
    failures: tuple[str, ...] = ()
    """Sentences of what agents could not do; taken by whoever logs them."""
    _asked: dict[WorkerId, list[ToAgent]] = field(default_factory=dict, init=False, repr=False, compare=False)

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


def with_barrier(orders: Orders, barrier: ObservedBarrier | None) -> Orders:
    """Stores the barrier; the same orders where it did not change, so that nothing is planned or sent for it."""
    return orders if barrier is orders.barrier else replace(orders, barrier=barrier)


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


def drop_other_generations(orders: Orders, epoch: int, committed: bool) -> Orders:
    """Voids requests of another epoch than the present world's."""
    kept = {n: o for n, o in orders.outstanding.items() if o.epoch == epoch}
    is_current = orders.barrier is not None and orders.barrier.sent.generation == epoch and committed
    barrier = orders.barrier if is_current else None
    promotions = {w: p for w, p in orders.promotions.items() if p.epoch == epoch}
    if (len(kept), barrier, len(promotions)) == (len(orders.outstanding), orders.barrier, len(orders.promotions)):
        return orders
    return replace(orders, outstanding=kept, barrier=barrier, promotions=promotions, older=_older_without(orders, kept))


def drop_worker(orders: Orders, worker: WorkerId) -> Orders:
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


# ---- memory servers read by agents -----------------------------------------------------------------------------------
# Merges agents' readings of memory servers that the operator cannot reach.

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


# ---- requests of the reconciler --------------------------------------------------------------------------------------
# Adds the reconciler's requests to agents, each asked once. A request that is under way is not made again, so that a
# round a second asks nothing twice.

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


def request_probe(
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
    layouts = orders.sighted_layouts if drop_older_generations(orders.sights, epoch) else {}
    known = known | orders.layouts.keys() | layouts.keys()
    order = Request(worker, LookAtHolders(number, holders, epoch, tuple(sorted(known))), epoch, now)
    seen = record_request(orders.sights, SightingRequest(epoch, now, holders))
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
