"""Builds a worker's pod, its Secret and the job's headless service.

Pure; called by `platform`. The pod template is kept as it is, with additions: the agent goes before the trainer's
command, with the variables, volumes and port that it needs. Anti-affinity is added only if the template does not spread
its pods itself.
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
"""Path of a memory server's Unix socket, in the worker's pod and in the server's own."""
METRICS_PORT = "sf-metrics"
"""Name of the container port at which the agent serves metrics."""
TOKEN_FOLDER = "/var/run/secrets/surefoot.dev"
"""Folder of the service account token with which the agent authenticates to the operator."""
CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
"""Keys of the persistent tier's Secret, and the variables with the same names."""
_DEFAULT_GRACE_SECONDS = 30
"""Kubernetes' default of terminationGracePeriodSeconds."""


@dataclass(frozen=True, slots=True)
class PodSettings:
    """Settings of the operator's installation that apply to every worker's pod."""

    agent: tuple[str, ...] = ("surefoot-agent", "--")
    """Command that starts the agent, on the PATH of the image; the trainer's command follows it."""
    run_folder: str = "/run/surefoot"
    """Folder in memory, for staged saves and sockets."""
    scratch_folder: str = "/var/lib/surefoot"
    """Folder on the node's disk, for logs, which grow with the run and must not use up the memory."""
    purge_image: str = ""
    """Image of the pod that deletes a job's persistent data; empty: the trainer's image."""
    socket_folder: str = ""
    """Folder on each node with the Unix sockets of its memory servers; empty: workers connect by TCP only."""
    token_audience: str = "surefoot"
    """Audience of the agent's service account token."""
    token_seconds: int = 3600
    """Lifetime of such a token; the kubelet renews it earlier."""


def build_secret(job: TrainingJob, environment: WorkerEnvironment) -> Object:
    """Builds the Secret of an environment.

    Its name is a digest of its content, so workers with equal secrets share one object.
    """
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": f"{job.name}-worker-{digest_secrets(job, environment)}",
            "namespace": job.namespace,
            "labels": api_objects.job_labels(job.name, job.uid),
            "ownerReferences": [api_objects.owner_reference(job.name, job.uid)],
        },
        "immutable": True,
        "stringData": dict(environment.secret),
    }


def digest_secrets(job: TrainingJob, environment: WorkerEnvironment) -> str:
    """Returns the digest of the job's UID and an environment's secret variables."""
    content = json.dumps([job.uid, dict(environment.secret)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def build_service(job: TrainingJob) -> Object:
    """Builds the headless service that gives each worker a DNS name.

    Surefoot does not use these names; they are for users and their programs.
    """
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": api_objects.service_name(job.name),
            "namespace": job.namespace,
            "labels": api_objects.job_labels(job.name, job.uid),
            "ownerReferences": [api_objects.owner_reference(job.name, job.uid)],
        },
        "spec": {
            "clusterIP": "None",
            "selector": {api_objects.JOB_UID_LABEL: job.uid, api_objects.PART_LABEL: api_objects.WORKER},
            # workers resolve each other's names before any of them is ready
            "publishNotReadyAddresses": True,
        },
    }


def build_pod(job: TrainingJob, worker: CreateWorker, environment: WorkerEnvironment, settings: PodSettings) -> Object:
    """Builds the pod of one worker from the job's template."""
    template = copy.deepcopy(job.spec.template.raw)
    metadata, spec = template.get("metadata") or {}, template["spec"]
    worker_labels = {
        api_objects.PART_LABEL: api_objects.WORKER,
        api_objects.WORKER_INDEX_LABEL: str(worker.index),
        api_objects.ATTEMPT_LABEL: str(worker.attempt),
        api_objects.SECRET_LABEL: digest_secrets(job, environment),
    }
    spec["restartPolicy"] = "Never"
    trainer = next(c for c in spec["containers"] if c["name"] == api_objects.TRAINER_CONTAINER)
    trainer["command"] = [*settings.agent, *trainer["command"]]
    for container in (*(spec.get("initContainers") or []), trainer):
        # puts the end of the log into the pod's status, for programs that fail before the agent can report why
        container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    template_grace = spec.get("terminationGracePeriodSeconds")
    grace = _DEFAULT_GRACE_SECONDS if template_grace is None else int(template_grace)
    trainer["env"] = _build_worker_env(trainer.get("env") or [], job, environment, settings, grace)
    trainer["volumeMounts"] = [
        *(trainer.get("volumeMounts") or []),
        {"name": RUN_VOLUME, "mountPath": settings.run_folder},
        {"name": SCRATCH_VOLUME, "mountPath": settings.scratch_folder},
        {"name": TOKEN_VOLUME, "mountPath": TOKEN_FOLDER, "readOnly": True},
    ]
    spec["volumes"] = [*(spec.get("volumes") or []), *_build_volumes(trainer, settings)]
    if settings.socket_folder:
        _mount_socket_folder(trainer, spec, settings.socket_folder)
    _add_metrics_port(trainer, spec, environment.plain.get("SUREFOOT_METRICS_PORT"))
    _set_dns_name(spec, job, worker)
    _spread_over_nodes(spec, job)
    _prefer_other_nodes(spec, worker.avoid_nodes)
    pod: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": api_objects.pod_name(job.name, worker.index, worker.attempt),
            "namespace": job.namespace,
            "labels": {**(metadata.get("labels") or {}), **api_objects.job_labels(job.name, job.uid), **worker_labels},
            "annotations": metadata.get("annotations") or {},
            "ownerReferences": [api_objects.owner_reference(job.name, job.uid)],
        },
        "spec": spec,
    }
    pod_groups.add_pod_to_group(pod, job)
    return pod


def _build_volumes(trainer: Object, settings: PodSettings) -> list[Object]:
    token = {
        "audience": settings.token_audience,
        "expirationSeconds": settings.token_seconds,
        "path": "token",
    }
    # staging must not wait for a disk; its content may be lost with the pod
    staging: Object = {"medium": "Memory"}
    limit = ((trainer.get("resources") or {}).get("limits") or {}).get("memory")
    if limit is not None:
        staging["sizeLimit"] = limit  # its content counts as memory of the trainer's container
    return [
        {"name": RUN_VOLUME, "emptyDir": staging},
        {"name": SCRATCH_VOLUME, "emptyDir": {}},
        {"name": TOKEN_VOLUME, "projected": {"sources": [{"serviceAccountToken": token}]}},
    ]


def _mount_socket_folder(trainer: Object, spec: Object, folder: str) -> None:
    """Mounts the folder with the node's memory servers' sockets.

    It mounts the folder, not a socket: a server that restarts creates a new socket of the same name.
    """
    # DirectoryOrCreate: a node without a memory server must not keep a worker from starting
    volume = {"name": SOCKET_VOLUME, "hostPath": {"path": folder, "type": "DirectoryOrCreate"}}
    spec["volumes"] = [*spec["volumes"], volume]
    mount = {"name": SOCKET_VOLUME, "mountPath": str(PurePosixPath(SERVER_SOCKET).parent), "readOnly": True}
    trainer["volumeMounts"] = [*trainer["volumeMounts"], mount]


def _add_metrics_port(trainer: Object, spec: Object, port: str | None) -> None:
    """Adds the agent's metrics port to the container, unless the template has a port of that name."""
    if not port or port == "0":
        return
    used_ports = [p for c in spec["containers"] for p in c.get("ports") or []]
    if any(p.get("name") == METRICS_PORT for p in used_ports):
        return
    trainer["ports"] = [*(trainer.get("ports") or []), {"name": METRICS_PORT, "containerPort": int(port)}]


def _set_dns_name(spec: Object, job: TrainingJob, worker: CreateWorker) -> None:
    """Sets the pod's DNS name, unless it uses the node's network or the template sets a name."""
    if spec.get("hostNetwork") or spec.get("hostname") or spec.get("subdomain"):
        return
    spec["hostname"], spec["subdomain"] = api_objects.host_name(worker.index), api_objects.service_name(job.name)


def _build_worker_env(
    template_env: list[Object], job: TrainingJob, environment: WorkerEnvironment, settings: PodSettings, grace: int
) -> list[Object]:
    """Adds the agent's variables after the template's, which later entries may refer to and which take precedence."""
    secret_name = build_secret(job, environment)["metadata"]["name"]
    added = {
        "SUREFOOT_NODE": _from_field("spec.nodeName"),
        "SUREFOOT_HOST": _from_field("status.podIP"),
        "SUREFOOT_RUN_FOLDER": {"value": settings.run_folder},
        "SUREFOOT_SCRATCH_FOLDER": {"value": settings.scratch_folder},
        "SUREFOOT_TOKEN_FILE": {"value": f"{TOKEN_FOLDER}/token"},
        "SUREFOOT_TERMINATION_GRACE_SECONDS": {"value": str(grace)},
    }
    if settings.socket_folder:
        added["SUREFOOT_MEMORY_SOCKET"] = {"value": SERVER_SOCKET}
    persistent = job.spec.checkpoint.persistent
    if persistent is not None and persistent.secret_ref is not None:
        added |= {name: secret_key_source(persistent.secret_ref, name) for name in CREDENTIALS}
    added |= {name: {"value": value} for name, value in environment.plain.items()}
    added |= {name: secret_key_source(secret_name, name) for name in environment.secret}
    template_names = {entry["name"] for entry in template_env}
    return [*template_env, *({"name": name, **value} for name, value in added.items() if name not in template_names)]


def _from_field(path: str) -> Object:
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


def secret_key_source(name: str, key: str) -> Object:
    """Builds the source of a variable whose value is a key of a Secret."""
    return {"valueFrom": {"secretKeyRef": {"name": name, "key": key}}}


def _spread_over_nodes(spec: Object, job: TrainingJob) -> None:
    """Requires one worker per node, because two that fail together would lose each other's copies.

    Requires nothing about racks or zones: a job of eight workers in two racks must be schedulable.
    """
    if spec.get("topologySpreadConstraints") or (spec.get("affinity") or {}).get("podAntiAffinity"):
        return
    term = {
        "labelSelector": {"matchLabels": {api_objects.JOB_UID_LABEL: job.uid}},
        "topologyKey": api_objects.HOSTNAME_LABEL,
    }
    spec["affinity"] = {
        **(spec.get("affinity") or {}),
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]},
    }


def _prefer_other_nodes(spec: Object, nodes: tuple[str, ...]) -> None:
    """Prefers other nodes than these; no requirement, because a worker on an avoided node is better than none."""
    if not nodes:
        return
    expression = {"key": api_objects.HOSTNAME_LABEL, "operator": "NotIn", "values": list(nodes)}
    preference = {"weight": 100, "preference": {"matchExpressions": [expression]}}
    affinity = dict(spec.get("affinity") or {})
    node_affinity = dict(affinity.get("nodeAffinity") or {})
    preferred = "preferredDuringSchedulingIgnoredDuringExecution"
    node_affinity[preferred] = [*(node_affinity.get(preferred) or []), preference]
    spec["affinity"] = {**affinity, "nodeAffinity": node_affinity}


# ---- deletion of persistent data -------------------------------------------------------------------------------------
# Builds the pod that deletes a job's persistent data. Each attempt has its own pod, which never restarts and is deleted
# together with the job.

PURGE_COMMAND = ("python", "-m", "surefoot.tools.delete")
PURGE_TIMEOUT_SECONDS = 590
"""Time after which the kubelet ends the pod; the attempt has then failed."""
_COPIED_POD_FIELDS = (
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
"""Fields copied from the template's pod spec: its identity and its access to the store.

Fields that choose the node are not copied: the training's nodes may be deleted by now, or expensive."""
_COPIED_TRAINER_FIELDS = ("env", "envFrom", "volumeMounts", "securityContext", "imagePullPolicy", "workingDir")
"""Fields copied from the trainer's container."""
_RESOURCES = {"cpu": "500m", "memory": "512Mi", "ephemeral-storage": "1Gi"}
"""Resources that a quota may require every container to name; the last one is set only if the trainer has it too."""
_PASSED_VARIABLES = ("SUREFOOT_JOB_UID", "SUREFOOT_PERSISTENT_")
"""Prefixes of the agent's variables that this pod gets too."""


def build_purge_pod(job: TrainingJob, attempt: int, environment: WorkerEnvironment, settings: PodSettings) -> Object:
    """Builds the pod of one attempt to delete the job's persistent data."""
    template = copy.deepcopy(job.spec.template.raw)
    template_spec = template["spec"]
    trainer = next(c for c in template_spec["containers"] if c["name"] == api_objects.TRAINER_CONTAINER)
    container = {name: trainer[name] for name in _COPIED_TRAINER_FIELDS if trainer.get(name) is not None}
    container |= {
        "name": "delete",
        "command": list(PURGE_COMMAND),
        "resources": _choose_resources(trainer),
        "env": _build_purge_env(container.get("env") or [], job, environment),
        # puts the end of its output, with the reason of a failure, into the pod's status
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    image = settings.purge_image or trainer.get("image")
    if image:
        container["image"] = image
    spec = {name: template_spec[name] for name in _COPIED_POD_FIELDS if template_spec.get(name) is not None}
    spec |= {"restartPolicy": "Never", "activeDeadlineSeconds": PURGE_TIMEOUT_SECONDS, "containers": [container]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": api_objects.purge_name(job.name, attempt),
            "namespace": job.namespace,
            "labels": {
                **api_objects.job_labels(job.name, job.uid),
                api_objects.PART_LABEL: api_objects.PURGE,
                api_objects.ATTEMPT_LABEL: str(attempt),
            },
            "ownerReferences": [api_objects.owner_reference(job.name, job.uid)],
        },
        "spec": spec,
    }


def _choose_resources(trainer: Object) -> Object:
    """Returns equal requests and limits: a quota on either one rejects a pod that does not name it."""
    trainer_resources = trainer.get("resources") or {}
    names_storage = any("ephemeral-storage" in (trainer_resources.get(kind) or {}) for kind in ("requests", "limits"))
    resources = {name: value for name, value in _RESOURCES.items() if names_storage or name != "ephemeral-storage"}
    return {"requests": resources, "limits": dict(resources)}


def _build_purge_env(template_env: list[Object], job: TrainingJob, environment: WorkerEnvironment) -> list[Object]:
    added = {n: {"value": v} for n, v in environment.plain.items() if n.startswith(_PASSED_VARIABLES)}
    persistent = job.spec.checkpoint.persistent
    if persistent is not None and persistent.secret_ref is not None:
        added |= {name: secret_key_source(persistent.secret_ref, name) for name in CREDENTIALS}
    template_names = {entry["name"] for entry in template_env}
    return [*template_env, *({"name": name, **value} for name, value in added.items() if name not in template_names)]
