"""Defines names, labels, paths and errors of Kubernetes objects.

The Helm chart uses the same labels and names; change both together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surefoot_operator.api import topology_levels
from surefoot_operator.api.spec import GROUP, KIND, VERSION
from surefoot_operator.errors import PlatformError
from surefoot_operator.rejected_calls import WATCH, ApiCall, Cause

JOB_NAME_LABEL = f"{GROUP}/job-name"
"""Label with the job's name, on every object of a job."""
JOB_UID_LABEL = f"{GROUP}/job-uid"
"""Label with the job's UID, on every object of a job."""
WORKER_INDEX_LABEL = f"{GROUP}/worker-index"
"""Label with a worker's index, on its pod."""
ATTEMPT_LABEL = f"{GROUP}/attempt"
"""Label with the number of the attempt, on the pod of a worker or of a deletion."""
SECRET_LABEL = f"{GROUP}/secret"
"""Label with the digest that names a worker's Secret, on its pod."""
PART_LABEL = f"{GROUP}/part"
"""Label with the role of a pod: `WORKER`, `PURGE` or memory-tier."""
WORKER, PURGE = "worker", "purge"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
OPERATOR = "surefoot-operator"
MEMORY_SERVER_SELECTOR = f"{PART_LABEL}=memory-tier"
"""Label selector of the memory servers' pods."""
MEMORY_SERVER_CONTAINER, MEMORY_SERVER_PORT = "redis", 6379
"""Container and port of a memory server, unless its pod has a container port named `redis`; then that one is used."""
MEMORY_SERVER_TLS = f"{GROUP}/tls"
"""Annotation on pods of memory servers that use TLS; while TLS is being switched on or off, only some pods have it."""
TRAINER_CONTAINER = "trainer"
"""Name of the container in the pod template that runs the training script."""
HOSTNAME_LABEL = topology_levels.HOSTNAME
"""Label with a node's host name, on the node."""


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """Identifies a job, even one whose spec is invalid."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


JOBS_API_PATH = f"/apis/{GROUP}/{VERSION}"
"""API path of the group version that has the TrainingJobs."""


def jobs_path(namespace: str, name: str) -> str:
    """Returns the API path of one TrainingJob."""
    return f"{JOBS_API_PATH}/namespaces/{namespace}/trainingjobs/{name}"


def core_path(namespace: str, kind: str, name: str = "") -> str:
    """Returns the API path of all objects of a core kind (such as "pods") in a namespace, or of one."""
    return f"/api/v1/namespaces/{namespace}/{kind}" + (f"/{name}" if name else "")


def role_of(pod: dict[str, Any]) -> str:
    """Returns the role of a job's pod; a pod without the label is a worker."""
    part = pod["metadata"].get("labels", {}).get(PART_LABEL, WORKER)
    return str(part)


def job_uid_label_of(pod: dict[str, Any]) -> str | None:
    """Returns the job UID in a pod's labels. Anyone may set labels: check ownership with `is_controlled_by`."""
    uid = pod["metadata"].get("labels", {}).get(JOB_UID_LABEL)
    return None if uid is None else str(uid)


def owner_reference(name: str, uid: str) -> dict[str, Any]:
    """Builds the owner reference by which the garbage collector deletes an object together with its job."""
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": name, "uid": uid, "controller": True}


def controller_of(pod: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the name and UID of the TrainingJob that controls a pod; None: no TrainingJob does.

    Labels are no proof of ownership: any user who may create pods can set any label on them.
    """
    for reference in pod["metadata"].get("ownerReferences") or ():
        is_training_job = (
            str(reference.get("apiVersion", "")).partition("/")[0] == GROUP and reference.get("kind") == KIND
        )
        if is_training_job and reference.get("controller"):
            return str(reference.get("name")), str(reference.get("uid"))
    return None


def is_controlled_by(pod: Mapping[str, Any], job: JobIdentity) -> bool:
    """Whether a pod is in the job's namespace and controlled by the job."""
    return pod["metadata"].get("namespace") == job.namespace and controller_of(pod) == (job.name, job.uid)


def pod_name(job: str, index: int, attempt: int) -> str:
    """Returns the name of a worker's pod."""
    return f"{job}-worker-{index}-{attempt}"


def purge_name(job: str, attempt: int) -> str:
    """Returns the name of the pod that deletes the job's persistent data."""
    return f"{job}-delete-{attempt}"


def host_name(index: int) -> str:
    """Returns a worker's host name, which is the same for every attempt."""
    return f"worker-{index}"


def service_name(job: str) -> str:
    """Returns the name of the job's headless service; a worker's DNS name is `host_name(index)` below it."""
    return f"{job}-workers"


def job_labels(job: str, uid: str) -> dict[str, str]:
    """Returns the labels of every object that belongs to a job."""
    return {JOB_NAME_LABEL: job, JOB_UID_LABEL: uid, MANAGED_BY_LABEL: OPERATOR}


def job_selector(uid: str) -> str:
    """Returns the label selector of a job's pods."""
    return f"{JOB_UID_LABEL}={uid}"


# ---- api errors ------------------------------------------------------------------------------------------------------
# Defines the errors of calls to the API server. Pure. They are not in `api_client`, because commands that need no
# cluster also run where the Kubernetes client is not installed.

_LONG_VALUE = re.compile(r'(?:(?<=value: )"|"(?=[{\[]))(?:[^"\\]|\\.){100,}"')
"""A long quoted value or object that the server repeats before it names the fault."""
_MAX_MESSAGE_CHARACTERS = 700
"""Length limit of an API server's message, in characters."""
PATCH_TEST_FAILED = "the server rejected our request due to an error in our request"
"""The API server's whole message when a JSON Patch's `test` fails because the object was changed by another client."""
_CRD_HINT = (
    "; if the CustomResourceDefinition in the cluster is older than this operator, apply the one of the operator's"
    " version (crd.yaml of its chart)"
)


class ApiError(PlatformError):
    """The API server answered a call with an error code.

    Args:
        call_text: The call, as a method and a path.
        code: HTTP status code.
        reason: Reason in the server's Status object; may be empty.
        message: Message in the server's Status object.
        namespace_terminating: Whether the server gave the cause NamespaceTerminating.
    """

    def __init__(
        self, call_text: str, code: int, reason: str, message: str, namespace_terminating: bool = False
    ) -> None:
        self.server_message = shorten_message(message)
        """The server's shortened message. It comes first in the error's text, because log viewers cut long lines."""
        if (
            code == 422
            and message != PATCH_TEST_FAILED
            and "/trainingjobs/" in call_text
            and call_text.endswith("/status")
        ):
            self.server_message += _CRD_HINT
        super().__init__(f"{self.server_message} ({code} {reason}: the API server rejected {call_text})")
        self.code = code
        self.reason = reason
        self.is_permanent = code in (400, 422)
        """Whether the same call will always be rejected, because its content is invalid."""
        self.is_final = code < 500
        """Whether the server certainly did not carry out the call."""
        self.is_busy = code == 429
        """Whether the server is overloaded or limits the rate of calls."""
        # servers before 1.19 give no cause; all versions write these words
        self.is_namespace_deleted = namespace_terminating or (
            code == 403 and "because it is being terminated" in message
        )


class ApiUnreachable(PlatformError):
    """The API server did not answer; whether the call took effect is unknown.

    Args:
        call_text: The call, as a method and a path.
        problem: The error of the connection.
    """

    def __init__(self, call_text: str, problem: BaseException) -> None:
        error_text = str(problem) or type(problem).__name__
        super().__init__(f"the API server did not answer {call_text}: {error_text}; trying again later")


def shorten_message(message: str) -> str:
    """Shortens an API server's message; keeps its end, where the server names the fault."""
    text = _LONG_VALUE.sub('"…"', message).strip() or "the API server gave no reason"
    return (
        text
        if len(text) <= _MAX_MESSAGE_CHARACTERS
        else f"{text[: _MAX_MESSAGE_CHARACTERS // 2]} … {text[-_MAX_MESSAGE_CHARACTERS // 2 :]}"
    )


# ---- api calls -------------------------------------------------------------------------------------------------------
# Parses calls to the API server and classifies the responses. Pure; called by `api_client`, which records the outcome
# of every call in `RefusedCalls`.

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def parse_call(method: str, path: str, body: Any = None, job: str = "") -> ApiCall:
    """Parses a call from its method and path; for a create, takes the name from the body."""
    segments = path.strip("/").split("/")
    segments = segments[2:] if segments[0] == "api" else segments[3:]
    namespace = ""
    if len(segments) > 2 and segments[0] == "namespaces":
        namespace, segments = segments[1], segments[2:]
    resource, name, subresource = (*segments, "", "", "")[:3]
    if method == "POST" and not name and isinstance(body, dict):
        name = str((body.get("metadata") or {}).get("name") or "")
        # event names are digests: one that is created proves that all can be, so they count as one call
        name = "" if resource == "events" else name
    verb = _VERBS.get(method) or ("get" if name else WATCH)
    return ApiCall(verb, f"{resource}/{subresource}" if subresource else resource, namespace, name, job)


def already_exists(call: ApiCall, error: ApiError) -> bool:
    """Whether a create failed because the object exists already."""
    return call.verb == "create" and error.code == 409 and error.reason == "AlreadyExists"


def is_expected_error(call: ApiCall, error: ApiError) -> bool:
    """Whether an error response is part of normal operation, so that it counts as no rejection.

    This is so for an object that was deleted or changed by another client, and for a watch that is too old.
    """
    if error.code in (409, 410):
        return True
    if error.code == 404:
        return bool(call.name) and call.verb != "create"
    return error.code == 422 and call.verb == "patch" and PATCH_TEST_FAILED in error.server_message


def classify_error(error: ApiError) -> Cause:
    """Classifies an error response by its cause."""
    if error.is_namespace_deleted:
        return "closing"
    if error.code in (401, 403):
        # a used-up ResourceQuota and a missing permission both answer 403; only the message differs
        return (
            "quota"
            if "exceeded quota" in error.server_message or "failed quota" in error.server_message
            else "forbidden"
        )
    if error.code == 404:
        return "absent"
    if error.code in (400, 413, 415, 422):
        return "invalid"
    return "busy" if error.code == 429 else "failed"
