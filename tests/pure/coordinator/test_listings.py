"""Listings, repairs, uploads and deletions as the coordinator asks for them and takes the answers."""

from __future__ import annotations

from dataclasses import replace

from support.fakes.fake_agent import hello
from support.talk import CLAIMED, NODES, A, B, talking, words
from surefoot.protocol.checkpoints.completeness import LeftOut
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, OlderJob, RankSave, WorkerId
from surefoot.protocol.messages import (
    DropPersistent,
    Listing,
    ListPersistent,
    PersistentDropped,
    Repaired,
    RepairSave,
    Retire,
    Stop,
)
from surefoot_operator.coordinator import conversations, listings, uploads
from surefoot_operator.coordinator.sessions import (
    Sessions,
    begin,
    connected,
    heard,
)

# ---- requests ------------------------------------------------------------------------------------------------------


def manifest(step: int = 40, rank: int = 0, world: int = 1) -> RankManifest:
    return RankManifest(RankSave(1, step, rank), world, "i", "layout", 10, 1, "d", 8, "v", 2, 0.0)


def asked(sessions: Sessions) -> Sessions:
    return replace(sessions, orders=listings.list_persistent(sessions.orders, A, 3, 1001.0))


def request_of(sessions: Sessions) -> int:
    return max(sessions.orders.outstanding)


def test_a_listing_counts_for_the_epoch_it_was_asked_for() -> None:
    sessions = asked(talking(status=CLAIMED))
    number = request_of(sessions)
    assert ListPersistent(number, layouts=()) in words(sessions, A, CLAIMED)
    answer = Listing(number, (manifest().to_json(), "{}"), {"layout": "{}"})
    assert heard(sessions, B, answer, 1002.0).orders.persistent.read_epoch is None
    sessions = heard(sessions, A, answer, 1002.0)
    assert sessions.orders.persistent.read_epoch == 3
    assert sessions.orders.persistent.entries == (manifest(),)
    assert sessions.orders.layouts == {"layout": "{}"}
    assert "cannot be read" in sessions.orders.failures[0]
    assert words(sessions, A, CLAIMED) == (Stop(3, "worker 1 lost"),)


def test_an_older_jobs_listing_stands_beside_ours_with_its_epochs_negated() -> None:
    older = OlderJob("file:///tmp/checkpoints", "old")
    sessions = asked(talking(status=CLAIMED))
    sessions = replace(sessions, orders=listings.list_persistent(sessions.orders, A, 3, 1001.0, older))
    number = request_of(sessions)
    assert ListPersistent(number, older, layouts=()) in words(sessions, A, CLAIMED)
    assert len(sessions.orders.outstanding) == 2
    sessions = replace(sessions, orders=listings.void_listing(sessions.orders))
    sessions = heard(sessions, A, Listing(number, (manifest().to_json(),), {"layout": "{}"}), 1002.0)
    seen = sessions.orders.older
    assert (seen.read_epoch, seen.older_job, sessions.orders.persistent.entries) == (3, older, None)
    assert [m.save for m in seen.entries or ()] == [replace(manifest().save, epoch=-1)]
    assert (sessions.orders.older_layouts, sessions.orders.layouts) == ({"layout": "{}"}, {})


def test_an_older_jobs_listing_may_be_asked_of_another_agent() -> None:
    older = OlderJob("file:///tmp/checkpoints", "old")
    sessions = talking(status=CLAIMED)
    sessions = replace(sessions, orders=listings.list_persistent(sessions.orders, A, 3, 1001.0, older))
    sessions = connected(sessions, hello(0, incarnation="newer"), 1002.0)
    assert sessions.orders.older.asked_seconds is None
    assert not sessions.orders.outstanding


def test_a_listing_is_void_once_another_holder_was_read() -> None:
    sessions = asked(talking(status=CLAIMED))
    number = request_of(sessions)
    sessions = replace(sessions, orders=listings.void_listing(sessions.orders))
    sessions = heard(sessions, A, Listing(number), 1002.0)
    assert sessions.orders.persistent.read_epoch is None
    assert sessions.orders.persistent.asked_seconds is None


def test_a_failed_listing_says_why() -> None:
    sessions = asked(talking(status=CLAIMED))
    sessions = heard(sessions, A, Listing(request_of(sessions), error="bucket away"), 1002.0)
    assert sessions.orders.persistent.error == "bucket away"
    assert sessions.orders.persistent.read_epoch is None


def test_a_listing_whose_agent_was_replaced_may_be_asked_of_another() -> None:
    sessions = asked(talking(status=CLAIMED))
    sessions = connected(sessions, hello(0, incarnation="newer"), 1002.0)
    assert sessions.orders.persistent.asked_seconds is None
    assert sessions.orders.outstanding == {}


def test_requests_of_two_terms_never_share_a_number() -> None:
    first, second = asked(begin("job-1", 1000.0)), asked(begin("job-1", 1001.0))
    assert request_of(first) != request_of(second)


def test_a_repair_is_asked_once_and_again_only_after_an_answer() -> None:
    sessions = talking()
    save, source, target = RankSave(2, 50, 0), NODES[0].holder, NODES[1].holder
    copy = RepairSave(0, 2, save, source, target)
    book = uploads.repair(sessions.orders, [(A, copy), (B, copy)], 1001.0)
    assert uploads.repair(book, [(B, copy)], 1001.5) is book
    sessions = replace(sessions, orders=book)
    number = request_of(sessions)
    assert RepairSave(number, 2, save, source, target) in words(sessions, A)
    sessions = heard(sessions, A, Repaired(number, "source away"), 1002.0)
    assert sessions.orders.outstanding == {}
    assert "source away" in sessions.orders.failures[0]


def test_a_repair_that_was_made_is_asked_for_again_only_once_the_holder_must_have_been_read() -> None:
    """Found on a real run: one save of 25 MB was copied five times in 0.2 s, until its target's index was read."""
    sessions = talking()
    save, source, target = RankSave(2, 50, 0), NODES[0].holder, NODES[1].holder
    copy = RepairSave(0, 2, save, source, target)
    sessions = replace(sessions, orders=uploads.repair(sessions.orders, [(A, copy)], 1001.0))
    sessions = heard(sessions, A, Repaired(request_of(sessions)), 1002.0)
    assert uploads.repair(sessions.orders, [(A, copy)], 1002.1) is sessions.orders
    elsewhere = replace(copy, target=replace(target, instance="restarted"))
    assert uploads.repair(sessions.orders, [(A, elsewhere)], 1002.1).outstanding
    assert uploads.repair(sessions.orders, [(A, copy)], 1002.0 + uploads.COPIED_SECONDS).outstanding


def test_what_was_deleted_leaves_the_listing() -> None:
    sessions = asked(talking(status=CLAIMED))
    listing = Listing(request_of(sessions), (manifest(20).to_json(), manifest(40).to_json()), {"layout": "{}"})
    sessions = heard(sessions, A, listing, 1002.0)
    book = listings.drop_persistent(sessions.orders, B, 3, (Checkpoint(1, 20),), 1003.0)
    assert listings.drop_persistent(book, B, 3, (Checkpoint(1, 40),), 1003.0) == book
    sessions = replace(sessions, orders=book)
    number = request_of(sessions)
    assert DropPersistent(number, (Checkpoint(1, 20),)) in words(sessions, B, CLAIMED)
    sessions = heard(sessions, B, PersistentDropped(number), 1004.0)
    assert sessions.orders.persistent.deleting == frozenset()
    assert sessions.orders.persistent.entries == (manifest(40),)


def test_what_is_being_deleted_counts_as_gone_until_a_listing_lacks_it() -> None:
    """Its agent may be slow, fail half-way or be cut off, and still delete the rest."""
    sessions = asked(talking(status=CLAIMED))
    texts = (manifest(20).to_json(), manifest(40).to_json())
    sessions = heard(sessions, A, Listing(request_of(sessions), texts, {"layout": "{}"}), 1002.0)
    old = Checkpoint(1, 20)
    uploaded = {old: frozenset({RankSave(1, 20, 0)}), Checkpoint(1, 40): frozenset({RankSave(1, 40, 0)})}
    sessions = replace(sessions, orders=replace(sessions.orders, promoted=uploaded))
    sessions = replace(sessions, orders=listings.drop_persistent(sessions.orders, B, 3, (old,), 1003.0))
    assert sessions.orders.persistent.entries == (manifest(40),)
    assert sessions.orders.persistent.deleting == {old}
    assert sessions.orders.promoted.keys() == {Checkpoint(1, 40)}
    failed = heard(sessions, B, PersistentDropped(request_of(sessions), "store away"), 1004.0)
    assert failed.orders.persistent.deleting == {old}
    again = asked(failed)
    away = heard(again, A, Listing(request_of(again), error="store away"), 1005.0)
    assert away.orders.persistent.deleting == {old}, "a listing that failed tells nothing"
    shown = heard(again, A, Listing(request_of(again), texts, {"layout": "{}"}), 1005.0)
    assert (shown.orders.persistent.entries, shown.orders.persistent.deleting) == ((manifest(40),), {old})
    gone = heard(again, A, Listing(request_of(again), texts[1:], {"layout": "{}"}), 1005.0)
    assert (gone.orders.persistent.entries, gone.orders.persistent.deleting) == ((manifest(40),), frozenset())


def test_retiring_means_this_attempt_and_not_the_next() -> None:
    sessions = talking()
    book = conversations.retire(sessions.orders, (A,), Retire("job complete", 0))
    sessions = connected(replace(sessions, orders=book), hello(0, 2), 1001.0)
    assert Retire("job complete", 0) in words(sessions, A)
    assert Retire("job complete", 0) not in words(sessions, WorkerId(0, 2))


def test_a_listing_in_pages_counts_once_the_last_has_come_and_begins_anew_with_its_first() -> None:
    sessions = asked(talking(status=CLAIMED))
    number = request_of(sessions)
    first = Listing(number, (manifest(20).to_json(),), {"layout": "{}"}, page=0, more=True)
    last = Listing(number, (manifest(40).to_json(),), page=1)
    for message in (first, first):  # said again on a new line
        sessions = heard(sessions, A, message, 1002.0)
        assert sessions.orders.persistent.entries is None
    sessions = heard(sessions, A, last, 1002.0)
    assert sessions.orders.persistent.entries == (manifest(20), manifest(40))
    assert sessions.orders.layouts == {"layout": "{}"}


def test_a_page_that_did_not_come_makes_the_listing_fail() -> None:
    sessions = asked(talking(status=CLAIMED))
    sessions = heard(sessions, A, Listing(request_of(sessions), (manifest(40).to_json(),), page=2), 1002.0)
    assert "page 1 of 3" in str(sessions.orders.persistent.error)


def test_a_late_answer_of_whoever_was_asked_first_counts_and_layouts_are_remembered() -> None:
    sessions = asked(talking(status=CLAIMED))
    number = request_of(sessions)
    sessions = replace(sessions, orders=listings.list_persistent(sessions.orders, B, 3, 1061.0))
    assert sessions.orders.persistent.asked_of == {A, B}
    sessions = heard(sessions, A, Listing(number, (manifest().to_json(),), {"layout": "{}"}), 1062.0)
    assert sessions.orders.persistent.entries == (manifest(),)
    assert sessions.orders.outstanding == {}, "B's answer is no longer needed"
    sessions = replace(sessions, orders=listings.list_persistent(sessions.orders, A, 3, 1070.0))
    sessions = heard(sessions, A, Listing(request_of(sessions), (manifest().to_json(),)), 1071.0)
    assert sessions.orders.outstanding == {}, "a layout that is known is not asked for"
    assert sessions.orders.layouts == {"layout": "{}"}


def test_what_a_listing_left_out_is_told_by_name_and_judged_by_nobody() -> None:
    sessions = asked(talking(status=CLAIMED))
    left_out = (
        LeftOut("rank-0.json is damaged", False, checkpoint=Checkpoint(1, 20)),
        LeftOut("layouts/layout.json is damaged", False, digest="layout"),
    )
    listing = Listing(request_of(sessions), (manifest(40).to_json(),), left_out=left_out)
    sessions = heard(sessions, A, listing, 1002.0)
    assert sessions.orders.persistent.unjudged == {Checkpoint(1, 20), Checkpoint(1, 40)}
    assert [any(str(one) in told for told in sessions.orders.failures) for one in left_out] == [True, True]


def with_layouts(*digests: str) -> list[str]:
    """A manifest each, of one rank at steps 10, 20, …, with these layouts."""
    return [replace(manifest(10 * n), layout=digest).to_json() for n, digest in enumerate(digests, 1)]


def test_layouts_are_asked_for_once_the_manifests_name_them_and_only_those_unknown() -> None:
    sessions = talking(status=CLAIMED)
    book = listings.list_persistent(sessions.orders, A, 3, 1001.0, known=frozenset({"a"}))
    sessions = replace(sessions, orders=book)
    first = request_of(sessions)
    sessions = heard(sessions, A, Listing(first, tuple(with_layouts("a", "b", "c", "c"))), 1002.0)
    number = request_of(sessions)
    assert sessions.orders.persistent.read_epoch is None, "it counts with its layouts"
    assert words(sessions, A, CLAIMED)[-1] == ListPersistent(number, manifests=False, layouts=("b", "c"))
    again = Listing(first, tuple(with_layouts("a")))
    assert heard(sessions, A, again, 1002.0) == replace(sessions, by_worker=heard(sessions, A, again, 1002.0).by_worker)
    sessions = heard(sessions, A, Listing(number, layouts={"b": "{}"}, more=True), 1003.0)
    sessions = heard(sessions, A, Listing(number, layouts={"c": "{}"}, page=1), 1003.0)
    assert sessions.orders.persistent.read_epoch == 3
    assert len(sessions.orders.persistent.entries or ()) == 4
    assert sessions.orders.layouts == {"b": "{}", "c": "{}"}
    assert sessions.orders.outstanding == {}


def test_a_layout_that_the_agent_neither_gives_nor_names_is_not_asked_for_without_an_end() -> None:
    sessions = asked(talking(status=CLAIMED))
    sessions = heard(sessions, A, Listing(request_of(sessions), tuple(with_layouts("a", "b"))), 1002.0)
    lost = LeftOut("layouts/a.json is damaged", False, digest="a")
    sessions = heard(sessions, A, Listing(request_of(sessions), left_out=(lost,)), 1003.0)
    seen = sessions.orders.persistent
    assert (seen.read_epoch, seen.lost_layouts, len(seen.unjudged)) == (3, {"a", "b"}, 2)


def test_layouts_are_asked_for_a_few_at_a_time() -> None:
    digests = [f"{n:016x}" for n in range(300)]
    sessions = asked(talking(status=CLAIMED))
    sessions = heard(sessions, A, Listing(request_of(sessions), tuple(with_layouts(*digests))), 1002.0)
    counts = []
    while sessions.orders.persistent.read_epoch is None:
        order = sessions.orders.outstanding[request_of(sessions)].message
        assert isinstance(order, ListPersistent)
        counts.append(len(order.layouts or ()))
        sessions = heard(sessions, A, Listing(order.request, layouts=dict.fromkeys(order.layouts or (), "{}")), 1003.0)
    assert counts == [128, 128, 44]
    assert sorted(sessions.orders.layouts) == digests


def test_a_listing_of_older_agents_that_tell_everything_counts_at_once() -> None:
    sessions = asked(talking(status=CLAIMED))
    told = Listing(request_of(sessions), tuple(with_layouts("a")), {"a": "{}"})
    assert heard(sessions, A, told, 1002.0).orders.persistent.read_epoch == 3
    # and one that tells manifests again, where layouts alone were asked for, doubles none
    sessions = heard(sessions, A, replace(told, layouts={}), 1002.0)
    sessions = heard(sessions, A, replace(told, request=request_of(sessions)), 1002.0)
    assert len(sessions.orders.persistent.entries or ()) == 1


def test_what_is_asked_again_each_minute_is_answered_by_the_first_after_many() -> None:
    sessions = asked(talking(status=CLAIMED))
    first = request_of(sessions)
    for minute in range(1, 8):
        book = listings.list_persistent(sessions.orders, (A, B)[minute % 2], 3, 1001.0 + 60 * minute)
        sessions = replace(sessions, orders=book)
    sessions = heard(sessions, A, Listing(first, (manifest().to_json(),), {"layout": "{}"}), 1440.0)
    assert sessions.orders.persistent.read_epoch == 3
    assert sessions.orders.outstanding == {}
