"""The webhooks on a real API server: what is applied wrongly is refused at once, and an eviction waits for the last copy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError

import pytest

from cluster.processes import wait
from cluster.scenarios import faults
from cluster.scenarios.installed import answered
from cluster.scenarios.job import Job
from cluster.scenarios.measuring import strike
from cluster.scenarios.rows import Row
from cluster.scenarios.shapes import FIXED, document
from cluster.scenarios.stage import Stage
from cluster.test_scenario_drained import PATIENT, cordoned
from support.machine_speed import scaled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/surefoot.surefoot-system"
ENABLED = {"operator": {"admission": {"jobs": {"enabled": True}, "evictions": {"enabled": True}}}}
SECONDS = scaled(60.0)
REFUSED = 'admission webhook "trainingjobs.surefoot.dev" denied the request: the job\'s spec is invalid: '


@pytest.fixture(scope="module")
def asking(stage: Stage) -> Iterator[Stage]:
    """The stage, whose API server asks the operator, and trusts it."""
    stage.installed.up(ENABLED)

    def trusted() -> bool:
        webhooks = stage.installed.api.call("GET", CONFIGURATION)["webhooks"]
        return all(one["clientConfig"].get("caBundle") for one in webhooks)

    assert wait(lambda: answered(trusted), SECONDS), stage.installed.log_of_operators()[-1500:]
    assert wait(lambda: REFUSED in refused_job(stage), SECONDS), (
        refused_job(stage) + stage.installed.log_of_operators()[-1500:]
    )
    yield stage
    stage.installed.up()


def refused_job(stage: Stage) -> str:
    """What kubectl says to a job whose program has no name: the schema leaves templates open."""
    body = document(stage.asked("refused", FIXED), stage.installed.facts)
    body["spec"]["template"]["spec"]["containers"][0]["command"] = [" "]
    return apply(stage, body)


def apply(stage: Stage, body: dict[str, Any]) -> str:
    told = ("apply", "--dry-run=server", "--filename=-")
    return stage.installed.kubectl(*told, namespace=stage.space.name, given=json.dumps(body))


def evict(job: Job, pod: str) -> tuple[int, str]:
    """Once, as each try of `kubectl drain` does: the code, and the server's words."""
    path = f"/api/v1/namespaces/{job.space.name}/pods/{pod}/eviction"
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    try:
        job.api.call("POST", path, body)
    except HTTPError as error:
        with error:
            return error.code, json.loads(error.read()).get("message", "")
    return 201, ""


def test_kubectl_says_at_once_what_is_wrong_with_a_job(asking: Stage) -> None:
    assert f"{REFUSED}spec.template.spec.containers[0].command[0]" in refused_job(asking)


def test_kubectl_says_at_once_what_the_server_would_say_to_the_pods(asking: Stage) -> None:
    body = document(asking.asked("refused", FIXED), asking.installed.facts)
    body["spec"]["template"]["spec"]["tolleration"] = []
    said = apply(asking, body)
    assert "denied the request: the API server would reject its pods: " in said
    assert 'unknown field "spec.tolleration"' in said


def test_what_is_allowed_but_risky_is_a_warning(asking: Stage) -> None:
    body = document(asking.asked("risky", FIXED, persistent_interval=None), asking.installed.facts)
    body["spec"]["checkpoint"]["memory"]["replicas"] = 1
    said = apply(asking, body)
    assert "Warning: spec.checkpoint: with one copy in memory" in said
    assert "created (server dry run)" in said


def test_an_eviction_waits_for_the_last_copy_and_costs_no_step(asking: Stage) -> None:
    checkpoint = {"memory": {"intervalSteps": 10, "replicas": 1}}
    job = asking.training("evicted", FIXED, pod=PATIENT, persistent_interval=None, spec={"checkpoint": checkpoint})
    node = faults.victim(job, asking.installed)
    index = job.worker_on(node)
    assert index is not None
    pod = job.pod_of(index)["metadata"]["name"]
    others = [name for name in asking.installed.facts.node_names if name != node]
    [spare] = [name for name in others if job.worker_on(name) is None]
    with cordoned(asking, *others, node):
        code, said = evict(job, pod)
        assert code == 429, said
        assert f"from node {node} would lose data: job {asking.space.name}/{job.asked.name}: " in said
        assert "has no copy on a node that stays" in said
        assert not job.pod_of(index)["metadata"].get("deletionTimestamp")
        asking.kubectl("uncordon", spare)
        struck = strike(job)
        answers: list[tuple[int, str]] = []

        def evicted() -> bool:
            answers.append(evict(job, pod))
            return answers[-1][0] == 201

        assert wait(lambda: answered(evicted), SECONDS), f"{answers[-1]} {job.said()}"
        assert {code for code, _ in answers} <= {201, 429}, answers
        row = Row("node drained, one copy", worlds=[2, 2], whole_again_seconds=asking.whole_again(job, struck))
        assert [(i.kind, i.steps_lost) for i in job.incidents() if i.generation >= struck.epoch] == [("planned", 0)]
    row.steps_lost = 0
    asking.check(job, row)
    asking.finish(job)  # with one copy it cannot outlive the nodes that other scenarios end


def test_while_no_operator_answers_everything_is_let_in(asking: Stage) -> None:
    asking.installed.kubectl("scale", "deployment/surefoot-operator", "--replicas=0")
    try:
        # a pod that is being deleted still answers the webhook
        assert wait(lambda: answered(lambda: not asking.installed.pods("operator", ending=True)), SECONDS)
        assert "created (server dry run)" in refused_job(asking)
    finally:
        asking.installed.kubectl("scale", "deployment/surefoot-operator", "--replicas=2")
        asking.installed.wait_ready()
