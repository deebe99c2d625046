"""The kind cluster that stands, with the images of the chart on its workers. Brought up by `make test-kind` alone."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from chart import helm
from cluster import engines, kind, state
from cluster.api import Api
from cluster.engine import Engine
from cluster.processes import wait
from cluster.scenarios import rows
from images.docker import Docker
from kind import loading, stand_ins
from kind.release import NAMESPACE, SECONDS, Release


@pytest.fixture(scope="session")
def engine() -> Engine:
    found = state.load()
    if found is None or found.engine != kind.NAME:
        pytest.skip("these run on kind: `make test-kind`")
    return engines.choose()


@pytest.fixture(scope="session")
def loaded(engine: Engine) -> None:
    """Operator and Redis on every worker, under the names that the chart has for them."""
    docker = Docker("docker")
    version = helm.objects()[0]["metadata"]["labels"]["app.kubernetes.io/version"]
    for image in (f"surefoot/operator:{version}", stand_ins.redis(docker, print)):
        loading.load(docker, image, engine.facts().node_names)
    for node in engine.facts().node_names:
        loading.forget_pulls(docker, node)


@pytest.fixture(scope="module")
def release(engine: Engine, loaded: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    """Not installed yet; nothing of it is left afterwards."""
    api = Api(engine.facts().kubeconfig)
    found = Release(engine.facts(), tmp_path_factory.mktemp("release"))
    path = f"/api/v1/namespaces/{NAMESPACE}"
    try:
        found.helm("uninstall", helm.RELEASE, "--ignore-not-found", "--wait")
        if api.answers(path):  # left by a run that was killed
            api.call("DELETE", path)
            assert wait(lambda: not api.answers(path), SECONDS)
        found.make_namespace(NAMESPACE)
        yield found
    finally:
        found.helm("uninstall", helm.RELEASE, "--ignore-not-found", "--wait")
        if api.answers(path):
            api.call("DELETE", path)
            assert wait(lambda: not api.answers(path), SECONDS)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Each test here is a row of build/kind.json: how it ended, and its seconds."""
    path, _, name = report.nodeid.partition("::")
    if Path(path).parent != Path("tests/kind") or (report.when != "call" and report.passed):
        return
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    row = {"outcome": report.outcome, "seconds": round(report.duration, 1), "at": at}
    rows.update("tests", f"{Path(path).stem}.{name}", row, rows.REPORTS[kind.NAME])
