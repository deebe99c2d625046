"""Maps dataclass fields to YAML names, and lists unsupported fields.

Pure; called by `fields`, `parse`, and the test that compares docs/api.md with the dataclasses.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from surefoot_operator.api import spec

RENAMED = {
    ("MemoryTierSpec", "size_limit_bytes"): "sizeLimit",
    ("MemoryTierSpec", "bandwidth_bytes"): "bandwidth",
    ("PersistentTierSpec", "bandwidth_bytes"): "bandwidth",
    ("FailureRule", "exit_codes"): "onExitCodes",
    ("Template", "raw"): "",
    ("FailureRule", "operator"): "",
}
"""Where YAML does not simply say the field in camelCase; empty: it is part of another field."""

NOT_YET: dict[str, dict[str, str]] = {
    "TrainingJobSpec": {
        "nodeSelector": "put it into template.spec",
    },
    "ElasticPolicy": {"gracefulShutdownTimeoutSeconds": "checkpoint.drainGraceSeconds bounds the wait for saves"},
    "RunPolicy": {
        "schedulingPolicy": "write it as spec.schedulingPolicy",
        "faultDeadlineSeconds": "checkpoint.holderReturnSeconds bounds the wait for lost memory",
    },
    "SchedulingPolicy": {
        "minAvailable": "the group's minimum is the smallest world: elasticPolicy.minReplicas, or replicas",
        "minResources": "the scheduler adds up what the pods request",
    },
    "FailurePolicy": {
        "restartStrategy": "trainers are always restarted in place while their worker runs",
    },
    "FailureRule": {"onPodConditions": "rules match exit codes"},
    "CheckpointPolicy": {
        "onEviction": "before a pod is evicted, the world halts at a saved step",
    },
}
"""Fields that a person may expect from the API or from its neighbours: refused by name, never swallowed."""


REFUSED_VALUES: dict[tuple[str, str], dict[str, str]] = {
    ("RunPolicy", "clean_pod_policy"): {
        "None": "write Running (the default): pods that ended by themselves stay for their logs, and one that still runs"
        " would hold its node for ever, because nothing would delete it"
    },
    ("TrainingJobSpec", "nproc_per_node"): dict.fromkeys(
        ("auto", "gpu", "cpu"),
        "write the number of trainers in each worker, as a rule that of its GPUs: the world size and the placement of"
        " checkpoints follow from it before any worker runs on a node",
    ),
}
"""What neighbouring systems take in a field that is here as well: refused with the reason and what to write instead."""


def camel_case(name: str) -> str:
    """Converts `min_replicas` to `minReplicas`."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def yaml_name(cls: type[Any], field: str) -> str:
    """The field's name in YAML; empty where it has none."""
    return RENAMED.get((cls.__name__, field), camel_case(field))


def yaml_fields(cls: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """Maps YAML names to fields, without those that are refused."""
    refused = NOT_YET.get(cls.__name__, {})
    named = {yaml_name(cls, field.name): field for field in dataclasses.fields(cls)}
    return {name: field for name, field in named.items() if name and name not in refused}


API_VERSION = f"{spec.GROUP}/{spec.VERSION}"
