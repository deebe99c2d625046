"""Tests of `controller.leader.election_rules`."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from surefoot_operator.controller.credentials.certificates import server_names
from surefoot_operator.controller.leader import election_rules
from surefoot_operator.controller.leader.election_rules import (
    DELAY_PER_SHARD_SECONDS,
    MAX_DELAY_SECONDS,
    Candidate,
    LeaseTimings,
    ObservedLease,
    ObservedShard,
    ShardLayout,
    handover_reason,
    leader_label,
    lease_name,
    patience_seconds,
    shard_of,
    shard_to_request,
    shard_url,
)
from surefoot_operator.controller.leader.leader_election import LEADER_LABEL as LEADER_ELECTION_LEADER

# ---- election --------------------------------------------------------------------------------------------------------
# Who leads: every case of the decision, and many schedules of three candidates with lost answers and frozen ones.

TIMINGS = LeaseTimings()
ME = Candidate("me")


def lease(holder: str = "other", version: str = "1", seconds: float = 3.0) -> ObservedLease:
    return ObservedLease(holder, version, seconds)


def watched(since: float, found: ObservedLease | None) -> Candidate:
    return election_rules.record_read(ME, found, since)


@pytest.mark.parametrize(
    ("candidate", "now", "verb", "reason"),
    [
        (ME, 0.0, "look", "the lease was not read yet"),
        (watched(100.0, None), 100.0, "acquire", "no replica leads"),
        (watched(100.0, lease("")), 100.0, "acquire", "released the lease"),
        (
            watched(100.0, lease("me")),
            100.0,
            "acquire",
            "this replica had the lease before it restarted, and no other has taken it",
        ),
        (watched(100.0, lease()), 100.0, "wait", "other leads"),
        (watched(100.0, lease()), 102.9, "wait", "other leads"),
        (watched(100.0, lease()), 103.0, "acquire", "other has not renewed its lease for 3.0 s"),
        (watched(100.0, lease(seconds=60.0)), 120.0, "wait", "other leads"),
        (watched(100.0, lease(seconds=1.0)), 101.0, "acquire", "other has not renewed"),
    ],
)
def test_who_does_not_lead_waits_until_nobody_does(candidate: Candidate, now: float, verb: str, reason: str) -> None:
    step = election_rules.next_action(candidate, now, TIMINGS)
    assert step.verb == verb
    assert reason in step.reason


LEADER = election_rules.record_write(ME, lease("me", "7"), 100.0, TIMINGS)


@pytest.mark.parametrize(
    ("candidate", "now", "verb", "reason"),
    [
        (LEADER, 100.4, "wait", "just renewed"),
        (LEADER, 100.5, "renew", "renewed"),
        (LEADER, 101.9, "renew", "renewed"),
        # it may not act any more, and waits in place: nobody may have taken it
        (LEADER, 102.0, "renew", "renewed"),
        (LEADER, 109.9, "renew", "renewed"),
        (LEADER, 110.0, "stand-down", "could not be renewed for 10.0 s"),
        # frozen for an hour, or a machine that slept
        (LEADER, 3700.0, "stand-down", "could not be renewed for 3600.0 s"),
        (
            election_rules.record_read(LEADER, lease("other", "8"), 101.0),
            101.0,
            "lost",
            "the lease belongs to other now",
        ),
        (
            election_rules.record_read(LEADER, lease("", "8"), 101.0),
            101.0,
            "lost",
            "the lease belongs to no replica now",
        ),
        (election_rules.record_read(LEADER, None, 101.0), 101.0, "lost", "the lease was deleted"),
        # our own write, whose answer was lost: it is not counted, and the lease is renewed again
        (election_rules.record_read(LEADER, lease("me", "8"), 101.0), 101.0, "renew", "renewed"),
        (election_rules.record_read(LEADER, lease("me", "8"), 103.0), 110.0, "stand-down", "could not be renewed"),
        # it stands by then, and takes the lease where nobody else has
        (
            election_rules.stand_down(LEADER),
            110.0,
            "acquire",
            "this replica had the lease before it restarted, and no other has taken it",
        ),
        (
            election_rules.record_read(election_rules.stand_down(LEADER), lease("other", "8"), 110.0),
            110.0,
            "wait",
            "other leads",
        ),
    ],
)
def test_a_leader_renews_and_knows_when_it_is_none(candidate: Candidate, now: float, verb: str, reason: str) -> None:
    step = election_rules.next_action(candidate, now, TIMINGS)
    assert step.verb == verb
    assert reason in step.reason


def test_a_leader_may_act_only_until_its_own_deadline() -> None:
    assert not election_rules.is_leader(ME, 0.0)
    assert election_rules.is_leader(LEADER, 101.9)
    assert not election_rules.is_leader(LEADER, 102.0)
    assert not election_rules.is_leader(LEADER, 1e9)


def test_a_wait_ends_in_time_for_what_is_next() -> None:
    assert election_rules.next_action(watched(100.0, lease()), 100.0, TIMINGS).after_seconds == TIMINGS.retry_seconds
    assert election_rules.next_action(watched(100.0, lease()), 102.8, TIMINGS).after_seconds == pytest.approx(0.2)
    assert election_rules.next_action(LEADER, 100.1, TIMINGS).after_seconds == pytest.approx(0.4)


def test_only_a_new_version_is_a_sign_of_life() -> None:
    once = election_rules.record_read(ME, lease(version="1"), 100.0)
    again = election_rules.record_read(once, lease(version="1"), 108.0)
    assert again.changed_seconds == 100.0
    assert election_rules.record_read(again, lease(version="2"), 109.0).changed_seconds == 109.0
    # deleted meanwhile, and there again: news
    assert (
        election_rules.record_read(
            election_rules.record_read(again, None, 110.0), lease(version="1"), 111.0
        ).changed_seconds
        == 111.0
    )


def test_a_write_counts_from_when_it_was_asked_for() -> None:
    """The server took it at some moment after that, and others count from when they saw it: later still."""
    asked = election_rules.record_write(ME, lease("me", "3"), 50.0, TIMINGS)
    assert asked.leads_until_seconds == 52.0
    # one that came so late that others may lead by now gives nothing but the right to try again
    assert not election_rules.is_leader(asked, 52.5)


def test_a_slow_server_is_given_time_and_no_call_outlasts_the_term() -> None:
    assert [election_rules.call_timeout_seconds(ME, timeouts, 0.0, TIMINGS) for timeouts in range(4)] == [
        1.5,
        3.0,
        4.0,
        4.0,
    ]
    assert election_rules.call_timeout_seconds(LEADER, 2, 109.0, TIMINGS) == 1.0
    assert election_rules.call_timeout_seconds(LEADER, 2, 200.0, TIMINGS) == TIMINGS.retry_seconds


def test_others_wait_longer_than_a_leader_acts() -> None:
    """Whatever a process may be late by between its question and its write, and a clock may run fast."""
    assert TIMINGS.renew_seconds + TIMINGS.retry_seconds < TIMINGS.lease_seconds < TIMINGS.stand_down_seconds


class Server:
    """One lease with compare-and-swap."""

    def __init__(self) -> None:
        self.lease: ObservedLease | None = None
        self.version = 0
        self.writers: list[str] = []

    def write(self, tested: ObservedLease | None, holder: str) -> ObservedLease | None:
        if (tested.version if tested else None) != (self.lease.version if self.lease else None):
            return None
        self.version += 1
        self.writers.append(holder)
        self.lease = ObservedLease(holder, str(self.version), TIMINGS.lease_seconds)
        return self.lease


# who acts, how much time passes before, how long its call takes, and whether the answer reaches it
TURN = st.tuples(
    st.sampled_from([0, 1, 2]),
    st.sampled_from([0.1, 0.6, 1.9, 3.1, 12.0]),
    st.sampled_from([0.0, 0.4, 1.8, 2.9, 11.0]),
    st.booleans(),
)


QUICK = (0.1, 0.0, True)


@pytest.mark.gate_only
@settings(max_examples=400)
@example(turns=[(0, *QUICK), (0, *QUICK), (1, *QUICK), (1, 4.0, 0.0, True)], skews=(0, 50, 0))
@example(turns=[(0, *QUICK), (0, 0.1, 1.8, True), (1, *QUICK), (1, 4.0, 0.0, True)], skews=(0, -50, 0))
@given(turns=st.lists(TURN, min_size=8, max_size=60), skews=st.tuples(*[st.integers(-10_000, 10_000)] * 3))
def test_never_two_lead_at_one_moment(turns: list[tuple[int, float, float, bool]], skews: tuple[int, int, int]) -> None:
    """Each candidate has a clock of its own; calls take long, answers get lost, anybody may be frozen for any time."""
    server, now = Server(), 0.0
    candidates = [Candidate(f"c{n}") for n in range(3)]
    lost: set[int] = set()
    for who, passes, takes, arrives in turns:
        now += passes
        if who in lost:
            continue
        asked_at = now + skews[who]
        step = election_rules.next_action(candidates[who], asked_at, TIMINGS)
        if step.verb == "lost":
            lost.add(who)
            continue
        if step.verb == "stand-down":
            candidates[who] = election_rules.stand_down(candidates[who])
            continue
        if step.verb in ("acquire", "renew"):
            now += takes
            before = server.writers[-1:]
            taken = server.write(candidates[who].lease, candidates[who].identity)
            if taken is not None and arrives:
                goes_on = step.verb == "renew"
                assert not goes_on or before == [candidates[who].identity], (
                    "its term goes on, and another one led meanwhile"
                )
                candidates[who] = election_rules.record_write(candidates[who], taken, asked_at, TIMINGS)
            elif taken is None and arrives:
                candidates[who] = election_rules.record_read(candidates[who], server.lease, now + skews[who])
        else:
            candidates[who] = election_rules.record_read(candidates[who], server.lease, now + skews[who])
        leaders = [
            c.identity
            for n, c in enumerate(candidates)
            if n not in lost and election_rules.is_leader(c, now + skews[n])
        ]
        assert len(leaders) <= 1, f"{leaders} lead at {now}"


@given(st.data())
def test_somebody_leads_in_the_end(data: st.DataObject) -> None:
    """Whatever the lease says: who looks every two seconds leads after one lease's length."""
    found = data.draw(st.none() | st.builds(ObservedLease, st.sampled_from(["", "me", "other"]), st.just("9")))
    now, candidate = 1000.0, replace(ME)
    for _ in range(20):
        step = election_rules.next_action(candidate, now, TIMINGS)
        if step.verb == "acquire":
            return
        candidate = election_rules.record_read(candidate, found, now)
        now += max(step.after_seconds, 0.1)
    raise AssertionError("nobody ever leads")


# ---- fair share ------------------------------------------------------------------------------------------------------
# Who takes, asks for and gives up a shard: whatever replicas come and die, shards are led soon, evenly, and stay.

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

    def seen(self) -> dict[int, ObservedShard]:
        return {
            shard: ObservedShard(holder if holder in self.alive or self.free_ticks[shard] < 0 else "", asked)
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
            if self.holder[shard] == name and handover_reason(name, shard, seen, self.layout):
                self.holder[shard], self.free_ticks[shard] = "", 0
            elif not seen[shard].leader and self._waited(shard) >= patience_seconds(name, shard, seen, self.layout):
                self.moves += 1
                self.holder[shard], self.asked[shard], self.free_ticks[shard] = name, "", 0
        if self.tick % ASK_TICKS == 0:
            wanted = shard_to_request(name, self.seen(), self.layout)
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
    assert leases.unled_ticks * TICK_SECONDS <= MAX_DELAY_SECONDS + 2 * TICK_SECONDS
    moves, holders = leases.moves, list(leases.holder)
    run(4 * ASK_TICKS)
    assert (leases.moves, leases.holder) == (moves, holders), "nothing is handed to and fro"


@given(
    holders=st.lists(st.sampled_from(NAMES[:4]), min_size=1, max_size=8),
    me=st.sampled_from(NAMES),
)
def test_what_is_asked_for_is_given_up_and_brings_both_nearer(holders: list[str], me: str) -> None:
    layout = ShardLayout(len(holders), len(holders))
    seen = {shard: ObservedShard(holder) for shard, holder in enumerate(holders)}
    wanted = shard_to_request(me, seen, layout)
    held = Counter(holders)
    if wanted is None:
        assert all(held[other] < held[me] + 2 for other in held if other != me)
        return
    other = holders[wanted]
    asked = {**seen, wanted: ObservedShard(other, me)}
    assert handover_reason(other, wanted, asked, layout)
    assert not any(handover_reason(other, shard, asked, layout) for shard in seen if shard != wanted)
    moved = [*holders[:wanted], me, *holders[wanted + 1 :]]
    assert abs(moved.count(other) - moved.count(me)) < abs(held[other] - held[me])


SPREAD = {0: ObservedShard("root"), 1: ObservedShard("other"), 2: ObservedShard("")}


@pytest.mark.parametrize(
    ("me", "shard", "seen", "layout", "expected"),
    [
        ("new", 2, SPREAD, ShardLayout(3, 3), 0.0),
        ("other", 2, SPREAD, ShardLayout(3, 3), DELAY_PER_SHARD_SECONDS),
        ("root", 2, {**SPREAD, 1: ObservedShard("root")}, ShardLayout(3, 3), MAX_DELAY_SECONDS),
        ("new", 2, {**SPREAD, 2: ObservedShard("", "other")}, ShardLayout(3, 3), MAX_DELAY_SECONDS),
        ("other", 2, {**SPREAD, 2: ObservedShard("", "other")}, ShardLayout(3, 3), 0.0),
        ("new", 2, SPREAD, ShardLayout(3, 1), math.inf),
        ("root", 2, SPREAD, ShardLayout(3, 1), 0.0),
        ("new", 0, {**SPREAD, 0: ObservedShard("")}, ShardLayout(3, 1), 0.0),
    ],
)
def test_who_has_least_takes_a_free_shard_first(
    me: str, shard: int, seen: dict[int, ObservedShard], layout: ShardLayout, expected: float
) -> None:
    assert patience_seconds(me, shard, seen, layout) == expected


def test_whoever_leads_shard_0_gathers_them_all_to_cut_the_jobs_anew() -> None:
    changing = ShardLayout(3, 1)
    assert "root gathers all shards" in handover_reason("other", 1, SPREAD, changing)
    assert not handover_reason("root", 0, SPREAD, changing)
    assert not handover_reason("other", 1, {**SPREAD, 0: ObservedShard("")}, changing), "nobody is there to gather them"
    assert shard_to_request("new", {0: ObservedShard("root"), 1: ObservedShard("root")}, ShardLayout(2, 1)) is None


# ---- shards ----------------------------------------------------------------------------------------------------------
# Names of shards: jobs are spread evenly and the same everywhere; one shard is called as before there were any.

URL = "wss://surefoot-coordinator.surefoot-system.svc:8443/v1/agents"


@given(st.uuids(), st.integers(1, 8))
def test_every_job_is_in_one_shard(uid: object, shards: int) -> None:
    assert 0 <= shard_of(str(uid), shards) < shards
    assert shard_of(str(uid), 1) == 0


def test_a_jobs_shard_is_the_same_in_every_version() -> None:
    uids = ["5d0f1c2e-0000-4000-8000-000000000000", "a", ""]
    assert [shard_of(uid, 3) for uid in uids] == [2, 1, 1]


def test_jobs_are_spread_evenly() -> None:
    found = Counter(shard_of(f"job-{n}", 3) for n in range(3000))
    assert all(900 < count < 1100 for count in found.values()), found


def test_one_shard_has_the_names_of_before() -> None:
    assert (lease_name("surefoot-operator", 0), leader_label(0), shard_url(URL, 0)) == (
        "surefoot-operator",
        LEADER_ELECTION_LEADER,
        URL,
    )
    assert server_names(URL, "surefoot-system", 1) == server_names(URL, "surefoot-system")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (URL, "wss://surefoot-coordinator-2.surefoot-system.svc:8443/v1/agents"),
        ("wss://here/v1/agents", "wss://here-2/v1/agents"),
        ("wss://10.0.0.1:8443/v1/agents", "wss://10.0.0.1:8443/v1/agents"),
        ("ws://[::1]:8443/v1/agents", "ws://[::1]:8443/v1/agents"),
    ],
)
def test_each_shard_has_an_address_where_there_are_names(url: str, expected: str) -> None:
    assert shard_url(url, 2) == expected


def test_the_certificate_has_every_shards_name() -> None:
    names = server_names(URL, "surefoot-system", 3)
    assert {f"surefoot-coordinator-{n}.surefoot-system.svc" for n in (1, 2)} <= set(names)
    assert "surefoot-coordinator-2.surefoot-system.svc.cluster.local" in names
