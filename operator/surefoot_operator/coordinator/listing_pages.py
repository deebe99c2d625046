"""Assembles the pages of a listing and selects missing layout records.

Pure; part of `pending_requests`. An agent first sends the manifests, which name their layouts by digest; then it is asked for the
layouts unknown here, a few at a time. Layouts of thousands of ranks are hundreds of megabytes: sent unasked they
delayed heartbeats on the same connection. Each page is parsed as it comes, so that none holds up the operator for long.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from surefoot.errors import OutOfBounds, ProtocolError
from surefoot.protocol import bounds
from surefoot.protocol.checkpoints.completeness import LeftOut
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.messages import Listing, ListPersistent

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
