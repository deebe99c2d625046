"""The cluster tool itself: what it brings up works, every verb does what it says, and `down` leaves nothing.

Minutes, root (or docker), and a machine to itself; skipped where a cluster stands already, which is somebody's.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from cluster import engines, layout, pods, remains, state, use
from cluster.api import Api
from cluster.engine import Engine
from cluster.kind import NAME as KIND
from cluster.processes import run, wait

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PODS = "/api/v1/namespaces/default/pods"
PYTHON = str(Path(sys.prefix) / "bin" / "python")
SERVE = """
import socket
server = socket.create_server(("", 8080))
while True:
    peer, _ = server.accept()
    peer.sendall(socket.gethostname().encode())
    peer.close()
"""
ASK = "import socket, sys; print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 2).recv(99).decode())"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """A cluster that is brought up over what a killed `up` left, and is taken down at the end."""
    if use.stands():
        pytest.skip("a cluster stands on this machine; take it down first")
    if use.why_none():
        pytest.skip(use.why_none())
    with use.held(alone=True):
        chosen = engines.choose()
        _kill_an_up_in_the_middle()
        try:
            chosen.up(3)
            yield chosen
        finally:
            chosen.down()
        assert remains.left() == []


def _kill_an_up_in_the_middle() -> None:
    command = [sys.executable, "-m", "cluster", "up"]
    environment = {**os.environ, "PYTHONPATH": str(layout.PROJECT / "tests")}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    def is_half_way() -> bool:
        found = state.load()
        return process.poll() is not None or (found is not None and "node-2" in found.processes)

    assert wait(is_half_way, 500.0), "`python -m cluster build` comes first: it takes minutes"
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def api(engine: Engine) -> Api:
    return Api(engine.facts().kubeconfig)


@pytest.fixture(scope="module")
def servers(engine: Engine, api: Api) -> list[str]:
    """One pod on each node, behind a Service."""
    names = []
    for node in engine.facts().node_names:
        names.append(f"serve-{node}")
        _run_server(engine, api, node)
    ports = [{"port": 80, "targetPort": 8080}]
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "all"}}
    api.create(
        "/api/v1/namespaces/default/services", {**service, "spec": {"selector": {"role": "serve"}, "ports": ports}}
    )
    return names


def _run_server(engine: Engine, api: Api, node: str) -> None:
    body = pods.host_pod(f"serve-{node}", [PYTHON, "-c", SERVE], node, engine.facts().host_prefix)
    body["metadata"]["labels"]["role"] = "serve"
    body["spec"]["containers"][0]["readinessProbe"] = {"tcpSocket": {"port": 8080}, "periodSeconds": 1}
    api.create(PODS, body)
    assert wait(lambda: _pod(api, f"serve-{node}")["phase"] == "Running", 60.0), _pod(api, f"serve-{node}")


def _pod(api: Api, name: str) -> dict[str, Any]:
    status = api.call("GET", f"{PODS}/{name}")["status"]
    assert isinstance(status, dict)
    return status


def _exec(engine: Engine, pod: str, *command: str, check: bool = True) -> str:
    facts = engine.facts()
    kubectl = str(facts.programs[0] / "kubectl")
    return run(kubectl, f"--kubeconfig={facts.kubeconfig}", "exec", pod, "--", *command, check=check)


def _asks(engine: Engine, pod: str, name: str, port: int) -> str:
    return _exec(engine, pod, PYTHON, "-c", ASK, name, str(port), check=False).strip()


def test_every_node_is_ready_and_everything_runs(engine: Engine) -> None:
    assert engine.status().is_well


def test_its_environment_leads_kubectl_to_it(engine: Engine) -> None:
    """As docs/cluster.md has it."""
    words = f'eval "$({shlex.quote(sys.executable)} -m cluster env)" && kubectl get nodes --output name'
    environment = {**os.environ, "PYTHONPATH": str(layout.PROJECT / "tests")}
    said = subprocess.run(["sh", "-c", words], env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert sorted(said.stdout.split()) == sorted(f"node/{name}" for name in engine.facts().node_names)


def test_a_pod_imports_torch_from_the_hosts_folders(engine: Engine, api: Api) -> None:
    say = "import torch; print(int(torch.ones(3).sum()))"
    api.create(PODS, pods.host_pod("torch", [PYTHON, "-c", say], host_prefix=engine.facts().host_prefix))
    assert wait(lambda: _pod(api, "torch")["phase"] in ("Succeeded", "Failed"), 120.0)
    assert api.call("GET", f"{PODS}/torch/log").strip() == "3"


def test_a_service_name_resolves_and_reaches_every_node(engine: Engine, servers: list[str]) -> None:
    heard: set[str] = set()

    def all_heard() -> bool:
        heard.add(_asks(engine, servers[0], "all.default.svc.cluster.local", 80))
        return heard >= set(servers)

    assert wait(all_heard, 60.0), heard


def test_a_partitioned_node_is_silent_until_it_is_healed(engine: Engine, api: Api, servers: list[str]) -> None:
    node, address = engine.facts().node_names[1], _pod(api, servers[1])["podIP"]
    engine.partition(node)
    assert _asks(engine, servers[0], address, 8080) == ""
    engine.heal(node)
    assert wait(lambda: _asks(engine, servers[0], address, 8080) == servers[1], 30.0)


def test_a_frozen_node_keeps_its_pods_and_says_nothing(engine: Engine, api: Api, servers: list[str]) -> None:
    node, address = engine.facts().node_names[1], _pod(api, servers[1])["podIP"]
    engine.freeze(node)
    assert _asks(engine, servers[0], address, 8080) == ""
    assert not engine.status().is_well
    engine.thaw(node)
    assert _asks(engine, servers[0], address, 8080) == servers[1]


def test_containers_outlive_their_kubelet(engine: Engine, api: Api, servers: list[str]) -> None:
    node, address = engine.facts().node_names[1], _pod(api, servers[1])["podIP"]
    engine.stop_kubelet(node)
    assert _asks(engine, servers[0], address, 8080) == servers[1]
    engine.return_node(node)
    assert engine.status().is_well


def test_a_killed_container_is_seen_to_have_failed(engine: Engine, api: Api, servers: list[str]) -> None:
    node = engine.facts().node_names[2]
    engine.kill_container("default", servers[2])
    assert wait(lambda: _pod(api, servers[2])["phase"] == "Failed", 30.0)
    state_of_it = _pod(api, servers[2])["containerStatuses"][0]["state"]
    assert state_of_it["terminated"]["exitCode"] == 128 + signal.SIGKILL
    api.call("DELETE", f"{PODS}/{servers[2]}")
    assert wait(lambda: _is_gone(api, servers[2]), 30.0)
    _run_server(engine, api, node)


@pytest.mark.parametrize("silently", [False, True])
def test_a_crashed_node_returns_without_its_pods(engine: Engine, api: Api, servers: list[str], silently: bool) -> None:
    node, address = engine.facts().node_names[1], _pod(api, servers[1])["podIP"]
    engine.crash(node, silently=silently)
    assert not next(one for one in engine.status().nodes if one.name == node).is_running
    assert _asks(engine, servers[0], address, 8080) == ""
    engine.return_node(node)
    assert wait(lambda: _pod(api, servers[1])["phase"] == "Failed", 60.0)
    api.call("DELETE", f"{PODS}/{servers[1]}")
    assert wait(lambda: _is_gone(api, servers[1]), 60.0)
    _run_server(engine, api, node)
    assert engine.status().is_well


def _is_gone(api: Api, pod: str) -> bool:
    try:
        api.call("GET", f"{PODS}/{pod}")
    except HTTPError as error:
        return error.code == 404
    return False


def test_up_repairs_what_is_hurt_and_keeps_what_is_well(engine: Engine, api: Api, servers: list[str]) -> None:
    names = engine.facts().node_names
    before = _pod(api, servers[0])["podIP"]
    engine.kill_daemon("kube-apiserver")
    engine.kill_daemon("s3")
    engine.freeze(names[1])
    engine.partition(names[2])
    engine.up(3)
    assert engine.status().is_well
    assert _pod(api, servers[0])["podIP"] == before
    assert _asks(engine, servers[0], "all.default.svc.cluster.local", 80) in servers


def test_down_takes_a_hurt_cluster_away_whole(engine: Engine) -> None:
    if engine.status().engine == KIND:
        pytest.skip("kind takes its containers away itself")
    names = engine.facts().node_names
    engine.freeze(names[0])
    engine.partition(names[1])
    engine.crash(names[2])
    engine.down()
    assert remains.left() == []
