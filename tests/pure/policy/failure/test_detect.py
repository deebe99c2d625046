"""What counts as losing a worker, and what does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.builders import BEGAN, running, told, with_node, with_session, with_worker
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.spec import ExitCodes, FailurePolicy, FailureRule, RunPolicy
from surefoot_operator.api.status import Restart
from surefoot_operator.job_snapshot import ExitSeen, Observed
from surefoot_operator.policy.core.actions import Plan
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check

NOW = BEGAN + 100


def decided(seen: Observed) -> Plan:
    made = plan(seen)
    check(made, seen)
    return made


def claims(seen: Observed) -> bool:
    world = decided(seen).status.world
    return world is not None and world.state == "Claimed"


def kind(seen: Observed) -> str:
    return decided(seen).status.incidents[-1].kind


def exited(seen: Observed, index: int, code: int = 1, secondary: bool = False, ago: float = 0.0) -> Observed:
    gone = ExitSeen(1, index, code, "RuntimeError: boom", secondary, seen.now - ago)
    return with_session(seen, index, exit=gone)


def told_slow(seen: Observed, step_seconds: float) -> Observed:
    return replace(seen, sessions=tuple(told(s, step_seconds=step_seconds) for s in seen.sessions))


def unpaced(seen: Observed) -> Observed:
    return replace(seen, sessions=tuple(told(s, step_seconds=None) for s in seen.sessions))


def late_word(seen: Observed, ago: float) -> Observed:
    return replace(seen, sessions=tuple(replace(s, heard_seconds=seen.now - ago) for s in seen.sessions))


def stood_still(seen: Observed, seconds: float) -> Observed:
    """Nobody made a step for so long, everybody is heard."""
    return replace(seen, sessions=tuple(replace(s, step_at_seconds=seen.now - seconds) for s in seen.sessions))


def test_a_healthy_world_is_left_alone() -> None:
    first = decided(running())
    again = decided(replace(running(), status=first.status))
    assert not first.actions
    assert not again.actions
    assert again.status == first.status


def test_a_worker_that_the_fabric_calls_failed_is_lost_at_once() -> None:
    seen = with_worker(running(), 1, phase="Failed", exit_code=137)
    assert claims(seen)
    assert kind(seen) == "agent-lost"


@pytest.mark.parametrize(
    ("code", "said"), [(137, "worker 1 ended with exit code 137 (why)"), (None, "worker 1 ended (why)")]
)
def test_an_exit_code_is_said_where_it_is_known(code: int | None, said: str) -> None:
    """Of a worker that went with its node there is none."""
    seen = with_worker(running(), 1, phase="Failed", exit_code=code, message="why")
    assert decided(seen).status.incidents[-1].reason == said


def test_a_worker_that_no_longer_exists_is_lost_at_once() -> None:
    seen = running()
    assert claims(replace(seen, workers=seen.workers[:2]))


def test_a_dead_node_under_a_broken_line_is_a_lost_node() -> None:
    seen = with_session(with_node(running(), "n1", ready=False), 1, connected=False, since_seconds=NOW - 0.01)
    assert kind(seen) == "node-lost"
    assert decided(seen).status.incidents[-1].detected_seconds == NOW - 0.01


def test_a_node_that_is_not_ready_is_believed_alive_while_its_agent_speaks() -> None:
    assert not claims(with_node(running(), "n1", ready=False))


def broken(seen: Observed, seconds: float, index: int = 1) -> Observed:
    """The line of one worker broke so long ago; nothing was heard of its agent since."""
    return with_session(seen, index, connected=False, since_seconds=NOW - seconds, heard_seconds=NOW - seconds)


def stepping(seen: Observed, step_seconds: float, ago: float) -> Observed:
    """Steps usually take so long, and the last was so long ago."""
    return replace(
        seen,
        sessions=tuple(told(s, step_at_seconds=NOW - ago, step_seconds=step_seconds) for s in seen.sessions),
    )


@pytest.mark.parametrize(
    ("step_seconds", "ago", "gap", "workers", "lost"),
    [
        pytest.param(60.0, 10.0, 0.26, 100, False, id="a minute's step, a line reset"),
        pytest.param(60.0, 10.0, 2.9, 3, False, id="a minute's step, a slow return"),
        pytest.param(60.0, 10.0, 3.1, 3, True, id="as silent as one without a line"),
        pytest.param(0.1, 0.5, 0.45, 3, False, id="short steps that others report twice a second"),
        pytest.param(0.1, 1.2, 1.05, 3, True, id="short steps, and everybody stands"),
        pytest.param(1.0, 1.9, 1.5, 3, False, id="the step may still come"),
        pytest.param(1.0, 2.4, 1.5, 3, False, id="it may have come, and be told with the next heartbeat"),
        pytest.param(1.0, 2.6, 1.5, 3, True, id="the step is overdue"),
        pytest.param(0.1, 2.0, 2.0, 1, False, id="nobody else to say that it stands"),
        pytest.param(0.1, 3.2, 3.1, 1, True, id="alone, and as silent as can be"),
    ],
)
def test_a_line_that_broke_is_judged_by_the_step_that_should_have_come(
    step_seconds: float, ago: float, gap: float, workers: int, lost: bool
) -> None:
    seen = broken(stepping(running(workers=workers), step_seconds, ago), gap, index=workers - 1)
    assert claims(seen) == lost
    assert lost or 0 < (decided(seen).wake_after_seconds or 0) <= 3.0


def test_others_say_that_a_step_is_overdue_once_it_is_and_not_before() -> None:
    seen = broken(stepping(running(), 0.1, 1.3), 1.2)
    unheard = replace(
        seen, sessions=tuple(replace(s, heard_seconds=min(s.heard_seconds, NOW - 0.3)) for s in seen.sessions)
    )
    assert claims(seen)
    assert not claims(unheard)


def new_leader(
    missing: tuple[int, ...] = (1,), *, came: float = 2.5, stood: float = 2.5, workers: int = 3, **other: float
) -> Observed:
    """Its term began 3 s ago; the others `came` so long ago, and the first word of steps is `stood` seconds old."""
    seen = running(workers=workers)
    there = tuple(
        replace(s, since_seconds=NOW - came, step_at_seconds=NOW - stood)
        for s in seen.sessions
        if s.index not in missing
    )
    return replace(seen, term_seconds=NOW - 3.0, sessions=there, **other)


def test_who_never_came_to_a_new_leader_is_lost_by_the_others_testimony() -> None:
    assert claims(new_leader())
    assert kind(new_leader()) == "worker-silent"
    assert claims(new_leader(workers=2))


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param(new_leader(came=0.9), id="the others came a moment ago"),
        pytest.param(new_leader(turned_away_seconds=NOW - 0.9), id="somebody was asked to come again"),
        pytest.param(new_leader(stood=0.3), id="they make steps: it lives"),
        pytest.param(told_slow(new_leader(), 10.0), id="the step may still come"),
        pytest.param(new_leader((0, 1)), id="most did not come: this leader may be cut off"),
        pytest.param(new_leader((0, 1, 2)), id="nobody came"),
        pytest.param(unpaced(new_leader()), id="nobody knows how long a step takes"),
        pytest.param(late_word(new_leader(), 2.0), id="nobody has said since that the step is overdue"),
    ],
)
def test_who_never_came_is_waited_for_while_another_reason_is_possible(seen: Observed) -> None:
    assert not claims(seen)
    assert 0 < (decided(seen).wake_after_seconds or 0) <= 27.0


def test_who_never_came_beside_dead_peers_is_waited_for_until_nobody_else_comes() -> None:
    seen = told_slow(new_leader(), 10.0)
    assert claims(exited(seen, 0, secondary=True))
    assert kind(exited(seen, 0, secondary=True)) == "worker-silent"


def test_a_broken_line_is_no_loss_while_steps_advance() -> None:
    assert not claims(with_session(running(), 1, connected=False, since_seconds=NOW - 1.0))


def test_one_last_step_after_a_line_broke_is_no_proof_of_life_for_long() -> None:
    assert not claims(broken(stepping(running(), 0.1, 0.7), 1.2))
    assert claims(broken(stepping(running(), 0.1, 0.8), 1.2))


def test_a_broken_line_beside_a_dead_peer_needs_no_grace() -> None:
    seen = with_session(stood_still(running(), 0.1), 1, connected=False, since_seconds=NOW - 0.05)
    seen = exited(seen, 0, secondary=True)
    assert claims(seen)
    assert decided(seen).status.incidents[-1].worker == 1


def test_silence_counts_after_the_heartbeat_timeout_only() -> None:
    assert not claims(with_session(stood_still(running(), 2.9), 1, heard_seconds=NOW - 2.9))
    seen = with_session(stood_still(running(), 3.2), 1, heard_seconds=NOW - 3.1)
    assert kind(seen) == "worker-silent"
    assert decided(seen).status.incidents[-1].detected_seconds == pytest.approx(NOW - 0.1)


def test_a_silent_worker_is_not_given_up_while_steps_advance() -> None:
    assert not claims(with_session(running(), 1, heard_seconds=NOW - 10))


def test_steps_quicker_than_heartbeats_are_life_until_the_next_could_be_told() -> None:
    # steps of 0.1 s, told of every 0.5 s
    assert not claims(with_session(stepping(running(), 0.1, 0.6), 1, heard_seconds=NOW - 3.2))
    assert claims(with_session(stepping(running(), 0.1, 0.9), 1, heard_seconds=NOW - 3.2))


def test_losing_most_workers_by_silence_alone_freezes_decisions() -> None:
    seen = stood_still(running(), 5)
    for index in (0, 1):
        seen = with_session(seen, index, heard_seconds=NOW - 4)
    made = decided(seen)
    assert not claims(seen)
    assert not made.actions
    assert "lost its network" in made.reason


def test_losing_most_workers_is_believed_when_the_fabric_says_so() -> None:
    seen = stood_still(running(), 5)
    for index in (0, 1):
        seen = with_node(with_session(seen, index, heard_seconds=NOW - 4), f"n{index}", ready=False)
    assert claims(seen)


def test_losing_most_workers_is_believed_when_trainers_die_of_it() -> None:
    seen = exited(stood_still(running(), 1), 2, secondary=True)
    for index in (0, 1):
        seen = with_session(seen, index, connected=False, since_seconds=NOW - 0.5)
    assert claims(seen)


def test_the_only_worker_of_a_job_may_be_lost_by_silence() -> None:
    assert claims(with_session(stood_still(running(workers=1), 5), 0, heard_seconds=NOW - 4))


def test_a_new_operator_does_not_judge_workers_that_it_has_not_heard() -> None:
    seen = replace(running(), sessions=(), term_seconds=NOW - 29)
    assert not claims(seen)
    assert not claims(replace(seen, term_seconds=NOW - 31))
    unknown = with_worker(replace(seen, term_seconds=NOW - 31), 1, phase="Unknown")
    assert claims(unknown)


def test_another_incarnation_is_not_the_member() -> None:
    assert kind(with_session(running(), 1, incarnation="another")) == "agent-lost"


def test_a_failed_trainer_ends_the_epoch_and_counts() -> None:
    made = decided(exited(running(), 1))
    assert made.status.incidents[-1].kind == "trainer-failed"
    assert (made.status.restarts, made.status.restarts_counted) == (1, 1)


def test_a_lost_node_counts_against_no_budget() -> None:
    seen = running(run_policy=RunPolicy(backoff_limit=0))
    made = decided(with_worker(seen, 1, phase="Failed"))
    assert made.status.phase == "Recovering"
    assert (made.status.restarts, made.status.restarts_counted) == (1, 0)


def test_an_echo_waits_a_moment_for_the_first_cause_and_never_counts() -> None:
    assert not claims(exited(running(), 1, secondary=True, ago=0.1))
    made = decided(exited(running(), 1, secondary=True, ago=0.3))
    assert made.status.restarts_counted == 0
    assert made.status.restarts == 1


def test_before_the_first_step_only_the_startup_deadline_counts() -> None:
    seen = running(now=BEGAN + 599)
    fresh = tuple(told(s, step=0, step_at_seconds=None) for s in seen.sessions)
    assert not claims(replace(seen, sessions=fresh))
    late = tuple(replace(s, heard_seconds=BEGAN + 601) for s in fresh)
    made = decided(replace(seen, now=BEGAN + 601, sessions=late))
    assert "startupDeadlineSeconds" in made.reason
    assert made.status.restarts_counted == 1


def test_backoff_limit_ends_the_job_with_the_cause() -> None:
    seen = exited(running(run_policy=RunPolicy(backoff_limit=2)), 1)
    made = decided(replace(seen, status=replace(seen.status, restarts_counted=2)))
    assert made.status.phase == "Failed"
    assert "backoffLimit" in made.status.message
    assert "boom" in made.status.message


def test_restarts_without_a_new_step_end_the_job() -> None:
    stuck = replace(running(), sessions=tuple(told(s, step=0, step_at_seconds=None) for s in running().sessions))
    seen = exited(replace(stuck, status=replace(stuck.status, no_progress_restarts=3)), 0)
    assert "maxNoProgressRestarts" in decided(seen).status.message
    moving = exited(replace(running(), status=replace(running().status, no_progress_restarts=3)), 0)
    assert decided(moving).status.phase == "Recovering"


def test_max_restarts_counts_within_its_window() -> None:
    policy = FailurePolicy(max_restarts=2, eval_period_seconds=60)
    seen = exited(running(failure_policy=policy), 0)
    old = (Restart(NOW - 100, True, True, True), Restart(NOW - 10, True, True, True))
    assert decided(replace(seen, status=replace(seen.status, recent_restarts=old))).status.phase == "Recovering"
    new = (Restart(NOW - 50, True, True, True), Restart(NOW - 10, True, True, True))
    assert decided(replace(seen, status=replace(seen.status, recent_restarts=new))).status.phase == "Failed"


@pytest.mark.parametrize(
    ("rule", "code", "phase", "counted"),
    [
        (FailureRule("bad arguments", "FailJob", ExitCodes((2,))), 2, "Failed", 0),
        (FailureRule("bad arguments", "FailJob", ExitCodes((2,))), 3, "Recovering", 1),
        (FailureRule("all but", "FailJob", ExitCodes((2,), "NotIn")), 3, "Failed", 0),
        (FailureRule("out of memory", "RestartAndIgnoreMaxRestarts", ExitCodes((-9,))), -9, "Recovering", 0),
    ],
)
def test_the_first_rule_that_matches_an_exit_code_decides(
    rule: FailureRule, code: int, phase: str, counted: int
) -> None:
    made = decided(exited(running(failure_policy=FailurePolicy(rules=(rule,))), 1, code))
    assert (made.status.phase, made.status.restarts_counted) == (phase, counted)


def test_a_checkpoint_whose_every_copy_is_damaged_is_put_aside() -> None:
    parent = Checkpoint(1, 40)
    made = decided(with_session(running(), 1, unreadable=(parent, False, "rank 1: digest")))
    assert made.status.bad == (parent,)
    assert claims(with_session(running(), 1, unreadable=(parent, False, "rank 1: digest")))


def test_a_checkpoint_that_is_absent_is_not_bad() -> None:
    made = decided(with_session(running(), 1, unreadable=(Checkpoint(1, 40), True, "restarted")))
    assert made.status.bad == ()
    assert made.status.world is not None
    assert made.status.world.state == "Claimed"


def test_the_job_is_complete_once_every_member_finished() -> None:
    seen = running()
    for index in range(2):
        seen = with_session(seen, index, finished=0, finished_steps=50, saves_told=True)
    assert decided(seen).status.phase == "Running"
    assert decided(with_session(seen, 2, finished=0, finished_steps=50, saves_told=True)).status.phase == "Complete"


def test_a_member_that_finished_may_leave_without_being_lost() -> None:
    seen = with_session(running(), 0, finished=0, finished_steps=50, connected=False, since_seconds=NOW - 5)
    assert not claims(with_worker(seen, 0, phase="Succeeded", exit_code=0))


def test_a_program_that_never_called_step_has_failed() -> None:
    seen = running()
    for index in range(3):
        seen = with_session(seen, index, step=0, step_at_seconds=None, finished=0, finished_steps=0)
    made = decided(seen)
    assert made.status.phase == "Failed"
    assert "never called step" in made.status.message


def test_the_active_deadline_ends_the_job() -> None:
    made = decided(running(run_policy=RunPolicy(active_deadline_seconds=99)))
    assert made.status.phase == "Failed"
    assert "activeDeadlineSeconds" in made.status.message


def test_an_epoch_that_status_forgot_is_gone_beyond() -> None:
    seen = running()
    ahead = replace(seen, holders=tuple(replace(h, fence=7) for h in seen.holders))
    world = decided(ahead).status.world
    assert world is not None
    assert (world.epoch, world.state) == (8, "Claimed")
