"""What is written on nodes that jobs found sick: by whom, for how long, for how many at once, and nothing without need."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot_operator.api.known_node_signals import KNOWN_SIGNALS
from surefoot_operator.platforms.kubernetes.api_writes import timestamp
from surefoot_operator.platforms.kubernetes.node_conditions import (
    CONDITION,
    MARK,
    NodeReport,
    node_writes,
    wanted_reports,
)
from surefoot_operator.platforms.kubernetes.views import observations as node_objects
from surefoot_operator.platforms.kubernetes.views.observations import Heard

NOW = 1_000_000.0
REPORT = NodeReport("GpuLost", "GPU 0 is lost; found by an agent of job ns/gpt", NOW + 100)


def node(
    name: str = "n0", condition: dict[str, Any] | None = None, taints: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": "True"}, *([{"type": CONDITION, **condition}] if condition else [])]
    return {
        "metadata": {"name": name, "uid": name, "resourceVersion": "7"},
        "spec": {"taints": taints or []},
        "status": {"conditions": conditions},
    }


def job(name: str, **sick: tuple[str, float]) -> dict[str, Any]:
    entries = [{"name": n, "reason": reason, "untilTime": timestamp(until)} for n, (reason, until) in sick.items()]
    return {"metadata": {"namespace": "ns", "name": name}, "status": {"sickNodes": entries}}


def merged(found: dict[str, Any], report: NodeReport | None, taint: str = "") -> dict[str, Any]:
    """The node after the writes, as the API server merges them."""
    writes = node_writes(found, report, taint, NOW)
    conditions = {one["type"]: one for one in found["status"]["conditions"]}
    annotations = dict(found["metadata"].get("annotations") or {})
    if writes.status is not None:
        conditions |= {one["type"]: one for one in writes.status["status"]["conditions"]}
        annotations |= writes.status["metadata"]["annotations"]
    taints = found["spec"]["taints"]
    if writes.taint is not None:  # a list of taints is replaced whole, unlike conditions
        assert writes.taint["metadata"]["resourceVersion"] == found["metadata"]["resourceVersion"]
        taints = writes.taint["spec"]["taints"]
    return {
        "metadata": {**found["metadata"], "annotations": {k: v for k, v in annotations.items() if v is not None}},
        "spec": {"taints": taints},
        "status": {"conditions": list(conditions.values())},
    }


def test_a_sick_node_gets_a_condition_with_reason_and_job_and_a_mark_for_repair() -> None:
    nodes = {"n0": node()}
    reports, left_out = wanted_reports([job("gpt", n0=("GpuLost: GPU 0 is lost", NOW + 100))], nodes, NOW)
    assert (reports, left_out) == ({"n0": REPORT}, [])
    told = merged(nodes["n0"], reports["n0"])
    (condition,) = (one for one in told["status"]["conditions"] if one["type"] == CONDITION)
    assert (condition["status"], condition["reason"], condition["message"]) == ("True", "GpuLost", REPORT.message)
    assert condition["lastTransitionTime"] == timestamp(NOW)
    assert told["metadata"]["annotations"] == {MARK: f"GpuLost: {REPORT.message}"}
    assert told["spec"]["taints"] == [], "a taint only where one is wanted"
    assert node_objects.observe_node(told, Heard(), "zone", KNOWN_SIGNALS).signal.startswith(
        "it has the condition SurefootUnhealthy=True"
    )


@pytest.mark.parametrize("taint", ["", "NoSchedule"])
@pytest.mark.parametrize("report", [REPORT, None])
@pytest.mark.parametrize(
    "condition",
    [
        None,
        {"status": "False", "reason": "NothingFound", "message": ""},
        {"status": "True", "reason": "LinkDown", "message": "x"},
    ],
)
def test_what_was_written_is_not_written_again(condition: Any, report: NodeReport | None, taint: str) -> None:
    once = merged(node(condition=condition), report, taint)
    again = node_writes(once, report, taint, NOW + 50)
    assert (again.status, again.taint) == (None, None)


def test_a_node_of_which_nothing_is_found_any_more_is_taken_back_and_one_that_never_was_is_not_touched() -> None:
    assert node_writes(node(), None, "NoSchedule", NOW) == node_writes(node(), None, "", NOW)
    assert node_writes(node(), None, "NoSchedule", NOW).status is None
    sick = merged(node(), REPORT, "NoSchedule")
    assert sick["spec"]["taints"] == [{"key": MARK, "value": "GpuLost", "effect": "NoSchedule"}]
    well = merged(sick, None, "NoSchedule")
    assert well["spec"]["taints"] == []
    assert well["metadata"]["annotations"] == {}
    assert node_objects.observe_node(well, Heard(), "zone", KNOWN_SIGNALS).signal == ""


def test_taints_of_others_and_without_a_wish_are_left_alone() -> None:
    other = {"key": "gpu", "effect": "NoSchedule"}
    sick = merged(node(taints=[other]), REPORT, "NoSchedule")
    assert sick["spec"]["taints"][0] == other
    assert merged(sick, None, "NoSchedule")["spec"]["taints"] == [other]
    marked = node(taints=[{"key": MARK, "effect": "NoSchedule"}])
    assert node_writes(marked, None, "", NOW).taint is None


def test_reports_decay_and_the_longest_of_several_jobs_counts() -> None:
    nodes = {"n0": node()}
    jobs = [
        job("a", n0=("GpuLost: x", NOW + 10)),
        job("b", n0=("LinkDown: y", NOW + 20)),
        {"metadata": {"namespace": "ns", "name": "c"}},
    ]
    assert wanted_reports(jobs, nodes, NOW)[0]["n0"].reason == "LinkDown"
    assert wanted_reports(jobs, nodes, NOW + 15)[0]["n0"].reason == "LinkDown"
    assert wanted_reports(jobs, nodes, NOW + 25) == ({}, [])
    assert wanted_reports([job("a", n9=("GpuLost: x", NOW + 10))], nodes, NOW) == ({}, []), "a node that is gone"


@given(st.integers(1, 60), st.integers(0, 60), st.integers(0, 5))
def test_a_tenth_of_the_cluster_at_most_is_told_of_and_who_was_told_of_stays(size: int, sick: int, marked: int) -> None:
    nodes = {f"n{i:02}": node(f"n{i:02}") for i in range(size)}
    found = job("gpt", **{f"n{i:02}": ("GpuLost: x", NOW + 10) for i in range(min(sick, size))})
    most = max(1, size // 10)
    before = [f"n{i:02}" for i in range(min(sick, size))][-min(marked, most) :] if marked else []
    for name in before:
        nodes[name] = merged(nodes[name], REPORT)
    reports, left_out = wanted_reports([found], nodes, NOW)
    assert len(reports) <= most
    assert set(before) <= set(reports)
    assert len(reports) + len(left_out) == min(sick, size)
