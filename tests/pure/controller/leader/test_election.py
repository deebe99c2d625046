"""Who leads: every case of the decision, and many schedules of three candidates with lost answers and frozen ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from surefoot_operator.controller.leader import election_rules
from surefoot_operator.controller.leader.election_rules import Candidate, LeaseSeen, LeaseTimings

TIMINGS = LeaseTimings()
ME = Candidate("me")


def lease(holder: str = "other", version: str = "1", seconds: float = 3.0) -> LeaseSeen:
    return LeaseSeen(holder, version, seconds)


def watched(since: float, found: LeaseSeen | None) -> Candidate:
    return election_rules.seen(ME, found, since)


@pytest.mark.parametrize(
    ("candidate", "now", "verb", "reason"),
    [
        (ME, 0.0, "look", "the lease was not read yet"),
        (watched(100.0, None), 100.0, "acquire", "nobody leads"),
        (watched(100.0, lease("")), 100.0, "acquire", "released the lease"),
        (watched(100.0, lease("me")), 100.0, "acquire", "this replica held the lease, and nobody has since"),
        (watched(100.0, lease()), 100.0, "wait", "other leads"),
        (watched(100.0, lease()), 102.9, "wait", "other leads"),
        (watched(100.0, lease()), 103.0, "acquire", "other has not renewed its lease for 3.0 s"),
        (watched(100.0, lease(seconds=60.0)), 120.0, "wait", "other leads"),
        (watched(100.0, lease(seconds=1.0)), 101.0, "acquire", "other has not renewed"),
    ],
)
def test_who_does_not_lead_waits_until_nobody_does(candidate: Candidate, now: float, verb: str, reason: str) -> None:
    step = election_rules.decide(candidate, now, TIMINGS)
    assert step.verb == verb
    assert reason in step.reason


LEADER = election_rules.written(ME, lease("me", "7"), 100.0, TIMINGS)


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
        (election_rules.seen(LEADER, lease("other", "8"), 101.0), 101.0, "lost", "the lease is held by other"),
        (election_rules.seen(LEADER, lease("", "8"), 101.0), 101.0, "lost", "the lease is held by nobody"),
        (election_rules.seen(LEADER, None, 101.0), 101.0, "lost", "the lease was deleted"),
        # our own write, whose answer was lost: it is not counted, and the lease is renewed again
        (election_rules.seen(LEADER, lease("me", "8"), 101.0), 101.0, "renew", "renewed"),
        (election_rules.seen(LEADER, lease("me", "8"), 103.0), 110.0, "stand-down", "could not be renewed"),
        # it stands by then, and takes the lease where nobody else has
        (election_rules.stood_down(LEADER), 110.0, "acquire", "this replica held the lease, and nobody has since"),
        (
            election_rules.seen(election_rules.stood_down(LEADER), lease("other", "8"), 110.0),
            110.0,
            "wait",
            "other leads",
        ),
    ],
)
def test_a_leader_renews_and_knows_when_it_is_none(candidate: Candidate, now: float, verb: str, reason: str) -> None:
    step = election_rules.decide(candidate, now, TIMINGS)
    assert step.verb == verb
    assert reason in step.reason


def test_a_leader_may_act_only_until_its_own_deadline() -> None:
    assert not election_rules.leads(ME, 0.0)
    assert election_rules.leads(LEADER, 101.9)
    assert not election_rules.leads(LEADER, 102.0)
    assert not election_rules.leads(LEADER, 1e9)


def test_a_wait_ends_in_time_for_what_is_next() -> None:
    assert election_rules.decide(watched(100.0, lease()), 100.0, TIMINGS).after_seconds == TIMINGS.retry_seconds
    assert election_rules.decide(watched(100.0, lease()), 102.8, TIMINGS).after_seconds == pytest.approx(0.2)
    assert election_rules.decide(LEADER, 100.1, TIMINGS).after_seconds == pytest.approx(0.4)


def test_only_a_new_version_is_a_sign_of_life() -> None:
    once = election_rules.seen(ME, lease(version="1"), 100.0)
    again = election_rules.seen(once, lease(version="1"), 108.0)
    assert again.changed_at == 100.0
    assert election_rules.seen(again, lease(version="2"), 109.0).changed_at == 109.0
    # deleted meanwhile, and there again: news
    assert election_rules.seen(election_rules.seen(again, None, 110.0), lease(version="1"), 111.0).changed_at == 111.0


def test_a_write_counts_from_when_it_was_asked_for() -> None:
    """The server took it at some moment after that, and others count from when they saw it: later still."""
    asked = election_rules.written(ME, lease("me", "3"), 50.0, TIMINGS)
    assert asked.leads_until == 52.0
    # one that came so late that others may lead by now gives nothing but the right to try again
    assert not election_rules.leads(asked, 52.5)


def test_a_slow_server_is_given_time_and_no_call_outlasts_the_term() -> None:
    assert [election_rules.call_limit(ME, timeouts, 0.0, TIMINGS) for timeouts in range(4)] == [1.5, 3.0, 4.0, 4.0]
    assert election_rules.call_limit(LEADER, 2, 109.0, TIMINGS) == 1.0
    assert election_rules.call_limit(LEADER, 2, 200.0, TIMINGS) == TIMINGS.retry_seconds


def test_others_wait_longer_than_a_leader_acts() -> None:
    """Whatever a process may be late by between its question and its write, and a clock may run fast."""
    assert TIMINGS.renew_seconds + TIMINGS.retry_seconds < TIMINGS.lease_seconds < TIMINGS.stand_down_seconds


class Server:
    """One lease with compare-and-swap."""

    def __init__(self) -> None:
        self.lease: LeaseSeen | None = None
        self.version = 0
        self.writers: list[str] = []

    def write(self, tested: LeaseSeen | None, holder: str) -> LeaseSeen | None:
        if (tested.version if tested else None) != (self.lease.version if self.lease else None):
            return None
        self.version += 1
        self.writers.append(holder)
        self.lease = LeaseSeen(holder, str(self.version), TIMINGS.lease_seconds)
        return self.lease


# who acts, how much time passes before, how long its call takes, and whether the answer reaches it
TURN = st.tuples(
    st.sampled_from([0, 1, 2]),
    st.sampled_from([0.1, 0.6, 1.9, 3.1, 12.0]),
    st.sampled_from([0.0, 0.4, 1.8, 2.9, 11.0]),
    st.booleans(),
)


QUICK = (0.1, 0.0, True)


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
        step = election_rules.decide(candidates[who], asked_at, TIMINGS)
        if step.verb == "lost":
            lost.add(who)
            continue
        if step.verb == "stand-down":
            candidates[who] = election_rules.stood_down(candidates[who])
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
                candidates[who] = election_rules.written(candidates[who], taken, asked_at, TIMINGS)
            elif taken is None and arrives:
                candidates[who] = election_rules.seen(candidates[who], server.lease, now + skews[who])
        else:
            candidates[who] = election_rules.seen(candidates[who], server.lease, now + skews[who])
        leaders = [
            c.identity for n, c in enumerate(candidates) if n not in lost and election_rules.leads(c, now + skews[n])
        ]
        assert len(leaders) <= 1, f"{leaders} lead at {now}"


@given(st.data())
def test_somebody_leads_in_the_end(data: st.DataObject) -> None:
    """Whatever the lease says: who looks every two seconds leads after one lease's length."""
    found = data.draw(st.none() | st.builds(LeaseSeen, st.sampled_from(["", "me", "other"]), st.just("9")))
    now, candidate = 1000.0, replace(ME)
    for _ in range(20):
        step = election_rules.decide(candidate, now, TIMINGS)
        if step.verb == "acquire":
            return
        candidate = election_rules.seen(candidate, found, now)
        now += max(step.after_seconds, 0.1)
    raise AssertionError("nobody ever leads")
