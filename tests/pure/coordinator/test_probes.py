"""What agents read of holders that the operator does not reach, as the coordinator takes and uses it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.builders import manifest
from support.talk import CLAIMED, NODES, STATUS, A, B, talking, words
from surefoot.protocol.bounds import MAX_INDEX_ENTRIES
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.messages import Assign, HolderReading, Listing, ListPersistent, LookAtHolders
from surefoot_operator.coordinator import listings, probes
from surefoot_operator.coordinator.agent_server import check_size
from surefoot_operator.coordinator.desired_messages import desired_messages, desired_state
from surefoot_operator.coordinator.probes import proxied, refused_of
from surefoot_operator.coordinator.sessions import Sessions, heard
from surefoot_operator.job_snapshot import HolderSeen
from surefoot_operator.policy.failure.memory_server_liveness import UsableHolders, with_proxied

FIRST, SECOND = NODES[0].holder, NODES[1].holder
ENTRY, OTHER = manifest(2, 50, 0, 2), manifest(2, 50, 1, 2)


def asked(now: float = 1001.0, known: frozenset[str] = frozenset()) -> tuple[Sessions, LookAtHolders]:
    sessions = talking(status=CLAIMED)
    orders = probes.request_probe(sessions.orders, A, 3, (NODES[0], NODES[1]), now, known)
    sessions = replace(sessions, orders=orders)
    request = words(sessions, A, CLAIMED)[-1]
    assert isinstance(request, LookAtHolders)
    return sessions, request


def reading(request: LookAtHolders, *entries: RankManifest, **layouts: str) -> HolderReading:
    return HolderReading(request.request, FIRST, tuple(e.to_json() for e in entries), layouts)


def silent(sessions: Sessions) -> tuple[HolderSeen, ...]:
    holders = tuple(HolderSeen(e, "Silent", 1000.0) for e in NODES)
    return proxied(holders, sessions.orders.sights, CLAIMED.world)


def test_an_agent_is_asked_to_seal_for_the_claimed_epoch_and_told_which_layouts_are_known() -> None:
    _, request = asked(known=frozenset({"b", "a"}))
    assert (request.epoch, request.layouts) == (3, ("a", "b"))


def test_what_was_read_stands_for_the_silent_holder_while_the_world_is_claimed() -> None:
    sessions, request = asked()
    assert [h.state for h in silent(sessions)] == ["Silent"] * len(NODES)
    sessions = heard(sessions, A, reading(request, ENTRY, layout="{}"), 1002.0)
    first, *others = silent(sessions)
    assert (first.state, first.fence, first.read_epoch, first.entries) == ("Proxied", 3, 3, (ENTRY,))
    assert {h.state for h in others} == {"Silent"}
    assert sessions.orders.sighted_layouts == {"layout": "{}"}
    assert sessions.orders.outstanding, "the Sighting ends the request"
    committed = proxied(silent(sessions), sessions.orders.sights, STATUS.world)
    assert committed == silent(sessions), "a world that runs changes nothing"
    ready = (HolderSeen(NODES[0], "Ready", 1000.0, fence=3),)
    assert proxied(ready, sessions.orders.sights, CLAIMED.world) == ready, "the operator's own look counts more"


def test_the_first_reading_counts() -> None:
    sessions, request = asked()
    sessions = heard(sessions, A, reading(request, ENTRY), 1002.0)
    again = heard(sessions, A, reading(request, ENTRY, OTHER), 1003.0)
    assert silent(again)[0].entries == (ENTRY,)
    assert again.orders.read_seconds == 1002.0


def listed(sessions: Sessions, now: float) -> Sessions:
    number = max(n for n, o in sessions.orders.outstanding.items() if isinstance(o.message, ListPersistent))
    return heard(sessions, B, Listing(number, (ENTRY.to_json(),), {ENTRY.layout: "{}"}), now)


def test_a_listing_from_before_a_reading_is_asked_for_once_more_however_many_are_read() -> None:
    sessions, request = asked()
    sessions = replace(sessions, orders=listings.list_persistent(sessions.orders, B, 3, 1001.5))
    sessions = heard(sessions, A, reading(request, ENTRY), 1002.0)
    sessions = heard(sessions, A, replace(reading(request, ENTRY), holder=SECOND), 1002.1)
    assert sessions.orders.persistent.asked_seconds == 1001.5, "what is under way is not begun again for each"
    sessions = listed(sessions, 1002.2)
    assert (sessions.orders.persistent.read_epoch, sessions.orders.persistent.asked_seconds) == (None, None)
    sessions = replace(sessions, orders=listings.list_persistent(sessions.orders, B, 3, 1002.3))
    sessions = listed(sessions, 1002.4)
    assert sessions.orders.persistent.read_epoch == 3
    third = probes.request_probe(sessions.orders, A, 3, (NODES[2],), 1002.5)
    sessions = replace(sessions, orders=third)
    number = max(third.outstanding)
    sessions = heard(sessions, A, HolderReading(number, NODES[2].holder, (OTHER.to_json(),)), 1002.6)
    assert sessions.orders.persistent.read_epoch is None, "what was listed before counts no more"


def test_an_entry_that_cannot_be_read_takes_no_other_along_and_is_told() -> None:
    sessions, request = asked()
    told = replace(reading(request, ENTRY), manifests=("{}", ENTRY.to_json()))
    sessions = heard(sessions, A, told, 1002.0)
    assert silent(sessions)[0].entries == (ENTRY,)
    assert "unreadable index entry of holder" in sessions.orders.failures[0]


@pytest.mark.parametrize("many", [False, True], ids=["an entry", "the whole index"])
def test_a_reading_that_breaks_a_bound_is_named_for_as_long_as_a_claim_uses_it(many: bool) -> None:
    """A job without a persistent tier, which is never listed, said so until its operator was restarted."""
    sessions, request = asked()
    wrong = ("{}",) * (MAX_INDEX_ENTRIES + 1) if many else (replace(OTHER, world=10**9).to_json(), ENTRY.to_json())
    sessions = heard(sessions, A, replace(reading(request), manifests=wrong), 1002.0)
    (why,) = refused_of(sessions.orders.sights, CLAIMED.world)
    assert ("index entries" if many else "world is 1000000000") in why
    assert silent(sessions)[0].entries == (() if many else (ENTRY,))
    assert refused_of(sessions.orders.sights, STATUS.world) == ()
    assert refused_of(probes.request_probe(sessions.orders, A, 4, (NODES[0],), 1010.0).sights, CLAIMED.world) == ()
    assert sessions.orders.refused == ()


@pytest.mark.parametrize("wrong", ["another agent", "another request", "another holder"])
def test_what_nobody_asked_for_counts_nothing(wrong: str) -> None:
    sessions, request = asked()
    told = reading(request, ENTRY)
    if wrong == "another request":
        told = replace(told, request=request.request + 1)
    if wrong == "another holder":
        told = replace(told, holder=NODES[2].holder)
    before = sessions.orders
    after = heard(sessions, B if wrong == "another agent" else A, told, 1002.0).orders
    assert (after.sights, after.persistent, after.outstanding) == (before.sights, before.persistent, before.outstanding)


def test_another_claim_begins_without_what_was_read_for_the_last() -> None:
    sessions, request = asked()
    sessions = heard(sessions, A, reading(request, ENTRY, layout="{}"), 1002.0)
    later = probes.request_probe(sessions.orders, A, 4, (NODES[0],), 1010.0)
    assert later.sights[FIRST].entries is None
    assert later.sighted_layouts == {}


def test_members_may_read_such_a_holder_and_write_to_the_others() -> None:
    sessions, request = asked()
    sessions = heard(sessions, A, reading(request, ENTRY), 1002.0)
    named, sights = STATUS.named_holders, {FIRST: replace(sessions.orders.sights[FIRST], epoch=2)}
    answering = UsableHolders(tuple(e for e in NODES if e.holder != FIRST))
    seen = tuple(HolderSeen(e, "Silent" if e.holder == FIRST else "Ready", 1000.0) for e in NODES)
    usable = with_proxied(answering, seen, named, sights, 2)
    (said,) = desired_messages(desired_state(STATUS, usable, 2), talking(), A)
    assert isinstance(said, Assign)
    assert FIRST in {e.holder for e in said.holders}
    assert FIRST not in said.targets
    assert with_proxied(answering, seen, named, sights, 3) == answering, "it was read for another epoch"
    gone = tuple(replace(h, state="Gone") if h.state == "Silent" else h for h in seen)
    assert with_proxied(answering, gone, named, sights, 2).proxied == ()


def test_a_reading_may_be_large_and_not_endless() -> None:
    text = '{"v":3,"type":"HolderReading","request":1'
    check_size(text + " " * (7 << 20))
    with pytest.raises(Exception, match="HolderReading"):
        check_size(text + " " * (9 << 20))
