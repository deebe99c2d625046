"""Assembles the pages of a listing and selects missing layout records.

Pure; part of `orders`. An agent first sends the manifests, which name their layouts by digest; then it is asked for the
layouts unknown here, a few at a time. Layouts of thousands of ranks are hundreds of megabytes: sent unasked they
delayed heartbeats on the same connection. Each page is parsed as it comes, so that none holds up the operator for long.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from surefoot.errors import ProtocolError
from surefoot.protocol.checkpoints.completeness import LeftOut
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.messages import Listing

LAYOUTS_AT_ONCE = 128
"""Asked for in one request: tens of megabytes at most, in the agent and on the line."""


@dataclass(frozen=True, slots=True)
class ListingPage:
    """The content of one or more pages."""

    entries: tuple[RankManifest, ...] = ()
    layouts: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[LeftOut, ...] = ()
    unreadable: tuple[str, ...] = ()
    """Why manifests in it could not be read."""
    newest_epoch: int = 0
    """That the tier names, beside the claim that was asked for."""


@dataclass(frozen=True, slots=True)
class PartialListing:
    """A listing under way: earlier requests' content, and this one's pages."""

    before: ListingPage = field(default_factory=ListingPage)
    pages: tuple[ListingPage, ...] = ()

    def whole(self) -> ListingPage:
        """Joins everything received so far."""
        return _joined((self.before, *self.pages))

    def asked_anew(self) -> PartialListing:
        """Starts the next request, once the present one is answered."""
        return PartialListing(self.whole())

    def answered(self, asked: Collection[str]) -> PartialListing:
        """Marks layouts that were asked for and not sent as withheld.

        Otherwise they would be asked for without end.
        """
        found = self.whole()
        withheld = set(asked) - found.layouts.keys() - {one.digest for one in found.left_out}
        told = tuple(LeftOut(f"layout {d} was not sent by the agent", True, digest=d) for d in sorted(withheld))
        return replace(self, before=replace(self.before, left_out=(*self.before.left_out, *told)))


def taken(gathered: PartialListing, page: Listing, manifests: bool) -> PartialListing | None:
    """Adds a page; None where pages before it are missing.

    A page that came before starts the answer anew. `manifests`: whether they were asked for; older agents send them
    with every answer.
    """
    if page.page > len(gathered.pages):
        return None
    read = _read(page) if manifests else ListingPage(layouts=page.layouts, left_out=page.left_out)
    return PartialListing(gathered.before, (*gathered.pages[: page.page], read))


def lacking(found: ListingPage, known: Collection[str]) -> tuple[str, ...]:
    """Digests of missing layouts that the next request asks for."""
    told = {one.digest for one in found.left_out}
    named = {m.layout for m in found.entries}
    return tuple(sorted(named - told - set(known) - found.layouts.keys())[:LAYOUTS_AT_ONCE])


def _read(page: Listing) -> ListingPage:
    entries, unreadable = [], []
    for text in page.manifests:
        try:
            entries.append(RankManifest.from_json(text))
        except ProtocolError as error:
            unreadable.append(str(error))
    return ListingPage(tuple(entries), page.layouts, page.left_out, tuple(unreadable), page.newest_epoch)


def _joined(pages: Collection[ListingPage]) -> ListingPage:
    return ListingPage(
        tuple(m for page in pages for m in page.entries),
        {digest: text for page in pages for digest, text in page.layouts.items()},
        tuple(one for page in pages for one in page.left_out),
        tuple(why for page in pages for why in page.unreadable),
        max((page.newest_epoch for page in pages), default=0),
    )
