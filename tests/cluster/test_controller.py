"""The operator's process against a real API server: who leads, who is let in, which jobs it takes, and how it leaves.

Operators run on the host, in a namespace of their own, and look after that namespace's jobs alone: another release
beside them goes on. What an installed chart does when its leader dies is tried in test_scenario_operator.
"""

from __future__ import annotations

import asyncio
import re
import signal
import ssl
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cluster import layout, pods
from cluster.api import Api
from cluster.engine import Engine
from cluster.operator_process import SECONDS, Operator
from cluster.processes import wait
from support.fakes.fake_agent import hello
from support.servers.kubernetes_cluster import a_cluster, install_crd
from surefoot.protocol.messages import HelloRejected
from surefoot.protocol.wire import decode, encode
from surefoot_operator.controller.credentials import certificates
from surefoot_operator.controller.leader.election_rules import leader_label, shard_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NAMESPACE = "surefoot-controller"
JOBS = f"/apis/surefoot.dev/v1alpha1/namespaces/{NAMESPACE}/trainingjobs"
CORE = f"/api/v1/namespaces/{NAMESPACE}"
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/surefoot-operator"
LEADER = "surefoot.dev/leader"
LEASE_SECONDS = 10.0
"""A killed leader is followed by then: its lease's 3 s, a second for who leads another shard, and a busy machine."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    yield from a_cluster(2)


@pytest.fixture(scope="module")
def api(engine: Engine) -> Api:
    made = Api(engine.facts().kubeconfig)
    install_crd(made)
    return made


@pytest.fixture(autouse=True)
def namespace(api: Api) -> Iterator[None]:
    """New for each test: no lease and no secret of before."""
    path = f"/api/v1/namespaces/{NAMESPACE}"
    if api.answers(path):  # left by a run that was killed
        api.call("DELETE", path)
        assert wait(lambda: not api.answers(path), SECONDS)
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    assert wait(lambda: _made(api, body), SECONDS)
    assert wait(lambda: api.answers(f"{CORE}/serviceaccounts/default"), SECONDS)
    assert wait(lambda: api.answers(JOBS), SECONDS)
    yield
    api.call("DELETE", path)
    assert wait(lambda: not api.answers(path), SECONDS)


def _made(api: Api, body: dict[str, Any]) -> bool:
    api.create("/api/v1/namespaces", body)
    return True


@pytest.fixture
def operators(engine: Engine, tmp_path: Path) -> Iterator[dict[str, Operator]]:
    """By name, as they are asked for."""
    made = {name: Operator(name, engine, tmp_path, NAMESPACE) for name in ("a", "b", "c")}
    yield made
    for one in made.values():
        one.kill()


def document(engine: Engine, name: str, **spec: Any) -> dict[str, Any]:
    """A job whose trainer sleeps."""
    volumes, mounts = pods.host_mounts(engine.facts().host_prefix)
    container = {
        "name": "trainer",
        "image": layout.HOST_IMAGE,
        "command": [sys.executable, "-c", "import time; time.sleep(600)"],
        "env": [{"name": "PATH", "value": f"{Path(sys.prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin"}],
        "volumeMounts": mounts,
    }
    template = {"spec": {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 0}}
    return {
        "apiVersion": "surefoot.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"replicas": 1, "template": template, **spec},
    }


def workers(api: Api) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.call("GET", f"{CORE}/pods?labelSelector=surefoot.dev%2Fjob-uid")["items"]
    return found


def status(api: Api, name: str) -> dict[str, Any]:
    found: dict[str, Any] = api.call("GET", f"{JOBS}/{name}").get("status", {})
    return found


def leaders(api: Api) -> set[str]:
    found = api.call("GET", f"{CORE}/pods?labelSelector=surefoot.dev%2Fleader%3Dtrue")["items"]
    return {pod["metadata"]["name"] for pod in found}


def stand_in(api: Api, engine: Engine, name: str) -> None:
    """A pod that could be an operator's: the process itself runs on the host."""
    body = pods.host_pod(name, ["sleep", "600"], host_prefix=engine.facts().host_prefix)
    body["metadata"]["labels"] = {"surefoot.dev/part": "operator"}
    api.create(f"{CORE}/pods", body)


# ---- who leads ------------------------------------------------------------------------------------------------------


def test_a_leader_that_leaves_hands_lease_and_label_over(
    api: Api, engine: Engine, operators: dict[str, Operator]
) -> None:
    for name in operators:
        stand_in(api, engine, name)
    first = operators["a"].start()
    first.says("leading, with 0 jobs")
    assert wait(lambda: leaders(api) == {"a"}, SECONDS)
    second = operators["b"].start()
    second.says("standing by: a-")
    # both are ready: the label alone says where agents go
    assert (first.probe("/readyz")[0], second.probe("/readyz")[0]) == (200, 200)
    assert (first.probe("/healthz"), second.probe("/healthz")) == ((200, "ok\n"), (200, "ok\n"))
    assert 'surefoot_operator_leader{shard="0"} 1.0' in first.probe("/metrics")[1]
    assert 'surefoot_operator_leader{shard="0"} 0.0' in second.probe("/metrics")[1]
    first.signal(signal.SIGTERM)
    assert first.ends() == 0
    assert "released the lease surefoot-operator" in first.text()
    second.says("leads: the last leader released the lease")
    assert wait(lambda: leaders(api) == {"b"}, SECONDS)
    # both made, or found, the same secrets
    made = re.findall(r"created secret (\S+)", first.text() + second.text())
    assert sorted(made) == sorted(set(made))
    assert len(made) == 3


@pytest.mark.nightly
def test_a_frozen_leader_is_followed_and_leads_no_more_when_it_thaws(
    api: Api, engine: Engine, operators: dict[str, Operator]
) -> None:
    for name in operators:
        stand_in(api, engine, name)
    first = operators["a"].start()
    first.says("leading, with 0 jobs")
    assert wait(lambda: leaders(api) == {"a"}, SECONDS)
    second = operators["b"].start()
    second.says("standing by: a-")
    first.signal(signal.SIGSTOP)
    second.says("leads: a-")
    assert wait(lambda: leaders(api) == {"b"}, SECONDS)
    asked = document(engine, "made-meanwhile")
    api.call("POST", JOBS, asked)
    assert wait(lambda: len(workers(api)) == 1, SECONDS)
    first.signal(signal.SIGCONT)
    # after a short freeze it finds another in the lease and ends; after a long one it stands by
    ends = ("the operator cannot run: the lease belongs to b-", "the lease could not be renewed")
    assert wait(lambda: any(words in first.text() for words in ends), SECONDS), first.text()
    # it may have heard of the job in the moment before it ended: it has done nothing about it
    assert "GenerationClaimed" not in first.text()
    assert len(workers(api)) == 1
    assert api.call("GET", LEASE)["spec"]["holderIdentity"].startswith("b-")
    assert leaders(api) == {"b"}


# ---- shards ---------------------------------------------------------------------------------------------------------


def lease_of(api: Api, shard: int) -> dict[str, Any]:
    """Its spec; empty: there is none."""
    path = f"{LEASE}{f'-shard-{shard}' if shard else ''}"
    return dict(api.found(path).get("spec", {}))


def term_of(api: Api, shard: int) -> tuple[str, int]:
    """Who leads it, by the first letter, and in which term."""
    spec = lease_of(api, shard)
    return str(spec.get("holderIdentity", ""))[:1], int(spec.get("leaseTransitions", -1))


def test_three_replicas_lead_a_shard_each_and_a_killed_one_moves_its_own_alone(
    api: Api, engine: Engine, operators: dict[str, Operator]
) -> None:
    jobs = {n: api.call("POST", JOBS, document(engine, f"job-{n}", suspend=True))["metadata"]["uid"] for n in range(6)}
    for name, one in operators.items():
        stand_in(api, engine, name)
        one.start("--shards", "3")
    assert wait(lambda: {term_of(api, shard)[0] for shard in range(3)} == {"a", "b", "c"}, SECONDS)
    assert wait(lambda: all(status(api, f"job-{n}").get("phase") == "Suspended" for n in jobs), SECONDS)
    before = {shard: term_of(api, shard) for shard in range(3)}
    for n, uid in jobs.items():
        led = [name for name, one in operators.items() if f"job {NAMESPACE}/job-{n} " in one.text()]
        assert before[shard_of(uid, 3)][0] in led
    dead = before[1][0]
    killed = operators[dead]
    killed.kill()
    at = time.monotonic()
    assert wait(lambda: term_of(api, 1)[0] not in ("", dead), SECONDS)
    assert time.monotonic() - at < LEASE_SECONDS
    assert {shard: term_of(api, shard) for shard in (0, 2)} == {shard: before[shard] for shard in (0, 2)}
    assert wait(lambda: label_of(api, 1) == {term_of(api, 1)[0]}, SECONDS)
    # started again it asks for one of the two that somebody leads now
    operators[dead] = Operator(dead, engine, killed.folder, NAMESPACE, killed.port).start("--shards", "3")
    assert wait(lambda: {term_of(api, shard)[0] for shard in range(3)} == {"a", "b", "c"}, SECONDS)
    moved = [shard for shard in range(3) if term_of(api, shard)[0] == dead]
    assert wait(lambda: label_of(api, moved[0]) == {dead}, SECONDS)
    after = {n: status(api, f"job-{n}") for n in jobs}
    assert all(found["phase"] == "Suspended" for found in after.values())


def label_of(api: Api, shard: int) -> set[str]:
    label = leader_label(shard).replace("/", "%2F")
    found = api.call("GET", f"{CORE}/pods?labelSelector={label}%3Dtrue")["items"]
    return {pod["metadata"]["name"] for pod in found}


def test_shards_of_a_running_release_become_three_and_one_again(
    api: Api, engine: Engine, operators: dict[str, Operator]
) -> None:
    """As its Deployment is rolled; a worker of before finds its job's leader by what it is told where it asks."""
    for name in operators:
        stand_in(api, engine, name)
    a, b = operators["a"].start(), operators["b"]
    a.says("leading, with 0 jobs;")
    api.call("POST", JOBS, document(engine, "goes-on"))
    assert wait(lambda: status(api, "goes-on").get("membership", {}).get("state") == "Committed", SECONDS), a.text()
    before, pod = status(api, "goes-on"), workers(api)[0]["metadata"]["uid"]
    b.start("--shards", "3")
    b.says("standing by: a-")
    a.signal(signal.SIGTERM)
    assert a.ends() == 0
    assert wait(lambda: all(term_of(api, shard)[0] == "b" for shard in range(3)), SECONDS), b.text()
    b.says("jobs are spread over 3 shard(s) from now on, instead of 1")
    assert wait(lambda: f"job {NAMESPACE}/goes-on" in b.text(), SECONDS)
    c = operators["c"].start()
    c.says("standing by: b-")
    b.signal(signal.SIGTERM)
    assert b.ends() == 0
    c.says("jobs are spread over 1 shard(s) from now on, instead of 3")
    c.says("leading, with 1 jobs;")
    assert lease_of(api, 1)["holderIdentity"] == lease_of(api, 2)["holderIdentity"] == ""
    assert wait(lambda: status(api, "goes-on").get("serial", 0) >= before["serial"], SECONDS)
    after = status(api, "goes-on")
    assert (after["membership"]["generation"], after.get("restarts", 0)) == (
        before["membership"]["generation"],
        before.get("restarts", 0),
    )
    assert workers(api)[0]["metadata"]["uid"] == pod


# ---- who is let in --------------------------------------------------------------------------------------------------


def token_of(api: Api, pod: str, audience: str) -> str:
    uid = api.call("GET", f"{CORE}/pods/{pod}")["metadata"]["uid"]
    bound = {"kind": "Pod", "apiVersion": "v1", "name": pod, "uid": uid}
    body = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"audiences": [audience], "boundObjectRef": bound},
    }
    return str(api.call("POST", f"{CORE}/serviceaccounts/default/token", body)["status"]["token"])


async def answer(operator: Operator, authority: str, job: str, attempt: int, token: str) -> Any:
    """What the operator says to a hello of worker 0."""
    said = hello(0, attempt, job=job, token=token)
    context = ssl.create_default_context(cadata=authority)
    url = f"wss://{operator.host}:{operator.port}/v1/agents"
    async with aiohttp.ClientSession() as session:
        try:
            async with session.ws_connect(url, ssl=context) as line:
                await line.send_str(encode(said))
                return decode(await line.receive_str(timeout=10.0))
        finally:
            await asyncio.sleep(0.1)  # a TLS connection is closed in the loop's next rounds


def test_only_the_pod_of_that_worker_is_let_in(api: Api, engine: Engine, operators: dict[str, Operator]) -> None:
    leader = operators["a"].start()
    leader.says("leading, with 0 jobs")
    uid = api.call("POST", JOBS, document(engine, "mine"))["metadata"]["uid"]
    # its agent speaks TLS with the authority it was given, and shows the token that its kubelet gave it
    assert wait(lambda: _connected(leader) == 1, SECONDS), leader.text()
    worker = workers(api)[0]
    environment = {entry["name"]: entry.get("value") for entry in worker["spec"]["containers"][0]["env"]}
    assert "SUREFOOT_TOKEN" not in environment
    authority = str(environment["SUREFOOT_COORDINATOR_CA"])
    name, attempt = worker["metadata"]["name"], int(worker["metadata"]["labels"]["surefoot.dev/attempt"])
    stand_in(api, engine, "stranger")

    def said(token: str, job: str = uid) -> HelloRejected:
        found = asyncio.run(answer(leader, authority, job, attempt, token))
        assert isinstance(found, HelloRejected)
        return found

    audience = said(token_of(api, name, "vault"))
    assert audience.retry is False
    assert "the API server rejects the token" in audience.reason
    stranger = said(token_of(api, "stranger", "surefoot"))
    assert stranger.retry is False
    assert f"that worker is pod {name}" in stranger.reason
    forged = said("not-a-token")
    assert forged.retry is False
    assert said(token_of(api, name, "surefoot"), job="another-job").retry is True
    assert _connected(leader) == 1
    strangers = certificates.issue_certificate({}, [leader.host], time.time())[certificates.CA].decode()
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        asyncio.run(answer(leader, strangers, uid, attempt, "x"))


def _connected(operator: Operator) -> int:
    found = re.search(r"^surefoot_agents_connected\{.*\} (\d+)", operator.probe("/metrics")[1], re.MULTILINE)
    return int(found[1]) if found else 0


# ---- which jobs it takes --------------------------------------------------------------------------------------------


def test_jobs_come_and_go_and_another_managers_is_left_alone(
    api: Api, engine: Engine, operators: dict[str, Operator]
) -> None:
    leader = operators["a"].start()
    api.call("POST", JOBS, document(engine, "theirs", managedBy="example.com/another"))
    api.call("POST", JOBS, document(engine, "early"))
    leader.says("job surefoot-controller/early")
    api.call("POST", JOBS, document(engine, "late", suspend=True))
    leader.says("job surefoot-controller/late")
    assert wait(lambda: status(api, "late").get("phase") == "Suspended", SECONDS)
    assert wait(lambda: len(workers(api)) == 1, SECONDS)
    api.call("DELETE", f"{JOBS}/early")
    assert wait(lambda: re.search(r"job surefoot-controller/early \(\S+\): the job is deleted", leader.text()), SECONDS)
    assert wait(lambda: not workers(api), SECONDS)
    assert status(api, "theirs") == {}
    assert "theirs" not in leader.text()
    assert "surefoot_operator_jobs 1.0" in leader.probe("/metrics")[1]


def test_an_operator_that_is_killed_takes_its_jobs_up_where_they_are(
    api: Api, engine: Engine, operators: dict[str, Operator]
) -> None:
    leader = operators["a"].start()
    api.call("POST", JOBS, document(engine, "goes-on"))
    assert wait(lambda: status(api, "goes-on").get("membership", {}).get("state") == "Committed", SECONDS), (
        leader.text()
    )
    before, pod = status(api, "goes-on"), workers(api)[0]["metadata"]["uid"]
    leader.kill()
    # a process killed without its lease must wait for that lease's end: on a desk nobody knows whether it lives
    again = Operator("a", engine, leader.folder, NAMESPACE, leader.port).start()
    operators["a"] = again
    assert wait(lambda: again.text().count("leading, with 1 jobs") == 1, SECONDS), again.text()
    assert wait(lambda: _connected(again) == 1, SECONDS), again.text()
    assert wait(lambda: status(api, "goes-on").get("serial", 0) >= before["serial"], SECONDS)
    after = status(api, "goes-on")
    assert (after["membership"]["generation"], after.get("restarts", 0)) == (
        before["membership"]["generation"],
        before.get("restarts", 0),
    )
    assert workers(api)[0]["metadata"]["uid"] == pod
