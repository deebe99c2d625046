"""Which nodes are left for what agents find there: those whose own hardware is at fault, and no healthy one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.builders import BEGAN, job, running, with_session
from support.fakes.fake_world import FakeWorld
from surefoot.protocol.messages import Blame, NodeFinding
from surefoot_operator.api.spec import HealthPolicy, RunPolicy
from surefoot_operator.api.status import ExcludedNode
from surefoot_operator.job_snapshot import JobSnapshot, ObservedExit
from surefoot_operator.policy.core.availability import evacuation_reason
from surefoot_operator.policy.core.facts import build_facts
from surefoot_operator.policy.failure.failure_detection import Failure
from surefoot_operator.policy.failure.unhealthy_nodes import (
    CONFIRM_SECONDS,
    UNHEALTHY_SECONDS,
    unhealthy_nodes,
    update_unhealthy_nodes,
)
from surefoot_operator.policy.membership.node_exclusion import exclude_nodes
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check_plan

NOW = BEGAN + 100
LOST = NodeFinding("GpuLost", "GPU 0 is lost", "node")
MISTAKE = NodeFinding("GpuXid31", "GPU 0 reported Xid 31", "application")
ODD = NodeFinding("GpuThrottled", "GPU 0 is slow", "unknown")


def found(seen: JobSnapshot, findings: dict[int, tuple[NodeFinding, ...]], ago: float = CONFIRM_SECONDS) -> JobSnapshot:
    for index, told in findings.items():
        seen = with_session(seen, index, findings=told, findings_seconds=NOW - ago)
    return seen


def left(seen: JobSnapshot) -> set[str]:
    """Nodes that workers should leave once this snapshot was planned."""
    after = replace(seen, status=plan(seen).status)
    return {f"n{i}" for i in range(len(seen.sessions)) if evacuation_reason(build_facts(after), f"n{i}")}


@pytest.mark.parametrize(
    ("findings", "sick"),
    [
        ({}, set()),
        ({1: (LOST,)}, {"n1"}),
        ({1: (MISTAKE,)}, set()),
        ({1: (ODD,)}, set()),
        ({1: (ODD, LOST, MISTAKE)}, {"n1"}),
        ({1: (LOST,), 2: (LOST,)}, {"n1", "n2"}),
        ({1: (LOST,), 2: (LOST,), 3: (LOST,)}, set()),
        ({0: (MISTAKE,), 1: (MISTAKE,), 2: (MISTAKE,), 3: (LOST,)}, {"n3"}),
    ],
)
def test_a_node_is_left_for_its_own_hardware_alone(
    findings: dict[int, tuple[NodeFinding, ...]], sick: set[str]
) -> None:
    """Of four nodes; what most tell at once is no node's own."""
    assert left(found(running(now=NOW, workers=4), findings)) == sick


BLAMES: list[Blame] = ["node", "application", "unknown"]


@given(
    st.integers(2, 6).flatmap(
        lambda n: st.tuples(
            st.just(n),
            st.dictionaries(
                st.integers(0, n - 1),
                st.lists(
                    st.builds(NodeFinding, st.sampled_from(["A", "B", "C"]), st.just("x"), st.sampled_from(BLAMES)),
                    max_size=3,
                    unique_by=lambda one: one.reason,
                ).map(tuple),
            ),
        )
    )
)
def test_whatever_agents_find_no_healthy_node_is_left_and_never_all_for_one_cause(
    drawn: tuple[int, dict[int, tuple[NodeFinding, ...]]],
) -> None:
    workers, findings = drawn
    seen = found(running(now=NOW, workers=workers), findings)
    sick = left(seen)
    named = {f"n{i}" for i, told in findings.items() if any(one.blame == "node" for one in told)}
    assert sick <= named
    for reason in "ABC":
        alone = {i: tuple(o for o in told if o.reason == reason) for i, told in findings.items()}
        of_one = left(found(running(now=NOW, workers=workers), alone))
        assert len(of_one) <= max(1, workers // 2)
    made = plan(seen)
    check_plan(made, seen)
    again = plan(replace(seen, status=made.status))
    assert again.status.unhealthy_nodes == made.status.unhealthy_nodes
    assert not [e for e in again.events if e.reason == "NodeUnhealthy"]


def test_a_finding_settles_before_it_is_acted_upon_and_wakes_the_plan_then() -> None:
    early = found(running(now=NOW, workers=4), {1: (LOST,)}, ago=CONFIRM_SECONDS - 5)
    assert left(early) == set()
    wake = plan(early).wake_after_seconds
    assert wake is not None
    assert wake <= 5.0
    made = plan(found(running(now=NOW, workers=4), {1: (LOST,)}))
    (event,) = (e for e in made.events if e.warning)
    assert event.reason == "NodeUnhealthy"
    assert "node n1 is unhealthy (GpuLost: GPU 0 is lost)" in event.message


def test_a_sick_node_is_avoided_though_nobody_is_there_any_more_and_not_for_ever() -> None:
    seen = running(now=NOW, workers=4)
    one = ExcludedNode("n1", "GpuLost: x", NOW + 1)
    seen = replace(seen, status=replace(seen.status, unhealthy_nodes=(one,)))
    assert left(seen) == {"n1"}
    over = replace(seen, now_seconds=NOW + 2)
    assert plan(over).status.unhealthy_nodes == ()
    still = found(seen, {1: (LOST,)})
    (kept,) = update_unhealthy_nodes(build_facts(still))[0]
    assert kept.until_seconds == NOW + UNHEALTHY_SECONDS


def test_what_an_agent_found_before_its_node_was_started_anew_counts_no_more() -> None:
    """Its worker is gone, and its line may not have broken yet; who came after it looked again."""
    seen = found(running(), {1: (LOST,)})
    former = next(s for s in seen.sessions if s.index == 1)
    now = former.last_message_seconds + 1
    later = replace(former, attempt=2, incarnation="inc-1-2", since_seconds=now, last_message_seconds=now, findings=())
    workers = tuple(replace(w, attempt=2) if w.index == 1 else w for w in seen.workers)
    assert (
        set(
            unhealthy_nodes(
                build_facts(replace(seen, now_seconds=now, sessions=(*seen.sessions, later), workers=workers))
            )
        )
        == set()
    )
    again = replace(later, findings=former.findings)
    assert set(
        unhealthy_nodes(build_facts(replace(seen, now_seconds=now, sessions=(*seen.sessions, again), workers=workers)))
    ) == {"n1"}
    alone = replace(seen, workers=tuple(w for w in seen.workers if w.index != 1))
    assert set(unhealthy_nodes(build_facts(alone))) == {"n1"}, "nobody has looked since"


def test_failures_of_the_job_do_not_push_a_sick_node_out_of_the_list() -> None:
    seen = running(now=NOW, workers=4)
    one = ExcludedNode("n1", "GpuLost: x", NOW + 100)
    facts = build_facts(replace(seen, status=replace(seen.status, unhealthy_nodes=(one,))))
    assert exclude_nodes(facts, Failure("trainer-failed", "x", NOW, 2, "n2", caused_by_program=True)) == ()
    assert evacuation_reason(facts, "n1") == "GpuLost: x"


def test_a_job_may_be_told_and_left_alone() -> None:
    seen = found(running(now=NOW, workers=4, health_policy=HealthPolicy(on_unhealthy_node="Warn")), {1: (LOST,)})
    assert unhealthy_nodes(build_facts(seen)) == {}
    assert left(seen) == set()


@pytest.mark.parametrize(("told", "application"), [((LOST,), False), ((MISTAKE,), True), ((ODD,), True), ((), True)])
def test_what_ends_on_a_sick_node_uses_up_no_budget(told: tuple[NodeFinding, ...], application: bool) -> None:
    """At once, without settling: the driver's word comes before the program's end."""
    seen = found(running(now=NOW, run_policy=RunPolicy(backoff_limit=0)), {1: told}, ago=0.0)
    seen = with_session(seen, 1, exit=ObservedExit(1, 1, 1, "CUDA error: unspecified launch failure", False, NOW))
    made = plan(seen)
    assert (made.status.phase == "Failed") == application
    if not application:
        assert "is unhealthy: GpuLost" in made.status.incidents[-1].reason


@pytest.mark.gate_only
def test_a_sick_node_is_left_at_a_saved_step_for_a_free_one() -> None:
    world = FakeWorld(job(3, 2), node_count=4)
    world.settle()
    world.run(5.0)
    before = world.status
    assert before.membership is not None
    agent = next(w.agent for w in world.workers.values() if w.agent is not None and w.agent.seen.index == 1)
    agent.seen = replace(agent.seen, findings=(LOST,), findings_seconds=world.now)
    sick = agent.seen.node
    world.run(CONFIRM_SECONDS + 150.0)
    after = world.status.membership
    assert after is not None
    assert sick not in {member.node for member in after.members}
    assert [i.steps_lost for i in world.status.incidents] == [0] * len(world.status.incidents)
    assert all(i.kind == "planned" for i in world.status.incidents)
