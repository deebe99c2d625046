"""The doctor asks with a person's own rights, and says what it could not learn."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.fakes.fake_api import FakeApi, silent
from surefoot_operator.cli import doctor
from surefoot_operator.cli.cluster_access import OpenCluster
from surefoot_operator.cli.doctor import CRD, JOB_KIND, REVIEWS, SCHEMA, SLICES, look_at
from surefoot_operator.cli.doctor_network import Finding
from surefoot_operator.cli.jobs import read_jobs
from surefoot_operator.cli.main import main
from surefoot_operator.platforms.kubernetes.api_objects import ApiRefused

ROOT = Path(__file__).parents[4]


def named(name: str, **rest: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "surefoot"}, **rest}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    found = FakeApi()
    found.keep("/version", {"metadata": {}, "major": "1", "minor": "35", "gitVersion": "v1.35.4"})
    found.keep(CRD, yaml.safe_load((ROOT / "manifests" / "crd.yaml").read_text()))
    found.keep("/apis/apps/v1/deployments/o", named("o", spec={"replicas": 1}, status={"readyReplicas": 1}))
    found.keep("/apis/apps/v1/daemonsets/m", named("m", status={"desiredNumberScheduled": 1, "numberReady": 1}))
    found.keep(f"{SLICES}/s", named("s", endpoints=[{"addresses": ["10.0.0.9"], "conditions": {"ready": True}}]))
    found.answers[REVIEWS] = lambda body: {"status": {"allowed": True}}

    @asynccontextmanager
    async def opened(_choice: Any) -> AsyncIterator[OpenCluster]:
        yield OpenCluster(found.api, "team", "https://cluster:6443")

    monkeypatch.setattr(read_jobs, "opened", opened)
    return found


def states(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    return {one["check"]: one["state"] for one in json.loads(capsys.readouterr().out)}


def test_a_whole_installation_ends_with_zero(server: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "-o", "json"]) == 0
    found = states(capsys)
    assert (found.pop("persistent tier"), found.pop("network")) == ("unknown", "unknown")
    cluster = {
        "cluster",
        "leader",
        "see jobs",
        "run jobs",
        "see workers",
        "see nodes",
        "CRD",
        "operator",
        "memory tier",
    }
    assert {found[name] for name in cluster} == {"ok"}


def test_the_network_is_tried_where_it_is_asked_for(server: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--network"]) == 0
    said = capsys.readouterr().out
    assert "no worker runs here from which it could be tried" in said
    assert "was not tried" not in said


async def test_rights_are_asked_as_the_server_wants_them(server: FakeApi) -> None:
    asked: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        asked.append(body["spec"]["resourceAttributes"])
        return {"status": {"allowed": body["spec"]["resourceAttributes"]["verb"] != "create"}}

    server.answers[REVIEWS] = answer
    found = await look_at(OpenCluster(server.api, "team", "s"))
    assert isinstance(found.denied, dict)
    assert {purpose for purpose, denied in found.denied.items() if denied} == {"run jobs"}
    assert {"verb": "get", "group": "", "resource": "pods", "subresource": "log", "namespace": "team"} in asked
    assert {"verb": "list", "group": "", "resource": "nodes"} in asked


async def test_who_may_not_read_the_crd_reads_what_is_published_of_it(server: FakeApi) -> None:
    schema = server.objects[CRD]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

    def refuse(verb: str, path: str) -> None:
        if path == CRD:
            raise ApiRefused(f"{verb} {path}", 403, "Forbidden", "no")

    server.before = refuse
    server.keep(SCHEMA, {"metadata": {}, "components": {"schemas": {JOB_KIND: schema}}})
    assert (await look_at(OpenCluster(server.api, "team", "s"))).schema == schema
    del server.objects[SCHEMA]
    assert (await look_at(OpenCluster(server.api, "team", "s"))).schema is None


def test_who_has_no_rights_learns_what_cannot_be_known(server: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(verb: str, path: str) -> None:
        if path != "/version":
            raise ApiRefused(f"{verb} {path}", 403, "Forbidden", "no")

    server.before = refuse
    assert main(["doctor", "-o", "json"]) == 0
    found = states(capsys)
    assert {found[name] for name in ("rights", "CRD", "operator", "memory tier")} == {"unknown"}


def test_a_server_that_is_silent_is_a_fault(server: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    server.before = silent
    assert main(["doctor"]) == 1
    assert "Is https://cluster:6443 running" in capsys.readouterr().out


def test_without_a_cluster_the_rest_is_still_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "no cluster is configured" in said
    assert "surefoot local needs no cluster" in said
    assert main(["doctor", "--kubeconfig", str(tmp_path / "none")]) == 2


def test_a_named_tier_is_probed_and_its_fault_is_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def probed(tier: Any) -> Finding:
        asked.append(tier.uri)
        return Finding("persistent tier", "fault", "refused", "give rights")

    monkeypatch.setattr(doctor, "probed", probed)
    assert main(["doctor", "--no-cluster", str(tmp_path)]) == 1
    assert asked == [tmp_path.as_uri()]
    assert main(["doctor", "--no-cluster", "-f", str(ROOT / "examples" / "gpt.yaml")]) == 0
    assert "every holder loses is lost" in capsys.readouterr().out
    assert main(["doctor", "--no-cluster", "nowhere/at/all"]) == 2
    assert main(["doctor", str(tmp_path), "-f", "x.yaml"]) == 2
    assert main(["doctor", "--no-cluster", "--network"]) == 2
