"""A look at a cluster is judged by what it keeps from working, and what was not answered is unknown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from surefoot_operator.cli.doctor import ClusterLook, cluster_findings, missing_fields, rights_asked
from surefoot_operator.cli.doctor_network import Finding, finding_lines, has_fault

ROOT = Path(__file__).parents[4]
SCHEMA: dict[str, Any] = yaml.safe_load((ROOT / "manifests" / "crd.yaml").read_text())["spec"]["versions"][0]["schema"][
    "openAPIV3Schema"
]


def deployment(
    ready: int = 2, wanted: int = 2, version: str = "1.0.0", name: str = "surefoot-operator"
) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "surefoot", "labels": {"app.kubernetes.io/version": version}}
    return {"metadata": metadata, "spec": {"replicas": wanted}, "status": {"readyReplicas": ready} if ready else {}}


def holders(ready: int = 3, wanted: int = 3) -> dict[str, Any]:
    metadata = {"name": "surefoot-memory", "namespace": "surefoot"}
    return {"metadata": metadata, "status": {"desiredNumberScheduled": wanted, "numberReady": ready}}


def endpoints(ready: bool | None = True, service: str = "surefoot-coordinator") -> dict[str, Any]:
    conditions = {} if ready is None else {"ready": ready}
    metadata = {"namespace": "surefoot", "labels": {"kubernetes.io/service-name": service}}
    return {"metadata": metadata, "endpoints": [{"addresses": ["10.0.0.9"], "conditions": conditions}]}


WELL = ClusterLook(
    "https://c:6443",
    "team",
    {"major": "1", "minor": "35+", "gitVersion": "v1.35.4"},
    SCHEMA,
    (deployment(),),
    (holders(),),
    (endpoints(),),
    {},
)


def older_schema() -> dict[str, Any]:
    spec = {name: body for name, body in SCHEMA["properties"]["spec"]["properties"].items() if name != "spares"}
    return {"properties": {**SCHEMA["properties"], "spec": {"properties": spec}}}


def found(look: ClusterLook) -> dict[str, Finding]:
    return {one.check: one for one in cluster_findings(look, "1.0.0")}


def test_a_whole_installation_is_well() -> None:
    assert {one.state for one in found(WELL).values()} == {"ok"}
    assert "v1.35.4" in found(WELL)["cluster"].said


@pytest.mark.parametrize(
    ("look", "check", "state", "said"),
    [
        (replace(WELL, version={"major": "1", "minor": "28"}), "cluster", "fault", "unknown version"),
        (replace(WELL, version="no answer"), "cluster", "unknown", "no answer"),
        (replace(WELL, version={}), "cluster", "ok", "unknown version"),
        (replace(WELL, schema=None), "CRD", "fault", "not installed"),
        (replace(WELL, schema="you may not"), "CRD", "unknown", "you may not"),
        (replace(WELL, schema=older_schema()), "CRD", "warning", "lacks spec.spares"),
        (replace(WELL, operators=()), "operator", "fault", "no Deployment"),
        (replace(WELL, operators="you may not list"), "operator", "unknown", "you may not list"),
        (replace(WELL, operators=(deployment(0),)), "operator", "fault", "0 of 2 ready"),
        (replace(WELL, operators=(deployment(1),)), "operator", "warning", "1 of 2 ready"),
        (replace(WELL, operators=(deployment(version="0.9.0"),)), "operator", "warning", "0.9.0"),
        (replace(WELL, operators=(deployment(), deployment(name="b"))), "operator", "warning", "2 operators"),
        (replace(WELL, coordinators=()), "leader", "fault", "no operator leads"),
        (
            replace(WELL, coordinators=(endpoints(False), {**endpoints(), "endpoints": None})),
            "leader",
            "fault",
            "nobody",
        ),
        (replace(WELL, coordinators=(endpoints(None),)), "leader", "ok", "10.0.0.9 of surefoot"),
        (replace(WELL, coordinators=(endpoints(), endpoints(service="c-1"))), "leader", "ok", "10.0.0.9 of surefoot"),
        (replace(WELL, coordinators=(endpoints(), endpoints(False, "c-1"))), "leader", "fault", "ask Service c-1"),
        (replace(WELL, coordinators="you may not"), "leader", "unknown", "you may not"),
        (replace(WELL, tiers=()), "memory tier", "warning", "no DaemonSet"),
        (replace(WELL, tiers=(holders(0),)), "memory tier", "fault", "0 of 3"),
        (replace(WELL, tiers=(holders(2),)), "memory tier", "warning", "2 of 3"),
        (replace(WELL, tiers=(holders(0, 0),)), "memory tier", "fault", "no node is chosen"),
        (replace(WELL, tiers="no"), "memory tier", "unknown", "no"),
        (replace(WELL, denied={"see jobs": ("list trainingjobs",)}), "see jobs", "fault", "list trainingjobs"),
        (replace(WELL, denied={"run jobs": ("create trainingjobs",)}), "run jobs", "warning", "suspend"),
        (replace(WELL, denied={"see nodes": ("list nodes",)}), "see nodes", "warning", "list nodes"),
        (replace(WELL, denied="401"), "rights", "unknown", "401"),
    ],
)
def test_one_thing_amiss_is_one_finding(look: ClusterLook, check: str, state: str, said: str) -> None:
    findings = found(look)
    assert findings[check].state == state
    assert said in findings[check].said
    assert findings[check].remedy or state in ("ok", "unknown")
    assert {one.state for name, one in findings.items() if name != check} == {"ok"}


def test_the_shipped_crd_lacks_nothing() -> None:
    assert missing_fields(SCHEMA) == []
    assert "status.schemaVersion" in missing_fields({})
    assert "spec.template" in missing_fields({"properties": {"spec": None}})


def test_every_right_has_its_namespace_or_none_on_purpose() -> None:
    here = {right.namespace for one in rights_asked("team") for right in one.rights if one.purpose != "see nodes"}
    assert here == {"team"}


def test_lines_have_the_remedy_beneath_and_a_count() -> None:
    lines = finding_lines([Finding("CRD", "fault", "is not there", "install it"), Finding("operator", "ok", "1.0")])
    assert lines == [
        "fault    CRD        is not there",
        "                    -> install it",
        "ok       operator   1.0",
        "",
        "1 ok, 1 fault",
    ]
    assert has_fault([Finding("a", "fault", "b")])
    assert not has_fault([Finding("a", "warning", "b"), Finding("a", "unknown", "b")])
