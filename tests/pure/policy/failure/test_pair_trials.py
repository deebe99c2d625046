"""Nodes are tried in pairs before they get ranks: who is tried with whom, who is sick by that, and that nobody waits for ever."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.builders import BEGAN, beginning, job, session
from surefoot_operator.api.spec import HealthPolicy
from surefoot_operator.api.status import Member, World
from surefoot_operator.job_snapshot import Observed, PairSeen
from surefoot_operator.policy.core.actions import TryPairs
from surefoot_operator.policy.core.facts import gather
from surefoot_operator.policy.failure.spare_workers import spare_agents
from surefoot_operator.policy.failure.unhealthy_nodes import (
    PAIRED_SECONDS,
    TRIAL_SECONDS,
    due_tests,
    found_sick,
    unhealthy_by_pair_tests,
)
from surefoot_operator.policy.membership.claim import select_members
from surefoot_operator.policy.planning.plan import plan

NOW = BEGAN + 5
ENFORCED = HealthPolicy(pre_join_check="Enforce")


def waiting(
    workers: int, least: int | None = None, policy: HealthPolicy = ENFORCED, free: int | None = 0, alone: int = 0
) -> Observed:
    """A job that begins, all of whose nodes passed alone, but for the last `alone`, whose agents know of no trial."""
    sessions = tuple(
        replace(session(i, now=NOW, stopped=1), tried_seconds=NOW - 1 if i < workers - alone else None)
        for i in range(workers)
    )
    return beginning(NOW, job(workers, least, health_policy=policy), sessions, free)


def at(seen: Observed, now: float) -> Observed:
    """The same later, with everybody heard."""
    return replace(seen, now=now, sessions=tuple(replace(s, heard_seconds=now) for s in seen.sessions))


def asked(seen: Observed) -> list[tuple[str, str]]:
    return [(one.node, two.node) for action in due_tests(gather(seen)) for one, two in action.pairs]


def told(
    seen: Observed, bad: Collection[str] = (), links: Collection[frozenset[str]] = (), answer: str = "fails"
) -> Observed:
    """One round: every pair that is due is made, and answered at once."""
    for action in due_tests(gather(seen)):
        for sides in action.pairs:
            nodes = {side.node for side in sides}
            verdict = answer if nodes & set(bad) or nodes in links else "well"
            known = tuple(replace(side, verdict=verdict, text="closed by peer") for side in sides)  # type: ignore[arg-type]
            pair = PairSeen(len(seen.pairs) + 1, known, seen.now, seen.now + 1)  # type: ignore[arg-type]
            seen = replace(seen, pairs=(*seen.pairs, pair))
    return at(seen, seen.now + 1)


def ended(
    seen: Observed, bad: Collection[str] = (), links: Collection[frozenset[str]] = (), answer: str = "fails"
) -> tuple[Observed, int]:
    """All rounds that there are, and how many those were."""
    for rounds in range(20):
        if not asked(seen):
            return seen, rounds
        seen = told(seen, bad, links, answer)
    raise AssertionError(f"pairs are tried without end: {seen.pairs}")


def chosen(seen: Observed) -> tuple[int, ...]:
    return tuple(member.index for member in select_members(gather(seen)).members)


def test_fresh_workers_are_tried_with_one_another_and_the_odd_one_with_who_passed() -> None:
    seen = waiting(5)
    assert asked(seen) == [("n0", "n1"), ("n2", "n3")]
    assert chosen(seen) == ()
    seen = told(seen)
    assert asked(seen) == [("n4", "n0")]
    seen = told(seen)
    assert asked(seen) == []
    assert chosen(seen) == (0, 1, 2, 3, 4)


def test_who_fails_with_two_that_pass_with_others_is_sick_and_gets_no_rank() -> None:
    seen, _ = ended(waiting(4, least=3), {"n1"})
    (name,) = unhealthy_by_pair_tests(gather(seen))
    assert name == "n1"
    text = found_sick(gather(seen))["n1"]
    assert text == "AllReduceFails: an all-reduce with n0, n3 failed, which do with others: closed by peer"
    assert chosen(at(seen, BEGAN + 31)) == (0, 2, 3)
    made = plan(at(seen, NOW + 30))
    assert [one.name for one in made.status.sick_nodes] == ["n1"], "named as any other sick node"
    assert [event.reason for event in made.events if event.reason == "NodeSick"] == ["NodeSick"]


def test_of_two_nodes_alone_nobody_is_blamed_and_the_world_begins_and_says_so() -> None:
    seen, rounds = ended(waiting(2), {"n1"})
    assert rounds == 1
    assert unhealthy_by_pair_tests(gather(seen)) == {}
    assert chosen(seen) == (0, 1)
    (said,) = (event.message for event in plan(seen).events if event.reason == "PairFails")
    assert said.startswith("an all-reduce failed between nodes n0 and n1 (closed by peer): which of them is sick")


def test_where_only_what_lies_between_two_nodes_is_broken_none_of_them_is_sick() -> None:
    seen, _ = ended(waiting(4), links=[frozenset({"n0", "n1"})])
    assert unhealthy_by_pair_tests(gather(seen)) == {}
    assert chosen(seen) == (0, 1, 2, 3)
    assert [event.reason for event in plan(seen).events if event.reason == "PairFails"]


@pytest.mark.parametrize("answer", ["unknown", ""])
def test_a_partner_that_dies_or_cannot_say_proves_nothing(answer: str) -> None:
    seen = waiting(4, least=2)
    seen = told(seen, {"n1"}, answer=answer)
    if not answer:  # it hangs until its time is over, and nobody is asked meanwhile
        assert chosen(seen) == ()
        seen = at(seen, seen.now + TRIAL_SECONDS)
    assert unhealthy_by_pair_tests(gather(seen)) == {}
    assert {"n0", "n1"} <= {node for pair in asked(seen) for node in pair}, "each is tried with others"
    gone = replace(seen, sessions=tuple(s for s in seen.sessions if s.index != 1))
    assert unhealthy_by_pair_tests(gather(gone)) == {}


def test_one_side_s_word_alone_is_no_verdict_where_the_other_never_answered() -> None:
    seen = told(waiting(3), {"n1"})
    (pair,) = seen.pairs
    seen = replace(seen, pairs=(replace(pair, sides=(pair.sides[0], replace(pair.sides[1], verdict="", text=""))),))
    assert unhealthy_by_pair_tests(gather(seen)) == {}
    later, _ = ended(at(seen, NOW + TRIAL_SECONDS + 1))
    assert unhealthy_by_pair_tests(gather(later)) == {}


def test_agents_that_know_no_trial_join_without_one_and_it_is_said() -> None:
    seen, rounds = ended(waiting(3, alone=2))
    assert rounds == 0
    assert chosen(seen) == (0, 1, 2)
    assert "tried with no other node: n0, n1, n2" in plan(seen).reason


@pytest.mark.parametrize(
    ("policy", "pairs", "waits"),
    [
        (HealthPolicy(), 0, False),
        (HealthPolicy(pre_join_check="Warn"), 1, False),
        (HealthPolicy(pre_join_check="Enforce", node_findings="Show"), 1, False),
        (ENFORCED, 1, True),
    ],
    ids=["off", "warn", "show", "enforce"],
)
def test_what_follows_is_as_the_mode_says(policy: HealthPolicy, pairs: int, waits: bool) -> None:
    seen = waiting(3, policy=policy)
    assert len(asked(seen)) == pairs
    assert (chosen(seen) == ()) is waits
    done, _ = ended(seen, {"n1"})
    assert bool(found_sick(gather(done))) is waits


def test_no_worker_waits_for_its_trials_without_end() -> None:
    seen = told(waiting(2), {"n1"}, answer="")
    found = select_members(gather(seen))
    assert (found.members, found.until_seconds) == ((), NOW - 1 + PAIRED_SECONDS)
    assert chosen(at(seen, NOW + PAIRED_SECONDS)) == (0, 1)


def trained(seen: Observed, *members: int) -> Observed:
    """These were of a world that made a step and was lost; whoever else is there has come since."""
    old = tuple(Member(i, 1, seen.sessions[i].incarnation, f"n{i}") for i in members)
    sessions = tuple(
        replace(s, epoch=1, stopped=2, step_at_seconds=NOW - 2) if s.index in members else replace(s, stopped=2)
        for s in seen.sessions
    )
    world = World(2, "Claimed", None, len(old), old, "n9 died", BEGAN)
    return replace(seen, sessions=sessions, status=replace(seen.status, world=world))


def test_a_worker_that_joins_a_halted_world_is_tried_with_its_members_and_they_are_not_for_their_own_sake() -> None:
    seen = trained(waiting(3), 0, 1)
    assert asked(seen) == [("n2", "n0")]
    assert asked(trained(waiting(3, policy=HealthPolicy(pre_join_check="Warn")), 0, 1)) == [], (
        "nobody would wait for it"
    )
    well = told(seen)
    assert asked(well) == []
    assert chosen(well) == (0, 1, 2)
    sick, _ = ended(seen, {"n2"})
    assert set(unhealthy_by_pair_tests(gather(sick))) == {"n2"}, "both of them made collectives with one another"
    one, _ = ended(trained(waiting(2), 0), {"n1"})
    assert unhealthy_by_pair_tests(gather(one)) == {}, "with one witness it may be that one that broke the world"


def test_a_spare_beside_a_world_that_trains_is_tried_with_another_spare_alone() -> None:
    seen = trained(waiting(4), 0, 1)
    world = seen.status.world
    assert world is not None
    seen = replace(seen, status=replace(seen.status, world=replace(world, state="Committed")))
    assert asked(seen) == [("n2", "n3")]
    assert spare_agents(gather(seen)) == [], "the world does not halt for a worker that is being tried"
    assert [s.index for s in spare_agents(gather(told(seen)))] == [2, 3]
    lonely = replace(seen, sessions=seen.sessions[:3])
    assert asked(lonely) == []
    assert [s.index for s in spare_agents(gather(lonely))] == [2]


def test_two_workers_of_one_node_are_no_pair() -> None:
    seen = waiting(2)
    assert asked(replace(seen, sessions=tuple(replace(s, node="n0") for s in seen.sessions))) == []


def test_a_plan_asks_and_looks_again() -> None:
    made = plan(waiting(2))
    assert [action for action in made.actions if isinstance(action, TryPairs)]
    seen = told(waiting(2), {"n1"}, answer="")
    made = plan(seen)
    assert not [action for action in made.actions if isinstance(action, TryPairs)], "they are at it"
    assert made.wake_after_seconds is not None
    assert made.wake_after_seconds <= TRIAL_SECONDS


@given(st.integers(1, 9), st.sets(st.integers(0, 8)), st.sets(st.frozensets(st.integers(0, 8), min_size=2, max_size=2)))
def test_nobody_healthy_is_blamed_and_trials_end(workers: int, bad: set[int], links: set[frozenset[int]]) -> None:
    sick = {f"n{i}" for i in bad if i < workers}
    seen, rounds = ended(waiting(workers), sick)
    assert set(unhealthy_by_pair_tests(gather(seen))) <= sick
    if workers - len(sick) >= 3 and len(sick) == 1:
        assert set(unhealthy_by_pair_tests(gather(seen))) == sick
    assert rounds <= 6
    broken, _ = ended(waiting(workers), (), [frozenset(f"n{i}" for i in link) for link in links])
    if not any(len([link for link in links if i in link]) > 1 for i in range(9)):
        assert unhealthy_by_pair_tests(gather(broken)) == {}, "one broken way is no node's fault"


@given(st.integers(2, 9), st.sets(st.integers(0, 8)))
def test_every_job_begins(workers: int, bad: set[int]) -> None:
    """Whatever fails: a minute after the claim everybody there has a rank, or nobody is awaited any more."""
    seen, _ = ended(waiting(workers, free=0), {f"n{i}" for i in bad})
    assert len(chosen(seen)) == workers


def test_a_spare_that_was_alone_for_an_hour_is_tried_where_its_world_is_claimed() -> None:
    seen = trained(waiting(3, least=2), 0, 1)
    sessions = tuple(replace(s, tried_seconds=BEGAN - 3600) for s in seen.sessions)
    seen = replace(seen, sessions=sessions)
    assert asked(seen) == [("n2", "n0")]
    assert chosen(seen) == ()
    assert chosen(at(seen, BEGAN + PAIRED_SECONDS)) == (0, 1, 2)


def test_one_that_passed_elsewhere_is_no_witness_alone() -> None:
    """The way between may be broken: where nobody else was there, and where it had passed with this very node."""
    seen = waiting(3)
    seen = told(seen)  # n0 with n1
    again = replace(seen.sessions[0], attempt=2, incarnation="again", tried_seconds=seen.now)
    second = replace(seen.workers[0], attempt=2)
    newcomer = replace(
        seen,
        sessions=(again, seen.sessions[1]),
        workers=(*seen.workers[1:2], second),
        free_nodes=0,
    )
    failed, _ = ended(newcomer, {"n0"})
    assert [{side.node for side in pair.sides} for pair in failed.pairs] == [{"n0", "n1"}] * 2
    assert unhealthy_by_pair_tests(gather(failed)) == {}
    busy = told(replace(seen, sessions=seen.sessions), {"n2"})  # n2 with n0, and n1 goes before they meet
    gone = replace(busy, sessions=tuple(s for s in busy.sessions if s.node != "n1"))
    assert unhealthy_by_pair_tests(gather(gone)) == {}


def test_two_that_trained_together_and_fail_in_a_trial_are_no_witnesses() -> None:
    """Then it is the trial that fails: its port is blocked, say."""
    everywhere = {"n0", "n1", "n2"}
    seen, _ = ended(waiting(2, least=2), everywhere)
    third = waiting(3, least=2)
    joined = trained(replace(third, pairs=seen.pairs), 0, 1)
    failed, _ = ended(joined, everywhere)
    assert len(failed.pairs) == 3
    assert unhealthy_by_pair_tests(gather(failed)) == {}
    without = replace(failed, pairs=failed.pairs[1:])
    assert list(unhealthy_by_pair_tests(gather(without))) == ["n2"]


def test_another_agent_of_a_node_that_it_failed_with_tells_nothing_new() -> None:
    """Found by the simulator: n0's agent was restarted, and n1, which garbles, spent its last trial on it, while n2 was busy."""
    seen = waiting(3)
    assert asked(seen) == [("n0", "n1")]
    seen = told(seen, {"n1"})
    again = replace(seen.sessions[0], incarnation="restarted", tried_seconds=seen.now)
    seen = replace(seen, sessions=(again, *seen.sessions[1:]))
    assert ("n1", "n0") not in asked(seen)
    assert ("n0", "n1") not in asked(seen)
    seen, _ = ended(seen, {"n1"})
    assert unhealthy_by_pair_tests(gather(seen)) == {}, (
        "n0's former agent never passed with anybody: n2 alone is no witness"
    )


def test_who_trained_when_it_was_tried_stays_a_witness_whatever_becomes_of_it() -> None:
    """Found by the simulator: the world that began without n2 ended before a step by two silent agents, and n2 got a rank."""
    seen, _ = ended(trained(waiting(3, least=1), 0, 1), {"n2"})
    assert set(unhealthy_by_pair_tests(gather(seen))) == {"n2"}
    silent = replace(
        seen, sessions=tuple(replace(s, heard_seconds=NOW - 100) if s.index < 2 else s for s in seen.sessions)
    )
    assert set(unhealthy_by_pair_tests(gather(silent))) == {"n2"}
    stepless = replace(seen, sessions=tuple(replace(s, step_at_seconds=None) for s in seen.sessions))
    assert set(unhealthy_by_pair_tests(gather(stepless))) == {"n2"}
