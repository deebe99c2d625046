"""Validates a pod-bound token against the worker that presents it.

Pure; called by `token_review` with what the API server answered.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.protocol.messages import Hello, Refused
from surefoot_operator.platforms.kubernetes import api_objects

_POD = "authentication.kubernetes.io/pod-"
_ACCOUNT = "system:serviceaccount:"


@dataclass(frozen=True, slots=True)
class BoundPod:
    """The pod that a token is bound to, by the API server."""

    namespace: str
    name: str
    uid: str


def bound_pod(status: Mapping[str, Any], audience: str) -> BoundPod | str:
    """Extracts the pod of a reviewed token, or why it is refused."""
    if not status.get("authenticated"):
        return f"the API server does not accept the token: {status.get('error') or 'not authenticated'}"
    if audience not in status.get("audiences", ()):
        return f"the token is not meant for the audience {audience!r}"
    user = status.get("user", {})
    username, extra = str(user.get("username", "")), user.get("extra") or {}
    names, uids = extra.get(f"{_POD}name") or [], extra.get(f"{_POD}uid") or []
    if not username.startswith(_ACCOUNT) or len(names) != 1 or len(uids) != 1:
        return f"the token of {username or 'nobody'} is bound to no pod; a projected service-account token is needed"
    return BoundPod(username.removeprefix(_ACCOUNT).partition(":")[0], names[0], uids[0])


def refusal(
    hello: Hello, pod: BoundPod, stored: Mapping[str, Any] | None, right: Mapping[str, Any] | None, controlled: bool
) -> Refused | None:
    """Decides whether the token's pod is the worker that says hello.

    `stored`: the pod of that name, `right`: the worker's pod, as known now; `controlled`: the hello's job controls
    `stored`. By labels alone a pod of any namespace could speak as a worker of any job whose uid it knows.
    """
    whose = f"the token is that of pod {pod.namespace}/{pod.name}"
    if stored is None or stored["metadata"]["uid"] != pod.uid:
        if right is not None:
            return Refused(f"{whose}; that worker is pod {right['metadata']['name']}", retry=False)
        # a watch may be a moment behind; a pod that is gone asks no more
        return Refused(
            f"pod {pod.namespace}/{pod.name} ({pod.uid}) is not in the operator's cache yet: ask again", retry=True
        )
    said = stored["metadata"].get("labels") or {}
    claimed = worker_labels(hello)
    wrong = [f"{name} is {said.get(name)!r}, not {text!r}" for name, text in claimed.items() if said.get(name) != text]
    if wrong:
        return Refused(f"{whose}, whose {wrong[0]}", retry=False)
    return None if controlled else Refused(f"{whose}, which job {hello.job} does not control", retry=False)


def worker_labels(hello: Hello) -> dict[str, str]:
    """The labels that the worker's pod must have."""
    return {
        api_objects.JOB_UID: hello.job,
        api_objects.WORKER_INDEX: str(hello.index),
        api_objects.ATTEMPT: str(hello.attempt),
    }


def expires_seconds(token: str) -> float | None:
    """Reads a JWT's expiry in Unix seconds; None without one.

    The signature is not checked: call it only for reviewed tokens.
    """
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        return float(claims["exp"])
    except (binascii.Error, ValueError, KeyError, TypeError):
        return None
