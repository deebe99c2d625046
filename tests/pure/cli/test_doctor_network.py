"""Who asks whom, and what ways that fail mean for whoever can mend them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from support.builders import running
from support.fakes.fake_api import FakeApi
from support.stored import worker_pod, written
from surefoot_operator.cli.cluster_access import ClusterConnection
from surefoot_operator.cli.doctor_network import (
    MAX_TARGETS,
    Finding,
    ReachabilityResult,
    check_network,
    choose_probe_workers,
    network_findings,
)
from surefoot_operator.cli.jobs.read_jobs import stored_job
from surefoot_operator.platforms.kubernetes.api_client import ExecResult
from surefoot_operator.platforms.kubernetes.api_objects import ApiError

JOBS = "/apis/surefoot.dev/v1alpha1/namespaces/team/trainingjobs"
PODS = "/api/v1/namespaces/team/pods"


def pod(index: int, node: str, **status: Any) -> dict[str, Any]:
    found = worker_pod(index, node)
    ports = [{"name": "sf-metrics", "containerPort": 9464}]
    spec = {**found["spec"], "containers": [{"name": "trainer", "ports": ports}]}
    return {**found, "spec": spec, "status": {**found["status"], "podIP": f"10.0.0.{index}", **status}}


def way(
    kind: str, source: str = "n0", target: str = "n1", problem: str = "", step: str = "connect"
) -> ReachabilityResult:
    return ReachabilityResult(kind, target, "10.0.0.1", len(target), None if problem else 0.002, step, problem, source)


def one(*ways: ReachabilityResult) -> Finding:
    [found] = network_findings(ways, ())
    return found


def test_one_worker_of_each_node_asks_holders_and_the_workers_of_other_nodes() -> None:
    seen = running()
    job = stored_job(written(seen.status, seen))
    pods = [pod(0, "n0"), pod(1, "n1"), pod(2, "n1"), pod(3, "n2", phase="Pending"), worker_pod(4, None)]
    asked = choose_probe_workers(job, pods)
    assert [(asker.node, asker.pod) for asker in asked] == [("n0", "gpt-worker-0-1"), ("n1", "gpt-worker-1-1")]
    ways = [[(target["kind"], target["node"]) for target in asker.targets] for asker in asked]
    holders = [("memory-server", "n0"), ("memory-server", "n1"), ("memory-server", "n2")]
    assert ways == [[*holders, ("worker", "n1")], [*holders[1:], holders[0], ("worker", "n0")]]
    assert asked[0].targets[-1] == {"kind": "worker", "node": "n1", "host": "10.0.0.1", "port": 9464}


def test_of_many_nodes_each_is_asked_as_often() -> None:
    seen = running(workers=2)
    nodes = [f"n{number:03}" for number in range(3 * MAX_TARGETS)]
    asked = choose_probe_workers(stored_job(written(seen.status, seen)), [pod(i, node) for i, node in enumerate(nodes)])
    tried = [target["node"] for asker in asked for target in asker.targets if target["kind"] == "worker"]
    assert {tried.count(node) for node in nodes} == {MAX_TARGETS}


@pytest.mark.parametrize(
    ("ways", "check", "state", "said", "remedy"),
    [
        ([way("worker"), way("worker", "n1")], "between workers", "ok", "2 ways from 2 nodes", ""),
        ([way("coordinator", problem="timed out")], "to the operator", "fault", "n0 to n1", "port 8443"),
        ([way("coordinator", problem="no name", step="resolve")], "to the operator", "fault", "no name", "DNS"),
        ([way("coordinator", problem="bad", step="verify")], "to the operator", "fault", "bad", "authority"),
        ([way("worker", problem="timed out"), way("worker")], "between workers", "fault", "1 of 2", "any port"),
        (
            [way("memory-server", problem="timed out"), way("memory-server")],
            "to memory servers",
            "warning",
            "1 of 2",
            "port redis",
        ),
        (
            [way("memory-server", problem="timed out"), way("memory-server", "n1")],
            "to memory servers",
            "fault",
            "1 of 2",
            "port redis",
        ),
    ],
)
def test_ways_that_fail_are_one_finding_with_its_remedy(
    ways: list[ReachabilityResult], check: str, state: str, said: str, remedy: str
) -> None:
    found = one(*ways)
    assert (found.check, found.state) == (f"network {check}", state)
    assert said in found.text
    assert remedy in found.remedy


def test_a_node_behind_a_wall_is_one_sentence() -> None:
    ways = [way("memory-server", f"n{number}", "n9", "timed out") for number in range(7)]
    found = one(*ways)
    assert found.text == "7 of 7 ways fail: from n0, n1, n2, n3, n4 and 2 more to n9 (10.0.0.1:2): timed out"


@pytest.fixture
def server() -> FakeApi:
    found, seen = FakeApi(), running()
    found.keep(f"{JOBS}/gpt", written(seen.status, seen))
    for index in range(2):
        found.keep(f"{PODS}/gpt-worker-{index}-1", pod(index, f"n{index}"))
    return found


async def look(server: FakeApi) -> list[Finding]:
    return await check_network(ClusterConnection(server.api, "team", "s"))


async def test_what_workers_answer_is_what_was_found(server: FakeApi) -> None:
    def answer(command: Sequence[str], told: str) -> ExecResult:
        assert command[0] == "python3"
        _, targets = json.loads(told)
        return ExecResult(json.dumps([{**target, "seconds": 0.001} for target in targets]), "", "")

    for index in range(2):
        server.programs[f"{PODS}/gpt-worker-{index}-1/exec"] = answer
    holders, workers = await look(server)
    assert (holders.state, workers.state) == ("ok", "ok")
    assert workers.text.startswith("2 ways from 2 nodes are open")


@pytest.mark.parametrize(
    ("ran", "said"),
    [
        (ExecResult("", "python3: not found", "exit code 127"), "exit code 127 python3: not found"),
        (ExecResult("{", "", ""), "cannot be read"),
        (None, "gpt-worker-0-1 on n0"),
    ],
)
async def test_a_worker_that_cannot_be_asked_is_unknown(server: FakeApi, ran: ExecResult | None, said: str) -> None:
    if ran is not None:
        server.programs = {f"{PODS}/gpt-worker-{index}-1/exec": lambda command, told: ran for index in range(2)}
    [found] = await look(server)
    assert (found.check, found.state) == ("network", "unknown")
    assert said in found.text
    assert "python3" in found.remedy


async def test_who_may_not_run_programs_in_workers_is_told_the_right(server: FakeApi) -> None:
    def refuse(verb: str, path: str) -> None:
        if path.endswith("/exec"):
            raise ApiError(f"{verb} {path}", 403, "Forbidden", "no")

    server.before = refuse
    [found] = await look(server)
    assert "you may not create pods/exec in namespace team (403)" in found.text


async def test_who_may_not_see_jobs_learns_it_and_where_none_runs_nobody_is_asked(server: FakeApi) -> None:
    server.objects.pop(f"{JOBS}/gpt")
    [found] = await look(server)
    assert (found.state, found.text) == ("unknown", "no worker runs here from which it could be tried")

    def refuse(verb: str, path: str) -> None:
        raise ApiError(f"{verb} {path}", 403, "Forbidden", "no")

    server.before = refuse
    [found] = await look(server)
    assert "you may not list trainingjobs" in found.text


def test_a_job_whose_status_cannot_be_read_asks_for_workers_alone() -> None:
    job = replace(stored_job(written(running().status, running())), status=None)
    assert [len(asker.targets) for asker in choose_probe_workers(job, [pod(0, "n0"), pod(1, "n1")])] == [1, 1]
