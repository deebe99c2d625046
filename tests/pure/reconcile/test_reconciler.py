"""When a job's next round begins: words that keep coming are gathered, and what stands still is looked at seldom."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest

from surefoot_operator.policy.membership import planned_change
from surefoot_operator.reconcile import Reconciler
from surefoot_operator.reconcile.build_snapshot import Dependencies
from surefoot_operator.reconcile.reconciler import (
    BATCHING_COST_RATIO,
    IDLE_JITTER_RATIO,
    IDLE_POLL_SECONDS,
    MAX_BATCHING_SECONDS,
    MIN_BATCHING_SECONDS,
    ReconcilePacer,
)
from surefoot_operator.settings import OperatorSettings


def test_a_dear_decision_is_made_of_more_words_and_a_cheap_one_waits_for_none() -> None:
    pace = ReconcilePacer()
    assert pace.batching_seconds == MIN_BATCHING_SECONDS
    pace.record_decision_seconds(0.0005)
    assert pace.batching_seconds == MIN_BATCHING_SECONDS
    pace.record_decision_seconds(0.02)
    assert pace.batching_seconds == pytest.approx(BATCHING_COST_RATIO * 0.02)
    pace.record_decision_seconds(5.0)
    assert pace.batching_seconds == MAX_BATCHING_SECONDS


def test_looks_that_find_nothing_become_rarer_and_any_word_brings_them_back() -> None:
    pace, slept = ReconcilePacer(), []
    for _ in range(5):
        slept.append(pace.sleep_seconds(2.0, chance=0.0))
        pace.record_poll(woken=False, still=True)
    assert slept == [2.0, 4.0, 8.0, IDLE_POLL_SECONDS, IDLE_POLL_SECONDS]
    assert IDLE_POLL_SECONDS < planned_change.MAX_SNAPSHOT_AGE_SECONDS
    pace.record_poll(woken=True, still=True)
    assert pace.sleep_seconds(2.0, chance=0.5) == 2.0
    pace.record_poll(woken=False, still=True)
    pace.record_poll(woken=False, still=False)
    assert pace.sleep_seconds(2.0, chance=0.5) == 2.0
    pace.record_poll(woken=False, still=True)
    assert pace.sleep_seconds(60.0, chance=1.0) == 60.0  # a job at rest sleeps as long as it did


def test_jobs_that_began_to_wait_together_are_not_looked_at_together() -> None:
    pace = ReconcilePacer()
    for _ in range(9):
        pace.record_poll(woken=False, still=True)
    early, late = pace.sleep_seconds(2.0, chance=1.0), pace.sleep_seconds(2.0, chance=0.0)
    assert (early, late) == (pytest.approx((1 - IDLE_JITTER_RATIO) * IDLE_POLL_SECONDS), IDLE_POLL_SECONDS)


class Talkative:
    """A reconciler to which a word comes with each tick of a clock, for so many ticks."""

    TICK_SECONDS = 0.005

    def __init__(self, monkeypatch: pytest.MonkeyPatch, words: int) -> None:
        nothing = cast(Any, None)
        fabric = cast(Any, type("Fabric", (), {"record_events": None}))
        parts = Dependencies(fabric, nothing, nothing, nothing, OperatorSettings(), time.time, nothing)
        self.reconciler, self.now, self.words, self.ended = Reconciler(parts), 0.0, words, False
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(self._loop, "time", lambda: self.now)
        self._tick()

    def _tick(self) -> None:
        self.now += self.TICK_SECONDS
        if self.words > 0:
            self.words -= 1
            self.reconciler.wake()
        if not self.ended:
            self._loop.call_soon(self._tick)

    async def gathered(self) -> float:
        """How long the reconciler sleeps, once a decision has taken 20 ms."""
        self.reconciler._pacer.record_decision_seconds(0.02)
        began = self.now
        await self.reconciler._sleep_until_woken(60.0)
        self.ended = True
        return self.now - began


async def test_words_that_keep_coming_are_gathered_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = BATCHING_COST_RATIO * 0.02
    assert asked <= await Talkative(monkeypatch, words=10_000).gathered() <= asked + 0.03


async def test_the_last_word_is_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await Talkative(monkeypatch, words=2).gathered() <= 0.05
