"""Nodes that fail one job again and again are left in order, as far as the job allows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from support.builders import BEGAN, running, with_worker
from surefoot_operator.api.spec import FailurePolicy
from surefoot_operator.api.status import ExcludedNode, Incident
from surefoot_operator.job_snapshot import NodeSeen, Observed
from surefoot_operator.policy.core.actions import CreateWorker
from surefoot_operator.policy.planning.plan import plan

NOW = BEGAN + 100


def failing(most: int, *past: str, seconds_ago: float = 10.0, **other: Any) -> Observed:
    """The agent on n1 just died; the job failed before on the nodes of `past`."""
    policy = FailurePolicy(max_num_repeat_offenders_to_avoid=most, eval_period_seconds=50.0)
    incidents = tuple(
        Incident("trainer-failed", "it died", 1, node, 1, NOW - seconds_ago, first_step_seconds=NOW - seconds_ago + 1)
        for node in past
    )
    seen = running(failure_policy=policy)
    seen = with_worker(seen, 1, phase="Failed", exit_code=1)
    return replace(seen, status=replace(seen.status, incidents=incidents, **other))


def names(seen: Observed) -> list[str]:
    return [e.name for e in plan(seen).status.excluded_nodes]


def test_a_second_failure_within_the_window_excludes_the_node_for_as_long() -> None:
    assert names(failing(2)) == []
    made = plan(failing(2, "n1")).status
    (found,) = made.excluded_nodes
    assert (found.name, found.until_seconds) == ("n1", NOW + 50.0)
    assert "2 failures of this job within 50 s" in found.reason
    assert names(failing(2, "n1", seconds_ago=51.0)) == []
    assert names(failing(2, "n0")) == []


def test_a_job_that_allows_none_excludes_none() -> None:
    assert names(failing(0, "n1", "n1")) == []


def test_never_more_than_the_job_allows_and_the_newest_stay() -> None:
    old = (ExcludedNode("n5", "it failed", NOW + 9), ExcludedNode("n6", "it failed", NOW - 1))
    assert names(failing(2, "n1", excluded_nodes=old)) == ["n5", "n1"]  # the other one's time is up
    assert names(failing(1, "n1", excluded_nodes=old)) == ["n1"]


def test_an_excluded_node_is_left_once_another_worker_is_warm_elsewhere() -> None:
    seen = running(least=None)
    bad = ExcludedNode("n1", "2 failures", NOW + 50)
    seen = replace(
        seen,
        status=replace(seen.status, excluded_nodes=(bad,)),
        nodes=(*seen.nodes, NodeSeen("n3", "n3", True)),
    )
    assert [a for a in plan(seen).actions if isinstance(a, CreateWorker)] == [CreateWorker(1, 2, ("n1",))]
    over = replace(seen, now=NOW + 51, sessions=tuple(replace(s, heard_seconds=NOW + 51) for s in seen.sessions))
    assert not [a for a in plan(over).actions if isinstance(a, CreateWorker)]
