"""Defines names, labels and paths of Kubernetes objects, shared with the chart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surefoot_operator.api import topology_levels
from surefoot_operator.api.spec import GROUP, KIND, VERSION

JOB_NAME = f"{GROUP}/job-name"
JOB_UID = f"{GROUP}/job-uid"
WORKER_INDEX = f"{GROUP}/worker-index"
ATTEMPT = f"{GROUP}/attempt"
SECRET = f"{GROUP}/secret"
"""On a worker's pod: the digest that names its Secret."""
PART = f"{GROUP}/part"
WORKER, PURGE = "worker", "purge"
MANAGED_BY = "app.kubernetes.io/managed-by"
OPERATOR = "surefoot-operator"
HOLDER_SELECTOR = f"{PART}=memory-tier"
HOLDER_CONTAINER, HOLDER_PORT = "redis", 6379
"""Unless a container port of the holder's pod is named `redis`: then that one of that container."""
HOLDER_TLS = f"{GROUP}/tls"
"""An annotation of holders that speak TLS: while it is switched, some do and some do not."""
TRAINER = "trainer"
HOSTNAME = topology_levels.HOSTNAME


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """Names a job, even one whose spec cannot be read."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


JOBS = f"/apis/{GROUP}/{VERSION}"


def jobs_path(namespace: str, name: str) -> str:
    return f"{JOBS}/namespaces/{namespace}/trainingjobs/{name}"


def core_path(namespace: str, kind: str, name: str = "") -> str:
    """The path of pods, secrets, services or events, or of one."""
    return f"/api/v1/namespaces/{namespace}/{kind}" + (f"/{name}" if name else "")


def part_of(pod: dict[str, Any]) -> str:
    """The role of a job's pod; without a label, a worker."""
    found = pod["metadata"].get("labels", {}).get(PART, WORKER)
    return str(found)


def job_of(pod: dict[str, Any]) -> str | None:
    """The job's uid on a pod's label, which proves nothing."""
    found = pod["metadata"].get("labels", {}).get(JOB_UID)
    return None if found is None else str(found)


def owner(name: str, uid: str) -> dict[str, Any]:
    """The owner reference by which objects are deleted with their job."""
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": name, "uid": uid, "controller": True}


def controller_of(pod: Mapping[str, Any]) -> tuple[str, str] | None:
    """Name and uid of the TrainingJob that controls a pod, if any.

    Labels alone prove nothing: whoever may create pods somewhere can write any label on them.
    """
    for owner in pod["metadata"].get("ownerReferences") or ():
        ours = str(owner.get("apiVersion", "")).partition("/")[0] == GROUP and owner.get("kind") == KIND
        if ours and owner.get("controller"):
            return str(owner.get("name")), str(owner.get("uid"))
    return None


def is_of(pod: Mapping[str, Any], job: JobIdentity) -> bool:
    """Whether a pod is in that job's namespace and controlled by it."""
    return pod["metadata"].get("namespace") == job.namespace and controller_of(pod) == (job.name, job.uid)


def pod_name(job: str, index: int, attempt: int) -> str:
    return f"{job}-worker-{index}-{attempt}"


def purge_name(job: str, attempt: int) -> str:
    return f"{job}-delete-{attempt}"


def host_name(index: int) -> str:
    """A worker's host name, the same for every attempt."""
    return f"worker-{index}"


def service_name(job: str) -> str:
    """The headless service; workers are `host_name(i)` below it."""
    return f"{job}-workers"


def job_labels(job: str, uid: str) -> dict[str, str]:
    """The labels of everything that belongs to a job."""
    return {JOB_NAME: job, JOB_UID: uid, MANAGED_BY: OPERATOR}


def selector(uid: str) -> str:
    """Selects a job's pods."""
    return f"{JOB_UID}={uid}"
