"""Tests of `reconcile.event_recorder`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from surefoot_operator.errors import PlatformError
from surefoot_operator.policy.core.actions import Event
from surefoot_operator.reconcile.event_recorder import (
    MAX_AGENT_EVENTS_PER_MINUTE,
    MAX_PLAN_EVENTS_PER_MINUTE,
    MAX_RECENT_FAILURES,
    REPEAT_INTERVAL_SECONDS,
    EventBudget,
    EventRecorder,
    TierFailureEvents,
)

# ---- event recorder --------------------------------------------------------------------------------------------------
# Events are told beside a job's rounds, and no more than people can read.


def events(count: int) -> list[Event]:
    return [Event("Said", f"number {n}") for n in range(count)]


def test_within_any_minute_there_are_so_many_and_how_many_were_left_out_is_said_later() -> None:
    budget = EventBudget(5)
    assert len(budget.select_allowed(events(3), 0.0)) == 3
    assert len(budget.select_allowed(events(9), 30.0)) == 2
    assert budget.select_allowed(events(1), 59.0) == ()
    later = budget.select_allowed(events(1), 60.0)
    assert [event.reason for event in later] == ["EventsSuppressed", "Said"]
    assert "8 earlier events" in later[0].message
    told = sum(len(budget.select_allowed(events(10), 60.0 + n)) for n in range(60))
    assert told <= 2 * 5


async def test_a_server_that_takes_its_time_holds_nobody_up_and_everything_is_told_in_order() -> None:
    told: list[Event] = []
    go = asyncio.Event()

    async def record(some: Sequence[Event]) -> None:
        await go.wait()
        told.extend(some)

    voice = EventRecorder(record, lambda: 0.0)
    voice.record(events(50))
    voice.record(events(1), of_agents=True)
    await asyncio.sleep(0)
    assert told == []
    go.set()
    await voice.flush()
    assert told == [*events(50), *events(1)]
    await voice.close()


async def test_agents_that_say_too_much_leave_room_for_the_operators_own_words() -> None:
    told: list[Event] = []

    async def record(some: Sequence[Event]) -> None:
        told.extend(some)

    voice = EventRecorder(record, lambda: 0.0)
    for _ in range(100):
        voice.record(events(64), of_agents=True)
    voice.record([Event("Planned", "this")] * (MAX_PLAN_EVENTS_PER_MINUTE + 1))
    await voice.flush()
    assert [event.reason for event in told] == ["Said"] * MAX_AGENT_EVENTS_PER_MINUTE + [
        "Planned"
    ] * MAX_PLAN_EVENTS_PER_MINUTE
    await voice.close()


async def test_what_cannot_be_recorded_is_in_the_log_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    tries = []

    async def record(some: Sequence[Event]) -> None:
        tries.append(len(some))
        raise PlatformError("the API server is away") if len(tries) == 1 else RuntimeError("a bug")

    voice = EventRecorder(record, lambda: 0.0)
    for _ in range(3):
        voice.record(events(1))
        await voice.flush()
    assert tries == [1, 1, 1]
    assert "in this log only" in caplog.text
    await voice.close()


# ---- tier failure events ---------------------------------------------------------------------------------------------
# What agents could not do: told once, told again while it lasts, and never in a flood.


def test_the_same_failure_is_told_once_until_it_has_lasted_for_a_while() -> None:
    complaints = TierFailureEvents()
    (event,) = complaints.new_events(["worker 0 could not upload: no space"], 100.0)
    assert (event.reason, event.warning) == ("StorageOperationFailed", True)
    assert complaints.new_events(["worker 0 could not upload: no space"], 104.0) == ()
    assert len(complaints.new_events(["worker 0 could not upload: no space"], 100.0 + REPEAT_INTERVAL_SECONDS)) == 1


def test_a_tier_that_fails_for_every_rank_makes_few_events() -> None:
    complaints = TierFailureEvents()
    told = complaints.new_events([f"rank {rank} could not be uploaded" for rank in range(1000)], 0.0)
    assert len(told) == MAX_RECENT_FAILURES
    assert complaints.new_events(["rank 7000 could not be uploaded"], 1.0) == ()
    assert len(complaints.new_events(["rank 7000 could not be uploaded"], REPEAT_INTERVAL_SECONDS + 1.0)) == 1
