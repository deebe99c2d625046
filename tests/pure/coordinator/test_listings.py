"""What a rogue agent says is bounded before it is read, kept or written to a status."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.builders import manifest
from support.talk import CLAIMED, B, talking
from surefoot.errors import ProtocolError
from surefoot.protocol import bounds
from surefoot.protocol.checkpoints.completeness import UnreadRecord
from surefoot.protocol.messages import ListPersistent, PersistentPage, TrainerFailure
from surefoot.protocol.wire import encode
from surefoot_operator.coordinator import listings
from surefoot_operator.coordinator.agent_server import check_size
from surefoot_operator.coordinator.sessions import Sessions, apply_message

ENTRY, OTHER = manifest(2, 50, 0, 2), manifest(2, 50, 1, 2)
HUGE = replace(OTHER, world_size=10**9).to_json()


def asked() -> tuple[Sessions, int]:
    sessions = talking(status=CLAIMED)
    sessions = replace(sessions, requests=listings.request_listing(sessions.requests, B, 3, 1001.0))
    return sessions, max(n for n, o in sessions.requests.by_id.items() if isinstance(o.message, ListPersistent))


def test_a_large_answer_that_nobody_asked_for_is_refused_unread() -> None:
    text = encode(PersistentPage(1, ("x" * bounds.MAX_SMALL_RECORD_BYTES,) * 2))
    check_size(text, listing_requested=True)
    with pytest.raises(ProtocolError, match="without a request"):
        check_size(text, listing_requested=False)


@pytest.mark.parametrize("text", ["x" * (60 << 20), '","'.join(["ab"] * (2 * bounds.MAX_PAGE_TEXTS))])
def test_an_answer_that_would_fill_memory_is_refused_unread(text: str) -> None:
    with pytest.raises(ProtocolError, match="more than any valid one"):
        check_size(f'{{"v":3,"type":"PersistentPage","request":1,"manifests":["{text}"]}}')


def test_a_manifest_that_breaks_a_bound_is_left_out_and_named() -> None:
    sessions, number = asked()
    sessions = apply_message(sessions, B, PersistentPage(number, (ENTRY.to_json(), HUGE), {ENTRY.layout: "{}"}), 1002.0)
    assert sessions.requests.persistent_listing.entries == (ENTRY,)
    (refused,) = sessions.requests.rejected_records
    assert "world_size is 1000000000" in refused
    orders = listings.request_listing(sessions.requests, B, 3, 1003.0)
    sessions = replace(sessions, requests=orders)
    sessions = apply_message(
        sessions, B, PersistentPage(max(orders.by_id), (ENTRY.to_json(),), {ENTRY.layout: "{}"}), 1004.0
    )
    assert sessions.requests.rejected_records == (), "it was removed"


def test_what_an_agent_of_ours_left_out_for_its_bounds_is_named_too() -> None:
    sessions, number = asked()
    why = "persistent: rank-0.json: the manifest is out of bounds: world_size is 1000000000"
    left_out = (UnreadRecord(why, False, checkpoint=ENTRY.save.checkpoint), UnreadRecord("it is damaged", False))
    listing = PersistentPage(number, (ENTRY.to_json(),), {ENTRY.layout: "{}"}, unread_records=left_out)
    assert apply_message(sessions, B, listing, 1002.0).requests.rejected_records == (why,)


@pytest.mark.parametrize("page", [0, 1])
def test_a_listing_without_end_is_refused(page: int) -> None:
    sessions, number = asked()
    sessions = replace(sessions, requests=replace(sessions.requests, max_records=3))
    two = (ENTRY.to_json(), OTHER.to_json())
    sessions = apply_message(sessions, B, PersistentPage(number, two, page=0, more=True), 1002.0)
    more = two if page else (*two, *two)
    sessions = apply_message(sessions, B, PersistentPage(number, more, page=page, more=True), 1002.0)
    assert number not in sessions.requests.by_id
    assert "number of manifests is 4" in sessions.requests.rejected_records[0]
    assert sessions.requests.persistent_listing.entries is None


def test_a_cause_of_a_mebibyte_is_cut() -> None:
    sessions = talking()
    epoch = sessions.by_worker[B].observed.generation
    sessions = apply_message(
        sessions, B, TrainerFailure(epoch, 0, 1, "c" * (1 << 20), False, 5, detail="d" * (1 << 20)), 1002.0
    )
    seen = sessions.by_worker[B].observed.exit
    assert seen is not None
    assert (len(seen.cause), len(seen.detail)) == (bounds.MAX_CAUSE_CHARACTERS, bounds.MAX_DETAIL_CHARACTERS)
