"""Policies where a network enforces them: strangers reach neither Redis, coordinator nor metrics, and who is let in does."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from chart import helm
from cluster import pods
from images.docker import Docker
from kind import enforcing
from kind.release import NAMESPACE, SECONDS, SMALL, Object, Release

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STRANGERS, MONITORING = "surefoot-strangers", "surefoot-monitoring"
ANSWER_SECONDS = 2
PATIENCE_SECONDS = 20
"""A network takes a moment to hear of a pod, and may let nobody pass before: each door is tried again for so long."""
SETTLE_SECONDS = 60.0
ASK = """
import socket, sys, time
closed, deadline = set(sys.argv[1:]), time.monotonic() + {patience}
while closed and time.monotonic() < deadline:
    for target in sorted(closed):
        host, port = target.rsplit(":", 1)
        try:
            socket.create_connection((host, int(port)), {seconds}).close()
            closed.discard(target)
        except OSError:
            time.sleep(0.2)
for target in sys.argv[1:]:
    print(target, "refused" if target in closed else "reached")
"""
WORKER = {"surefoot.dev/part": "worker"}
_numbers = itertools.count()


@dataclass(frozen=True)
class Doors:
    """Addresses of pods, as HOST:PORT."""

    redis: str
    coordinator: str
    operator_metrics: str
    memory_metrics: str

    def all(self) -> list[str]:
        return [self.redis, self.coordinator, self.operator_metrics, self.memory_metrics]


def ask(release: Release, namespace: str, labels: dict[str, str], targets: list[str]) -> list[bool]:
    """Whether a pod with these labels reaches each."""
    name = f"asks-{next(_numbers)}"
    command = ["/usr/bin/python3", "-c", ASK.format(seconds=ANSWER_SECONDS, patience=PATIENCE_SECONDS), *targets]
    pod: Object = pods.host_pod(name, command, host_prefix=release.facts.host_prefix)
    pod["metadata"]["labels"] = labels
    path = f"/api/v1/namespaces/{namespace}/pods"
    release.api.call("POST", path, pod)
    try:
        release.kubectl(
            "wait", f"pod/{name}", "--namespace", namespace, "--for=jsonpath={.status.phase}=Succeeded",
            f"--timeout={SECONDS:.0f}s",
        )  # fmt: skip
        said = dict(line.split() for line in str(release.api.call("GET", f"{path}/{name}/log")).splitlines())
    finally:
        release.api.call("DELETE", f"{path}/{name}?gracePeriodSeconds=0")
    return [said[target] == "reached" for target in targets]


@pytest.fixture(scope="module")
def doors(release: Release) -> Iterator[Doors]:
    """The chart's, on a network that enforces policies: else skipped, with what to do about it."""
    for namespace in (STRANGERS, MONITORING):
        release.make_namespace(namespace, enforce="privileged")
    try:
        enforcing.start(Docker("docker"), release.facts.node_names)
        scrapers = [{"namespaceSelector": {"matchLabels": {"name": MONITORING}}}]
        release.up(str(helm.CHART), {**SMALL, "networkPolicy": {"metricsFrom": scrapers}})
        found = _doors(release)
        _require_enforcement(release, found)
        yield found
    finally:
        for namespace in (STRANGERS, MONITORING):
            release.kubectl("delete", "namespace", namespace, "--ignore-not-found", "--timeout=120s")


def _doors(release: Release) -> Doors:
    leader = next(
        pod for pod in release.ready("operator") if pod["metadata"]["labels"].get("surefoot.dev/leader") == "true"
    )
    operator, holder = leader["status"]["podIP"], release.ready("memory-tier")[0]
    [exported] = [
        port["containerPort"]
        for container in holder["spec"]["containers"]
        for port in container.get("ports", [])
        if port["name"] == "metrics"
    ]
    address = holder["status"]["podIP"]
    return Doors(f"{address}:6379", f"{operator}:8443", f"{operator}:8080", f"{address}:{exported}")


def _require_enforcement(release: Release, doors: Doors) -> None:
    """A policy of the test's own, far from the chart's: whoever enforces any enforces this one."""
    denied = {"podSelector": {}, "policyTypes": ["Egress"], "egress": []}
    body = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "nothing"},
        "spec": denied,
    }
    path = f"/apis/networking.k8s.io/v1/namespaces/{MONITORING}/networkpolicies"
    release.api.create(path, body)
    deadline = time.monotonic() + SETTLE_SECONDS
    try:
        while any(ask(release, MONITORING, {}, [doors.operator_metrics])):
            if time.monotonic() > deadline:
                pytest.skip(f"this network enforces no policy; {enforcing.VARIABLE} names a kube-router that does")
    finally:
        release.api.call("DELETE", f"{path}/nothing")


def test_a_strangers_pod_reaches_nothing(release: Release, doors: Doors) -> None:
    assert ask(release, STRANGERS, {}, doors.all()) == [False] * 4


def test_a_label_of_the_operators_pods_is_worth_nothing_elsewhere(release: Release, doors: Doors) -> None:
    """The operator is one in its own namespace alone."""
    assert ask(release, STRANGERS, {"surefoot.dev/part": "operator"}, doors.all()) == [False] * 4


def test_a_worker_reaches_redis_and_coordinator_and_no_metrics(release: Release, doors: Doors) -> None:
    assert ask(release, STRANGERS, WORKER, doors.all()) == [True, True, False, False]


def test_who_scrapes_reaches_metrics_alone(release: Release, doors: Doors) -> None:
    assert ask(release, MONITORING, {}, doors.all()) == [False, False, True, True]


def test_the_installation_itself_works_under_its_policies(release: Release, doors: Doors) -> None:
    assert "Succeeded" in release.test()
    assert NAMESPACE in release.helm("list", "--deployed")
