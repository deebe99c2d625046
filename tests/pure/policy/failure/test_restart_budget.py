"""What uses up which budget: whatever comes again without a new step ends the job, and what a node did never does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.builders import BEGAN, job, running, told, with_node, with_session, with_worker
from support.fakes.fake_world import FakeWorld
from surefoot_operator.api.spec import ExitCodes, FailurePolicy, FailureRule, RunPolicy
from surefoot_operator.api.status import JobStatus, Restart
from surefoot_operator.api.status_json import status_from_json, status_to_json
from surefoot_operator.job_snapshot import ExitSeen, Observed
from surefoot_operator.policy.core.facts import gather
from surefoot_operator.policy.failure.failure_detection import Loss
from surefoot_operator.policy.failure.restart_budget import (
    MOST_REMEMBERED,
    PAUSES,
    allowance,
    pause_until,
    recorded,
    remember,
)
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check

NOW = BEGAN + 100
REFUSED = "ConnectionError: HTTPConnectionPool(host='data', port=80): Max retries exceeded: Connection refused"


# ---- programs that fail in the same step again and again -----------------------------------------------------------


def strike(world: FakeWorld, step: int, how: str) -> None:
    """At `step` of each epoch the program does the same thing."""
    members = [w.agent for w in world.workers.values() if w.agent is not None]
    here = [a for a in members if world.status.world is not None and a.seen.epoch == world.status.world.epoch]
    if len(here) < 3 or any(a.seen.progress.step < step or a.seen.exit is not None for a in here):
        return
    for agent in here:
        gone = ExitSeen(agent.seen.epoch, agent.seen.index, 1, REFUSED, True, world.now)
        if how == "raises":
            agent.seen = replace(agent.seen, exit=replace(gone, secondary=False, cause="ValueError: bad data"))
        elif how == "ends with 0" and agent.seen.index == 1:
            agent.seen = told(agent.seen, ended=(1,))
        else:
            agent.seen = replace(agent.seen, exit=gone)


def failing(how: str) -> FakeWorld:
    """A job whose program does so at step 35, run until it fails."""
    world = FakeWorld(job(3, 1))
    world.settle()
    for _ in range(1000):
        world.run(0.1)
        strike(world, 35, how)
        if world.status.phase == "Failed":
            return world
    raise AssertionError(f"{world.status.restarts} restarts, and no end: {plan(world.observe()).reason}")


@pytest.mark.parametrize("how", ["raises", "loses its data server", "ends with 0"])
def test_a_program_that_fails_alike_each_time_ends_after_its_limit_whatever_it_says(how: str) -> None:
    world = failing(how)
    assert world.status.restarts == 4, "one that made new steps, and three that did not"
    assert "3 restarts in a row without one new step used up maxNoProgressRestarts (3)" in world.status.message
    claims = [s.world.changed_seconds for s in world.written if s.world is not None and s.world.state == "Claimed"]
    commits = [s.world.changed_seconds for s in world.written if s.world is not None and s.world.state == "Committed"]
    waits = [next(c for c in commits if c >= at) - at for at in sorted(set(claims))[1:]]
    assert waits[0] < 1.0
    assert [round(w) for w in waits[1:]] == [1, 2, 4]


def test_who_ended_with_0_is_the_cause_and_not_those_who_lost_it() -> None:
    incident = failing("ends with 0").status.incidents[-1]
    assert (incident.kind, incident.worker, incident.rank) == ("trainer-failed", 1, 1)
    assert "rank 1 on worker 1 ended with code 0 after step 35 while others train" in incident.reason


# ---- budgets against a model of them -------------------------------------------------------------------------------


@dataclass
class Model:
    """Every restart, kept for ever."""

    limit: int
    most: int | None
    row_limit: int
    own: int = 0
    row: int = 0
    all: int = 0

    def refuses(self, what: str, progressed: bool) -> bool:
        if what == "own" and self.own >= self.limit:
            return True
        if what != "ignored" and self.most is not None and self.all >= self.most:
            return True
        row = 0 if progressed else self.row + 1
        return what in ("own", "unexplained") and row > self.row_limit

    def restarted(self, what: str, progressed: bool) -> None:
        self.own += what == "own"
        self.all += what != "ignored"
        self.row = 0 if progressed else self.row + (what != "outside")


LOSSES = {
    "own": Loss("trainer-failed", "it failed", NOW, 1, "n1", True, exit_code=1),
    "ignored": Loss("trainer-failed", "it asked for it", NOW, 1, "n1", True, exit_code=42),
    "unexplained": Loss("trainer-failed", "peers were lost", NOW, unexplained=True),
    "outside": Loss("node-lost", "n1 is gone", NOW, 1, "n1"),
}


@given(
    st.lists(st.tuples(st.sampled_from(sorted(LOSSES)), st.booleans()), max_size=120),
    st.integers(0, 60),
    st.none() | st.integers(0, 60),
    st.integers(1, 60),
)
@example([("own", False)] * 100, 60, None, 50)
@example([("own", True)] * 100, 50, None, 1)
@example([("outside", False)] * 100, 0, 50, 1)
@example([("unexplained", False)] * 100, 0, 60, 55)
def test_budgets_are_used_up_as_a_record_of_everything_says(
    losses: list[tuple[str, bool]], limit: int, most: int | None, row_limit: int
) -> None:
    rules = (FailureRule("asked for", "RestartAndIgnoreMaxRestarts", ExitCodes((42,))),)
    policy = FailurePolicy(max_restarts=most, max_no_progress_restarts=row_limit, rules=rules)
    seen = running(failure_policy=policy, run_policy=RunPolicy(backoff_limit=limit))
    seen = replace(seen, status=replace(seen.status, reached_step=42))
    model, reached = Model(limit, most, row_limit), 42
    for number, (what, progressed) in enumerate(losses):
        facts = gather(replace(seen, now=NOW + number))
        reached += progressed
        allowed = allowance(facts, LOSSES[what], reached)
        assert (allowed.refusal is not None) == model.refuses(what, progressed), (number, what, allowed)
        if allowed.refusal is not None:
            return
        model.restarted(what, progressed)
        seen = replace(seen, status=recorded(seen.status, allowed, reached))
        assert seen.status.no_progress_restarts == model.row
        assert status_from_json(status_to_json(seen.status)) == seen.status


def test_restarts_leave_their_window() -> None:
    policy = FailurePolicy(max_restarts=3, eval_period_seconds=60.0)
    seen = running(failure_policy=policy)
    for number in range(20):
        facts = gather(replace(seen, now=NOW + 25 * number))
        allowed = allowance(facts, LOSSES["outside"], 42)
        assert allowed.refusal is None
        seen = replace(seen, status=recorded(seen.status, allowed, 42))
    facts = gather(replace(seen, now=NOW + 25 * 19 + 1))
    assert "3 restarts within 60 s used up maxRestarts (3)" in str(allowance(facts, LOSSES["outside"], 42).refusal)


@given(st.lists(st.floats(0.0, 100.0), max_size=200))
def test_what_is_remembered_is_bounded_and_leaves_none_out(gaps: list[float]) -> None:
    at, kept = NOW, ()
    for gap in gaps:
        at += gap
        kept = remember(kept, Restart(at, True, True, False))
    assert len(kept) <= MOST_REMEMBERED
    assert sum(r.count for r in kept) == len(gaps)
    assert all(one.at_seconds <= other.at_seconds for one, other in pairwise(kept))


def test_pauses_grow_to_a_bound_and_only_where_a_program_may_be_the_cause() -> None:
    claimed = plan(exited(running())).status
    waits = []
    for row in range(12):
        seen = replace(running(), status=replace(claimed, no_progress_restarts=row))
        until = pause_until(gather(seen))
        waits.append(0.0 if until is None else until - NOW)
    assert waits[:5] == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert waits[-1] == PAUSES.longest_seconds
    lost = plan(with_worker(running(), 1, phase="Failed")).status
    assert pause_until(gather(replace(running(), status=replace(lost, no_progress_restarts=9)))) is None


# ---- what nobody can explain yet -----------------------------------------------------------------------------------


def exited(seen: Observed, code: int = 1, secondary: bool = False, ago: float = 0.0) -> Observed:
    return with_session(seen, 0, exit=ExitSeen(1, 0, code, REFUSED, secondary, seen.now - ago))


def echoing(row: int, ago: float = 0.3) -> Observed:
    """Rank 0 lost its peers, nobody else is known to have died, and the epoch made no new step."""
    seen = exited(running(), secondary=True, ago=ago)
    status = replace(seen.status, no_progress_restarts=row, reached_step=50)
    sessions = tuple(replace(s, step_at_seconds=NOW - 10) for s in seen.sessions)
    return replace(seen, status=status, sessions=sessions)


def decided(seen: Observed) -> JobStatus:
    made = plan(seen)
    check(made, seen)
    return made.status


def test_before_a_job_fails_for_it_a_silent_node_has_time_to_be_missed() -> None:
    assert decided(echoing(3)).phase == "Running", "it may be a node that lost its power"
    assert decided(echoing(3, ago=4.1)).phase == "Failed"
    gone = with_session(echoing(3, ago=3.9), 2, heard_seconds=NOW - 3.5)
    assert decided(gone).incidents[-1].kind == "worker-silent"
    assert decided(gone).no_progress_restarts == 3


def test_a_node_that_proves_to_be_lost_takes_the_restart_back() -> None:
    claimed = decided(echoing(1))
    assert (claimed.no_progress_restarts, claimed.incidents[-1].unexplained) == (2, True)
    later = with_node(with_session(echoing(1), 2, heard_seconds=NOW - 4), "n2", ready=False)
    known = decided(replace(later, status=claimed))
    assert known.no_progress_restarts == 1
    incident = known.incidents[-1]
    assert (incident.kind, incident.node, incident.unexplained) == ("node-lost", "n2", False)
    again = decided(replace(later, status=known))
    assert again.no_progress_restarts == 1, "once"


def test_a_worker_that_falls_silent_during_a_claim_is_named_as_its_cause() -> None:
    claimed = decided(echoing(1))
    later = with_session(echoing(1), 2, heard_seconds=NOW - 4)
    incident = decided(replace(later, status=claimed)).incidents[-1]
    assert (incident.kind, incident.unexplained) == ("worker-silent", False)
    assert incident.reason.startswith("worker 2 sends no heartbeats any more: ")


def test_a_line_that_broke_a_moment_ago_is_named_for_nothing() -> None:
    claimed = decided(echoing(1))
    later = with_session(echoing(1), 2, connected=False, since_seconds=NOW - 1, heard_seconds=NOW - 1.2)
    assert decided(replace(later, status=claimed)).incidents[-1].unexplained


def test_a_job_that_fails_names_who_ended_it_among_its_incidents() -> None:
    seen = exited(running(run_policy=RunPolicy(backoff_limit=0)))
    incident = decided(seen).incidents[-1]
    assert (incident.epoch, incident.worker, incident.rank, incident.claimed_seconds) == (1, 0, 0, None)
