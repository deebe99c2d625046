"""Tests of `policy.failure.failure_detection`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.builders import BEGAN, job, running, told, with_node, with_session, with_worker
from support.fakes.fake_world import FakeWorld
from surefoot.protocol.hangs import Collective, RankStack
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.spec import ExitCodes, FailurePolicy, FailureRule, RunPolicy, Template
from surefoot_operator.api.status import Incident, Restart
from surefoot_operator.job_snapshot import HangEvidence, JobSnapshot, ObservedExit, Timings
from surefoot_operator.policy.core.actions import Plan
from surefoot_operator.policy.core.facts import build_facts
from surefoot_operator.policy.failure.failure_detection import Failure, detect_failures, find_hang_outlier
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check_plan

# ---- detect ----------------------------------------------------------------------------------------------------------
# What counts as losing a worker, and what does not.

NOW = BEGAN + 100


def decided(seen: JobSnapshot) -> Plan:
    made = plan(seen)
    check_plan(made, seen)
    return made


def claims(seen: JobSnapshot) -> bool:
    world = decided(seen).status.membership
    return world is not None and world.state == "Claimed"


def kind(seen: JobSnapshot) -> str:
    return decided(seen).status.incidents[-1].kind


def exited(seen: JobSnapshot, index: int, code: int = 1, secondary: bool = False, ago: float = 0.0) -> JobSnapshot:
    gone = ObservedExit(1, index, code, "RuntimeError: boom", secondary, seen.now_seconds - ago)
    return with_session(seen, index, exit=gone)


def told_slow(seen: JobSnapshot, step_seconds: float) -> JobSnapshot:
    return replace(seen, sessions=tuple(told(s, step_seconds=step_seconds) for s in seen.sessions))


def unpaced(seen: JobSnapshot) -> JobSnapshot:
    return replace(seen, sessions=tuple(told(s, step_seconds=None) for s in seen.sessions))


def late_word(seen: JobSnapshot, ago: float) -> JobSnapshot:
    return replace(seen, sessions=tuple(replace(s, last_message_seconds=seen.now_seconds - ago) for s in seen.sessions))


def stood_still(seen: JobSnapshot, seconds: float) -> JobSnapshot:
    """Nobody made a step for so long, everybody is heard."""
    return replace(seen, sessions=tuple(replace(s, step_at_seconds=seen.now_seconds - seconds) for s in seen.sessions))


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


def broken(seen: JobSnapshot, seconds: float, index: int = 1) -> JobSnapshot:
    """The line of one worker broke so long ago; nothing was heard of its agent since."""
    return with_session(seen, index, connected=False, since_seconds=NOW - seconds, last_message_seconds=NOW - seconds)


def stepping(seen: JobSnapshot, step_seconds: float, ago: float) -> JobSnapshot:
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
        seen,
        sessions=tuple(replace(s, last_message_seconds=min(s.last_message_seconds, NOW - 0.3)) for s in seen.sessions),
    )
    assert claims(seen)
    assert not claims(unheard)


def new_leader(
    missing: tuple[int, ...] = (1,), *, came: float = 2.5, stood: float = 2.5, workers: int = 3, **other: float
) -> JobSnapshot:
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
        pytest.param(new_leader(retry_later_seconds=NOW - 0.9), id="somebody was asked to come again"),
        pytest.param(new_leader(stood=0.3), id="they make steps: it lives"),
        pytest.param(told_slow(new_leader(), 10.0), id="the step may still come"),
        pytest.param(new_leader((0, 1)), id="most did not come: this leader may be cut off"),
        pytest.param(new_leader((0, 1, 2)), id="nobody came"),
        pytest.param(unpaced(new_leader()), id="nobody knows how long a step takes"),
        pytest.param(late_word(new_leader(), 2.0), id="nobody has said since that the step is overdue"),
    ],
)
def test_who_never_came_is_waited_for_while_another_reason_is_possible(seen: JobSnapshot) -> None:
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
    assert not claims(with_session(stood_still(running(), 2.9), 1, last_message_seconds=NOW - 2.9))
    seen = with_session(stood_still(running(), 3.2), 1, last_message_seconds=NOW - 3.1)
    assert kind(seen) == "worker-silent"
    assert decided(seen).status.incidents[-1].detected_seconds == pytest.approx(NOW - 0.1)


def test_a_silent_worker_is_not_given_up_while_steps_advance() -> None:
    assert not claims(with_session(running(), 1, last_message_seconds=NOW - 10))


def test_steps_quicker_than_heartbeats_are_life_until_the_next_could_be_told() -> None:
    # steps of 0.1 s, told of every 0.5 s
    assert not claims(with_session(stepping(running(), 0.1, 0.6), 1, last_message_seconds=NOW - 3.2))
    assert claims(with_session(stepping(running(), 0.1, 0.9), 1, last_message_seconds=NOW - 3.2))


def test_losing_most_workers_by_silence_alone_freezes_decisions() -> None:
    seen = stood_still(running(), 5)
    for index in (0, 1):
        seen = with_session(seen, index, last_message_seconds=NOW - 4)
    made = decided(seen)
    assert not claims(seen)
    assert not made.actions
    assert "may be partitioned" in made.reason


def test_losing_most_workers_is_believed_when_the_fabric_says_so() -> None:
    seen = stood_still(running(), 5)
    for index in (0, 1):
        seen = with_node(with_session(seen, index, last_message_seconds=NOW - 4), f"n{index}", ready=False)
    assert claims(seen)


def test_losing_most_workers_is_believed_when_trainers_die_of_it() -> None:
    seen = exited(stood_still(running(), 1), 2, secondary=True)
    for index in (0, 1):
        seen = with_session(seen, index, connected=False, since_seconds=NOW - 0.5)
    assert claims(seen)


def test_the_only_worker_of_a_job_may_be_lost_by_silence() -> None:
    assert claims(with_session(stood_still(running(workers=1), 5), 0, last_message_seconds=NOW - 4))


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
    late = tuple(replace(s, last_message_seconds=BEGAN + 601) for s in fresh)
    made = decided(replace(seen, now_seconds=BEGAN + 601, sessions=late))
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
    old = (Restart(NOW - 100), Restart(NOW - 10))
    assert decided(replace(seen, status=replace(seen.status, recent_restarts=old))).status.phase == "Recovering"
    new = (Restart(NOW - 50), Restart(NOW - 10))
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
    made = decided(with_session(running(), 1, unreadable_report=(parent, False, "rank 1: digest")))
    assert made.status.unreadable_checkpoints == (parent,)
    assert claims(with_session(running(), 1, unreadable_report=(parent, False, "rank 1: digest")))


def test_a_checkpoint_that_is_absent_is_not_bad() -> None:
    made = decided(with_session(running(), 1, unreadable_report=(Checkpoint(1, 40), True, "restarted")))
    assert made.status.unreadable_checkpoints == ()
    assert made.status.membership is not None
    assert made.status.membership.state == "Claimed"


def test_the_job_is_complete_once_every_member_finished() -> None:
    seen = running()
    for index in range(2):
        seen = with_session(seen, index, finished=0, finished_steps=50, final_saves_reported=True)
    assert decided(seen).status.phase == "Running"
    assert (
        decided(with_session(seen, 2, finished=0, finished_steps=50, final_saves_reported=True)).status.phase
        == "Complete"
    )


def test_a_member_that_finished_may_leave_without_being_lost() -> None:
    seen = with_session(running(), 0, finished=0, finished_steps=50, connected=False, since_seconds=NOW - 5)
    assert not claims(with_worker(seen, 0, phase="Succeeded", exit_code=0))


def test_a_program_that_never_called_step_has_failed() -> None:
    seen = running()
    for index in range(3):
        seen = with_session(seen, index, step=0, step_at_seconds=None, finished=0, finished_steps=0)
    made = decided(seen)
    assert made.status.phase == "Failed"
    assert "never called checkpointer.step()" in made.status.message


def test_the_active_deadline_ends_the_job() -> None:
    made = decided(running(run_policy=RunPolicy(active_deadline_seconds=99)))
    assert made.status.phase == "Failed"
    assert "activeDeadlineSeconds" in made.status.message


def test_an_epoch_that_status_forgot_is_gone_beyond() -> None:
    seen = running()
    ahead = replace(seen, servers=tuple(replace(h, fence=7) for h in seen.servers))
    world = decided(ahead).status.membership
    assert world is not None
    assert (world.generation, world.state) == (8, "Claimed")


# ---- hangs -----------------------------------------------------------------------------------------------------------
# A world that stands still: when it is a hang, the same whoever's timer runs out first, and nobody is blamed by a tie.

NOW_HANGS = BEGAN + 700


def still(steps: tuple[int, ...] = (42, 42, 42), seconds: float = 601.0, **spec: object) -> JobSnapshot:
    """Everybody is heard, and nobody made a step for so long."""
    seen = running(now=NOW_HANGS, **spec)
    for index, step in enumerate(steps):
        seen = with_session(seen, index, step=step, step_at_seconds=NOW_HANGS - seconds)
    return seen


def timers(seen: JobSnapshot, *late: float, ranks: tuple[int, ...] = (-1, -1, -1)) -> JobSnapshot:
    """The agents' own timers ran out, each so long ago."""
    for index, seconds in enumerate(late):
        cause = "hang: no step for 600 s after step 42"
        seen = with_session(
            seen,
            index,
            exit=ObservedExit(1, ranks[index], -9, cause, False, NOW_HANGS - seconds, "hang", f"rank {index}: here"),
        )
    return seen


def decided_hangs(seen: JobSnapshot) -> Incident:
    made = plan(seen)
    check_plan(made, seen)
    return made.status.incidents[-1]


def blamed(incident: Incident) -> tuple[int | None, str | None, int | None]:
    return incident.worker, incident.node, incident.rank


@pytest.mark.parametrize("own", [True, False], ids=["agents", "operator"])
def test_where_all_stand_at_one_step_nobody_is_blamed(own: bool) -> None:
    seen = timers(still(seconds=599.0), 0.03, 0.04, 0.0) if own else still()
    incident = decided_hangs(seen)
    assert incident.kind == "hang"
    assert blamed(incident) == (None, None, None)
    assert "no rank is late: all are at step 42" in incident.reason
    assert plan(seen).status.restarts_counted == 1


@pytest.mark.parametrize("own", [True, False], ids=["agents", "operator"])
def test_the_one_that_stands_at_an_earlier_step_is_blamed(own: bool) -> None:
    seen = still((42, 42, 41), 599.0 if own else 601.0)
    incident = decided_hangs(timers(seen, 0.0, 0.02, 0.03) if own else seen)
    assert incident.kind == "hang"
    assert blamed(incident) == (2, "n2", 2)
    assert "rank 2 on worker 2 is at step 41" in incident.reason


PLACES = (
    RankStack((0,), "a", "in all_reduce", is_waiting=True),
    RankStack((1,), "b", "in load (me/train.py:28)", is_waiting=False),
    RankStack((2,), "a", "in all_reduce", is_waiting=True),
)


def proven(seconds: float = 121.0, places: tuple[RankStack, ...] = PLACES, **progress: object) -> JobSnapshot:
    """Each agent has told that nothing moves in its rank; steps took a second."""
    seen = still(seconds=seconds)
    for index, place in enumerate(places):
        standing, timings = HangEvidence(42, (place,)), Timings(steps=(1.0,) * 12)
        seen = with_session(seen, index, hang_evidence=standing, timings=timings, **progress)
    return seen


def test_a_hang_that_every_stack_shows_is_found_by_the_jobs_own_pace_and_names_who_differs() -> None:
    incident = decided_hangs(proven())
    assert (incident.kind, *blamed(incident)) == ("hang", 1, "n1", 1)
    assert incident.reason == (
        "no step for 120 s, although steps take 1 s: two observations of every rank show the same stack and no I/O;"
        " rank 1 on worker 1 is in load (me/train.py:28), all others wait elsewhere"
    )


def test_where_all_stand_alike_the_hang_is_found_and_nobody_named() -> None:
    alike = tuple(RankStack((rank,), "a", "in all_reduce", is_waiting=True) for rank in range(3))
    incident = decided_hangs(proven(places=alike))
    assert (incident.kind, *blamed(incident)) == ("hang", None, None, None)


def test_where_all_stand_in_one_line_the_collectives_name_who_is_in_another_and_no_node() -> None:
    alike = tuple(RankStack((rank,), "a", "in all_reduce", is_waiting=True) for rank in range(3))
    seen = proven(places=alike)
    for index, group in enumerate(("default_pg", "group 1", "default_pg")):
        call = Collective((index,), group, 7, "all_reduce", "Float[4]", "scheduled")
        seen = with_session(seen, index, hang_evidence=HangEvidence(42, alike[index : index + 1], collectives=(call,)))
    incident = decided_hangs(seen)
    assert (incident.kind, *blamed(incident)) == ("hang", 1, None, 1)
    assert incident.reason.endswith(
        "; rank 1 on worker 1 waits in all_reduce #7 of group 1 (Float[4]), all others in all_reduce #7 of default_pg (Float[4]):"
        " the program's ranks take different code paths, no node is at fault"
    )


def test_where_stacks_and_collectives_name_two_ranks_nobody_is_blamed() -> None:
    seen = proven()
    for index, place in enumerate(PLACES):
        state: Any = "finished" if index == 2 else "scheduled"
        call = Collective((index,), "default_pg", 7 - (index == 2), "all_reduce", "", state)
        seen = with_session(seen, index, hang_evidence=HangEvidence(42, (place,), collectives=(call,)))
    incident = decided_hangs(seen)
    assert (incident.kind, *blamed(incident)) == ("hang", None, None, None)
    assert "; no rank is blamed: by its stack, rank 1 differs" in incident.reason


def test_the_odd_one_is_named_at_the_ceiling_too() -> None:
    seen = with_session(proven(seconds=601.0), 0, timings=Timings())
    assert blamed(decided_hangs(seen)) == (1, "n1", 1)


def test_the_odd_one_that_computes_for_ever_is_named_at_the_ceiling_and_not_before() -> None:
    loops = HangEvidence(42, PLACES[1:2], is_progressing=True)
    assert plan(with_session(proven(), 1, hang_evidence=loops)).status.incidents == ()
    assert blamed(decided_hangs(with_session(proven(seconds=601.0), 1, hang_evidence=loops))) == (1, "n1", 1)


def test_who_stood_elsewhere_at_an_earlier_step_is_not_named_by_it() -> None:
    incident = decided_hangs(with_session(proven(seconds=601.0), 1, hang_evidence=HangEvidence(41, PLACES[1:2])))
    assert (incident.kind, *blamed(incident)) == ("hang", None, None, None)


def test_what_is_not_proven_waits_for_the_ceiling() -> None:
    moving = with_session(proven(), 2, hang_evidence=None)
    stepped = with_session(proven(), 2, hang_evidence=HangEvidence(41, PLACES[2:]))
    unheard = with_session(proven(), 2, connected=False, since_seconds=NOW_HANGS - 0.1)
    early = proven(seconds=119.0)
    few = proven()
    for index in range(3):
        few = with_session(few, index, timings=Timings(steps=(1.0,) * 3))
    paused = proven(pause_reason="evaluation")
    for seen in (moving, stepped, unheard, early, few, paused):
        assert plan(seen).status.incidents == ()


def test_what_stood_so_for_long_before_is_given_the_whole_time() -> None:
    hang = Incident("hang", "it stood", None, None, 0, BEGAN, first_step_seconds=BEGAN + 1, last_step=42)
    seen = proven()
    seen = replace(seen, status=replace(seen.status, incidents=(hang,)))
    assert plan(seen).status.incidents == (hang,)
    past = replace(hang, last_step=30)
    seen = replace(seen, status=replace(seen.status, incidents=(past,)))
    assert decided_hangs(seen).kind == "hang"


def test_an_announced_pause_has_the_time_that_it_announced() -> None:
    def pausing(seconds: float) -> JobSnapshot:
        return proven(seconds=seconds, pause_reason="evaluation", pause_seconds=650.0)

    assert plan(pausing(640.0)).status.incidents == ()
    assert decided_hangs(pausing(651.0)).reason.startswith(
        "no step for stepTimeoutSeconds (650 s), while it had announced evaluation; "
    )


def test_two_that_stand_at_an_earlier_step_are_named_and_not_blamed() -> None:
    incident = decided_hangs(still((41, 42, 41)))
    assert blamed(incident) == (None, None, None)
    assert "workers 0, 2 are at step 41" in incident.reason


def test_whoever_is_not_heard_is_no_evidence() -> None:
    seen = with_session(still((42, 42, 41)), 0, connected=False, since_seconds=NOW_HANGS - 0.1)
    assert blamed(decided_hangs(seen)) == (None, None, None)


def test_a_rank_that_has_ended_is_said() -> None:
    incident = decided_hangs(with_session(still(), 1, exited_ranks=(1,)))
    assert "ranks of worker 1 have exited with code 0" in incident.reason


def test_the_only_worker_is_blamed_where_one_of_its_ranks_is_behind_the_others() -> None:
    seen = running(now=NOW_HANGS, workers=1, nproc_per_node=2)
    assert blamed(decided_hangs(timers(seen, 0.0))) == (None, None, None)
    assert blamed(decided_hangs(timers(seen, 0.0, ranks=(1,)))) == (0, "n0", 1)


def test_ties_never_come_to_exclude_a_node() -> None:
    policy = FailurePolicy(max_excluded_nodes=2)
    seen = still(failure_policy=policy)
    for _ in range(3):
        made = plan(seen)
        assert made.status.excluded_nodes == ()
        seen = replace(seen, status=replace(seen.status, incidents=made.status.incidents))


def test_what_workers_say_is_kept_with_the_incident_also_when_it_comes_later() -> None:
    seen = timers(still(seconds=599.0), 0.0)
    claimed = plan(seen).status
    assert claimed.incidents[-1].detail == "rank 0: here"
    later = replace(timers(seen, 0.0, 0.0, 0.0), status=claimed, now_seconds=NOW_HANGS + 0.1)
    assert plan(later).status.incidents[-1].detail == "rank 0: here\nrank 1: here\nrank 2: here"


def test_details_are_shortened() -> None:
    seen = with_session(
        running(now=NOW_HANGS), 0, exit=ObservedExit(1, 0, 1, "boom", False, NOW_HANGS, detail="x" * 100_000)
    )
    old = Incident("hang", "it hung", None, None, 1, BEGAN, first_step_seconds=BEGAN, detail="y" * 8000)
    made = plan(replace(seen, status=replace(seen.status, incidents=(old,)))).status
    assert [len(i.detail) for i in made.incidents] == [500, 8000]


@given(st.lists(st.integers(40, 44), min_size=3, max_size=3))
def test_blame_follows_from_the_steps_alone(steps: list[int]) -> None:
    incident = decided_hangs(still((steps[0], steps[1], steps[2])))
    slow = [index for index, step in enumerate(steps) if step == min(steps)]
    assert incident.worker == (slow[0] if len(slow) == 1 else None)


# ---- node faults -----------------------------------------------------------------------------------------------------
# What a node did to a program is not the program's, and what comes again without a step counts all the same.

KILLED = ObservedExit(1, 1, -9, "killed by the kernel's OOM killer: …", False, NOW - 0.1)


def lost(seen: JobSnapshot) -> Failure:
    return detect_failures(build_facts(seen)).failures[0]


@pytest.mark.parametrize(
    ("oom", "application", "unexplained"), [("", True, False), ("limit", True, False), ("node", False, True)]
)
def test_a_kill_counts_against_the_program_only_where_its_own_limit_was_reached(
    oom: str, application: bool, unexplained: bool
) -> None:
    seen = with_session(running(now=NOW), 1, exit=replace(KILLED, oom=oom))
    loss = lost(seen)
    assert (loss.caused_by_program, loss.unexplained, loss.worker, loss.node) == (application, unexplained, 1, "n1")
    assert plan(seen).status.restarts_counted == int(application)


def test_a_limit_of_the_whole_pod_looks_like_the_node_s_memory_and_blames_no_node() -> None:
    seen = running(now=NOW)
    raw = {"spec": {"resources": {"limits": {"memory": "64Gi"}}}}
    seen = replace(seen, job=replace(seen.job, spec=replace(seen.job.spec, template=Template(("python",), raw=raw))))
    loss = lost(with_session(seen, 1, exit=replace(KILLED, oom="node")))
    assert (loss.caused_by_program, loss.unexplained, loss.node) == (False, True, None)


def test_a_container_that_is_killed_whole_is_told_as_out_of_memory() -> None:
    """As a kubelet does it on cgroup v2: agent and trainers end together, and nobody is left to say why."""
    seen = with_worker(running(now=NOW), 1, phase="Failed", exit_code=-9, message="OOMKilled", oom_killed=True)
    loss = lost(seen)
    assert (loss.kind, loss.caused_by_program, loss.unexplained) == ("agent-lost", False, True)
    assert "OOM killer ended the container of worker 1 (OOMKilled)" in loss.reason
    assert "resources.limits.memory" in loss.reason
    other = lost(with_worker(running(now=NOW), 1, phase="Failed", exit_code=-9, message="Error"))
    assert not other.unexplained


def struck(oom: str, limit: int) -> FakeWorld:
    """Rank 1 is killed at step 35 of each epoch, until the job ends or a tenth restart."""
    world = FakeWorld(job(3, 1, run_policy=RunPolicy(backoff_limit=limit)))
    world.settle()
    for _ in range(1500):
        world.run(0.1)
        here = [w.agent for w in world.workers.values() if w.agent is not None]
        now = world.status.membership
        for agent in here:
            at = now is not None and agent.seen.generation == now.generation and agent.seen.progress.step >= 35
            if at and agent.seen.index == 1 and agent.seen.exit is None:
                gone = replace(KILLED, generation=agent.seen.generation, received_seconds=world.now, oom=oom)
                agent.seen = replace(agent.seen, exit=gone)
        if world.status.phase == "Failed" or world.status.restarts >= 10:
            return world
    raise AssertionError(f"{world.status.restarts} restarts, and no end")


def test_kills_by_the_node_use_up_no_budget_of_the_program_but_end_a_job_that_makes_no_step() -> None:
    world = struck("node", limit=0)
    assert world.status.restarts_counted == 0, "backoffLimit is for what the program does"
    assert world.status.phase == "Failed"
    assert "used up maxNoProgressRestarts" in world.status.message


def test_kills_by_the_program_s_own_limit_use_up_its_budget() -> None:
    assert "used up backoffLimit (0)" in struck("limit", limit=0).status.message


# ---- odd one ---------------------------------------------------------------------------------------------------------
# Who is named where stacks and collectives agree, disagree, or one of them says nothing.

IN_ONE_LINE = tuple(RankStack((rank,), "a", "in all_reduce", is_waiting=True) for rank in range(3))
WAITS = Collective((0,), "default_pg", 8, "all_reduce", "Float[4]", "scheduled")


def seen(places: tuple[RankStack, ...], calls: dict[int, Collective]) -> list[HangEvidence]:
    """Of each rank by its own agent."""
    return [
        HangEvidence(42, (place,), collectives=tuple(replace(calls[r], ranks=(r,)) for r in place.ranks if r in calls))
        for place in places
    ]


def apart(rank: int) -> tuple[RankStack, ...]:
    return tuple(
        replace(p, stack_digest="b", text="in load", is_waiting=False) if p.ranks == (rank,) else p for p in IN_ONE_LINE
    )


def without(rank: int) -> dict[int, Collective]:
    return {r: replace(WAITS, number=7, state="finished") if r == rank else WAITS for r in range(3)}


ALL_WAIT = dict.fromkeys(range(3), WAITS)
LACKING = {0: WAITS, 2: WAITS}
UNLIKE = {**ALL_WAIT, 2: replace(WAITS, call="all_gather")}


@pytest.mark.parametrize(
    ("places", "calls", "named", "program"),
    [
        (IN_ONE_LINE, without(1), 1, False),
        (IN_ONE_LINE, UNLIKE, 2, True),
        (apart(1), {}, 1, False),
        (apart(1), LACKING, 1, False),
        (apart(1), ALL_WAIT, 1, False),
        (apart(1), without(1), 1, False),
        (apart(2), UNLIKE, 2, True),
    ],
    ids=["recorder alone", "unlike calls", "stacks alone", "a recorder is silent", "all wait alike", "both", "both, of the program"],
)  # fmt: skip
def test_who_is_named(places: tuple[RankStack, ...], calls: dict[int, Collective], named: int, program: bool) -> None:
    found = find_hang_outlier(seen(places, calls))
    assert found is not None
    assert (found.rank, found.is_program_fault) == (named, program)


@pytest.mark.parametrize("calls", [{}, LACKING, ALL_WAIT], ids=["none", "not all", "all alike"])
def test_nobody_is_odd(calls: dict[int, Collective]) -> None:
    assert find_hang_outlier(seen(IN_ONE_LINE, calls)) is None


def test_where_stacks_and_collectives_name_two_nobody_is() -> None:
    found = find_hang_outlier(seen(apart(1), without(2)))
    assert found is not None
    assert found.rank is None
    assert found.text == (
        "no rank is blamed: by its stack, rank 1 differs (in load); by its collectives, rank 2, which has not entered"
        " all_reduce #8 of default_pg (Float[4]), in which others wait; its last was all_reduce #7 of default_pg (Float[4])"
    )


@given(st.integers(0, 2), st.integers(0, 2))
def test_it_names_one_only_if_no_evidence_is_against_it(by_stack: int, by_call: int) -> None:
    found = find_hang_outlier(seen(apart(by_stack), without(by_call)))
    assert found is not None
    assert found.rank == (by_stack if by_stack == by_call else None)
