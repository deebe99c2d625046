"""Two agents are asked for one all-reduce: who hears of what when, and that late, foreign and doubled answers change nothing."""

from __future__ import annotations

from dataclasses import replace

from surefoot.protocol.identities import WorkerId
from surefoot.protocol.messages import PairResult, PairStore, PairTrial
from surefoot_operator.coordinator import pending_requests
from surefoot_operator.coordinator.pending_requests import Orders, drop_other_generations
from surefoot_operator.job_snapshot import PairSideSeen

A, B = WorkerId(0, 1), WorkerId(1, 1)
SIDES = (PairSideSeen(A, "ia", "n0"), PairSideSeen(B, "ib", "n1"))


def asked() -> Orders:
    return pending_requests.request_tests(Orders(7), [SIDES], 100.0)


def hosted() -> Orders:
    return pending_requests.record_result(asked(), A, PairStore(7, "n0:5"), 101.0)


def test_the_guest_hears_of_it_once_the_host_has_a_store() -> None:
    assert pending_requests.pending_tests(asked(), A, "ia") == [PairTrial(7, "n1")]
    assert pending_requests.pending_tests(asked(), B, "ib") == []
    assert pending_requests.pending_tests(hosted(), A, "ia") == [PairTrial(7, "n1")], "the host is told nothing new"
    assert pending_requests.pending_tests(hosted(), B, "ib") == [PairTrial(7, "n0", "n0:5")]
    assert pending_requests.pending_tests(hosted(), B, "another start") == []
    assert pending_requests.workers_of_changed_pairs(asked().pairs, hosted().pairs) == {A, B}


def test_who_answered_is_asked_no_more_and_its_first_word_stands() -> None:
    orders = pending_requests.record_result(hosted(), B, PairResult(7, "fails", "x" * 1000), 102.0)
    assert pending_requests.pending_tests(orders, B, "ib") == []
    assert pending_requests.pending_tests(orders, A, "ia") == [PairTrial(7, "n1")]
    (pair,) = orders.pairs.values()
    assert (pair.sides[1].verdict, pair.answered_seconds) == ("fails", 102.0)
    assert len(pair.sides[1].text) == 300
    assert pending_requests.record_result(orders, B, PairResult(7, "well"), 103.0) is orders
    assert pending_requests.record_result(orders, A, PairStore(7, "n0:6"), 103.0) is orders


def test_answers_to_another_coordinator_or_of_somebody_else_are_ignored() -> None:
    orders = hosted()
    assert pending_requests.record_result(orders, A, PairResult(6, "fails"), 102.0) is orders
    assert pending_requests.record_result(orders, WorkerId(2, 1), PairResult(7, "fails"), 102.0) is orders
    assert pending_requests.record_result(asked(), B, PairStore(7, "n1:5"), 101.0) == asked(), "only the host has one"


def test_a_pair_is_asked_once_outlives_epochs_and_goes_with_both_agents() -> None:
    orders = hosted()
    assert pending_requests.request_tests(orders, [SIDES, SIDES[::-1]], 200.0) is orders
    again = pending_requests.request_tests(orders, [(SIDES[0], replace(SIDES[1], incarnation="later"))], 200.0)
    assert sorted(again.pairs) == [7, 8]
    assert drop_other_generations(orders, 5, committed=True).pairs == orders.pairs
    assert pending_requests.drop_gone_pairs(orders, {"ia"}) is orders
    assert pending_requests.drop_gone_pairs(orders, {"another"}).pairs == {}
