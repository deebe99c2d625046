"""The chart on a real API server: everything of it is accepted, its pods are restricted, it is installed, upgraded and removed.

Runs on the cluster that stands, or brings one of two nodes up and takes it down; skipped where none can be had. Installs
a release of its own, whose operator looks after no namespace but its own: another release beside it goes on.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart import helm
from chart.objects import Object, pods_of
from chart.test_rendering import EVERYTHING
from cluster.api import Api
from cluster.engine import Engine
from cluster.processes import wait
from cluster.values import values
from support.machine_speed import scaled
from support.servers.kubernetes_cluster import a_cluster
from surefoot_operator.api.parse import parse_job
from surefoot_operator.platforms.interface import WorkerEnvironment
from surefoot_operator.platforms.kubernetes import pods as worker_pods
from surefoot_operator.policy.core.actions import CreateWorker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RESTRICTED, OWN = "surefoot-restricted", "surefoot-chart"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CRD = f"{CRDS}/trainingjobs.surefoot.dev"
FOREIGN = "monitoring.coreos.com/v1"
"""Kinds of the Prometheus operator, which does not run here."""
SECONDS = scaled(90.0)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    yield from a_cluster(2)


@pytest.fixture(scope="module")
def api(engine: Engine) -> Api:
    return Api(engine.facts().kubeconfig)


def _namespace(api: Api, name: str, labels: dict[str, str]) -> Iterator[str]:
    path = f"/api/v1/namespaces/{name}"
    if api.answers(path):  # left by a run that was killed
        api.call("DELETE", path)
        assert wait(lambda: not api.answers(path), SECONDS)
    api.create(
        "/api/v1/namespaces",
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}},
    )
    accounts = f"{path}/serviceaccounts/default"
    assert wait(lambda: api.answers(accounts), SECONDS)
    try:
        yield name
    finally:
        api.call("DELETE", path)
        assert wait(lambda: not api.answers(path), SECONDS)


@pytest.fixture(scope="module")
def restricted(api: Api) -> Iterator[str]:
    """A namespace in which pods that are not restricted are refused."""
    yield from _namespace(api, RESTRICTED, {"pod-security.kubernetes.io/enforce": "restricted"})


@pytest.fixture(scope="module")
def own(api: Api) -> Iterator[str]:
    yield from _namespace(api, OWN, {})


@pytest.fixture(scope="module")
def kubeconfig(engine: Engine) -> str:
    return str(engine.facts().kubeconfig)


def kubectl(engine: Engine, *arguments: str, given: str | None = None) -> str:
    """Its output; what it refuses is an assertion with its words."""
    facts = engine.facts()
    command = [str(facts.programs[0] / "kubectl"), f"--kubeconfig={facts.kubeconfig}", *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr or done.stdout
    return done.stdout


def accepted(engine: Engine, objects: list[Object]) -> str:
    """The server's word on each, without making any of them; unknown fields are refused too."""
    asked = [_with_an_account_that_exists(one) if one["kind"] == "Pod" else one for one in objects]
    told = ("--server-side", "--dry-run=server", "--force-conflicts", "--validate=strict", "--filename=-")
    return kubectl(engine, "apply", *told, given=yaml.safe_dump_all(asked))


def _with_an_account_that_exists(pod: Object) -> Object:
    return {**pod, "spec": {**pod["spec"], "serviceAccountName": "default"}}


# ---- what the server accepts ---------------------------------------------------------------------------------------


def test_every_pod_is_restricted(api: Api, restricted: str) -> None:
    pods = pods_of(helm.objects({}, helm.RELEASE, restricted), restricted)
    assert {pod["metadata"]["name"] for pod in pods} == {
        "deployment-surefoot-operator",
        "daemonset-surefoot-memory",
        "pod-surefoot-test",
    }
    for pod in pods:
        made = api.call("POST", f"/api/v1/namespaces/{restricted}/pods?dryRun=All&fieldValidation=Strict", pod)
        assert made["metadata"]["name"] == pod["metadata"]["name"]


def test_a_worker_is_restricted_where_its_template_is(api: Api, restricted: str) -> None:
    """What the operator adds to a template takes nothing of that away."""
    example = yaml.safe_load((helm.PROJECT / "examples" / "cluster" / "elastic.yaml").read_text(encoding="utf-8"))
    example["metadata"] |= {"namespace": restricted, "uid": "0a1b"}
    environment = WorkerEnvironment({"SUREFOOT_JOB_UID": "0a1b"}, {"SUREFOOT_MEMORY_PASSWORD": "secret"})
    pod = worker_pods.build_pod(parse_job(example), CreateWorker(0, 1), environment, worker_pods.PodSettings())
    pod["spec"]["serviceAccountName"] = "default"
    api.call("POST", f"/api/v1/namespaces/{restricted}/pods?dryRun=All&fieldValidation=Strict", pod)


def test_a_pod_that_is_not_restricted_is_refused_there(api: Api, restricted: str) -> None:
    """Else the test above would prove nothing."""
    pod = pods_of(helm.objects({}, helm.RELEASE, restricted), restricted)[0]
    pod["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    with pytest.raises(OSError, match="403"):
        api.call("POST", f"/api/v1/namespaces/{restricted}/pods?dryRun=All", pod)


@pytest.mark.parametrize("given", [{}, EVERYTHING], ids=["default", "everything"])
def test_the_server_accepts_every_object(engine: Engine, restricted: str, given: Object) -> None:
    rendered = helm.objects(given, helm.RELEASE, restricted)
    known = [one for one in rendered if one["apiVersion"] != FOREIGN]
    assert len(accepted(engine, known).splitlines()) == len(known)


def test_the_server_accepts_the_manifests(engine: Engine, restricted: str) -> None:
    folder = helm.PROJECT / "manifests"
    install = (folder / "install.yaml").read_text(encoding="utf-8").replace(helm.NAMESPACE, restricted)
    objects = [*yaml.safe_load_all((folder / "crd.yaml").read_text(encoding="utf-8")), *yaml.safe_load_all(install)]
    assert len(accepted(engine, objects).splitlines()) == len(objects)


@pytest.mark.parametrize("name", ["minimal", "s3", "elastic"])
def test_the_server_accepts_the_examples(engine: Engine, installed: Release, name: str) -> None:
    example = helm.PROJECT / "examples" / "cluster" / f"{name}.yaml"
    assert len(accepted(engine, [yaml.safe_load(example.read_text(encoding="utf-8"))]).splitlines()) == 1


# ---- installed -----------------------------------------------------------------------------------------------------


class Release:
    """A release in the namespace of this test."""

    def __init__(self, engine: Engine, api: Api, folder: Path) -> None:
        self.engine, self.api = engine, api
        self._file = folder / "values.json"
        self._where = ["--kubeconfig", str(engine.facts().kubeconfig), "--namespace", OWN]

    def up(self, changes: dict[str, Any]) -> None:
        given = {"crds": {"enabled": True}, "operator": {"watchNamespace": OWN}}
        self._file.write_text(json.dumps(values(self.engine.facts(), {**given, **changes})))
        told = ["--values", str(self._file), "--take-ownership", "--wait", "--timeout", f"{SECONDS:.0f}s"]
        helm.helm("upgrade", "--install", helm.RELEASE, str(helm.CHART), *told, *self._where)

    def test(self) -> str:
        return helm.helm("test", helm.RELEASE, "--timeout", f"{SECONDS:.0f}s", *self._where)

    def down(self) -> None:
        helm.helm("uninstall", helm.RELEASE, "--ignore-not-found", "--wait", *self._where)


@pytest.fixture(scope="module")
def installed(engine: Engine, api: Api, own: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    release = Release(engine, api, tmp_path_factory.mktemp("release"))
    try:
        release.up({})
        yield release
    finally:
        release.down()


def pods(api: Api, part: str) -> dict[str, str]:
    """Pods of that part that are not on their way out: name → uid."""
    items = api.call("GET", f"/api/v1/namespaces/{OWN}/pods?labelSelector=surefoot.dev/part%3D{part}")["items"]
    kept = [pod["metadata"] for pod in items if "deletionTimestamp" not in pod["metadata"]]
    return {one["name"]: one["uid"] for one in kept}


def test_the_installed_chart_passes_its_own_test(installed: Release) -> None:
    assert "Succeeded" in installed.test()


def test_the_coordinators_service_leads_to_one_pod(api: Api, installed: Release) -> None:
    def addresses() -> int:
        path = f"/apis/discovery.k8s.io/v1/namespaces/{OWN}/endpointslices"
        slices = api.call("GET", f"{path}?labelSelector=kubernetes.io/service-name%3Dsurefoot-coordinator")["items"]
        return sum(len(one["endpoints"] or []) for one in slices)

    assert wait(lambda: addresses() == 1, SECONDS)


OPERATOR = f"system:serviceaccount:{OWN}:surefoot-operator"


def _may(api: Api, verb: str, kind: str, namespace: str, user: str = OPERATOR) -> bool:
    """Whether the operator's account, or another user, may. `kind`: resource[.group][/name]; a name that is `:x` is a subresource."""
    resource, _, name = kind.partition("/")
    plain, _, group = resource.partition(".")
    about = {"verb": verb, "resource": plain, "group": group, "namespace": namespace}
    about |= {"subresource": name[1:]} if name.startswith(":") else {"name": name}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "resourceAttributes": about},
    }
    answer = api.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(answer["status"]["allowed"])


def test_the_operator_may_do_what_it_does_and_no_more(api: Api, installed: Release) -> None:
    allowed = [
        ("watch", "trainingjobs.surefoot.dev", "default"),
        ("patch", "trainingjobs.surefoot.dev/:status", "default"),
        ("create", "pods", "default"),
        ("delete", "pods", "default"),
        ("create", "tokenreviews.authentication.k8s.io", ""),
        ("update", "leases.coordination.k8s.io/surefoot-operator", OWN),
        ("get", "secrets/surefoot-keys", OWN),
        ("watch", "leases.coordination.k8s.io", "kube-node-lease"),
        ("create", "leases.coordination.k8s.io", "kube-node-lease"),
        ("update", "leases.coordination.k8s.io/surefoot-operators", "kube-node-lease"),
    ]
    refused = [
        ("list", "secrets", "default"),
        ("get", "leases.coordination.k8s.io", "default"),
        ("update", "leases.coordination.k8s.io/other", OWN),
        ("patch", "pods", "default"),
        ("delete", "nodes", ""),
        ("create", "pods/:exec", "default"),
        ("update", "leases.coordination.k8s.io", "kube-node-lease"),
        ("create", "clusterrolebindings.rbac.authorization.k8s.io", ""),
        ("create", "trainingjobs.surefoot.dev", "default"),
        ("get", "secrets", "default"),
        ("update", "secrets/somebodys", OWN),
    ]
    assert [one for one in allowed if not _may(api, *one)] == []
    assert [one for one in refused if _may(api, *one)] == []


def test_an_editor_of_a_namespace_makes_jobs_there_and_a_viewer_sees_them(api: Api, installed: Release) -> None:
    """By Kubernetes' own roles, which the controller manager adds ours to in its own time."""
    path = "/apis/rbac.authorization.k8s.io/v1/namespaces/default/rolebindings"
    roles = ("view", "edit", "admin")
    for role in roles:
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
        who = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": f"somebody-with-{role}"}
        body = {"metadata": {"name": f"surefoot-test-{role}"}, "roleRef": reference, "subjects": [who]}
        api.call("POST", path, {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", **body})
    try:

        def may(who: str, verb: str, kind: str) -> bool:
            return _may(api, verb, kind, "default", user=f"somebody-with-{who}")

        assert wait(lambda: may("edit", "create", "trainingjobs.surefoot.dev"), SECONDS)
        assert wait(lambda: may("view", "list", "trainingjobs.surefoot.dev"), SECONDS)
        assert wait(lambda: may("admin", "create", "trainingjobs.surefoot.dev"), SECONDS)
        for role in roles:
            assert may(role, "watch", "trainingjobs.surefoot.dev")
            assert may(role, "get", "trainingjobs.surefoot.dev/:status")
            assert not may(role, "patch", "trainingjobs.surefoot.dev/:status"), "the operator's alone"
        for role in ("edit", "admin"):
            assert may(role, "delete", "trainingjobs.surefoot.dev")
            assert may(role, "patch", "trainingjobs.surefoot.dev/:scale")
        for verb in ("create", "update", "patch", "delete"):
            assert not may("view", verb, "trainingjobs.surefoot.dev")
        assert not _may(api, "list", "trainingjobs.surefoot.dev", "default", user="somebody-with-nothing")
    finally:
        for role in roles:
            api.call("DELETE", f"{path}/surefoot-test-{role}")


def test_an_upgrade_replaces_the_operator_and_leaves_holders_to_it(api: Api, installed: Release) -> None:
    operators, holders = pods(api, "operator"), pods(api, "memory-tier")
    assert len(operators) == 2
    assert holders
    installed.up({"operator": {"watchNamespace": OWN, "podAnnotations": {"again": "1"}}})
    assert not pods(api, "operator").items() & operators.items()
    assert pods(api, "memory-tier") == holders, "its template did not change"
    assert "Succeeded" in installed.test()


def test_the_memory_tier_is_switched_to_tls_by_the_operator_alone(api: Api, installed: Release) -> None:
    """A new revision of the DaemonSet, which nobody but the operator rolls out."""
    holders = set(pods(api, "memory-tier").values())
    installed.up({"memoryTier": {"tls": {"enabled": True}}})

    def rolled() -> bool:
        uids = set(pods(api, "memory-tier").values())
        return len(uids) == len(holders) and not uids & holders

    assert wait(rolled, 3 * SECONDS), "there is no job: nothing speaks against replacing a holder"
    assert "Succeeded" in installed.test(), "a companion is ready when it reaches its Redis"


def test_the_server_refused_nothing_to_the_operator(api: Api, installed: Release) -> None:
    """Whatever it asked since it was installed: to lead, to make its Secrets, to roll holders out."""
    for name in pods(api, "operator"):
        log = str(api.call("GET", f"/api/v1/namespaces/{OWN}/pods/{name}/log"))
        assert log
        assert [line for line in log.splitlines() if "403" in line or "orbidden" in line] == []


def test_uninstalling_leaves_the_crd_and_what_the_operator_made(api: Api, installed: Release) -> None:
    installed.down()
    assert api.answers(CRD)
    assert pods(api, "operator") == {}
    left = {one["metadata"]["name"] for one in api.call("GET", f"/api/v1/namespaces/{OWN}/secrets")["items"]}
    made = {"surefoot-keys", "surefoot-memory-admin", "surefoot-coordinator-tls"}
    assert made <= left <= made | {"surefoot-memory-tls"}
    assert not api.answers(f"/apis/rbac.authorization.k8s.io/v1/clusterroles/surefoot-operator.{OWN}")
