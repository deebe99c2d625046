"""A job with every field, a small one, and jobs that are refused, with the path that the refusal names and words of it.

The reader and a real API server refuse the same jobs: `tests/pure/api/test_parse.py` gives them to the one,
`tests/cluster/test_crd.py` to the other.
"""

from __future__ import annotations

import copy
from typing import Any

import yaml

SMALLEST: dict[str, Any] = {
    "apiVersion": "surefoot.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "gpt"},
    "spec": {
        "replicas": 3,
        "elasticPolicy": {"minReplicas": 2, "maxReplicas": 4},
        "checkpoint": {"memory": {}, "persistent": {"uri": "s3://bucket/prefix"}},
        "healthPolicy": {},
        "runPolicy": {},
        "failurePolicy": {"rules": [{"name": "data", "action": "FailJob", "onExitCodes": {"values": [42]}}]},
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "containers": [{"name": "trainer", "command": ["python", "train.py"], "env": []}],
            }
        },
    },
}

WHOLE: dict[str, Any] = yaml.safe_load("""
apiVersion: surefoot.dev/v1alpha1
kind: TrainingJob
metadata: {name: whole, labels: {team: a}, annotations: {a: b}}
spec:
  replicas: 4
  nprocPerNode: 2
  suspend: true
  managedBy: example.org/nobody
  elasticPolicy: {minReplicas: 2, maxReplicas: 6, replicaDiscreteValues: [2, 4, 6], faultyScaleDownTimeoutSeconds: 1.5, scaleUpSnoozeSeconds: 3}
  schedulingPolicy: {gang: Coscheduling, scheduleTimeoutSeconds: 60}
  runPolicy: {backoffLimit: 2, activeDeadlineSeconds: 1000, startupDeadlineSeconds: 60.5, schedulingDeadlineSeconds: 90, ttlSecondsAfterFinished: 30, cleanPodPolicy: All}
  failurePolicy:
    maxRestarts: 5
    evalPeriodSeconds: 100
    maxNoProgressRestarts: 2
    maxExcludedNodes: 3
    rules: [{name: bug, action: FailJob, onExitCodes: {operator: NotIn, values: [-9, 42]}}]
  healthPolicy:
    heartbeatSeconds: 0.25
    heartbeatTimeoutSeconds: 2
    stepTimeoutSeconds: 30
    nodeSignals: {taints: [a.b/c], conditions: [GpuUnhealthy=True], labels: [a=b]}
  checkpoint:
    memory: {intervalSteps: 5, replicas: 3, keep: 4, sizeLimit: 8Gi, topologyKey: kubernetes.io/hostname, bandwidth: 500Mi}
    persistent: {uri: s3://bucket/prefix, intervalSteps: 50, keep: 2, keepEverySteps: 500, keepSeconds: 60.5, endpoint: "http://s3:7070", region: here, secretRef: keys, caBundle: /ca.pem, sse: AES256, bandwidth: 100M, onJobDeletion: Delete}
    flushGraceSeconds: 0.5
    memoryServerTimeoutSeconds: 5
    onTotalLoss: Restart
    restoreFrom: {uid: older, step: 40}
    expectedBytes: 1048576
  template:
    metadata: {labels: {tier: gpu}, annotations: {a: b}}
    spec:
      priorityClassName: high
      restartPolicy: Never
      terminationGracePeriodSeconds: 20
      volumes: [{name: data, emptyDir: {}}]
      affinity: {nodeAffinity: {preferredDuringSchedulingIgnoredDuringExecution: []}}
      containers:
      - name: trainer
        command: [python, train.py]
        args: [--fast]
        workingDir: /work
        env: [{name: A, value: "1"}, {name: B, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]
        resources: {limits: {cpu: 2, memory: 2Gi}}
        volumeMounts: [{name: data, mountPath: /data}]
        ports: [{name: http, containerPort: 80}]
      - {name: sidecar, image: other}
""")


def changed(path: str, value: object) -> dict[str, Any]:
    """Returns the smallest job with one place changed; `...` removes it."""
    body = copy.deepcopy(SMALLEST)
    at: Any = body
    *way, last = (int(part) if part.isdigit() else part for part in path.split("."))
    for part in way:
        at = at[part]
    if value is ...:
        del at[last]
    else:
        at[last] = copy.deepcopy(value)
    return body


TRAINER = "spec.template.spec.containers.0"
_TRAINER = "spec.template.spec.containers[0]"
_ELASTIC = {"minReplicas": 2, "maxReplicas": 4}
_RULE = {"name": "a", "action": "Restart", "onExitCodes": {"values": [1]}}

REFUSED: list[tuple[str, object, str, str]] = [
    # numbers, words and names
    ("metadata.name", "Not_A_Name", "metadata.name", "a-z"),
    ("metadata.name", "1" + "a" * 60, "metadata.name", "at most 52 of a-z, 0-9 and -"),
    ("spec.replicas", 0, "spec.replicas", "a whole number of workers, at least 1 and at most 100000, is allowed"),
    ("spec.replicas", "3", "spec.replicas", "whole number"),
    ("spec.replicas", True, "spec.replicas", "whole number"),
    ("spec.suspend", "yes", "spec.suspend", "true or false"),
    ("spec.managedBy", "nobody", "spec.managedBy", "the name of a controller, domain/name, is allowed"),
    ("spec.replica", 3, "spec", "did you mean replicas?"),
    ("spec.elasticPolicy.minReplica", 2, "spec.elasticPolicy", "did you mean minReplicas?"),
    ("spec.elasticPolicy.minReplicas", ..., "spec.elasticPolicy.minReplicas", "required"),
    ("spec.elasticPolicy.scaleUpSnoozeSeconds", -1, "spec.elasticPolicy.scaleUpSnoozeSeconds", "seconds, at least 0,"),
    ("spec.elasticPolicy.replicaDiscreteValues", [2, 2], "spec.elasticPolicy.replicaDiscreteValues", "may occur once"),
    ("spec.healthPolicy.heartbeatSeconds", -0.5, "spec.healthPolicy.heartbeatSeconds", "at least 0.05 and at most 60"),
    ("spec.healthPolicy.heartbeatSeconds", 0, "spec.healthPolicy.heartbeatSeconds", "at least 0.05 and at most 60"),
    ("spec.healthPolicy.preJoinCheck", False, "spec.healthPolicy.preJoinCheck", "Disabled, Warn, Enforce, in quotes"),
    (
        "spec.healthPolicy.nodeSignals",
        {"conditions": ["Ready="]},
        "spec.healthPolicy.nodeSignals.conditions[0]",
        "Type=",
    ),
    ("spec.healthPolicy.nodeSignals", {"labels": ["broken"]}, "spec.healthPolicy.nodeSignals.labels[0]", "key=value"),
    ("spec.checkpoint.memory.intervalSteps", -10, "spec.checkpoint.memory.intervalSteps", "at least 1"),
    ("spec.checkpoint.memory.intervalSeconds", 0, "spec.checkpoint.memory.intervalSeconds", "at least 0.001"),
    ("spec.checkpoint.memory.interval", "often", "spec.checkpoint.memory.interval", "allowed are auto"),
    ("spec.checkpoint.memory.sizeLimit", "8GiB", "spec.checkpoint.memory.sizeLimit", "8Gi"),
    ("spec.checkpoint.memory.sizeLimit", "0", "spec.checkpoint.memory.sizeLimit", "a positive number of bytes"),
    ("spec.checkpoint.memory.bandwidth", "500Mbit", "spec.checkpoint.memory.bandwidth", "8Gi"),
    ("spec.checkpoint.memory.bandwidth", "100k", "spec.checkpoint.memory.bandwidth", "at least 1Mi, in bytes a second"),
    ("spec.checkpoint.persistent.bandwidth", 1, "spec.checkpoint.persistent.bandwidth", "at least 1Mi"),
    ("spec.checkpoint.expectedBytes", -1, "spec.checkpoint.expectedBytes", "a positive number of bytes"),
    ("spec.checkpoint.memory.topologyKey", "a zone", "spec.checkpoint.memory.topologyKey", "the key of a node label"),
    ("spec.checkpoint.onTotalLoss", "Ignore", "spec.checkpoint.onTotalLoss", "Wait, Fail, Restart"),
    ("spec.checkpoint.persistent.keepEverySteps", 0, "spec.checkpoint.persistent.keepEverySteps", "at least 1"),
    ("spec.checkpoint.persistent.keepSeconds", 0, "spec.checkpoint.persistent.keepSeconds", "at least 0.001"),
    ("spec.checkpoint.persistent.uri", ..., "spec.checkpoint.persistent.uri", "required"),
    ("spec.checkpoint.persistent.endpoint", " ", "spec.checkpoint.persistent.endpoint", "http://host:port"),
    (
        "spec.checkpoint.persistent.endpoint",
        "http://a:b@c",
        "spec.checkpoint.persistent.endpoint",
        "without credentials",
    ),
    ("spec.checkpoint.persistent.region", " ", "spec.checkpoint.persistent.region", "name of a region"),
    ("spec.checkpoint.persistent.sse", " ", "spec.checkpoint.persistent.sse", "AES256"),
    ("spec.checkpoint.persistent.secretRef", "A B", "spec.checkpoint.persistent.secretRef", "name of a secret"),
    ("spec.checkpoint.restoreFrom", {"uid": "a", "step": 0}, "spec.checkpoint.restoreFrom.step", "at least 1"),
    ("spec.checkpoint.restoreFrom", {"uid": "a", "step": "last"}, "spec.checkpoint.restoreFrom.step", "latest"),
    ("spec.checkpoint.restoreFrom", {"uid": "a", "job": "b"}, "spec.checkpoint.restoreFrom", "no field of that name"),
    ("spec.runPolicy.startupDeadlineSeconds", 5e-324, "spec.runPolicy.startupDeadlineSeconds", "at least 0.001"),
    ("spec.runPolicy.cleanPodPolicy", "None", "spec.runPolicy.cleanPodPolicy", "write Running"),
    ("spec.nprocPerNode", "auto", "spec.nprocPerNode", "write the number of trainers"),
    ("spec.failurePolicy.rules.0.action", "Pray", "spec.failurePolicy.rules[0].action", "FailJob"),
    ("spec.failurePolicy.rules.0.onExitCodes", ..., "spec.failurePolicy.rules[0].onExitCodes", "required"),
    ("spec.failurePolicy.rules.0.onExitCodes.values", [], "spec.failurePolicy.rules[0].onExitCodes.values", "1 to 64"),
    (
        "spec.failurePolicy.rules.0.onExitCodes.values",
        [999],
        "spec.failurePolicy.rules[0].onExitCodes.values[0]",
        "255",
    ),
    ("spec.failurePolicy.rules", [_RULE, _RULE], "spec.failurePolicy.rules", "each name may occur once"),
    ("spec.schedulingPolicy", {}, "spec.schedulingPolicy.gang", "required"),
    ("spec.schedulingPolicy", {"gang": "Kueue"}, "spec.schedulingPolicy.gang", "Coscheduling"),
    (
        "spec.schedulingPolicy",
        {"gang": "Coscheduling", "scheduleTimeoutSeconds": 0},
        "spec.schedulingPolicy.scheduleTimeoutSeconds",
        "at least 1",
    ),
    (f"{TRAINER}.command", "python train.py", f"{_TRAINER}.command", "list"),
    (f"{TRAINER}.env", [{"name": "A=B"}], f"{_TRAINER}.env[0].name", "characters but ="),
    ("spec.template.spec.terminationGracePeriodSeconds", -1, "spec.template.spec.termination", "seconds, at least 0"),
    ("spec.template", ..., "spec.template", "mapping"),
    ("spec", ..., "spec", "mapping"),
    # rules between fields
    ("spec.replicas", 9, "spec.replicas", "replicas must be a number that elasticPolicy allows"),
    ("spec.elasticPolicy.replicaIncrementStep", 2, "spec.replicas", "in steps of replicaIncrementStep: 2, 4"),
    ("spec.elasticPolicy.replicaDiscreteValues", [2, 4], "spec.replicas", "one of replicaDiscreteValues"),
    ("spec.elasticPolicy.minReplicas", 5, "spec.elasticPolicy.minReplicas", "must not be above maxReplicas"),
    (
        "spec.elasticPolicy",
        {**_ELASTIC, "replicaDiscreteValues": [3], "replicaIncrementStep": 2},
        "spec.elasticPolicy.replicaIncrementStep",
        "exclude each other: leave one of them out",
    ),
    (
        "spec.elasticPolicy.replicaDiscreteValues",
        [3, 7],
        "spec.elasticPolicy.replicaDiscreteValues",
        "must be between minReplicas and maxReplicas",
    ),
    ("spec.healthPolicy.heartbeatTimeoutSeconds", 0.6, "spec.healthPolicy.heartbeatTimeoutSeconds", "at least twice"),
    ("spec.healthPolicy.heartbeatSeconds", 2.5, "spec.healthPolicy.heartbeatTimeoutSeconds", "at least twice"),
    (
        "spec.checkpoint.memory",
        {"intervalSteps": 5, "intervalSeconds": 30},
        "spec.checkpoint.memory",
        "one of intervalSteps, intervalSeconds and interval is allowed",
    ),
    (
        "spec.checkpoint.persistent",
        {"uri": "file:///a", "intervalSeconds": 30, "interval": "auto"},
        "spec.checkpoint.persistent",
        "one of intervalSteps, intervalSeconds and interval is allowed",
    ),
    ("spec.checkpoint.persistent.uri", "/tmp/x", "spec.checkpoint.persistent.uri", "file:///"),
    ("spec.checkpoint.persistent.uri", "s3:///x", "spec.checkpoint.persistent.uri", "s3://bucket/prefix"),
    ("spec.checkpoint.persistent.uri", "s3://a:b@c/d", "spec.checkpoint.persistent.uri", "credentials are not allowed"),
    (
        "spec.checkpoint.persistent",
        {"uri": "file:///a", "endpoint": "http://x"},
        "spec.checkpoint.persistent.endpoint",
        "endpoint applies to s3:// only",
    ),
    ("spec.checkpoint.restoreFrom", {}, "spec.checkpoint.restoreFrom", "exactly one of uid"),
    ("spec.checkpoint.restoreFrom", {"step": 3}, "spec.checkpoint.restoreFrom", "is required"),
    (
        "spec.checkpoint.restoreFrom",
        {"uid": "a", "uri": "s3://b/a"},
        "spec.checkpoint.restoreFrom",
        "exactly one of uid",
    ),
    ("spec.checkpoint.restoreFrom", {"uid": "../a"}, "spec.checkpoint.restoreFrom.uid", "name of its folder"),
    ("spec.checkpoint.restoreFrom", {"uri": "/tmp/a"}, "spec.checkpoint.restoreFrom.uri", "file:///"),
    ("spec.checkpoint.restoreFrom", {"uri": "s3://bucket"}, "spec.checkpoint.restoreFrom.uri", "prefix/UID"),
    ("spec.checkpoint.restoreFrom", {"uri": "s3://a:b@c/d"}, "spec.checkpoint.restoreFrom.uri", "credentials are not"),
    (
        "spec.checkpoint",
        {"restoreFrom": {"uid": "old"}},
        "spec.checkpoint.restoreFrom.uid",
        "restoreFrom.uid requires checkpoint.persistent",
    ),
    ("spec.template.spec.restartPolicy", "OnFailure", "spec.template.spec.restartPolicy", "must be Never"),
    (f"{TRAINER}.name", "main", "spec.template.spec.containers", "exactly one of the containers must be named trainer"),
    (f"{TRAINER}.command", ..., "spec.template.spec", "the container named trainer must state its command"),
    (f"{TRAINER}.env", [{"name": "SUREFOOT_JOB_UID", "value": "x"}], "spec.template.spec", "only the operator may set"),
]
"""A place of `SMALLEST`, its new value, the path in the refusal, and words of the reader's message."""
