"""Defines names, labels and paths of Kubernetes objects, shared with the chart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surefoot_operator.api import topology_levels
from surefoot_operator.api.spec import GROUP, KIND, VERSION
from surefoot_operator.errors import PlatformError
from surefoot_operator.rejected_calls import WATCH, ApiCall, Cause

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


# ---- api errors ------------------------------------------------------------------------------------------------------
# Defines what a call to the API server may raise. Pure. Apart from `api_client`, since commands that talk to no cluster
# are there where its client is not installed.

_LONG_VALUE = re.compile(r'(?:(?<=value: )"|"(?=[{\[]))(?:[^"\\]|\\.){100,}"')
"""A quoted value, or a whole object, that the server repeats; what is wrong with it stands behind."""
_MOST = 700
TEST_FAILED = "the server rejected our request due to an error in our request"
"""All that the API server says where a JSON Patch's `test` fails: somebody else was faster."""
_CRD = (
    "; does the CustomResourceDefinition in the cluster fit this operator? If it is older, apply the one of the"
    " operator's version (crd.yaml of its chart)"
)


class ApiError(PlatformError):
    """The server answered with an error code."""

    def __init__(self, asked: str, code: int, reason: str, message: str, closing: bool = False) -> None:
        self.sentence = readable(message)
        """The server's own, which leads: log viewers cut lines at their end."""
        if code == 422 and message != TEST_FAILED and "/trainingjobs/" in asked and asked.endswith("/status"):
            self.sentence += _CRD
        super().__init__(f"{self.sentence} ({code} {reason}: the API server refused to {asked})")
        self.code = code
        self.reason = reason
        self.permanent = code in (400, 422)
        self.decided = code < 500
        self.busy = code == 429
        # servers before 1.19 give no cause, and all of them these words
        self.closing = closing or (code == 403 and "because it is being terminated" in message)


class ApiUnreachable(PlatformError):
    """The server did not answer; whether the call succeeded is unknown."""

    def __init__(self, asked: str, problem: BaseException) -> None:
        said = str(problem) or type(problem).__name__
        super().__init__(f"the API server did not answer when asked to {asked}: {said}; trying again later")


def readable(message: str) -> str:
    """Shortens a refusal's message; its end is kept, where the server says what is wrong."""
    text = _LONG_VALUE.sub('"…"', message).strip() or "the API server gave no reason"
    return text if len(text) <= _MOST else f"{text[: _MOST // 2]} … {text[-_MOST // 2 :]}"


# ---- api calls -------------------------------------------------------------------------------------------------------
# Reads what a call to the API server asked for, and what its answer means. Pure; called by `api_client`, which reports
# the outcome of every call to `blockers`.

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def call_of(method: str, path: str, body: Any = None, job: str = "") -> ApiCall:
    """Parses a call from its method and path; a create's name is its body's."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    namespace = ""
    if len(parts) > 2 and parts[0] == "namespaces":
        namespace, parts = parts[1], parts[2:]
    resource, name, sub = (*parts, "", "", "")[:3]
    if method == "POST" and not name and isinstance(body, dict):
        name = str((body.get("metadata") or {}).get("name") or "")
        # an event's name is a digest of its words: any one that is recorded says that events can be
        name = "" if resource == "events" else name
    verb = _VERBS.get(method) or ("get" if name else WATCH)
    return ApiCall(verb, f"{resource}/{sub}" if sub else resource, namespace, name, job)


def is_there(call: ApiCall, error: ApiError) -> bool:
    """Whether what a create asks for exists already."""
    return call.verb == "create" and error.code == 409 and error.reason == "AlreadyExists"


def is_ordinary(call: ApiCall, error: ApiError) -> bool:
    """Whether the answer tells of a state of things, and denies nothing.

    An object that is gone or was changed by another, a watch that is too old.
    """
    if error.code in (409, 410):
        return True
    if error.code == 404:
        return bool(call.name) and call.verb != "create"
    return error.code == 422 and call.verb == "patch" and TEST_FAILED in error.sentence


def cause_of(error: ApiError) -> Cause:
    """Sorts a refusal into one of a few causes."""
    if error.closing:
        return "closing"
    if error.code in (401, 403):
        # the admission plugin's own words: a ResourceQuota answers 403, as a missing right does
        return "quota" if "exceeded quota" in error.sentence or "failed quota" in error.sentence else "forbidden"
    if error.code == 404:
        return "absent"
    if error.code in (400, 413, 415, 422):
        return "invalid"
    return "busy" if error.code == 429 else "failed"
