"""Builds a worker's pod, its secret and the job's headless service.

Pure; called by `platform`. The template is kept whole: the agent is put in front of the trainer's command, and
what it needs is added. Anti-affinity is added only where the template does not spread its pods itself.
"""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.platforms.interface import WorkerEnvironment
from surefoot_operator.platforms.kubernetes import api_objects, pod_groups
from surefoot_operator.policy.core.actions import CreateWorker

Object = dict[str, Any]

RUN_VOLUME, SCRATCH_VOLUME, TOKEN_VOLUME = "surefoot-run", "surefoot-scratch", "surefoot-token"
SOCKET_VOLUME = "surefoot-memory"
SERVER_SOCKET = "/run/surefoot-memory/redis-{server}.sock"
"""In a worker's pod; in the holder's it is at the same place."""
METRICS_PORT = "sf-metrics"
TOKEN_FOLDER = "/var/run/secrets/surefoot.dev"
CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_GRACE_SECONDS = 30


@dataclass(frozen=True, slots=True)
class PodSettings:
    """What the operator's installation decides about every worker's pod."""

    agent: tuple[str, ...] = ("surefoot-agent", "--")
    """Found on the image's PATH."""
    run_folder: str = "/run/surefoot"
    scratch_folder: str = "/var/lib/surefoot"
    """On the node's disk: logs grow with the run, and must not use up the memory."""
    purge_image: str = ""
    """For the pod that deletes a job's persistent data; empty: the trainer's own image."""
    socket_folder: str = ""
    """On each node: where its holder has a Unix socket. Empty: there is none."""
    token_audience: str = "surefoot"
    token_seconds: int = 3600
    """How long a token is valid; the kubelet renews it earlier."""


def build_secret(job: TrainingJob, environment: WorkerEnvironment) -> Object:
    """Builds an environment's Secret, named by a digest of its content.

    Workers with equal secrets share one object.
    """
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": f"{job.name}-worker-{secret_digest(job, environment)}",
            "namespace": job.namespace,
            "labels": api_objects.job_labels(job.name, job.uid),
            "ownerReferences": [api_objects.owner(job.name, job.uid)],
        },
        "immutable": True,
        "stringData": dict(environment.secret),
    }


def secret_digest(job: TrainingJob, environment: WorkerEnvironment) -> str:
    """Digests what an environment keeps secret."""
    content = json.dumps([job.uid, dict(environment.secret)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def build_service(job: TrainingJob) -> Object:
    """Builds the headless service that gives each worker a DNS name.

    Surefoot does not use the names; people and their programs do.
    """
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": api_objects.service_name(job.name),
            "namespace": job.namespace,
            "labels": api_objects.job_labels(job.name, job.uid),
            "ownerReferences": [api_objects.owner(job.name, job.uid)],
        },
        "spec": {
            "clusterIP": "None",
            "selector": {api_objects.JOB_UID: job.uid, api_objects.PART: api_objects.WORKER},
            # workers look for each other before any of them is ready
            "publishNotReadyAddresses": True,
        },
    }


def build_pod(job: TrainingJob, worker: CreateWorker, environment: WorkerEnvironment, settings: PodSettings) -> Object:
    """Builds one worker's pod."""
    template = copy.deepcopy(job.spec.template.raw)
    metadata, spec = template.get("metadata") or {}, template["spec"]
    own = {
        api_objects.PART: api_objects.WORKER,
        api_objects.WORKER_INDEX: str(worker.index),
        api_objects.ATTEMPT: str(worker.attempt),
        api_objects.SECRET: secret_digest(job, environment),
    }
    spec["restartPolicy"] = "Never"
    trainer = next(c for c in spec["containers"] if c["name"] == api_objects.TRAINER)
    trainer["command"] = [*settings.agent, *trainer["command"]]
    for container in (*(spec.get("initContainers") or []), trainer):
        # why a program ended before its agent could tell, or before it began: the end of its log, in the pod's status
        container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    given = spec.get("terminationGracePeriodSeconds")
    grace = _GRACE_SECONDS if given is None else int(given)
    trainer["env"] = _worker_environment(trainer.get("env") or [], job, environment, settings, grace)
    trainer["volumeMounts"] = [
        *(trainer.get("volumeMounts") or []),
        {"name": RUN_VOLUME, "mountPath": settings.run_folder},
        {"name": SCRATCH_VOLUME, "mountPath": settings.scratch_folder},
        {"name": TOKEN_VOLUME, "mountPath": TOKEN_FOLDER, "readOnly": True},
    ]
    spec["volumes"] = [*(spec.get("volumes") or []), *_volumes(trainer, settings)]
    if settings.socket_folder:
        _show_socket(trainer, spec, settings.socket_folder)
    _expose(trainer, spec, environment.plain.get("SUREFOOT_METRICS_PORT"))
    _name(spec, job, worker)
    _spread(spec, job)
    _avoid(spec, worker.avoid_nodes)
    made: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": api_objects.pod_name(job.name, worker.index, worker.attempt),
            "namespace": job.namespace,
            "labels": {**(metadata.get("labels") or {}), **api_objects.job_labels(job.name, job.uid), **own},
            "annotations": metadata.get("annotations") or {},
            "ownerReferences": [api_objects.owner(job.name, job.uid)],
        },
        "spec": spec,
    }
    pod_groups.join_pod_group(made, job)
    return made


def _volumes(trainer: Object, settings: PodSettings) -> list[Object]:
    token = {
        "audience": settings.token_audience,
        "expirationSeconds": settings.token_seconds,
        "path": "token",
    }
    # in memory: what is staged there is lost with the pod, and never waits for a disk
    staging: Object = {"medium": "Memory"}
    limit = ((trainer.get("resources") or {}).get("limits") or {}).get("memory")
    if limit is not None:
        staging["sizeLimit"] = limit  # what lies there counts as the trainer's memory
    return [
        {"name": RUN_VOLUME, "emptyDir": staging},
        {"name": SCRATCH_VOLUME, "emptyDir": {}},
        {"name": TOKEN_VOLUME, "projected": {"sources": [{"serviceAccountToken": token}]}},
    ]


def _show_socket(trainer: Object, spec: Object, folder: str) -> None:
    """The folder, not the socket: a holder that starts again makes another one of that name."""
    # made here too if need be: a node without a memory tier's pod must not keep a worker from starting
    shown = {"name": SOCKET_VOLUME, "hostPath": {"path": folder, "type": "DirectoryOrCreate"}}
    spec["volumes"] = [*spec["volumes"], shown]
    mount = {"name": SOCKET_VOLUME, "mountPath": str(PurePosixPath(SERVER_SOCKET).parent), "readOnly": True}
    trainer["volumeMounts"] = [*trainer["volumeMounts"], mount]


def _expose(trainer: Object, spec: Object, port: str | None) -> None:
    """Names the port that metrics are served at, unless the template has one of that name."""
    if not port or port == "0":
        return
    taken = [p for c in spec["containers"] for p in c.get("ports") or []]
    if any(p.get("name") == METRICS_PORT for p in taken):
        return
    trainer["ports"] = [*(trainer.get("ports") or []), {"name": METRICS_PORT, "containerPort": int(port)}]


def _name(spec: Object, job: TrainingJob, worker: CreateWorker) -> None:
    """A pod on its node's network has its node's name; a template that names its pods itself is left alone."""
    if spec.get("hostNetwork") or spec.get("hostname") or spec.get("subdomain"):
        return
    spec["hostname"], spec["subdomain"] = api_objects.host_name(worker.index), api_objects.service_name(job.name)


def _worker_environment(
    given: list[Object], job: TrainingJob, environment: WorkerEnvironment, settings: PodSettings, grace: int
) -> list[Object]:
    """The template's own first: later entries may refer to it, and the same name is never given twice."""
    told = build_secret(job, environment)["metadata"]["name"]
    added = {
        "SUREFOOT_NODE": _field("spec.nodeName"),
        "SUREFOOT_HOST": _field("status.podIP"),
        "SUREFOOT_RUN_FOLDER": {"value": settings.run_folder},
        "SUREFOOT_SCRATCH_FOLDER": {"value": settings.scratch_folder},
        "SUREFOOT_TOKEN_FILE": {"value": f"{TOKEN_FOLDER}/token"},
        "SUREFOOT_TERMINATION_GRACE_SECONDS": {"value": str(grace)},
    }
    if settings.socket_folder:
        added["SUREFOOT_MEMORY_SOCKET"] = {"value": SERVER_SOCKET}
    persistent = job.spec.checkpoint.persistent
    if persistent is not None and persistent.secret_ref is not None:
        added |= {name: from_secret(persistent.secret_ref, name) for name in CREDENTIALS}
    added |= {name: {"value": value} for name, value in environment.plain.items()}
    added |= {name: from_secret(told, name) for name in environment.secret}
    named = {entry["name"] for entry in given}
    return [*given, *({"name": name, **value} for name, value in added.items() if name not in named)]


def _field(path: str) -> Object:
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


def from_secret(name: str, key: str) -> Object:
    return {"valueFrom": {"secretKeyRef": {"name": name, "key": key}}}


def _spread(spec: Object, job: TrainingJob) -> None:
    """One worker a node: two that die together would take each other's copies along.

    Whatever else copies are spread over: a job of eight workers in two racks must be placed.
    """
    if spec.get("topologySpreadConstraints") or (spec.get("affinity") or {}).get("podAntiAffinity"):
        return
    term = {
        "labelSelector": {"matchLabels": {api_objects.JOB_UID: job.uid}},
        "topologyKey": api_objects.HOSTNAME,
    }
    spec["affinity"] = {
        **(spec.get("affinity") or {}),
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]},
    }


def _avoid(spec: Object, nodes: tuple[str, ...]) -> None:
    """A wish, never a demand: a worker on an avoided node is better than none."""
    if not nodes:
        return
    expression = {"key": api_objects.HOSTNAME, "operator": "NotIn", "values": list(nodes)}
    wish = {"weight": 100, "preference": {"matchExpressions": [expression]}}
    affinity = dict(spec.get("affinity") or {})
    place = dict(affinity.get("nodeAffinity") or {})
    name = "preferredDuringSchedulingIgnoredDuringExecution"
    place[name] = [*(place.get(name) or []), wish]
    spec["affinity"] = {**affinity, "nodeAffinity": place}


# ---- deletion of persistent data -------------------------------------------------------------------------------------
# Builds the pod that deletes a job's persistent data. One pod per attempt; it never restarts, and is deleted with the
# job.

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
_PASSED_VARIABLES = ("SUREFOOT_JOB_UID", "SUREFOOT_PERSISTENT_")


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
        "env": _purge_environment(container.get("env") or [], job, environment),
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


def _purge_environment(given: list[Object], job: TrainingJob, environment: WorkerEnvironment) -> list[Object]:
    told = {n: {"value": v} for n, v in environment.plain.items() if n.startswith(_PASSED_VARIABLES)}
    persistent = job.spec.checkpoint.persistent
    if persistent is not None and persistent.secret_ref is not None:
        told |= {name: from_secret(persistent.secret_ref, name) for name in CREDENTIALS}
    named = {entry["name"] for entry in given}
    return [*given, *({"name": name, **value} for name, value in told.items() if name not in named)]
