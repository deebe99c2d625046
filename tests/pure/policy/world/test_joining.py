"""Who gets a rank where a fresh worker found its own node sick: somebody else, unless no world is possible without it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.builders import BEGAN, beginning, job, session, worker
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.messages import NodeFinding
from surefoot_operator.api.spec import HealthPolicy
from surefoot_operator.api.status import ExcludedNode, Member, World
from surefoot_operator.job_snapshot import NodeSeen, Observed
from surefoot_operator.policy.core.actions import CreateWorker, DeleteWorker
from surefoot_operator.policy.core.facts import gather
from surefoot_operator.policy.failure.unhealthy_nodes import SICK_SECONDS
from surefoot_operator.policy.membership.claim import STARTING_SECONDS, TRIED_SECONDS, select_members
from surefoot_operator.policy.planning.plan import plan

NOW = BEGAN + 5
WRONG = NodeFinding("ComputesWrong", "the processor multiplies wrong", "node")
ODD = NodeFinding("ComputesWrong", "the processor multiplies wrong", "unknown")


def fresh(
    workers: int,
    *failing: int,
    least: int | None = None,
    now: float = NOW,
    free: int | None = 1,
    finding: NodeFinding = WRONG,
    **spec: object,
) -> Observed:
    """A job that begins: all of its workers are warm, and some found their nodes sick."""
    sessions = tuple(
        session(i, now=now, stopped=1, findings=(finding,) if i in failing else (), findings_seconds=BEGAN + 3)
        for i in range(workers)
    )
    return beginning(now, job(workers, least, **spec), sessions, free)


def chosen(seen: Observed) -> tuple[int, ...]:
    return tuple(member.index for member in select_members(gather(seen)).members)


def test_a_world_that_is_possible_without_it_waits_for_another_and_then_begins_without() -> None:
    assert chosen(fresh(3, 1, least=2)) == ()
    assert chosen(fresh(3, 1, least=2, now=BEGAN + STARTING_SECONDS + 1)) == (0, 2)


def test_a_job_of_fixed_size_waits_for_another_node_and_then_takes_what_there_is() -> None:
    found = select_members(gather(fresh(3, 1)))
    assert found.members == ()
    assert found.waiting == (
        "the worker on node n1 (ComputesWrong: the processor multiplies wrong) gets no rank, another one is waited for"
    )
    assert found.until_seconds == BEGAN + TRIED_SECONDS
    assert chosen(fresh(3, 1, now=BEGAN + TRIED_SECONDS + 1)) == (0, 1, 2), "no job is kept from starting"


@pytest.mark.parametrize(
    "seen",
    [
        fresh(3),
        fresh(3, 0, 1, 2),
        fresh(3, 0, 1),
        fresh(3, 1, finding=ODD),
        fresh(3, 1, free=0),
        fresh(3, 1, health_policy=HealthPolicy(node_findings="Show")),
        fresh(1, 0, free=0),
    ],
    ids=[
        "none fails",
        "all fail",
        "most fail",
        "only told",
        "no other node",
        "findings are shown alone",
        "the only node",
    ],
)
def test_where_no_node_is_worse_than_others_or_no_other_is_there_nobody_waits(seen: Observed) -> None:
    assert len(chosen(seen)) == len(seen.sessions)


def test_what_most_nodes_find_is_said_once_with_the_world() -> None:
    made = plan(fresh(3, 0, 1, 2))
    (told,) = (event for event in made.events if event.reason == "NodesFailAlike")
    assert "ComputesWrong on n0, n1, n2" in told.message
    assert not [event for event in plan(fresh(3, 1, free=0)).events if event.reason == "NodesFailAlike"]


def test_a_trial_that_fails_wherever_it_is_made_costs_a_small_job_one_node() -> None:
    """One worker, and nobody to compare its node with: the first node is left, and the second one's word explains both."""
    seen = fresh(1, 0, now=BEGAN + 20)
    seen = replace(seen, status=plan(seen).status)
    assert [one.name for one in seen.status.sick_nodes] == ["n0"]
    other = replace(session(0, 2, now=seen.now, stopped=1, findings=(WRONG,), findings_seconds=seen.now), node="n1")
    nodes = (*seen.nodes, NodeSeen("n1", "n1", True))
    seen = replace(seen, workers=(*seen.workers, worker(0, 2, node="n1")), nodes=nodes)
    moved = replace(seen, sessions=(other,))
    for told in (replace(seen, sessions=(*seen.sessions, other)), moved):
        made = plan(told)
        assert made.status.world is not None
        assert [member.node for member in made.status.world.members] == ["n1"]
        assert [
            e.message for e in made.events if e.reason == "NodesFailAlike" and "ComputesWrong on n0, n1" in e.message
        ]
    later = replace(moved, now=seen.now + SICK_SECONDS / 2)
    assert [one.name for one in plan(later).status.sick_nodes] == ["n0"], "nobody is left for it any more"
    gone = replace(moved, now=seen.now + SICK_SECONDS + 1)
    assert "n0" not in [one.name for one in plan(gone).status.sick_nodes]


def test_an_agent_that_knows_no_trial_gets_a_rank() -> None:
    seen = fresh(3)
    assert not any(one.findings for one in seen.sessions)
    assert chosen(replace(seen, job=job(3, health_policy=HealthPolicy(pre_join_check="Enforce")))) == (0, 1, 2)


def test_another_worker_is_made_beside_one_whose_node_turned_out_sick() -> None:
    seen = fresh(3, 1, now=BEGAN + 20)
    sick = (ExcludedNode("n1", "ComputesWrong", BEGAN + 18 + SICK_SECONDS),)
    seen = replace(seen, status=replace(seen.status, sick_nodes=sick))
    (made,) = (action for action in plan(seen).actions if isinstance(action, CreateWorker))
    assert (made.index, "n1" in made.avoid_nodes) == (1, True)
    nodes = (*seen.nodes, NodeSeen("n3", "n3", True))
    later = replace(seen, nodes=nodes, workers=(*seen.workers, worker(1, 2, node="n3")))
    for room in (1, 0):  # it may have taken the last free node
        later = replace(later, free_nodes=room)
        assert not [action for action in plan(later).actions if isinstance(action, CreateWorker)], "one is enough"
        assert not [action for action in plan(later).actions if isinstance(action, DeleteWorker)], "none ends before"
        assert chosen(later) == (), "it is waited for"
    warm = replace(session(1, 2, now=seen.now, stopped=1), node="n3")
    assert chosen(replace(later, sessions=(*later.sessions, warm))) == (0, 1, 2)


def test_a_node_that_fails_too_is_no_end_of_looking() -> None:
    sick = tuple(ExcludedNode(name, "ComputesWrong", BEGAN + 18 + SICK_SECONDS) for name in ("n1", "n3"))
    seen = fresh(3, 1, now=BEGAN + 20)
    seen = replace(seen, status=replace(seen.status, sick_nodes=sick), nodes=(*seen.nodes, NodeSeen("n3", "n3", True)))
    second = replace(session(1, 2, now=seen.now, stopped=1, findings=(WRONG,), findings_seconds=BEGAN + 3), node="n3")
    seen = replace(seen, workers=(*seen.workers, worker(1, 2, node="n3")), sessions=(*seen.sessions, second))
    actions = plan(seen).actions
    (made,) = (action for action in actions if isinstance(action, CreateWorker))
    assert {"n1", "n3"} <= set(made.avoid_nodes)
    assert [action.name for action in actions if isinstance(action, DeleteWorker)] == [seen.workers[1].name]


def test_who_leaves_a_sick_node_keeps_no_room_from_whoever_a_claimed_world_waits_for() -> None:
    """Found by the simulator: three nodes, of which one is sick, and a fixed size of three."""
    seen = fresh(3, now=BEGAN + 20)
    members = tuple(Member(i, 1, s.incarnation, s.node) for i, s in enumerate(seen.sessions))
    world = World(3, "Claimed", None, 3, members, "n0 died", BEGAN + 10)
    status = replace(seen.status, world=world, sick_nodes=(ExcludedNode("n2", "x", BEGAN + 16 + SICK_SECONDS),))
    newer = replace(session(2, 3, now=seen.now, stopped=3), node="n0")
    sessions = (*(replace(s, stopped=3) for s in seen.sessions if s.index != 1), newer)
    pending = replace(worker(1, 4), node=None, phase="Pending")
    workers = (seen.workers[0], seen.workers[2], worker(2, 3, node="n0"), pending)
    seen = replace(seen, status=status, sessions=sessions, workers=workers, free_nodes=0)

    def ended(told: Observed) -> list[str]:
        return [action.name for action in plan(told).actions if isinstance(action, DeleteWorker)]

    assert ended(seen) == [seen.workers[1].name]
    assert ended(replace(seen, sessions=(*sessions[:-1], replace(newer, warm=False)))) == [], (
        "not before the other is ready"
    )
    assert ended(replace(seen, workers=workers[:-1])) == [], "nor where nobody waits for a node"
    writing = replace(sessions[1], pending=(Checkpoint(2, 6),))
    assert ended(replace(seen, sessions=(sessions[0], writing, newer))) == [], "nor while its last save is on its way"


def test_who_came_to_a_sick_node_for_want_of_another_stays() -> None:
    sick = (ExcludedNode("n1", "ComputesWrong", BEGAN - 1 + SICK_SECONDS),)
    seen = fresh(3, 1, now=BEGAN + 70)
    seen = replace(seen, status=replace(seen.status, sick_nodes=sick))
    assert not [action for action in plan(seen).actions if isinstance(action, CreateWorker)]


@given(st.integers(1, 6), st.sets(st.integers(0, 5)), st.booleans())
def test_every_job_starts(workers: int, failing: set[int], room: bool) -> None:
    seen = fresh(workers, *failing, now=BEGAN + TRIED_SECONDS + 1, free=1 if room else 0)
    assert len(chosen(seen)) == workers
