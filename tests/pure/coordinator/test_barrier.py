"""Tests of `coordinator.barrier`: a barrier is proposed, bound once all have accepted, and removed."""

from __future__ import annotations

from dataclasses import replace

from support.fakes.fake_agent import hello
from support.talk import CLAIMED, COMMITTED, A, B, C, talking, words
from surefoot.protocol.identities import WorkerId
from surefoot.protocol.messages import (
    Barrier,
    BarrierReply,
    ToAgent,
)
from surefoot_operator.coordinator.barrier import update_barrier
from surefoot_operator.coordinator.sessions import (
    Sessions,
    apply_hello,
    apply_membership,
    apply_message,
    create_sessions,
)


def wanting(sessions: Sessions, barrier: Barrier) -> Sessions:
    barrier_now = update_barrier(sessions.requests.barrier, barrier, (A, B), 1001.0)
    return replace(sessions, requests=replace(sessions.requests, barrier=barrier_now))


def proposed(step: int = 60) -> Sessions:
    return wanting(talking(), Barrier(2, step, "proposed"))


def holds(sessions: Sessions, worker: WorkerId) -> list[ToAgent]:
    return [word for word in words(sessions, worker) if isinstance(word, Barrier)]


def test_a_hold_binds_once_every_member_accepted() -> None:
    sessions = proposed()
    assert holds(sessions, A) == [Barrier(2, 60, "proposed")]
    assert holds(sessions, C) == []
    sessions = apply_message(sessions, A, BarrierReply(2, 60, True), 1002.0)
    assert sessions.requests.barrier is not None
    assert sessions.requests.barrier.barrier.phase == "proposed"
    sessions = apply_message(sessions, A, BarrierReply(2, 60, True), 1002.0)
    assert holds(sessions, B) == [Barrier(2, 60, "proposed")]
    sessions = apply_message(sessions, B, BarrierReply(2, 60, True), 1002.0)
    assert holds(sessions, A) == holds(sessions, B) == [Barrier(2, 60, "bound")]


def test_one_refusal_cancels_a_hold_for_all_and_it_may_be_proposed_anew() -> None:
    sessions = apply_message(proposed(), A, BarrierReply(2, 60, True), 1002.0)
    sessions = apply_message(sessions, B, BarrierReply(2, 60, False), 1002.0)
    assert holds(sessions, A) == [Barrier(2, 60, "cancelled")]
    sessions = apply_message(sessions, B, BarrierReply(2, 60, True), 1002.0)
    assert holds(sessions, A) == [Barrier(2, 60, "cancelled")]
    again = wanting(sessions, Barrier(2, 80, "proposed"))
    assert holds(again, A) == [Barrier(2, 80, "proposed")]


def test_nobody_may_bind_before_all_accepted() -> None:
    sessions = proposed()
    assert wanting(sessions, Barrier(2, 60, "bound")) == sessions
    assert update_barrier(None, Barrier(2, 60, "bound"), (A, B), 1.0) is None


def test_a_hold_ends_with_its_world_and_answers_of_another_step_are_ignored() -> None:
    sessions = apply_message(proposed(), A, BarrierReply(2, 50, False), 1002.0)
    assert holds(sessions, A) == [Barrier(2, 60, "proposed")]
    assert apply_membership(sessions, CLAIMED.membership).requests.barrier is None


def test_an_adopted_member_is_freed_from_a_hold_that_nobody_remembers() -> None:
    sessions = apply_hello(
        apply_membership(create_sessions("job-1", 2000.0), COMMITTED), hello(0, generation=2), 2000.0
    )
    assert holds(sessions, A) == [Barrier(2, 0, "cancelled")]
