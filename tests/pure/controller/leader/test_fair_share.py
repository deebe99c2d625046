"""Who takes, asks for and gives up a shard: whatever replicas come and die, shards are led soon, evenly, and stay."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot_operator.controller.leader.election_rules import (
    LONGEST_SECONDS,
    STEP_SECONDS,
    ShardLayout,
    ShardSeen,
    patience_seconds,
    shard_to_ask_for,
    why_give_up,
)

TICK_SECONDS = 0.2
ASK_TICKS = 8
EXPIRY_TICKS = 6


class Leases:
    """Shards, and replicas that run or are dead; each tick everybody looks once, in an order drawn for it."""

    def __init__(self, shards: int, alive: set[str]) -> None:
        self.layout = ShardLayout(shards, shards)
        self.holder = ["" for _ in range(shards)]
        self.asked = ["" for _ in range(shards)]
        self.free_ticks = [0 for _ in range(shards)]
        self.alive = set(alive)
        self.moves = self.tick = 0
        self.unled_ticks = 0

    def seen(self) -> dict[int, ShardSeen]:
        return {
            shard: ShardSeen(holder if holder in self.alive or self.free_ticks[shard] < 0 else "", asked)
            for shard, (holder, asked) in enumerate(zip(self.holder, self.asked, strict=True))
        }

    def kill(self, name: str) -> None:
        self.alive.discard(name)
        for shard, holder in enumerate(self.holder):
            if holder == name:
                self.free_ticks[shard] = -EXPIRY_TICKS

    def step(self, order: list[str]) -> None:
        self.tick += 1
        for shard, holder in enumerate(self.holder):
            if holder not in self.alive:
                self.free_ticks[shard] += 1
        for name in (one for one in order if one in self.alive):
            self._look(name)
        if self.tick % ASK_TICKS == 1:
            # its holder has had a turn and renewed the lease
            self.asked = [
                "" if holder in self.alive else asked for holder, asked in zip(self.holder, self.asked, strict=True)
            ]
        self.unled_ticks = max([self.unled_ticks, *self.free_ticks])

    def _look(self, name: str) -> None:
        for shard in range(len(self.holder)):
            seen = self.seen()
            if self.holder[shard] == name and why_give_up(name, shard, seen, self.layout):
                self.holder[shard], self.free_ticks[shard] = "", 0
            elif not seen[shard].holder and self._waited(shard) >= patience_seconds(name, shard, seen, self.layout):
                self.moves += 1
                self.holder[shard], self.asked[shard], self.free_ticks[shard] = name, "", 0
        if self.tick % ASK_TICKS == 0:
            wanted = shard_to_ask_for(name, self.seen(), self.layout)
            if wanted is not None:
                self.asked[wanted] = name

    def _waited(self, shard: int) -> float:
        return self.free_ticks[shard] * TICK_SECONDS

    def is_even(self) -> bool:
        counts = [self.holder.count(name) for name in self.alive]
        return set(self.holder) <= self.alive and max(counts) - min(counts) <= 1


NAMES = ("a", "b", "c", "d", "e")


@given(
    shards=st.integers(1, 6),
    events=st.lists(st.tuples(st.sampled_from(("kill", "begin")), st.sampled_from(NAMES)), max_size=4),
    rng=st.randoms(use_true_random=False),
)
def test_shards_are_led_soon_spread_evenly_and_then_stay(
    shards: int, events: list[tuple[str, str]], rng: object
) -> None:
    leases = Leases(shards, {"a", "b"})

    def run(ticks: int) -> None:
        for _ in range(ticks):
            order = sorted(NAMES)
            rng.shuffle(order)  # type: ignore[attr-defined]
            leases.step(order)

    run(10)
    for event, name in events:
        if event == "begin":
            leases.alive.add(name)
        elif len(leases.alive) > 1:
            leases.kill(name)
        run(rng.randint(1, 20))  # type: ignore[attr-defined]
    run(ASK_TICKS * (shards + 2) + EXPIRY_TICKS)
    assert leases.is_even(), leases.holder
    assert leases.unled_ticks * TICK_SECONDS <= LONGEST_SECONDS + 2 * TICK_SECONDS
    moves, holders = leases.moves, list(leases.holder)
    run(4 * ASK_TICKS)
    assert (leases.moves, leases.holder) == (moves, holders), "nothing is handed to and fro"


@given(
    holders=st.lists(st.sampled_from(NAMES[:4]), min_size=1, max_size=8),
    me=st.sampled_from(NAMES),
)
def test_what_is_asked_for_is_given_up_and_brings_both_nearer(holders: list[str], me: str) -> None:
    layout = ShardLayout(len(holders), len(holders))
    seen = {shard: ShardSeen(holder) for shard, holder in enumerate(holders)}
    wanted = shard_to_ask_for(me, seen, layout)
    held = Counter(holders)
    if wanted is None:
        assert all(held[other] < held[me] + 2 for other in held if other != me)
        return
    other = holders[wanted]
    asked = {**seen, wanted: ShardSeen(other, me)}
    assert why_give_up(other, wanted, asked, layout)
    assert not any(why_give_up(other, shard, asked, layout) for shard in seen if shard != wanted)
    moved = [*holders[:wanted], me, *holders[wanted + 1 :]]
    assert abs(moved.count(other) - moved.count(me)) < abs(held[other] - held[me])


SPREAD = {0: ShardSeen("root"), 1: ShardSeen("other"), 2: ShardSeen("")}


@pytest.mark.parametrize(
    ("me", "shard", "seen", "layout", "expected"),
    [
        ("new", 2, SPREAD, ShardLayout(3, 3), 0.0),
        ("other", 2, SPREAD, ShardLayout(3, 3), STEP_SECONDS),
        ("root", 2, {**SPREAD, 1: ShardSeen("root")}, ShardLayout(3, 3), LONGEST_SECONDS),
        ("new", 2, {**SPREAD, 2: ShardSeen("", "other")}, ShardLayout(3, 3), LONGEST_SECONDS),
        ("other", 2, {**SPREAD, 2: ShardSeen("", "other")}, ShardLayout(3, 3), 0.0),
        ("new", 2, SPREAD, ShardLayout(3, 1), math.inf),
        ("root", 2, SPREAD, ShardLayout(3, 1), 0.0),
        ("new", 0, {**SPREAD, 0: ShardSeen("")}, ShardLayout(3, 1), 0.0),
    ],
)
def test_who_has_least_takes_a_free_shard_first(
    me: str, shard: int, seen: dict[int, ShardSeen], layout: ShardLayout, expected: float
) -> None:
    assert patience_seconds(me, shard, seen, layout) == expected


def test_whoever_leads_shard_0_gathers_them_all_to_cut_the_jobs_anew() -> None:
    changing = ShardLayout(3, 1)
    assert "root gathers the shards" in why_give_up("other", 1, SPREAD, changing)
    assert not why_give_up("root", 0, SPREAD, changing)
    assert not why_give_up("other", 1, {**SPREAD, 0: ShardSeen("")}, changing), "nobody is there to gather them"
    assert shard_to_ask_for("new", {0: ShardSeen("root"), 1: ShardSeen("root")}, ShardLayout(2, 1)) is None
