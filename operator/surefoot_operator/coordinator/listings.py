"""Makes agents list the persistent tier or a source job's folder, and delete from it; assembles their replies.

Pure. Several agents may be asked for the same listing; the first complete reply counts. A listing is discarded if a
memory server was read after it was requested: an upload in between would make a checkpoint missing in both.
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
from surefoot.protocol.text import shorten
from surefoot_operator.api.status import JobStatus
from surefoot_operator.coordinator.pending_requests import (
    PendingRequest,
    PendingRequests,
    describe_request,
    with_failure,
)
from surefoot_operator.job_snapshot import PersistentListing

# ---- listing pages ---------------------------------------------------------------------------------------------------
# Assembles the pages of a listing. An agent first sends the manifests, which name their layouts by digest. Then the
# coordinator requests the layouts that it lacks, a few at a time: the layouts of thousands of ranks are hundreds of
# megabytes, which would delay heartbeats on the same connection. Each page is parsed when it arrives, so that none
# blocks the operator for long.

MAX_LAYOUTS_PER_REQUEST = 128
"""Layouts that one request asks for: at most tens of megabytes, in the agent and on the connection."""
MAX_UNREAD_RECORDS = 1000
"""Unread records of one page that are kept; agents send no more than this."""
MAX_ERROR_MESSAGES = 8
"""Error messages about unreadable manifests that are kept of each kind."""


@dataclass(frozen=True, slots=True)
class ListingPage:
    """The parsed content of one or more pages of a listing."""

    manifests: tuple[RankManifest, ...] = ()
    """The manifests that could be read."""
    layouts: Mapping[str, str] = field(default_factory=dict)
    """Layout records by digest."""
    unread_records: tuple[UnreadRecord, ...] = ()
    """Records that the agent found but did not send, with the reason."""
    unreadable_manifests: tuple[str, ...] = ()
    """Error messages about manifests that could not be read, the first few."""
    rejected_manifests: tuple[str, ...] = ()
    """The messages in `unreadable_manifests` that are about exceeded limits."""
    newest_generation: int = 0
    """The newest generation that another coordinator claimed in the tier; 0: none."""


@dataclass(frozen=True, slots=True)
class PartialListing:
    """A listing that is being received."""

    earlier_content: ListingPage = field(default_factory=ListingPage)
    """Content received in reply to earlier requests for this listing."""
    pages: tuple[ListingPage, ...] = ()
    """Pages received in reply to the present request, in order."""
    received_page_count: int = 0
    """Number of pages received for all requests, repeated ones included."""

    def join_pages(self, requested_digests: Collection[str]) -> ListingPage:
        """Joins everything received so far, after the last page.

        Layouts of `requested_digests` that the agent did not send become unread records. Otherwise they would be requested
        again without end.
        """
        content = _join_pages((self.earlier_content, *self.pages))
        unread_digests = {record.digest for record in content.unread_records}
        withheld = set(requested_digests) - content.layouts.keys() - unread_digests
        withheld_records = tuple(
            UnreadRecord(f"layout {d} was not sent by the agent", True, digest=d) for d in sorted(withheld)
        )
        return replace(content, unread_records=(*content.unread_records, *withheld_records))


def _add_page(
    partial_listing: PartialListing, page: PersistentPage, request: ListPersistent, max_entries: int
) -> PartialListing | None:
    """Adds a received page; returns None if a page before it is missing.

    A page number that was received already replaces that page and all later ones: the agent has started its reply
    again. Content that was not requested is dropped.

    Raises:
        OutOfBounds: The listing would have more than `max_entries` manifests, or too many pages or bytes.
    """
    if not 0 <= page.page <= len(partial_listing.pages):
        return None
    listing = "the listing of the persistent tier"
    bounds.require_in_range(
        listing, "the number of pages", partial_listing.received_page_count + 1, bounds.MAX_LISTING_PAGES
    )
    kept_pages = (partial_listing.earlier_content, *partial_listing.pages[: page.page])
    if request.manifests:
        total = len(page.manifests) + sum(len(kept_page.manifests) for kept_page in kept_pages)
        bounds.require_in_range(listing, "the number of manifests", total, max_entries)
    layout_bytes = sum(
        len(text)
        for layouts in (page.layouts, *(kept_page.layouts for kept_page in kept_pages))
        for text in layouts.values()
    )
    bounds.require_in_range(listing, "the bytes of layouts", layout_bytes, bounds.max_listed_layout_bytes(max_entries))
    layouts = page.layouts
    if request.layouts is not None and not request.manifests:
        layouts = {digest: text for digest, text in layouts.items() if digest in request.layouts}
    content = _read_manifests(page.manifests) if request.manifests else ListingPage()
    bounds.require_in_range(listing, "the newest generation", page.newest_generation, bounds.MAX_COUNT)
    content = replace(
        content,
        layouts=layouts,
        unread_records=page.unread_records[:MAX_UNREAD_RECORDS],
        newest_generation=page.newest_generation,
    )
    return PartialListing(
        partial_listing.earlier_content, (*kept_pages[1:], content), partial_listing.received_page_count + 1
    )


def _find_missing_layouts(content: ListingPage, known_digests: Collection[str]) -> tuple[str, ...]:
    """Returns the digests of missing layouts that the next request must ask for; empty: none is missing.

    Args:
        content: The content received so far.
        known_digests: Digests of the layouts that the coordinator already has.
    """
    unread_digests = {record.digest for record in content.unread_records}
    layout_digests = {m.layout for m in content.manifests}
    return tuple(
        sorted(layout_digests - unread_digests - set(known_digests) - content.layouts.keys())[:MAX_LAYOUTS_PER_REQUEST]
    )


def _read_manifests(manifests: Iterable[str]) -> ListingPage:
    """Parses manifests; records an error message for the first few that cannot be read."""
    entries: list[RankManifest] = []
    unreadable: list[str] = []
    out_of_bounds: list[str] = []
    for text in manifests:
        try:
            entries.append(RankManifest.from_json(text))
        except ProtocolError as error:
            messages = out_of_bounds if isinstance(error, OutOfBounds) else unreadable
            if len(messages) < MAX_ERROR_MESSAGES:
                messages.append(str(error))
    return ListingPage(
        tuple(entries), unreadable_manifests=(*out_of_bounds, *unreadable), rejected_manifests=tuple(out_of_bounds)
    )


def _join_pages(pages: Collection[ListingPage]) -> ListingPage:
    return ListingPage(
        tuple(m for page in pages for m in page.manifests),
        {digest: text for page in pages for digest, text in page.layouts.items()},
        tuple(record for page in pages for record in page.unread_records),
        tuple(islice((message for page in pages for message in page.unreadable_manifests), MAX_ERROR_MESSAGES)),
        tuple(islice((message for page in pages for message in page.rejected_manifests), MAX_ERROR_MESSAGES)),
        max((page.newest_generation for page in pages), default=0),
    )


# ---- requests --------------------------------------------------------------------------------------------------------

MAX_SIMULTANEOUS_LISTINGS = 8
"""Requests for the same listing that may be unanswered at once; a plan adds one a minute, and any may be answered."""


@dataclass(frozen=True, slots=True)
class ListingRights:
    """Permissions of an agent to write to the persistent tier before it lists it."""

    may_create_folder: bool = True
    """Whether it may create the job's folder if that is missing."""
    claim: tuple[int, str] = (0, "")
    """(generation, ticket) that it must claim there; generation 0: none. The ticket identifies the claim."""


DEFAULT_LISTING_RIGHTS = ListingRights()


def derive_listing_rights(status: JobStatus) -> ListingRights:
    """Derives from the status how an agent may write to the persistent tier.

    A missing folder may be created only while no checkpoint was ever complete in it; later, a missing folder means lost
    data. The ticket is the time of the claim, so a claim from a restored backup of the status never has the same one.
    """
    membership = status.membership
    is_claim = membership is not None and membership.state == "Claimed"
    claim = (
        (membership.generation, f"{membership.changed_seconds:.3f}") if membership is not None and is_claim else (0, "")
    )
    return ListingRights(may_create_folder=status.last_uploaded is None, claim=claim)


@dataclass(frozen=True, slots=True)
class ListingRequest(PendingRequest):
    """A request for a listing, with the pages received so far."""

    partial_listing: PartialListing = field(default_factory=PartialListing)
    """The pages received so far."""
    known_layouts: frozenset[str] = frozenset()
    """Digests of layouts that the coordinator has, so the agent need not send them."""


def is_listing(request: PendingRequest, of_source_job: bool) -> bool:
    """Whether this requests a listing: of the source job if `of_source_job`, else of this job."""
    message = request.message
    return isinstance(message, ListPersistent) and (message.source_job is not None) == of_source_job


def request_listing(
    requests: PendingRequests,
    worker: WorkerId,
    generation: int,
    now: float,
    source_job: SourceJob | None = None,
    known_layouts: frozenset[str] = frozenset(),
    rights: ListingRights = DEFAULT_LISTING_RIGHTS,
) -> PendingRequests:
    """Requests a listing from one agent.

    Requests to other agents for the same listing stay open: otherwise a listing that takes longer than the timeout
    would never finish.

    Args:
        requests: The job's requests.
        worker: The worker whose agent must list.
        generation: The present generation.
        now: Unix time, in seconds.
        source_job: The source job to list; None: this job's persistent tier.
        known_layouts: Digests of layouts that need not be sent, in addition to those of the last listing.
        rights: How the agent may write to the persistent tier first.
    """
    same_requests = {
        n: o
        for n, o in requests.by_id.items()
        if is_listing(o, source_job is not None) and o.generation == generation and o.message.source_job == source_job  # type: ignore[union-attr]
    }
    dropped_ids = sorted(same_requests)[: max(0, len(same_requests) - MAX_SIMULTANEOUS_LISTINGS)]
    open_requests = {
        n: o for n, o in requests.by_id.items() if not is_listing(o, source_job is not None) or n in same_requests
    }
    kept_requests = {n: o for n, o in open_requests.items() if n not in dropped_ids}
    request_id = requests.next_request
    stored_layouts = requests.persistent_layouts if source_job is None else requests.source_layouts
    claim_generation, claim_ticket = rights.claim if source_job is None else (0, "")
    message = ListPersistent(
        request_id,
        source_job,
        layouts=(),
        begin=rights.may_create_folder,
        claim_generation=claim_generation,
        claim_ticket=claim_ticket,
    )
    request = ListingRequest(worker, message, generation, now, known_layouts=known_layouts | stored_layouts.keys())
    requests = replace(requests, next_request=request_id + 1, by_id={**kept_requests, request_id: request})
    asked_workers = frozenset(o.worker for n, o in same_requests.items() if n in kept_requests) | {worker}
    return _with_listing(
        requests, PersistentListing(requested_seconds=now, source_job=source_job, requested_from=asked_workers)
    )


def discard_listing(requests: PendingRequests) -> PendingRequests:
    """Discards this job's listing and the requests for it, because a memory server was read after they were made."""
    other_requests = {n: o for n, o in requests.by_id.items() if not is_listing(o, of_source_job=False)}
    listing = replace(requests.persistent_listing, read_generation=None, requested_seconds=None)
    return replace(requests, by_id=other_requests, persistent_listing=listing)


def request_deletion(
    requests: PendingRequests, worker: WorkerId, generation: int, checkpoints: tuple[Checkpoint, ...], now: float
) -> PendingRequests:
    """Requests from one agent that it deletes checkpoints, unless such a request is already unanswered.

    The checkpoints leave the listing at once, so that none is chosen to restore from, or counted as uploaded or known
    good, a moment before it is deleted.
    """
    if any(isinstance(request.message, DeletePersistent) for request in requests.by_id.values()):
        return requests
    request_id = requests.next_request
    request = PendingRequest(worker, DeletePersistent(request_id, checkpoints), generation, now)
    return replace(
        requests,
        next_request=request_id + 1,
        by_id={**requests.by_id, request_id: request},
        persistent_listing=requests.persistent_listing.without_checkpoints(frozenset(checkpoints)),
        uploaded_saves={c: saves for c, saves in requests.uploaded_saves.items() if c not in checkpoints},
    )


def persistent_listing_after_drop(
    requests: PendingRequests, kept_requests: Mapping[int, PendingRequest]
) -> PersistentListing:
    """Returns this job's listing; marks it as not requested if no request for it is left in `kept_requests`.

    No agent would answer it, so the plan must request it again.
    """
    was_dropped = any(is_listing(o, of_source_job=False) for n, o in requests.by_id.items() if n not in kept_requests)
    was_dropped = was_dropped and not any(is_listing(o, of_source_job=False) for o in kept_requests.values())
    return replace(requests.persistent_listing, requested_seconds=None) if was_dropped else requests.persistent_listing


def source_listing_after_drop(
    requests: PendingRequests, kept_requests: Mapping[int, PendingRequest]
) -> PersistentListing:
    """Returns the source job's listing; marks it as not requested if no request for it is among `kept_requests`."""
    was_dropped = any(is_listing(o, of_source_job=True) for n, o in requests.by_id.items() if n not in kept_requests)
    return replace(requests.source_listing, requested_seconds=None) if was_dropped else requests.source_listing


# ---- replies ---------------------------------------------------------------------------------------------------------

MAX_LOGGED_RECORDS = 5
"""Unread records of one listing that are logged by name."""
MAX_REJECTED_RECORDS = 8
"""Error messages about records that exceed a limit; later ones are dropped."""


def apply_page(requests: PendingRequests, request: PendingRequest, page: PersistentPage) -> PendingRequests:
    """Applies one page of a listing.

    After the last page, requests layouts that the coordinator lacks, a few at a time. Stores the listing once none is
    missing, or an error if a page is missing or exceeds a limit.
    """
    request_message = request.message
    if not isinstance(request_message, ListPersistent) or not isinstance(request, ListingRequest):
        return requests
    error, partial_listing = page.error, None
    try:
        partial_listing = _add_page(request.partial_listing, page, request_message, requests.max_records)
    except OutOfBounds as out_of_bounds:
        error = str(out_of_bounds)
        requests = _with_rejected_records(requests, (error,))
    if error is None and partial_listing is None and not page.more:
        missing_page = len(request.partial_listing.pages) + 1
        error = f"page {missing_page} of {page.page + 1} of the listing was not received"
    if error is None and page.more:
        updated_request = request if partial_listing is None else replace(request, partial_listing=partial_listing)
        return replace(requests, by_id={**requests.by_id, page.request: updated_request})
    # this was the request's last page, or it failed: either way the request is answered
    other_requests = {n: o for n, o in requests.by_id.items() if n != page.request}
    if error is not None or partial_listing is None:
        requests = with_failure(
            replace(requests, by_id=other_requests),
            f"{request.worker} could not {describe_request(request.message)}: {error}",
        )
        failed_listing = PersistentListing(
            requested_seconds=request.requested_seconds, error=error, source_job=request_message.source_job
        )
        return _with_listing(requests, failed_listing)
    content = partial_listing.join_pages(request_message.layouts or ())
    missing_digests = _find_missing_layouts(content, request.known_layouts)
    if missing_digests:
        request_id = requests.next_request
        next_message = ListPersistent(
            request_id,
            request_message.source_job,
            manifests=False,
            layouts=missing_digests,
            begin=request_message.begin,
        )
        next_listing = PartialListing(content, received_page_count=partial_listing.received_page_count)
        request = replace(request, message=next_message, partial_listing=next_listing)
        return replace(requests, next_request=request_id + 1, by_id={**other_requests, request_id: request})
    # other agents' requests for the same listing are answered by this one
    other_requests = {n: o for n, o in other_requests.items() if not _same_listing(o, request)}
    return _finish_listing(replace(requests, by_id=other_requests), request, content)


def _finish_listing(requests: PendingRequests, request: PendingRequest, content: ListingPage) -> PendingRequests:
    source_job = request.message.source_job if isinstance(request.message, ListPersistent) else None
    entries = content.manifests
    # agents do not send records that exceed a limit; they send the text of OutOfBounds as the reason
    rejected_reasons = tuple(record.reason for record in content.unread_records if OutOfBounds.MARK in record.reason)
    requests = _with_rejected_records(
        replace(requests, rejected_records=()), (*content.rejected_manifests, *rejected_reasons)
    )
    for message in content.unreadable_manifests[:MAX_LOGGED_RECORDS]:
        requests = with_failure(requests, f"cannot read a manifest in {source_job or 'the persistent tier'}: {message}")
    if source_job is not None:
        # negative generations keep the source job's checkpoints apart from this job's own
        entries = tuple(replace(m, save=replace(m.save, generation=-m.save.generation)) for m in entries)
    listing = PersistentListing(
        request.generation,
        entries,
        request.requested_seconds,
        source_job=source_job,
        unread_records=content.unread_records,
    )
    listing = replace(listing, newest_generation=content.newest_generation)
    listing = replace(listing, undecidable=listing.unreadable_checkpoints(source_job is not None))
    layout_digests = {m.layout for m in entries}
    stored_layouts = requests.persistent_layouts if source_job is None else requests.source_layouts
    layouts = {
        digest: text for digest, text in {**stored_layouts, **content.layouts}.items() if digest in layout_digests
    }
    for record in content.unread_records[:MAX_LOGGED_RECORDS]:
        requests = with_failure(
            requests, f"the listing of {source_job or 'the persistent tier'} lacks a record: {record}"
        )
    if len(content.unread_records) > MAX_LOGGED_RECORDS:
        requests = with_failure(
            requests,
            f"the listing of {source_job or 'the persistent tier'} lacks"
            f" {len(content.unread_records) - MAX_LOGGED_RECORDS} more records",
        )
    if source_job is not None:
        return replace(requests, source_listing=listing, source_layouts=layouts)
    still_deleting = requests.persistent_listing.deleting & {m.save.checkpoint for m in entries}
    return replace(requests, persistent_listing=listing.without_checkpoints(still_deleting), persistent_layouts=layouts)


def _same_listing(request: PendingRequest, other: PendingRequest) -> bool:
    message, other_message = request.message, other.message
    return (
        isinstance(message, ListPersistent)
        and isinstance(other_message, ListPersistent)
        and message.source_job == other_message.source_job
    )


def confirm_deletion(requests: PendingRequests, request: DeletePersistent) -> PendingRequests:
    """Records that an agent has deleted these checkpoints."""
    deleting = requests.persistent_listing.deleting - frozenset(request.checkpoints)
    return replace(requests, persistent_listing=replace(requests.persistent_listing, deleting=deleting))


def _with_listing(requests: PendingRequests, listing: PersistentListing) -> PendingRequests:
    """Stores a listing of this job or of the source job.

    The deletions under way in this job's listing are kept: a new request, or a failed one, does not end them.
    """
    if listing.source_job is not None:
        return replace(requests, source_listing=listing)
    return replace(requests, persistent_listing=replace(listing, deleting=requests.persistent_listing.deleting))


def _with_rejected_records(requests: PendingRequests, error_messages: Iterable[str]) -> PendingRequests:
    """Adds error messages about records that exceed a limit, once each, keeping the first few."""
    distinct_messages = dict.fromkeys(
        (*requests.rejected_records, *(shorten(message, bounds.MAX_CAUSE_CHARACTERS) for message in error_messages))
    )
    kept_messages = tuple(distinct_messages)[:MAX_REJECTED_RECORDS]
    return requests if kept_messages == requests.rejected_records else replace(requests, rejected_records=kept_messages)
