"""Builds the pod that deletes a job's persistent data.

Pure; called by `platform`. One pod per attempt; it never restarts, and is deleted with the job.
"""

from __future__ import annotations

import copy
from typing import Any

from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.platforms.interface import WorkerEnvironment
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.pods import CREDENTIALS, PodSettings, from_secret

Object = dict[str, Any]

COMMAND = ("python", "-m", "surefoot.tools.delete")
ACTIVE_SECONDS = 590
_OF_POD = (
    "serviceAccountName",
    "imagePullSecrets",
    "securityContext",
    "tolerations",
    "volumes",
    "hostNetwork",
    "dnsPolicy",
    "dnsConfig",
    "hostAliases",
    "automountServiceAccountToken",
)
"""Who it is and how it reaches the store. Not where it runs: the training's nodes may be gone or dear."""
_OF_TRAINER = ("env", "envFrom", "volumeMounts", "securityContext", "imagePullPolicy", "workingDir")
_RESOURCES = {"cpu": "500m", "memory": "512Mi", "ephemeral-storage": "1Gi"}
"""Of what a quota may ask every container to name; the last only where the trainer names it too."""
_TOLD = ("SUREFOOT_JOB_UID", "SUREFOOT_PERSISTENT_")


def purge_pod(job: TrainingJob, attempt: int, environment: WorkerEnvironment, settings: PodSettings) -> Object:
    """Builds the pod of one attempt."""
    template = copy.deepcopy(job.spec.template.raw)
    given = template["spec"]
    trainer = next(c for c in given["containers"] if c["name"] == api_objects.TRAINER)
    container = {name: trainer[name] for name in _OF_TRAINER if trainer.get(name) is not None}
    container |= {
        "name": "delete",
        "command": list(COMMAND),
        "resources": _resources(trainer),
        "env": _environment(container.get("env") or [], job, environment),
        # the end of its output stands in the pod's status: why it failed is told where people look
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    image = settings.purge_image or trainer.get("image")
    if image:
        container["image"] = image
    spec = {name: given[name] for name in _OF_POD if given.get(name) is not None}
    spec |= {"restartPolicy": "Never", "activeDeadlineSeconds": ACTIVE_SECONDS, "containers": [container]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": api_objects.purge_name(job.name, attempt),
            "namespace": job.namespace,
            "labels": {
                **api_objects.job_labels(job.name, job.uid),
                api_objects.PART: api_objects.PURGE,
                api_objects.ATTEMPT: str(attempt),
            },
            "ownerReferences": [api_objects.owner(job.name, job.uid)],
        },
        "spec": spec,
    }


def _resources(trainer: Object) -> Object:
    """Requests and limits alike: a quota on either refuses a pod that does not name it."""
    given = trainer.get("resources") or {}
    stored = any("ephemeral-storage" in (given.get(part) or {}) for part in ("requests", "limits"))
    named = {name: value for name, value in _RESOURCES.items() if stored or name != "ephemeral-storage"}
    return {"requests": named, "limits": dict(named)}


def _environment(given: list[Object], job: TrainingJob, environment: WorkerEnvironment) -> list[Object]:
    told = {n: {"value": v} for n, v in environment.plain.items() if n.startswith(_TOLD)}
    persistent = job.spec.checkpoint.persistent
    if persistent is not None and persistent.secret_ref is not None:
        told |= {name: from_secret(persistent.secret_ref, name) for name in CREDENTIALS}
    named = {entry["name"] for entry in given}
    return [*given, *({"name": name, **value} for name, value in told.items() if name not in named)]
