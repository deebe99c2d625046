"""Holds at a step as the coordinator proposes them, binds them once all have accepted, and lets them go."""

from __future__ import annotations

from dataclasses import replace

from support.fakes.fake_agent import hello
from support.talk import CLAIMED, COMMITTED, A, B, C, talking, words
from surefoot.protocol.identities import WorkerId
from surefoot.protocol.messages import (
    Hold,
    HoldAnswer,
    ToAgent,
)
from surefoot_operator.coordinator import pending_requests
from surefoot_operator.coordinator.sessions import (
    Sessions,
    begin,
    connected,
    heard,
    ruled,
)


def proposed(step: int = 60) -> Sessions:
    sessions = talking()
    return replace(sessions, orders=pending_requests.propose_hold(sessions.orders, 2, step, "propose", (A, B), 1001.0))


def holds(sessions: Sessions, worker: WorkerId) -> list[ToAgent]:
    return [word for word in words(sessions, worker) if isinstance(word, Hold)]


def test_a_hold_binds_once_every_member_accepted() -> None:
    sessions = proposed()
    assert holds(sessions, A) == [Hold(2, 60, "propose")]
    assert holds(sessions, C) == []
    sessions = heard(sessions, A, HoldAnswer(2, 60, True), 1002.0)
    assert sessions.orders.hold is not None
    assert sessions.orders.hold.seen.state == "Proposed"
    sessions = heard(sessions, A, HoldAnswer(2, 60, True), 1002.0)
    assert holds(sessions, B) == [Hold(2, 60, "propose")]
    sessions = heard(sessions, B, HoldAnswer(2, 60, True), 1002.0)
    assert holds(sessions, A) == holds(sessions, B) == [Hold(2, 60, "bind")]


def test_one_refusal_cancels_a_hold_for_all_and_it_may_be_proposed_anew() -> None:
    sessions = heard(proposed(), A, HoldAnswer(2, 60, True), 1002.0)
    sessions = heard(sessions, B, HoldAnswer(2, 60, False), 1002.0)
    assert holds(sessions, A) == [Hold(2, 60, "cancel")]
    sessions = heard(sessions, B, HoldAnswer(2, 60, True), 1002.0)
    assert holds(sessions, A) == [Hold(2, 60, "cancel")]
    again = replace(sessions, orders=pending_requests.propose_hold(sessions.orders, 2, 80, "propose", (A, B), 1003.0))
    assert holds(again, A) == [Hold(2, 80, "propose")]


def test_nobody_may_bind_before_all_accepted() -> None:
    sessions = proposed()
    same = pending_requests.propose_hold(sessions.orders, 2, 60, "bind", (A, B), 1002.0)
    assert same.hold == sessions.orders.hold
    assert pending_requests.propose_hold(begin("job-1", 1.0).orders, 2, 60, "bind", (A, B), 1.0).hold is None


def test_a_hold_ends_with_its_world_and_answers_of_another_step_are_ignored() -> None:
    sessions = heard(proposed(), A, HoldAnswer(2, 50, False), 1002.0)
    assert holds(sessions, A) == [Hold(2, 60, "propose")]
    assert ruled(sessions, CLAIMED.world).orders.hold is None


def test_an_adopted_member_is_freed_from_a_hold_that_nobody_remembers() -> None:
    sessions = connected(ruled(begin("job-1", 2000.0), COMMITTED), hello(0, epoch=2), 2000.0)
    assert holds(sessions, A) == [Hold(2, 0, "cancel")]
