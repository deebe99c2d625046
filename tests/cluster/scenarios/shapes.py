"""The jobs of the scenarios: what differs in what is trained (`Shape`), and how one of them is asked for. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import layout, pods
from cluster.engine import Facts
from support.servers import s3_server

TRAINER = Path(__file__).with_name("trainer.py")
CREDENTIALS = "s3-account"
BUCKET_PREFIX = "scenarios"
INTERVAL_STEPS = 10


@dataclass(frozen=True)
class Shape:
    """What decides the result: two jobs of one shape must come to the same."""

    workers: int
    elastic: tuple[int, int] | None = None
    steps: int = 1500


ELASTIC = Shape(3, (2, 3))
FIXED = Shape(2)


@dataclass(frozen=True)
class Asked:
    """One job: `pace` seconds of sleep in each step; `trace`: it writes down every step's parameters."""

    name: str
    shape: Shape
    folder: Path
    """On this machine, seen by every node."""
    pace: float = 0.1
    trace: bool = False
    persistent_interval: int | None = 100
    spec: dict[str, Any] = field(default_factory=dict)
    """Laid over what the shape gives, a level deep."""
    pod: dict[str, Any] = field(default_factory=dict)
    """Laid over the pod's spec."""


def document(asked: Asked, facts: Facts) -> dict[str, Any]:
    """The TrainingJob."""
    checkpoint: dict[str, Any] = {"memory": {"intervalSteps": INTERVAL_STEPS, "replicas": 2}}
    if asked.persistent_interval is not None:
        checkpoint["persistent"] = {
            "uri": f"s3://{s3_server.BUCKET}/{BUCKET_PREFIX}",
            "endpoint": facts.s3_endpoint,
            "region": "us-east-1",
            "secretRef": CREDENTIALS,
            "intervalSteps": asked.persistent_interval,
        }
    spec: dict[str, Any] = {
        "replicas": asked.shape.workers,
        "checkpoint": checkpoint,
        "runPolicy": {"backoffLimit": 50},
        "template": {"spec": {**_pod(asked, facts), **asked.pod}},
    }
    if asked.shape.elastic is not None:
        spec["elasticPolicy"] = dict(zip(("minReplicas", "maxReplicas"), asked.shape.elastic, strict=True))
    for name, value in asked.spec.items():
        spec[name] = {**spec[name], **value} if isinstance(value, dict) and name in spec else value
    metadata = {"name": asked.name}
    return {"apiVersion": "surefoot.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": spec}


def _pod(asked: Asked, facts: Facts) -> dict[str, Any]:
    volumes, mounts = pods.host_mounts(facts.host_prefix)
    written = {"path": f"{facts.host_prefix}{layout.RUNS}", "type": "Directory"}
    volumes.append({"name": "written", "hostPath": written})
    mounts.append({"name": "written", "mountPath": str(layout.RUNS)})
    command = ["python", str(TRAINER), str(asked.shape.steps), str(asked.folder), "--pace", str(asked.pace)]
    return {
        "terminationGracePeriodSeconds": 2,
        "volumes": volumes,
        "containers": [
            {
                "name": "trainer",
                "image": layout.HOST_IMAGE,
                "command": [*command, "--trace"] if asked.trace else command,
                "env": pods.host_environment(),
                "volumeMounts": mounts,
            }
        ],
    }
