"""One job of each other system, as its users write it, and the only conversion of a file."""

from __future__ import annotations

from typing import Any

import yaml

from surefoot_operator.api.parse import parse_job
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.convert.conversion import convert_documents
from surefoot_operator.convert.job_draft import Conversion, render_yaml


def pod() -> dict[str, Any]:
    """Made anew each time: who changes one job's template changes no other test's."""
    return {
        "spec": {
            "restartPolicy": "OnFailure",
            "containers": [
                {"name": "sidecar", "image": "s", "command": ["s"]},
                {
                    "name": "pytorch",
                    "image": "registry.example/train:1",
                    "command": ["torchrun", "--nproc_per_node=auto", "--rdzv_backend=c10d", "train.py"],
                    "args": ["--lr", "1e-4"],
                    "env": [
                        {"name": "MASTER_PORT", "value": "1"},
                        {"name": "PET_X", "value": "1"},
                        {"name": "A", "value": "b"},
                    ],
                    "resources": {"limits": {"nvidia.com/gpu": 4}},
                },
            ],
        }
    }


def pytorch_job() -> dict[str, Any]:
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "mine", "namespace": "team", "labels": {"a": "b"}, "uid": "u"},
        "spec": {
            "runPolicy": {
                "cleanPodPolicy": "None",
                "backoffLimit": 3,
                "ttlSecondsAfterFinished": 60,
                "activeDeadlineSeconds": 3600,
                "suspend": False,
                "schedulingPolicy": {"queue": "q", "priorityClass": "high", "scheduleTimeoutSeconds": 30},
            },
            "elasticPolicy": {
                "minReplicas": 2,
                "maxReplicas": 8,
                "maxRestarts": 5,
                "rdzvBackend": "c10d",
                "metrics": [{}],
            },
            "pytorchReplicaSpecs": {
                "Master": {"replicas": 1, "restartPolicy": "ExitCode", "template": pod()},
                "Worker": {"replicas": 3, "restartPolicy": "ExitCode", "template": pod()},
            },
        },
        "status": {"conditions": []},
    }


def hyperpod_job() -> dict[str, Any]:
    return {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "metadata": {"name": "mine"},
        "spec": {
            "nprocPerNode": "8",
            "runPolicy": {
                "jobMaxRetryCount": 10,
                "cleanPodPolicy": "All",
                "restartPolicy": {
                    "evalPeriodSeconds": 600,
                    "maxFullJobRestarts": 2,
                    "numRestartBeforeFullJobRestart": 1,
                },
                "logMonitoringConfiguration": [
                    {"name": "start", "logPattern": "x", "expectedStartCutOffInSeconds": 240},
                    {"name": "hang", "logPattern": "x", "expectedRecurringFrequencyInSeconds": 90},
                ],
            },
            "elasticPolicy": {
                "minReplicas": 2,
                "maxReplicas": 6,
                "replicaIncrementStep": 2,
                "faultyScaleDownTimeoutInSeconds": 30,
                "scaleUpSnoozeTimeInSeconds": 60,
                "gracefulShutdownTimeoutInSeconds": 5,
            },
            "replicaSpecs": [{"name": "pods", "replicas": 4, "spares": 1, "template": pod()}],
        },
    }


def job_set() -> dict[str, Any]:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "mine"},
        "spec": {
            "failurePolicy": {"maxRestarts": 4, "rules": [{"name": "r", "action": "FailJobSet"}]},
            "network": {"enableDNSHostnames": True},
            "ttlSecondsAfterFinished": 5,
            "replicatedJobs": [
                {"name": "reader", "replicas": 9, "template": {"spec": {"template": pod()}}},
                {
                    "name": "workers",
                    "replicas": 2,
                    "template": {"spec": {"parallelism": 3, "completions": 3, "backoffLimit": 0, "template": pod()}},
                },
            ],
        },
    }


def train_job() -> dict[str, Any]:
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "mine"},
        "spec": {
            "runtimeRef": {"name": "torch"},
            "suspend": True,
            "initializer": {"dataset": {"storageUri": "hf://x"}},
            "trainer": {
                "numNodes": 3,
                "command": ["torchrun", "train.py"],
                "env": [{"name": "A", "value": "c"}],
                "resourcesPerNode": {"limits": {"nvidia.com/gpu": 2}},
            },
        },
    }


def runtime() -> dict[str, Any]:
    node = {"name": "node", "image": "torch:2", "env": [{"name": "A", "value": "b"}, {"name": "B", "value": "b"}]}
    group = {"name": "node", "template": {"spec": {"template": {"spec": {"containers": [{"name": "s"}, node]}}}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": "torch"},
        "spec": {"mlPolicy": {"numNodes": 1, "torch": {}}, "template": {"spec": {"replicatedJobs": [group]}}},
    }


ALL = (pytorch_job, hyperpod_job, job_set, train_job)


def one(*documents: dict[str, Any]) -> tuple[Conversion, TrainingJob]:
    """The only conversion, read back from its YAML as a user would apply it."""
    (found,), _ = convert_documents(documents)
    text = render_yaml(found)
    assert text.endswith("\n")
    return found, parse_job(yaml.safe_load(text))
