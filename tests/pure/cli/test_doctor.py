"""The doctor asks with a person's own rights, judges by what is kept from working, and says what it could not learn."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.fakes.fake_api import FakeApi, silent
from surefoot import __version__
from surefoot_operator.cli import doctor
from surefoot_operator.cli.cluster_access import ClusterConnection
from surefoot_operator.cli.doctor import (
    CRD,
    JOB_KIND,
    REVIEWS,
    SCHEMA,
    SLICES,
    check_cluster,
    missing_fields,
    required_permissions,
)
from surefoot_operator.cli.doctor_network import Finding, finding_lines, has_fault
from surefoot_operator.cli.jobs import read_jobs
from surefoot_operator.cli.main import main
from surefoot_operator.platforms.kubernetes.api_objects import ApiError

ROOT = Path(__file__).parents[3]
SHIPPED_CRD: dict[str, Any] = yaml.safe_load((ROOT / "manifests" / "crd.yaml").read_text())
DEPLOYMENTS, DAEMONSETS = "/apis/apps/v1/deployments", "/apis/apps/v1/daemonsets"
Object = dict[str, Any]


def named(name: str, labels: Object | None = None, **rest: Any) -> Object:
    return {"metadata": {"name": name, "namespace": "surefoot", "labels": labels or {}}, **rest}


def deployment(ready: int = 2, version: str = __version__, name: str = "surefoot-operator") -> Object:
    labels = {"app.kubernetes.io/version": version}
    return named(name, labels, spec={"replicas": 2}, status={"readyReplicas": ready} if ready else {})


def holders(ready: int = 3, wanted: int = 3) -> Object:
    return named("surefoot-memory", status={"desiredNumberScheduled": wanted, "numberReady": ready})


def endpoints(ready: bool | None = True, service: str = "surefoot-coordinator") -> Object:
    conditions = {} if ready is None else {"ready": ready}
    found = [{"addresses": ["10.0.0.9"], "conditions": conditions}]
    return named(service, {"kubernetes.io/service-name": service}, endpoints=found)


def kept(path: str, *objects: Object) -> Callable[[FakeApi], None]:
    """These objects alone are below that path."""

    def change(server: FakeApi) -> None:
        server.objects = {name: body for name, body in server.objects.items() if not name.startswith(f"{path}/")}
        for body in objects:
            server.keep(f"{path}/{body['metadata']['name']}", body)

    return change


def version(**numbers: str) -> Callable[[FakeApi], None]:
    return lambda server: server.objects.update({"/version": {"metadata": {}, **numbers}})


def refusing(part: str, code: int = 403) -> Callable[[FakeApi], None]:
    def change(server: FakeApi) -> None:
        def before(verb: str, path: str) -> None:
            if part in path:
                raise ApiError(f"{verb} {path}", code, "Forbidden", "no")

        server.before = before

    return change


def denying(verb: str, resource: str) -> Callable[[FakeApi], None]:
    def answer(body: Object) -> Object:
        asked = body["spec"]["resourceAttributes"]
        return {"status": {"allowed": (asked["verb"], asked["resource"]) != (verb, resource)}}

    return lambda server: server.answers.update({REVIEWS: answer})


def lacking_spares(server: FakeApi) -> None:
    del schema_of(server)["properties"]["spec"]["properties"]["spares"]


def schema_of(server: FakeApi) -> Object:
    found: Object = server.objects[CRD]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    """A whole installation."""
    found = FakeApi()
    version(major="1", minor="35+", gitVersion="v1.35.4")(found)
    found.keep(CRD, SHIPPED_CRD)
    for path, body in ((DEPLOYMENTS, deployment()), (DAEMONSETS, holders()), (SLICES, endpoints())):
        kept(path, body)(found)
    found.answers[REVIEWS] = lambda body: {"status": {"allowed": True}}

    @asynccontextmanager
    async def opened(_choice: Any) -> AsyncIterator[ClusterConnection]:
        yield ClusterConnection(found.api, "team", "https://cluster:6443")

    monkeypatch.setattr(read_jobs, "open_cluster", opened)
    return found


async def findings(server: FakeApi) -> dict[str, Finding]:
    return {one.check: one for one in await check_cluster(ClusterConnection(server.api, "team", "https://c:6443"))}


async def test_a_whole_installation_is_well(server: FakeApi) -> None:
    found = await findings(server)
    assert {one.state for one in found.values()} == {"ok"}
    assert "v1.35.4" in found["cluster"].text


@pytest.mark.parametrize(
    ("change", "check", "state", "said"),
    [
        (version(major="1", minor="28"), "cluster", "fault", "unknown version"),
        (refusing("/version"), "cluster", "unknown", "did not return its version"),
        (version(), "cluster", "ok", "unknown version"),
        (refusing(CRD, 404), "CRD", "fault", "not installed"),
        (refusing("trainingjobs", 404), "CRD", "fault", "not installed"),
        (lacking_spares, "CRD", "warning", "lacks spec.spares"),
        (kept(DEPLOYMENTS), "operator", "fault", "no Deployment"),
        (refusing(DEPLOYMENTS), "operator", "unknown", "you may not list"),
        (kept(DEPLOYMENTS, deployment(0)), "operator", "fault", "0 of 2 ready"),
        (kept(DEPLOYMENTS, deployment(1)), "operator", "warning", "1 of 2 ready"),
        (kept(DEPLOYMENTS, deployment(version="0.0.9")), "operator", "warning", "0.0.9"),
        (kept(DEPLOYMENTS, deployment(), deployment(name="b")), "operator", "warning", "2 operators"),
        (kept(SLICES), "leader", "fault", "no operator leads"),
        (
            kept(SLICES, endpoints(False), {**endpoints(service="c"), "endpoints": None}),
            "leader",
            "fault",
            "has no endpoint",
        ),
        (kept(SLICES, endpoints(None)), "leader", "ok", "10.0.0.9 of surefoot"),
        (kept(SLICES, endpoints(), endpoints(service="c-1")), "leader", "ok", "10.0.0.9 of surefoot"),
        (kept(SLICES, endpoints(), endpoints(False, "c-1")), "leader", "fault", "ask Service c-1"),
        (refusing(SLICES), "leader", "unknown", "you may not"),
        (kept(DAEMONSETS), "memory tier", "warning", "no DaemonSet"),
        (kept(DAEMONSETS, holders(0)), "memory tier", "fault", "0 of 3"),
        (kept(DAEMONSETS, holders(2)), "memory tier", "warning", "2 of 3"),
        (kept(DAEMONSETS, holders(0, 0)), "memory tier", "fault", "no node is chosen"),
        (refusing(DAEMONSETS), "memory tier", "unknown", "you may not"),
        (denying("list", "trainingjobs"), "see jobs", "fault", "list trainingjobs"),
        (denying("create", "trainingjobs"), "run jobs", "warning", "suspend"),
        (denying("list", "nodes"), "see nodes", "warning", "list nodes"),
        (denying("get", "pods"), "see workers", "warning", "get pods/log"),
    ],
)
async def test_one_thing_amiss_is_one_finding(
    server: FakeApi, change: Callable[[FakeApi], None], check: str, state: str, said: str
) -> None:
    change(server)
    found = await findings(server)
    assert found[check].state == state
    assert said in found[check].text
    assert found[check].remedy or state in ("ok", "unknown")
    assert {one.state for name, one in found.items() if name != check} == {"ok"}


def states(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    return {one["check"]: one["state"] for one in json.loads(capsys.readouterr().out)}


def test_a_whole_installation_ends_with_zero(server: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "-o", "json"]) == 0
    found = states(capsys)
    assert (found.pop("persistent tier"), found.pop("network")) == ("unknown", "unknown")
    cluster = (
        "cluster",
        "leader",
        "see jobs",
        "run jobs",
        "see workers",
        "see nodes",
        "CRD",
        "operator",
        "memory tier",
    )
    assert {found[name] for name in cluster} == {"ok"}


def test_the_network_is_tried_where_it_is_asked_for(server: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--network"]) == 0
    said = capsys.readouterr().out
    assert "no worker runs here from which it could be tried" in said
    assert "was not tried" not in said


async def test_rights_are_asked_as_the_server_wants_them(server: FakeApi) -> None:
    asked: list[Object] = []

    def answer(body: Object) -> Object:
        asked.append(body["spec"]["resourceAttributes"])
        return {"status": {"allowed": True}}

    server.answers[REVIEWS] = answer
    await findings(server)
    assert {"verb": "get", "group": "", "resource": "pods", "subresource": "log", "namespace": "team"} in asked
    assert {"verb": "list", "group": "", "resource": "nodes"} in asked


async def test_who_may_not_read_the_crd_reads_what_is_published_of_it(server: FakeApi) -> None:
    published = {"metadata": {}, "components": {"schemas": {JOB_KIND: schema_of(server)}}}
    refusing(CRD)(server)
    assert (await findings(server))["CRD"].state == "fault"  # nothing is published of it
    server.keep(SCHEMA, published)
    assert (await findings(server))["CRD"].state == "ok"
    refusing("trainingjobs.surefoot.dev")(server)
    server.keep(SCHEMA, {"metadata": {}})
    assert (await findings(server))["CRD"].state == "warning"


def test_the_shipped_crd_lacks_nothing(server: FakeApi) -> None:
    assert missing_fields(schema_of(server)) == []
    assert "status.schemaVersion" in missing_fields({})
    assert "spec.template" in missing_fields({"properties": {"spec": None}})


def test_every_right_has_its_namespace_or_none_on_purpose() -> None:
    here = {
        right.namespace for one in required_permissions("team") for right in one.rights if one.purpose != "see nodes"
    }
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


def test_who_has_no_rights_learns_what_cannot_be_known(server: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    refusing("api")(server)  # everything but the version
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
    assert "every memory server loses is lost" in capsys.readouterr().out
    assert main(["doctor", "--no-cluster", "nowhere/at/all"]) == 2
    assert main(["doctor", str(tmp_path), "-f", "x.yaml"]) == 2
    assert main(["doctor", "--no-cluster", "--network"]) == 2
