"""Tests of `policy.failure.restart_budget`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.builders import BEGAN, job, running, told, with_node, with_session, with_worker, worker
from support.fakes.fake_world import FakeWorld
from surefoot_operator.api.spec import ExitCodes, FailurePolicy, FailureRule, RunPolicy
from surefoot_operator.api.status import Incident, JobStatus, Membership, Restart
from surefoot_operator.api.status_json import status_from_json, status_to_json
from surefoot_operator.job_snapshot import JobSnapshot, ObservedExit, PendingCreate
from surefoot_operator.policy.core.actions import CreateWorker, DeleteWorker, Plan
from surefoot_operator.policy.core.facts import build_facts
from surefoot_operator.policy.failure.failure_detection import Failure
from surefoot_operator.policy.failure.restart_budget import (
    MAX_RECENT_RESTARTS,
    RESTART_BACKOFF,
    append_restart,
    decide_restart,
    record_restart,
    restart_delay_end,
)
from surefoot_operator.policy.membership.workers import START_TIMEOUT_SECONDS
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check_plan

# ---- failing starts --------------------------------------------------------------------------------------------------
# Workers that end before they can train are replaced after growing waits, and not for ever; what cannot be started is waited for.

NOW = BEGAN + 1000


def beginning(failed_starts: int = 0, age: float = 1000.0, workers: int = 1, **dead: object) -> JobSnapshot:
    """Epoch 1 is claimed; worker 0 ended with code 1 after it was made `age` seconds ago, and no agent was ever heard."""
    ended = replace(
        worker(0),
        phase="Failed",
        exit_code=1,
        message="Traceback\nModuleNotFoundError: No module named 'surefoot'\n",
        created_seconds=NOW - age,
    )
    return JobSnapshot(
        now_seconds=NOW,
        term_seconds=BEGAN,
        job=job(workers),
        status=JobStatus(
            membership=Membership(1, "Claimed", changed_seconds=BEGAN),
            next_attempt=2,
            failed_starts=failed_starts,
            failed_starts_counted=failed_starts,
            start_seconds=BEGAN,
        ),
        workers=(replace(ended, **dead), *(worker(i) for i in range(1, workers))),  # type: ignore[arg-type]
        free_nodes=3,
    )


def creates(made: Plan) -> list[CreateWorker]:
    return [a for a in made.actions if isinstance(a, CreateWorker)]


def test_a_worker_that_ended_is_replaced_counted_and_said_with_its_last_words() -> None:
    made = plan(beginning())
    assert [c.index for c in creates(made)] == [0]
    assert any(isinstance(a, DeleteWorker) for a in made.actions)
    assert (made.status.failed_starts, made.status.failed_starts_counted) == (1, 1)
    (said,) = [e.message for e in made.events if e.reason == "WorkerLost"]
    assert "exit code 1" in said
    assert said.endswith("ModuleNotFoundError: No module named 'surefoot'")


def test_each_round_is_waited_after_for_twice_as_long() -> None:
    for rounds, wait in ((0, 5), (1, 10), (3, 40), (5, 160), (9, 160)):
        policy = beginning(rounds, age=wait - 1)
        policy = replace(policy, job=job(1, run_policy=RunPolicy(backoff_limit=20)))
        early = plan(policy)
        assert not creates(early), (rounds, wait)
        assert early.wake_after_seconds is not None
        assert early.wake_after_seconds <= 1.0
        assert creates(plan(replace(policy, now_seconds=NOW + 1.5))), (rounds, wait)


def test_beyond_its_limit_the_job_fails_and_says_what_the_program_said() -> None:
    made = plan(beginning(failed_starts=6))
    assert made.status.phase == "Failed"
    assert "No module named 'surefoot'" in made.status.message
    assert "backoffLimit (6)" in made.status.message
    assert plan(beginning(failed_starts=5)).status.phase != "Failed"


def test_what_a_node_or_a_person_ended_counts_for_nothing() -> None:
    for dead in ({"exit_code": None}, {"deleting": True}):
        made = plan(beginning(failed_starts=9, **dead))
        assert made.status.phase != "Failed", dead
        assert made.status.failed_starts == 9, dead


def test_a_member_whose_agent_ended_is_a_loss_and_no_failed_start() -> None:
    seen = with_worker(running(), 1, phase="Failed", exit_code=1)
    claim = plan(seen)
    assert claim.status.membership is not None
    assert claim.status.membership.state == "Claimed"
    again = plan(replace(seen, status=claim.status, now_seconds=seen.now_seconds + 10))
    assert again.status.failed_starts == 0
    assert not [e for e in again.events if e.reason == "WorkerLost"]


def test_a_replacement_that_cannot_start_never_ends_a_world_that_trains() -> None:
    seen = running(workers=2, least=1)
    extra = replace(worker(2, 5), phase="Failed", exit_code=1, created_seconds=seen.now_seconds - 500)
    seen = replace(seen, job=job(3, least=1), workers=(*seen.workers, replace(extra, node="n0")))
    seen = replace(seen, status=replace(seen.status, failed_starts=50, next_attempt=6), free_nodes=1)
    made = plan(seen)
    assert made.status.phase == "Running"
    assert made.status.membership == seen.status.membership
    assert made.status.failed_starts == 51


NO_FOLDER = "the agent could not be started: [Errno 2] No such file or directory: '/no/such/folder'"


def unstarted(failed_starts: int = 0, age: float = 1000.0, phase: str = "Failed") -> JobSnapshot:
    """No process of worker 0 ever ran: it has no exit code."""
    return beginning(failed_starts, age, phase=phase, exit_code=None, message=NO_FOLDER, start_blocker=NO_FOLDER)


def test_a_worker_that_cannot_be_started_is_waited_after_said_and_given_up_like_one_that_ends() -> None:
    early = plan(unstarted(age=4.0))
    assert not creates(early)
    assert "worker 0 could not be started" in early.reason
    assert "/no/such/folder" in early.status.message
    made = plan(unstarted(age=5.0))
    assert [c.index for c in creates(made)] == [0]
    assert made.status.failed_starts == 1
    (said,) = [e.message for e in made.events if e.reason == "WorkerLost"]
    assert said == f"worker 0 could not be started: {NO_FOLDER}"
    assert not creates(plan(unstarted(failed_starts=2, age=19.0)))
    over = plan(unstarted(failed_starts=6))
    assert over.status.phase == "Failed"
    assert "/no/such/folder" in over.status.message
    assert "backoffLimit (6)" in over.status.message


def test_the_last_replacement_has_its_chance() -> None:
    seen = unstarted(failed_starts=6)
    new = worker(0, 2, phase="Pending", created_seconds=NOW)
    seen = replace(seen, workers=(*seen.workers, new), status=replace(seen.status, next_attempt=3))
    assert plan(seen).status.phase != "Failed"


def test_a_pod_that_its_kubelet_cannot_start_has_a_minute_and_is_then_made_anew_without_limit() -> None:
    early = plan(unstarted(age=START_TIMEOUT_SECONDS - 1, phase="Pending"))
    assert not early.actions
    assert "worker 0 could not be started" in early.reason
    assert early.wake_after_seconds is not None
    assert early.wake_after_seconds <= 1.0
    waiting = plan(unstarted(age=START_TIMEOUT_SECONDS + 4, phase="Pending"))
    assert not creates(waiting), "and the pause of one that failed"
    made = plan(unstarted(age=START_TIMEOUT_SECONDS + 5, phase="Pending"))
    assert [c.index for c in creates(made)] == [0]
    assert [a.reason for a in made.actions if isinstance(a, DeleteWorker)] == ["it could not be started"]
    assert (made.status.failed_starts, made.status.failed_starts_counted) == (1, 0)
    worn = plan(unstarted(6, age=START_TIMEOUT_SECONDS + 160, phase="Pending"))
    assert worn.status.phase == "Pending", "a job of Kubernetes waits for its image as well"
    assert [c.index for c in creates(worn)] == [0]


def test_a_pod_that_cannot_be_started_never_ends_a_world_that_trains() -> None:
    seen = running(workers=2, least=1)
    extra = replace(
        worker(2, 5), phase="Pending", start_blocker="ImagePullBackOff: no", created_seconds=seen.now_seconds - 500
    )
    seen = replace(seen, job=job(3, least=1), workers=(*seen.workers, extra))
    seen = replace(seen, status=replace(seen.status, failed_starts=50, next_attempt=6), free_nodes=1)
    made = plan(seen)
    assert (made.status.phase, made.status.membership) == ("Running", seen.status.membership)


IMAGE = "ImagePullBackOff: Back-off pulling image registry.example/trainer"
SECRET = 'CreateContainerConfigError: secret "data-keys" not found'
FETCH = "init container fetch ended with exit code 7: cannot reach the data server"


def trained(why: str, phase: str, rounds: int = 99, least: int | None = None, **other: Any) -> JobSnapshot:
    """Epoch 2 is claimed; its checkpoint is chosen; worker 1's replacement cannot be started."""
    seen = running(workers=2, now=NOW, least=least)
    assert seen.status.membership is not None
    world = Membership(2, "Claimed", None, 2, seen.status.membership.members, "worker 1 was deleted", NOW - 500)
    dead = replace(worker(1, 2), phase=phase, exit_code=None, message=why, start_blocker=why, created_seconds=NOW - 400)
    status = replace(seen.status, membership=world, failed_starts=rounds, failed_starts_counted=0, next_attempt=3)
    return replace(
        seen,
        status=replace(status, incidents=(Incident("planned", "", 1, "n1", 1, NOW - 500, claimed_seconds=NOW - 500),)),
        sessions=(replace(seen.sessions[0], stopped=2),),
        workers=(seen.workers[0], replace(dead, **other)),
        servers=tuple(replace(h, fence=2, read_generation=2) for h in seen.servers),
    )


@pytest.mark.parametrize(("why", "phase"), [(IMAGE, "Pending"), (SECRET, "Pending"), (FETCH, "Failed")])
def test_a_job_that_has_trained_waits_for_what_cannot_be_started_and_says_so(why: str, phase: str) -> None:
    made = plan(trained(why, phase))
    assert made.status.phase == "Recovering"
    assert [c.index for c in creates(made)] == [1], "and is tried again"
    assert creates(made)[0].avoid_nodes == ("n1",), "on another node, if there is one"
    assert (made.status.failed_starts, made.status.failed_starts_counted) == (100, 0)
    assert why in made.status.message
    conditions = {c.type: c for c in made.status.conditions}
    assert conditions["Recovering"].status == "True"
    assert why in conditions["Recovering"].message
    assert why in conditions["PodsScheduled"].message
    assert [e.message for e in made.events if e.reason == "WorkerLost" and e.warning] == [
        f"worker 1 could not be started: {why}"
    ]
    assert {e.reason for e in made.events if e.warning} >= {"WorkerStartFailed"}


def test_the_wait_wakes_by_itself_and_lasts_longer_after_each_round() -> None:
    for rounds, wait in ((0, 5), (3, 40), (9, 160)):
        seen = trained(FETCH, "Failed", rounds, created_seconds=NOW - wait + 1)
        early = plan(seen)
        assert not creates(early), (rounds, wait)
        assert early.wake_after_seconds is not None
        assert early.wake_after_seconds <= 1.0
        assert creates(plan(replace(seen, now_seconds=NOW + 1.5))), (rounds, wait)


def test_the_waits_begin_anew_once_a_world_was_begun() -> None:
    seen = trained(FETCH, "Failed", least=1)
    made = plan(seen)
    assert made.status.membership is not None
    assert (made.status.membership.state, made.status.membership.world_size) == ("Committed", 1), (
        "a smaller world trains meanwhile"
    )
    assert (made.status.failed_starts, made.status.failed_starts_counted) == (0, 0)


def test_a_refusal_that_lasts_ends_a_job_that_begins_and_none_that_has_trained() -> None:
    refused = PendingCreate(1, 2, in_progress=False, rejection="422 Invalid: spec.x", permanent=True)
    begins = replace(beginning(workers=2), workers=(), creates=(refused,))
    assert plan(begins).status.phase == "Failed"
    seen = replace(trained(IMAGE, "Pending"), sessions=(), workers=(), creates=(refused,))
    made = plan(seen)
    assert made.status.phase == "Recovering"
    assert "422 Invalid" in made.status.message


def test_a_program_that_ends_before_it_trains_uses_up_its_budget_also_later() -> None:
    seen = trained("", "Failed", exit_code=1, message="No module named 'surefoot'", start_blocker="")
    counted = plan(seen)
    assert counted.status.failed_starts_counted == 1
    over = plan(replace(seen, status=replace(seen.status, failed_starts_counted=6)))
    assert over.status.phase == "Failed"
    assert "backoffLimit (6)" in over.status.message


# ---- restart budget --------------------------------------------------------------------------------------------------
# What uses up which budget: whatever comes again without a new step ends the job, and what a node did never does.

NOW_RESTART_BUDGET = BEGAN + 100
REFUSED = "ConnectionError: HTTPConnectionPool(host='data', port=80): Max retries exceeded: Connection refused"


# ---- programs that fail in the same step again and again -----------------------------------------------------------


def strike(world: FakeWorld, step: int, how: str) -> None:
    """At `step` of each epoch the program does the same thing."""
    members = [w.agent for w in world.workers.values() if w.agent is not None]
    here = [
        a
        for a in members
        if world.status.membership is not None and a.seen.generation == world.status.membership.generation
    ]
    if len(here) < 3 or any(a.seen.progress.step < step or a.seen.exit is not None for a in here):
        return
    for agent in here:
        gone = ObservedExit(agent.seen.generation, agent.seen.index, 1, REFUSED, True, world.now)
        if how == "raises":
            agent.seen = replace(agent.seen, exit=replace(gone, secondary=False, cause="ValueError: bad data"))
        elif how == "ends with 0" and agent.seen.index == 1:
            agent.seen = told(agent.seen, exited_ranks=(1,))
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
    claims = [
        s.membership.changed_seconds
        for s in world.written
        if s.membership is not None and s.membership.state == "Claimed"
    ]
    commits = [
        s.membership.changed_seconds
        for s in world.written
        if s.membership is not None and s.membership.state == "Committed"
    ]
    waits = [next(c for c in commits if c >= at) - at for at in sorted(set(claims))[1:]]
    assert waits[0] < 1.0
    assert [round(w) for w in waits[1:]] == [1, 2, 4]


def test_who_ended_with_0_is_the_cause_and_not_those_who_lost_it() -> None:
    incident = failing("ends with 0").status.incidents[-1]
    assert (incident.kind, incident.worker, incident.rank) == ("trainer-failed", 1, 1)
    assert "rank 1 on worker 1 exited with code 0 after step 35 while others still train" in incident.reason


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
    "own": Failure("trainer-failed", "it failed", NOW_RESTART_BUDGET, 1, "n1", True, exit_code=1),
    "ignored": Failure("trainer-failed", "it asked for it", NOW_RESTART_BUDGET, 1, "n1", True, exit_code=42),
    "unexplained": Failure("trainer-failed", "peers were lost", NOW_RESTART_BUDGET, unexplained=True),
    "outside": Failure("node-lost", "n1 is gone", NOW_RESTART_BUDGET, 1, "n1"),
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
        facts = build_facts(replace(seen, now_seconds=NOW_RESTART_BUDGET + number))
        reached += progressed
        allowed = decide_restart(facts, LOSSES[what], reached)
        assert (allowed.rejection is not None) == model.refuses(what, progressed), (number, what, allowed)
        if allowed.rejection is not None:
            return
        model.restarted(what, progressed)
        seen = replace(seen, status=record_restart(seen.status, allowed, reached))
        assert seen.status.no_progress_restarts == model.row
        assert status_from_json(status_to_json(seen.status)) == seen.status


def test_one_restart_is_called_so() -> None:
    snapshot = running(failure_policy=FailurePolicy(max_restarts=1, eval_period_seconds=60.0))
    first = decide_restart(build_facts(snapshot), LOSSES["outside"], 42)
    seen = replace(snapshot, status=record_restart(snapshot.status, first, 42))
    assert "; 1 restart within 60 s used up maxRestarts (1)" in str(
        decide_restart(build_facts(seen), LOSSES["outside"], 42).rejection
    )


def test_restarts_leave_their_window() -> None:
    policy = FailurePolicy(max_restarts=3, eval_period_seconds=60.0)
    seen = running(failure_policy=policy)
    for number in range(20):
        facts = build_facts(replace(seen, now_seconds=NOW_RESTART_BUDGET + 25 * number))
        allowed = decide_restart(facts, LOSSES["outside"], 42)
        assert allowed.rejection is None
        seen = replace(seen, status=record_restart(seen.status, allowed, 42))
    facts = build_facts(replace(seen, now_seconds=NOW_RESTART_BUDGET + 25 * 19 + 1))
    assert "3 restarts within 60 s used up maxRestarts (3)" in str(
        decide_restart(facts, LOSSES["outside"], 42).rejection
    )


@given(st.lists(st.floats(0.0, 100.0), max_size=200))
def test_what_is_remembered_is_bounded_and_leaves_none_out(gaps: list[float]) -> None:
    at, kept = NOW_RESTART_BUDGET, ()
    for gap in gaps:
        at += gap
        kept = append_restart(kept, Restart(at))
    assert len(kept) <= MAX_RECENT_RESTARTS
    assert sum(r.count for r in kept) == len(gaps)
    assert all(one.time_seconds <= other.time_seconds for one, other in pairwise(kept))


def test_pauses_grow_to_a_bound_and_only_where_a_program_may_be_the_cause() -> None:
    claimed = plan(exited(running())).status
    waits = []
    for row in range(12):
        seen = replace(running(), status=replace(claimed, no_progress_restarts=row))
        until = restart_delay_end(build_facts(seen))
        waits.append(0.0 if until is None else until - NOW_RESTART_BUDGET)
    assert waits[:5] == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert waits[-1] == RESTART_BACKOFF.max_seconds
    lost = plan(with_worker(running(), 1, phase="Failed")).status
    assert restart_delay_end(build_facts(replace(running(), status=replace(lost, no_progress_restarts=9)))) is None


# ---- what nobody can explain yet -----------------------------------------------------------------------------------


def exited(seen: JobSnapshot, code: int = 1, secondary: bool = False, ago: float = 0.0) -> JobSnapshot:
    return with_session(seen, 0, exit=ObservedExit(1, 0, code, REFUSED, secondary, seen.now_seconds - ago))


def echoing(row: int, ago: float = 0.3) -> JobSnapshot:
    """Rank 0 lost its peers, nobody else is known to have died, and the epoch made no new step."""
    seen = exited(running(), secondary=True, ago=ago)
    status = replace(seen.status, no_progress_restarts=row, reached_step=50)
    sessions = tuple(replace(s, step_at_seconds=NOW_RESTART_BUDGET - 10) for s in seen.sessions)
    return replace(seen, status=status, sessions=sessions)


def decided(seen: JobSnapshot) -> JobStatus:
    made = plan(seen)
    check_plan(made, seen)
    return made.status


def test_before_a_job_fails_for_it_a_silent_node_has_time_to_be_missed() -> None:
    assert decided(echoing(3)).phase == "Running", "it may be a node that lost its power"
    assert decided(echoing(3, ago=4.1)).phase == "Failed"
    gone = with_session(echoing(3, ago=3.9), 2, last_message_seconds=NOW_RESTART_BUDGET - 3.5)
    assert decided(gone).incidents[-1].kind == "worker-silent"
    assert decided(gone).no_progress_restarts == 3


def test_a_node_that_proves_to_be_lost_takes_the_restart_back() -> None:
    claimed = decided(echoing(1))
    assert (claimed.no_progress_restarts, claimed.incidents[-1].unexplained) == (2, True)
    later = with_node(with_session(echoing(1), 2, last_message_seconds=NOW_RESTART_BUDGET - 4), "n2", ready=False)
    known = decided(replace(later, status=claimed))
    assert known.no_progress_restarts == 1
    incident = known.incidents[-1]
    assert (incident.kind, incident.node, incident.unexplained) == ("node-lost", "n2", False)
    again = decided(replace(later, status=known))
    assert again.no_progress_restarts == 1, "once"


def test_a_worker_that_falls_silent_during_a_claim_is_named_as_its_cause() -> None:
    claimed = decided(echoing(1))
    later = with_session(echoing(1), 2, last_message_seconds=NOW_RESTART_BUDGET - 4)
    incident = decided(replace(later, status=claimed)).incidents[-1]
    assert (incident.kind, incident.unexplained) == ("worker-silent", False)
    assert incident.reason.startswith("worker 2 sends no more heartbeats: ")


def test_a_line_that_broke_a_moment_ago_is_named_for_nothing() -> None:
    claimed = decided(echoing(1))
    later = with_session(
        echoing(1),
        2,
        connected=False,
        since_seconds=NOW_RESTART_BUDGET - 1,
        last_message_seconds=NOW_RESTART_BUDGET - 1.2,
    )
    assert decided(replace(later, status=claimed)).incidents[-1].unexplained


def test_a_job_that_fails_names_who_ended_it_among_its_incidents() -> None:
    seen = exited(running(run_policy=RunPolicy(backoff_limit=0)))
    incident = decided(seen).incidents[-1]
    assert (incident.generation, incident.worker, incident.rank, incident.claimed_seconds) == (1, 0, 0, None)
