"""What `helm test` says of an installation that is not well: one sentence a finding, and an exit code."""

from __future__ import annotations

import importlib.util
import io
from types import ModuleType
from typing import Any
from urllib.error import HTTPError

import pytest

from chart.helm import CHART
from surefoot_operator.controller.leader.election_rules import leader_label

API = {
    "/apis/surefoot.dev/v1alpha1": {"resources": [{"kind": "TrainingJob"}]},
    "/apis/apps/v1/namespaces/here/deployments/op": {"spec": {"replicas": 2}},
    "/apis/apps/v1/namespaces/here/daemonsets/mem": {"status": {"desiredNumberScheduled": 3, "numberReady": 3}},
}


def pod(name: str, leads: bool = False, address: str = "10.0.0.1", shard: int = 0) -> dict[str, Any]:
    labels = {leader_label(shard): "true"} if leads else {}
    return {"metadata": {"name": name, "labels": labels}, "status": {"podIP": address, "phase": "Running"}}


class Installation:
    """What the API server and the operator's pods answer."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = dict(API)
        self.pods = [pod("a", leads=True), pod("b")]
        self.asked: list[str] = []

    def ask(self, path: str) -> Any:
        if path.startswith("/api/v1/namespaces/here/pods?"):
            return {"items": self.pods}
        if path not in self.answers:
            raise HTTPError(f"https://api{path}", 404, "Not Found", None, io.BytesIO())  # type: ignore[arg-type]
        return self.answers[path]

    def open(self, url: str, timeout: float) -> io.BytesIO:
        self.asked.append(url)
        if "10.0.0.9" in url:
            raise HTTPError(url, 503, "Service Unavailable", None, io.BytesIO())  # type: ignore[arg-type]
        return io.BytesIO(b"ready")


@pytest.fixture
def installation() -> Installation:
    return Installation()


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, installation: Installation) -> ModuleType:
    told = {"NAMESPACE": "here", "RELEASE": "release", "OPERATOR": "op", "MEMORY": "mem", "TEST_SECONDS": "0"}
    for name, value in told.items():
        monkeypatch.setenv(f"SUREFOOT_{name}", value)
    spec = importlib.util.spec_from_file_location("surefoot_chart_check", CHART / "files" / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "asked", installation.ask)
    monkeypatch.setattr(module.urllib.request, "urlopen", installation.open)
    return module


def test_a_sound_installation_is_well(
    check: ModuleType, installation: Installation, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main() == 0
    assert capsys.readouterr().out == "CRD: well\noperator: well\nmemory tier: well\n"
    assert installation.asked == ["http://10.0.0.1:8081/readyz"] * 2


def test_each_finding_is_a_sentence(
    check: ModuleType, installation: Installation, capsys: pytest.CaptureFixture[str]
) -> None:
    del installation.answers["/apis/surefoot.dev/v1alpha1"]
    installation.pods = [pod("a", leads=True), pod("b", address="10.0.0.9")]
    installation.answers["/apis/apps/v1/namespaces/here/daemonsets/mem"] = {
        "status": {"desiredNumberScheduled": 3, "numberReady": 2}
    }
    assert check.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "CRD: https://api/apis/surefoot.dev/v1alpha1 answers 404 Not Found",
        "operator: http://10.0.0.9:8081/readyz answers 503 Service Unavailable",
        "memory tier: the memory tier is ready on 2 of 3 nodes",
    ]


@pytest.mark.parametrize(
    ("pods", "said"),
    [
        ([], "0 of 2 operator pods are there"),
        ([pod("a"), pod("b")], "of the operator's pods 0 lead: []"),
        ([pod("a", leads=True), pod("b", leads=True)], "of the operator's pods 2 lead: ['a', 'b']"),
        ([pod("a", leads=True), pod("b", address="")], "operator pod b has no address yet: it is Running"),
    ],
)
def test_exactly_one_operator_leads(
    check: ModuleType, installation: Installation, pods: list[dict[str, Any]], said: str
) -> None:
    installation.pods = pods
    assert check.said(check.operator) == said


def test_exactly_one_operator_leads_each_shard(
    check: ModuleType, installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "SHARDS", 2)
    assert check.said(check.operator) == "of the operator's pods 0 lead shard 1: []"
    installation.pods = [pod("a", leads=True), pod("b", leads=True, shard=1)]
    assert check.said(check.operator) == ""


def test_a_tier_on_no_node_is_no_tier(check: ModuleType, installation: Installation) -> None:
    installation.answers["/apis/apps/v1/namespaces/here/daemonsets/mem"] = {"status": {"numberReady": 0}}
    assert "memoryTier.nodeSelector" in check.said(check.memory_tier)
