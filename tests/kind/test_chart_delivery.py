"""The chart as others install charts: packaged, from an OCI registry, through a mirror, on pools of nodes; and gone again."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from chart import helm
from cluster import binaries
from cluster.engine import Engine
from cluster.processes import wait
from kind import registries, stand_ins
from kind.release import NAMESPACE, SECONDS, SMALL, Object, Release

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MIRROR = "mirror.example"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainingjobs.surefoot.dev"
MONITORED: Object = {
    "serviceMonitor": {"enabled": True},
    "podMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True},
    "dashboards": {"enabled": True},
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart as a file, as `helm package` makes it."""
    folder = tmp_path_factory.mktemp("package")
    helm.helm("package", str(helm.CHART), "--destination", str(folder))
    [found] = folder.glob("surefoot-*.tgz")
    return found


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of charts, open to all on this machine; its address."""
    with registries.serving(tmp_path_factory.mktemp("registry")) as port:
        yield f"127.0.0.1:{port}"


def test_the_packaged_chart_is_installed_where_only_restricted_pods_may_run(release: Release, package: Path) -> None:
    release.up(str(package), SMALL)
    assert "Succeeded" in release.test()
    assert len(release.ready("memory-tier")) == len(release.facts.node_names)
    assert len(release.ready("operator")) == 2


def test_the_same_chart_comes_from_an_oci_registry(release: Release, package: Path, registry: str) -> None:
    helm.helm("push", str(package), f"oci://{registry}/charts", "--plain-http")
    version = package.stem.removeprefix("surefoot-")
    before = {pod["metadata"]["uid"] for pod in release.pods("operator")}
    release.up(f"oci://{registry}/charts/surefoot", SMALL, "--version", version, "--plain-http")
    assert "Succeeded" in release.test()
    assert {pod["metadata"]["uid"] for pod in release.pods("operator")} == before, "it is the same chart"


@pytest.fixture
def pools(release: Release) -> Iterator[None]:
    """One node for the system, two for training, one of which is tainted as nodes with GPUs are."""
    system, plain, tainted = release.facts.node_names
    release.kubectl("label", "node", system, "pool=system")
    release.kubectl("label", "node", plain, tainted, "pool=training")
    release.kubectl("taint", "node", tainted, "nvidia.com/gpu=present:NoSchedule")
    release.kubectl("create", "priorityclass", "surefoot-test", "--value=1000")
    yield
    release.kubectl("label", "node", system, plain, tainted, "pool-")
    release.kubectl("taint", "node", tainted, "nvidia.com/gpu-")
    release.kubectl("delete", "priorityclass", "surefoot-test")


def _mirrored(release: Release) -> None:
    """As if nodes had pulled from the mirror."""
    names = {"surefoot/operator:0.1.0": "docker.io/surefoot/operator:0.1.0"}
    redis = stand_ins.redis_name()
    names[redis] = f"docker.io/library/{redis}"
    for node in release.facts.node_names:
        for name, there in names.items():
            tag = ["ctr", "--namespace", "k8s.io", "images", "tag", "--force", there, f"{MIRROR}/{name}"]
            subprocess.run(["docker", "exec", node, *tag], check=True, capture_output=True, timeout=60)


def test_pods_come_through_a_mirror_to_the_nodes_that_are_theirs(release: Release, package: Path, pools: None) -> None:
    _mirrored(release)
    zone = {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"}
    values = {
        "imageRegistry": MIRROR,
        "imagePullSecrets": ["of-the-mirror"],
        "operator": {
            "nodeSelector": {"pool": "system"},
            "priorityClassName": "surefoot-test",
            "topologySpreadConstraints": [zone],
        },
        "memoryTier": {
            **SMALL["memoryTier"],
            "nodeSelector": {"pool": "training"},
            "priorityClassName": "surefoot-test",
        },
    }
    system, *training = release.facts.node_names
    release.up(str(package), values)

    def moved() -> bool:
        operators, holders = release.ready("operator"), release.ready("memory-tier")
        nodes = sorted(pod["spec"]["nodeName"] for pod in holders)
        images = {c["image"] for pod in [*operators, *holders] for c in pod["spec"]["containers"]}
        return (
            {pod["spec"]["nodeName"] for pod in operators} == {system}
            and nodes == sorted(training)
            and all(image.startswith(f"{MIRROR}/") for image in images)
            and {pod["spec"]["priority"] for pod in [*operators, *holders]} == {1000}
        )

    assert wait(moved, SECONDS), release.kubectl("get", "pods", "--namespace", NAMESPACE, "--output=wide")


def test_monitors_and_rules_are_what_the_prometheus_operator_knows(release: Release, package: Path) -> None:
    crds = [str(path) for path in binaries.prometheus_crds()]
    for path in crds:
        release.kubectl("apply", "--server-side", "--filename", path)
    try:
        release.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
        release.up(str(package), {**SMALL, "metrics": MONITORED})
        kinds = "servicemonitors,podmonitors,prometheusrules"
        made = release.kubectl("get", kinds, "--namespace", NAMESPACE, "--output=name").split()
        assert len([one for one in made if one.startswith("servicemonitor")]) == 2
        assert len([one for one in made if one.startswith("podmonitor")]) == 1
        assert len([one for one in made if one.startswith("prometheusrule")]) == 1
        release.up(str(package), SMALL)
    finally:
        for path in crds:
            release.kubectl("delete", "--filename", path, "--ignore-not-found")


def test_a_bad_upgrade_is_rolled_back(release: Release, package: Path) -> None:
    """Pods that cannot start never replace those that run: the old ones lead on until the way back."""
    release.up(str(package), SMALL)
    before = {pod["metadata"]["uid"] for pod in release.ready("operator")}
    told = ["--reset-then-reuse-values", "--set", "operator.image.tag=no-such", "--wait", "--timeout", "20s"]
    with pytest.raises(helm.HelmRefused):
        release.helm("upgrade", helm.RELEASE, str(package), *told)
    assert before <= {pod["metadata"]["uid"] for pod in release.ready("operator")}
    release.helm("rollback", helm.RELEASE, "--wait", "--timeout", f"{SECONDS:.0f}s")
    assert wait(lambda: {pod["metadata"]["uid"] for pod in release.pods("operator")} == before, SECONDS)
    assert "Succeeded" in release.test()


def test_uninstalled_as_it_is_written_nothing_is_left(engine: Engine, release: Release, package: Path) -> None:
    release.up(str(package), SMALL)
    release.kubectl("delete", "trainingjobs", "--all", "--all-namespaces")
    release.helm("uninstall", helm.RELEASE, "--wait")
    release.kubectl("delete", "namespace", NAMESPACE, "--timeout=120s")
    release.kubectl("delete", "crd", "trainingjobs.surefoot.dev", "--timeout=60s")
    kinds = "clusterroles,clusterrolebindings,crds,namespaces,priorityclasses"
    names = release.kubectl("get", kinds, "--output=name").split()
    assert [name for name in names if "surefoot" in name and "surefoot-network" not in name] == []
    everywhere = release.kubectl(
        "get", "all,secrets,configmaps,leases,networkpolicies,roles,rolebindings", "--all-namespaces",
        "--selector=app.kubernetes.io/name=surefoot", "--output=name",
    )  # fmt: skip
    assert everywhere == ""
    release.make_namespace(NAMESPACE)
