"""What nodes of the API and their kubelets' leases mean: who is gone, and when that is only said by who was away."""

from __future__ import annotations

from typing import Any

import pytest

from surefoot_operator.api.spec import NodeSignals
from surefoot_operator.job_snapshot import ObservedNode
from surefoot_operator.platforms.kubernetes.views import observations
from surefoot_operator.platforms.kubernetes.views.observations import MAX_LEASE_AGE_SECONDS, KubeletLiveness, NodeLeases

UNREACHABLE = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}
OUT_OF_SERVICE = {"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}
RENEWED, UNHEARD, SILENT = (
    KubeletLiveness(renewed=frozenset({"n0"})),
    KubeletLiveness(),
    KubeletLiveness(silent=frozenset({"n0"})),
)


def node(name: str = "n0", ready: str = "True", **spec: Any) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": ready, "message": "said so"}]
    metadata = {"name": name, "uid": name, "labels": {"zone": "z"}}
    return {"metadata": metadata, "spec": spec, "status": {"conditions": conditions}}


def among(found: dict[str, Any], heard: KubeletLiveness, gone: int = 0, of: int = 5) -> ObservedNode:
    """`found` beside nodes of which `gone` more seem gone, all told `of`."""
    others = [node(f"n{i}", "Unknown" if i <= gone else "True") for i in range(1, of)]
    return observations.confirm_node_failures(
        observations.observe_node(one, heard, "zone") for one in (found, *others)
    )[0]


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize(
    ("found", "heard", "lost"),
    [
        (node(), UNHEARD, ""),
        (node(), RENEWED, ""),
        (node(), SILENT, "its kubelet has not renewed its lease"),
        (node(ready="Unknown"), UNHEARD, "not ready: said so"),
        (node(ready="Unknown"), SILENT, "not ready: said so"),
        (node(ready="Unknown"), RENEWED, ""),
        (node(ready="Unknown", taints=[UNREACHABLE]), RENEWED, ""),
        (node(ready="False"), RENEWED, "not ready: said so"),
        (node(taints=[UNREACHABLE]), UNHEARD, "it has the taint node.kubernetes.io/unreachable"),
        (node(taints=[OUT_OF_SERVICE]), RENEWED, "it has the taint node.kubernetes.io/out-of-service"),
        (node(taints=[{"key": "gpu", "effect": "NoSchedule"}]), UNHEARD, ""),
        ({**node(), "status": {}}, RENEWED, "its condition Ready is not set yet"),
    ],
)
def test_a_node_is_lost_by_what_its_kubelet_does_not_contradict(
    found: dict[str, Any], heard: KubeletLiveness, lost: str, gone: int
) -> None:
    shown = among(found, heard, gone)
    assert (shown.ready, shown.reason or shown.unconfirmed_failure, shown.path) == (not lost, lost, ("z",))
    assert bool(shown.unconfirmed_failure) == (bool(lost) and OUT_OF_SERVICE["key"] not in lost), (
        "it may only not have been heard"
    )


@pytest.mark.parametrize(
    ("found", "heard", "doubt"),
    [
        (node(ready="Unknown"), UNHEARD, "not ready: said so"),
        (node(ready="False"), RENEWED, "not ready: said so"),
        (node(), SILENT, "its kubelet has not renewed its lease"),
        (node(ready="Unknown"), RENEWED, ""),
        (node(), UNHEARD, ""),
    ],
)
def test_where_most_nodes_seem_gone_at_once_none_is_gone_by_that_alone(
    found: dict[str, Any], heard: KubeletLiveness, doubt: str
) -> None:
    shown = among(found, heard, gone=3)
    assert (shown.ready, shown.reason, shown.unconfirmed_failure) == (True, "", doubt)


def test_a_node_that_a_person_took_out_of_service_is_gone_whatever_the_others_are() -> None:
    assert not among(node(taints=[OUT_OF_SERVICE]), RENEWED, gone=4).ready


def lease(time: str, name: str = "n0") -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"renewTime": time}}


def test_a_kubelet_is_heard_by_a_renewal_that_came_and_not_by_a_lease_that_was_there() -> None:
    leases = NodeLeases()
    leases.record_change(None, lease("old"), 0.0)
    assert leases.classify_nodes(0.0, 1.0) == UNHEARD
    leases.record_change(lease("old"), lease("old"), 5.0)
    assert leases.classify_nodes(0.0, 6.0) == UNHEARD
    leases.record_change(lease("old"), lease("new"), 10.0)
    assert leases.classify_nodes(0.0, 10.0 + MAX_LEASE_AGE_SECONDS) == RENEWED
    assert leases.classify_nodes(0.0, 10.1 + MAX_LEASE_AGE_SECONDS) == SILENT
    leases.record_change(lease("new"), None, 50.0)
    assert leases.classify_nodes(0.0, 90.0) == UNHEARD


def test_no_kubelet_is_silent_for_what_was_missed_while_its_api_server_was_away() -> None:
    leases = NodeLeases()
    leases.record_change(None, lease("old"), 0.0)
    leases.record_change(lease("old"), lease("new"), 5.0)
    back = 65.0
    assert leases.classify_nodes(contact_since_seconds=back, last_contact_seconds=back) == UNHEARD
    assert (
        leases.classify_nodes(contact_since_seconds=back, last_contact_seconds=back + MAX_LEASE_AGE_SECONDS + 0.1)
        == SILENT
    )


@pytest.mark.parametrize(
    ("found", "news"), [(node(), False), (node(ready="Unknown"), True), (node(ready="False"), False)]
)
def test_a_renewal_is_news_only_where_it_contradicts(found: dict[str, Any], news: bool) -> None:
    assert observations.lease_outweighs_conditions(found) == news


@pytest.mark.parametrize(
    ("bears", "signal"),
    [
        ({"labels": {"sagemaker.amazonaws.com/node-health-status": "Schedulable"}}, ""),
        (
            {"labels": {"sagemaker.amazonaws.com/node-health-status": "UnschedulablePendingReboot"}},
            "it has the label sagemaker.amazonaws.com/node-health-status=UnschedulablePendingReboot",
        ),
        ({"taints": [{"key": "karpenter.sh/disrupted"}]}, "it has the taint karpenter.sh/disrupted"),
        ({"conditions": [{"type": "GpuUnhealthy", "status": "True"}]}, ""),
    ],
)
def test_what_others_say_of_a_node_is_a_reason_to_leave_it(bears: dict[str, Any], signal: str) -> None:
    assert observations.observe_node(a_node(**bears), KubeletLiveness(), "zone").evacuation_reason == signal


def test_a_job_may_name_signals_of_its_own_instead() -> None:
    own = NodeSignals(conditions=("GpuUnhealthy=True",))
    sick = a_node(conditions=[{"type": "GpuUnhealthy", "status": "True"}], taints=[{"key": "karpenter.sh/disrupted"}])
    shown = observations.observe_node(sick, KubeletLiveness(), "zone", own)
    assert (shown.ready, shown.evacuation_reason) == (True, "it has the condition GpuUnhealthy=True")


def test_a_heartbeat_of_a_node_is_no_news_and_a_label_is() -> None:
    beat = {"type": "Ready", "status": "True", "lastHeartbeatTime": "2026-01-01T00:00:00Z"}
    first = a_node(conditions=[beat])
    assert observations.node_plan_fields(first) == observations.node_plan_fields(
        a_node(conditions=[{**beat, "lastHeartbeatTime": "later"}])
    )
    assert observations.node_plan_fields(first) != observations.node_plan_fields(
        a_node(conditions=[beat], labels={"a": "b"})
    )


def a_node(
    labels: dict[str, str] | None = None,
    taints: list[dict[str, Any]] | None = None,
    conditions: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """A node that is ready, and bears all that."""
    ready = {"type": "Ready", "status": "True"}
    return {
        "metadata": {"name": "n1", "uid": "x", "labels": labels or {}},
        "spec": {"taints": taints or []},
        "status": {"conditions": [ready, *(conditions or [])]},
    }
