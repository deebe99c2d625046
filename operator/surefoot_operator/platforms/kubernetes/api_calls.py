"""Reads what a call to the API server asked for, and what its answer means.

Pure; called by `api_client`, which reports the outcome of every call to `refused_calls`.
"""

from __future__ import annotations

from typing import Any

from surefoot_operator.platforms.kubernetes.api_errors import TEST_FAILED, ApiRefused
from surefoot_operator.rejected_calls import WATCH, ApiCall, Cause

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


def is_there(call: ApiCall, error: ApiRefused) -> bool:
    """Whether what a create asks for exists already."""
    return call.verb == "create" and error.code == 409 and error.reason == "AlreadyExists"


def is_ordinary(call: ApiCall, error: ApiRefused) -> bool:
    """Whether the answer tells of a state of things, and denies nothing.

    An object that is gone or was changed by another, a watch that is too old.
    """
    if error.code in (409, 410):
        return True
    if error.code == 404:
        return bool(call.name) and call.verb != "create"
    return error.code == 422 and call.verb == "patch" and TEST_FAILED in error.sentence


def cause_of(error: ApiRefused) -> Cause:
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
