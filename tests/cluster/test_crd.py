"""The TrainingJob on a real API server: what it refuses and with which words, and that nothing of a job is lost there.

Runs on the cluster that stands, or brings one of two nodes up and takes it down; skipped where none can be had.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.error import HTTPError

import pytest
import yaml

from cluster.api import Api
from cluster.engine import Engine
from cluster.processes import wait
from support.servers.kubernetes_cluster import a_cluster, install_crd
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.parse import parse_job
from surefoot_operator.api.status import Condition, Incident, Interval, JobStatus, World
from surefoot_operator.api.status_json import status_from_json, status_to_json

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

JOBS = "/apis/surefoot.dev/v1alpha1/namespaces/default/trainingjobs"

SMALL: dict[str, Any] = {
    "apiVersion": "surefoot.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "small"},
    "spec": {
        "replicas": 3,
        "template": {"spec": {"containers": [{"name": "trainer", "command": ["python", "train.py"]}]}},
    },
}
ELASTIC = {"minReplicas": 2, "maxReplicas": 4}
WHOLE = yaml.safe_load("""
apiVersion: surefoot.dev/v1alpha1
kind: TrainingJob
metadata: {name: whole, labels: {team: a}}
spec:
  replicas: 4
  nprocPerNode: 2
  suspend: true
  managedBy: example.org/nobody
  elasticPolicy: {minReplicas: 2, maxReplicas: 6, replicaDiscreteValues: [2, 4, 6], faultyScaleDownTimeoutSeconds: 1.5, scaleUpSnoozeSeconds: 3}
  schedulingPolicy: {gang: Volcano, queue: research, priorityClass: high}
  runPolicy: {backoffLimit: 2, activeDeadlineSeconds: 1000, startupDeadlineSeconds: 60.5, schedulingDeadlineSeconds: 90, ttlSecondsAfterFinished: 30, cleanPodPolicy: All}
  failurePolicy:
    maxRestarts: 5
    evalPeriodSeconds: 100
    maxNoProgressRestarts: 2
    maxNumRepeatOffendersToAvoid: 3
    rules: [{name: bug, action: FailJob, onExitCodes: {operator: NotIn, values: [-9, 42]}}]
  healthPolicy:
    heartbeatSeconds: 0.25
    heartbeatTimeoutSeconds: 2
    stepTimeoutSeconds: 30
    nodeSignals: {taints: [a.b/c], conditions: [GpuUnhealthy=True], labels: [a=b]}
  checkpoint:
    memory: {intervalSteps: 5, replicas: 3, keep: 4, sizeLimit: 8Gi, topologyKey: kubernetes.io/hostname, bandwidth: 500Mi}
    persistent: {uri: s3://bucket/prefix, intervalSteps: 50, keep: 2, keepEverySteps: 500, keepSeconds: 60.5, endpoint: "http://s3:7070", region: here, secretRef: keys, caBundle: /ca.pem, sse: AES256, bandwidth: 100M, onJobDeletion: Delete}
    drainGraceSeconds: 0.5
    holderReturnSeconds: 5
    onTotalLoss: Restart
    restoreFrom: {uid: older, step: 40}
    expectedBytes: 1048576
  template:
    metadata: {labels: {tier: gpu}}
    spec:
      priorityClassName: high
      restartPolicy: Never
      containers:
      - name: trainer
        command: [python, train.py]
        args: [--fast]
        workingDir: /work
        env: [{name: A, value: "1"}, {name: B, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]
        resources: {limits: {cpu: 2}}
      - {name: sidecar, image: other}
""")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    yield from a_cluster(2)


@pytest.fixture(scope="module")
def api(engine: Engine) -> Api:
    found = Api(engine.facts().kubeconfig)
    install_crd(found)
    assert wait(lambda: found.answers(JOBS), 30.0)
    return found


@pytest.fixture
def made(api: Api) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """Makes a job; jobs made are deleted at the end."""
    names: list[str] = []

    def make(body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = api.call("POST", f"{JOBS}?fieldValidation=Strict", body)
        names.append(body["metadata"]["name"])
        return answer

    yield make
    for name in names:
        api.call("DELETE", f"{JOBS}/{name}")
        assert wait(lambda: not api.answers(f"{JOBS}/{name}"), 30.0)  # noqa: B023 -- called before the name moves on


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(HTTPError) as caught:
        call()
    assert caught.value.code in (400, 422)
    return str(json.loads(caught.value.read())["message"])


REFUSED = [
    ({"replicas": 5, "elasticPolicy": ELASTIC}, "replicas must lie between elasticPolicy.minReplicas and"),
    ({"elasticPolicy": {"minReplicas": 4, "maxReplicas": 2}}, "minReplicas must not be above maxReplicas"),
    ({"elasticPolicy": {**ELASTIC, "replicaIncrementStep": 2}}, "minReplicas plus a multiple of elasticPolicy.replica"),
    ({"elasticPolicy": {**ELASTIC, "replicaDiscreteValues": [2, 4]}}, "must be one of elasticPolicy.replicaDiscrete"),
    ({"elasticPolicy": {**ELASTIC, "replicaDiscreteValues": [3, 9]}}, "each of replicaDiscreteValues must lie between"),
    (
        {"elasticPolicy": {**ELASTIC, "replicaDiscreteValues": [3], "replicaIncrementStep": 2}},
        "replicaIncrementStep and replicaDiscreteValues exclude each other: leave one of them out",
    ),
    ({"replicas": 0}, "spec.replicas: Invalid value: 0: spec.replicas in body should be greater than or equal to 1"),
    ({"replica": 3}, 'unknown field "spec.replica"'),
    ({"healthPolicy": {"heartbeatTimeoutSeconds": 0.6}}, "heartbeatTimeoutSeconds must be at least twice heartbeat"),
    ({"healthPolicy": {"nodeSignals": {"labels": ["broken"]}}}, "spec.healthPolicy.nodeSignals.labels[0]"),
    ({"checkpoint": {"persistent": {"uri": "http://x"}}}, "uri must be file:///absolute/folder or s3://bucket/prefix"),
    ({"checkpoint": {"persistent": {"uri": "s3://a:b@c/d"}}}, "credentials are not allowed in uri and endpoint: use"),
    ({"checkpoint": {"persistent": {"uri": "file:///a", "endpoint": "http://x"}}}, "endpoint belongs to s3 alone"),
    ({"checkpoint": {"restoreFrom": {"uid": "x"}}}, "restoreFrom.uid needs checkpoint.persistent too"),
    ({"checkpoint": {"restoreFrom": {"step": 3}}}, "either uid (of an older job) or uri (of its folder) is allowed"),
    ({"checkpoint": {"restoreFrom": {"uri": "s3://b/p/u", "step": "newest"}}}, "spec.checkpoint.restoreFrom.step"),
    (
        {"checkpoint": {"memory": {"intervalSteps": 5, "intervalSeconds": 30}}},
        "one of intervalSteps, intervalSeconds and interval is allowed",
    ),
    (
        {"checkpoint": {"persistent": {"uri": "file:///a", "intervalSeconds": 30, "interval": "auto"}}},
        "one of intervalSteps, intervalSeconds and interval is allowed",
    ),
    ({"checkpoint": {"memory": {"interval": "often"}}}, 'supported values: "auto"'),
    ({"checkpoint": {"memory": {"sizeLimit": "lots"}}}, "spec.checkpoint.memory.sizeLimit"),
    ({"failurePolicy": {"rules": [{"name": "a", "action": "Ignore", "onExitCodes": {"values": [1]}}]}}, '"FailJob"'),
    ({"managedBy": "nobody"}, "spec.managedBy"),
    ({"schedulingPolicy": {"queue": "a"}}, "spec.schedulingPolicy.gang: Required value"),
    ({"schedulingPolicy": {"gang": "Coscheduling", "queue": "a"}}, "queue is Volcano's: leave it out with gang Cosch"),
    ({"schedulingPolicy": {"gang": "Coscheduling", "priorityClass": "a"}}, "set template.spec.priorityClassName"),
    (
        {"schedulingPolicy": {"gang": "Volcano", "scheduleTimeoutSeconds": 9}},
        "scheduleTimeoutSeconds is Coscheduling's",
    ),
    ({"runPolicy": {"cleanPodPolicy": "None"}}, 'supported values: "Running", "All"'),
    (
        {
            "template": {
                "spec": {"containers": [{"name": "trainer", "command": ["a"], "env": [{"name": "SUREFOOT_X"}]}]}
            }
        },
        "names in the trainer's env that begin with SUREFOOT_ are the operator's to set",
    ),
    ({"template": {"spec": {"containers": [{"name": "main"}]}}}, "one of the containers must be named trainer"),
    ({"template": {"spec": {"containers": [{"name": "trainer"}]}}}, "the container named trainer must state its comm"),
    (
        {"template": {"spec": {**SMALL["spec"]["template"]["spec"], "restartPolicy": "Always"}}},
        "restartPolicy must be Never: the operator restarts workers",
    ),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_an_invalid_job_is_refused_with_the_words_a_person_needs(api: Api, fields: dict[str, Any], words: str) -> None:
    body = copy.deepcopy(SMALL)
    body["spec"].update(fields)
    assert words in refusal(lambda: api.call("POST", f"{JOBS}?fieldValidation=Strict", body))


def test_a_name_that_no_pod_could_bear_is_refused(api: Api) -> None:
    body = {**SMALL, "metadata": {"name": "1" + "a" * 60}}
    assert "at most 52 of a-z, 0-9 and -" in refusal(lambda: api.call("POST", JOBS, body))


def test_a_template_changes_only_while_the_job_is_suspended(
    api: Api, made: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    found = made(SMALL)
    found["spec"]["template"]["spec"]["nodeSelector"] = {"gpu": "yes"}
    words = refusal(lambda: api.call("PUT", f"{JOBS}/small", found))
    assert "template cannot be changed while the job runs: set suspend to true first" in words
    found["spec"]["suspend"] = True
    assert "template cannot be changed" in refusal(lambda: api.call("PUT", f"{JOBS}/small", found))
    del found["spec"]["template"]["spec"]["nodeSelector"]
    found = api.call("PUT", f"{JOBS}/small", found)
    found["spec"]["template"]["spec"]["nodeSelector"] = {"gpu": "yes"}
    found["spec"]["suspend"] = False
    assert api.call("PUT", f"{JOBS}/small", found)["spec"]["template"]["spec"]["nodeSelector"] == {"gpu": "yes"}


def test_a_scheduling_policy_changes_only_while_the_job_is_suspended(
    api: Api, made: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    body = copy.deepcopy(SMALL)
    body["spec"] |= {"schedulingPolicy": {"gang": "Volcano"}, "managedBy": "example.org/nobody"}
    made(body)
    for changed in (None, {"gang": "Coscheduling"}, {"queue": "other"}):
        words = refusal(lambda: api.merge(f"{JOBS}/small", {"spec": {"schedulingPolicy": changed}}))  # noqa: B023
        assert "schedulingPolicy cannot be changed while the job runs" in words
    api.merge(f"{JOBS}/small", {"spec": {"suspend": True}})
    api.merge(f"{JOBS}/small", {"spec": {"schedulingPolicy": None, "suspend": False}})
    words = refusal(lambda: api.merge(f"{JOBS}/small", {"spec": {"schedulingPolicy": {"gang": "Volcano"}}}))
    assert "schedulingPolicy cannot be changed while the job runs" in words


def test_what_workers_are_told_once_changes_only_while_the_job_is_suspended(
    api: Api, made: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    body = copy.deepcopy(SMALL)
    body["spec"] |= {"checkpoint": {"persistent": {"uri": "s3://bucket/prefix"}}, "managedBy": "example.org/nobody"}
    found = made(body)

    def change(*path: str, value: Any) -> dict[str, Any]:
        new = copy.deepcopy(found)
        place = new["spec"]
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        return api.call("PUT", f"{JOBS}/small", new)  # type: ignore[no-any-return]

    for path, value, words in (
        (("checkpoint", "memory", "intervalSteps"), 5, "cannot be changed while the job runs, for workers are told"),
        (
            ("checkpoint", "persistent", "intervalSeconds"),
            30,
            "cannot be changed while the job runs, for workers are told",
        ),
        (("checkpoint", "persistent", "keep"), 9, "cannot be changed while the job runs, for workers are told"),
        (("checkpoint", "persistent", "uri"), "s3://another", "checkpoint.persistent.uri cannot be changed: what a re"),
        (("healthPolicy", "heartbeatSeconds"), 0.25, "heartbeatSeconds cannot be changed while the job runs"),
        (("managedBy",), "a.b/c", "managedBy cannot be changed"),
    ):
        assert words in refusal(lambda: change(*path, value=value))  # noqa: B023 -- called before the loop moves on
    found = change("checkpoint", "persistent", "onJobDeletion", value="Delete")
    found = change("checkpoint", "persistent", "keepEverySteps", value=500)
    found = change("replicas", value=4)
    found = change("suspend", value=True)
    found = change("checkpoint", "memory", "intervalSteps", value=5)
    assert "uri cannot be changed" in refusal(lambda: change("checkpoint", "persistent", "uri", value="s3://another"))


def test_a_job_with_every_field_comes_back_as_it_was(made: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    kept, meant = parse_job(made(WHOLE), "uid"), parse_job(WHOLE, "uid")
    assert dataclasses.replace(kept, namespace="", generation=1) == dataclasses.replace(meant, namespace="")
    assert kept.spec.template.raw == meant.spec.template.raw


def test_a_small_job_comes_back_with_the_defaults_that_the_parser_would_give(
    made: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    assert parse_job(made(SMALL), "uid").spec == parse_job(SMALL, "uid").spec


def test_a_status_comes_back_whole_and_scale_and_its_columns_are_served(
    api: Api, made: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    found = made(SMALL)
    incident = Incident("node-lost", "it died", None, None, 1, 12.5, world_before=3)
    conditions = (Condition("Running", "True", "Running", "", 3.25),)
    status = JobStatus("Running", 1, World(2, "Committed", Checkpoint(1, 5), 3), step=7, incidents=(incident,))
    often = Interval(64, 6, "it costs least", 3.5, 40, 4.5, wanted_seconds=60.5, memory_loss_odds=0.05)
    status = dataclasses.replace(status, conditions=conditions, memory_interval=often)
    found["status"] = {**status_to_json(status), "replicas": 3, "selector": "a=b"}
    found = api.call("PUT", f"{JOBS}/small/status", found)
    assert status_from_json(found["status"]) == status
    scale = api.call("GET", f"{JOBS}/small/scale")
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (3, 3)
