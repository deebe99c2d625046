"""Who gets a rank where a fresh worker found its own node sick: somebody else, unless no world is possible without it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.builders import BEGAN, endpoint, job, session, worker
from surefoot.protocol.node_findings import NodeFinding
from surefoot_operator.api.spec import HealthPolicy
from surefoot_operator.api.status import ExcludedNode, JobStatus, World
from surefoot_operator.observed import HolderSeen, NodeSeen, Observed
from surefoot_operator.policy.actions import CreateWorker, DeleteWorker
from surefoot_operator.policy.facts import gather
from surefoot_operator.policy.failure.sick_nodes import SICK_SECONDS
from surefoot_operator.policy.plan import plan
from surefoot_operator.policy.world.claim import STARTING_SECONDS, TRIED_SECONDS, select_members

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
    return Observed(
        now=now,
        term_seconds=BEGAN - 100,
        job=job(workers, least, **spec),
        status=JobStatus(
            world=World(1, "Claimed", None, 0, (), "the job starts", BEGAN), next_attempt=2, start_seconds=BEGAN
        ),
        workers=tuple(worker(i) for i in range(workers)),
        nodes=tuple(NodeSeen(f"n{i}", f"n{i}", True) for i in range(workers)),
        sessions=sessions,
        holders=tuple(HolderSeen(endpoint(f"n{i}"), "Ready", BEGAN, fence=1, read_epoch=1) for i in range(workers)),
        free_nodes=free,
    )


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


def test_who_came_to_a_sick_node_for_want_of_another_stays() -> None:
    sick = (ExcludedNode("n1", "ComputesWrong", BEGAN - 1 + SICK_SECONDS),)
    seen = fresh(3, 1, now=BEGAN + 70)
    seen = replace(seen, status=replace(seen.status, sick_nodes=sick))
    assert not [action for action in plan(seen).actions if isinstance(action, CreateWorker)]


@given(st.integers(1, 6), st.sets(st.integers(0, 5)), st.booleans())
def test_every_job_starts(workers: int, failing: set[int], room: bool) -> None:
    seen = fresh(workers, *failing, now=BEGAN + TRIED_SECONDS + 1, free=1 if room else 0)
    assert len(chosen(seen)) == workers
