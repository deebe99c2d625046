"""Authenticates agents by TokenReview, with a cache of answers.

Touches the API server. What cannot be decided now is refused with `retry`; training continues meanwhile. A reviewed
token is accepted until it expires, but only while its pod exists.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.protocol.messages import Hello, HelloRejected
from surefoot_operator.controller import process_metrics
from surefoot_operator.errors import PlatformError
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.api_client import Api

log = logging.getLogger(__name__)


# ---- pod token -------------------------------------------------------------------------------------------------------
# Validates a pod-bound token against the worker that presents it. Pure; called below with what the API server answered.

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


def rejection(
    hello: Hello, pod: BoundPod, stored: Mapping[str, Any] | None, right: Mapping[str, Any] | None, controlled: bool
) -> HelloRejected | None:
    """Decides whether the token's pod is the worker that says hello.

    `stored`: the pod of that name, `right`: the worker's pod, as known now; `controlled`: the hello's job controls
    `stored`. By labels alone a pod of any namespace could speak as a worker of any job whose uid it knows.
    """
    whose = f"the token is that of pod {pod.namespace}/{pod.name}"
    if stored is None or stored["metadata"]["uid"] != pod.uid:
        if right is not None:
            return HelloRejected(f"{whose}; that worker is pod {right['metadata']['name']}", retry=False)
        # a watch may be a moment behind; a pod that is gone asks no more
        return HelloRejected(
            f"pod {pod.namespace}/{pod.name} ({pod.uid}) is not in the operator's cache yet: ask again", retry=True
        )
    said = stored["metadata"].get("labels") or {}
    claimed = worker_labels(hello)
    wrong = [f"{name} is {said.get(name)!r}, not {text!r}" for name, text in claimed.items() if said.get(name) != text]
    if wrong:
        return HelloRejected(f"{whose}, whose {wrong[0]}", retry=False)
    return None if controlled else HelloRejected(f"{whose}, which job {hello.job} does not control", retry=False)


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


# ---- token review ----------------------------------------------------------------------------------------------------

REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
Pod = Mapping[str, Any]
_MAX_AFTER_SECONDS = 7.0


@dataclass(frozen=True, slots=True)
class ReviewSettings:
    audience: str = "surefoot"
    remembered: int = 16384
    """Reviews kept, newest first; one that fell out is asked for again."""
    rejected_seconds: float = 5.0
    """A token that counts for nothing is not asked about again for so long."""
    rate: float = 300.0
    """Reviews a second on average; more are told to come again. An answer costs an API server about a millisecond."""
    burst: float = 1000.0
    at_once: int = 16
    """Reviews under way; others wait within the hello's time limit."""


class TokenReviewer:
    """Authenticates agents' hellos; the server's Authenticator.

    `pods` and `jobs` by namespace and name, as cached now.
    """

    def __init__(
        self,
        api: Api,
        pods: Mapping[tuple[str, str], Pod],
        jobs: Mapping[tuple[str, str], Pod],
        clock: Callable[[], float],
        settings: ReviewSettings | None = None,
    ) -> None:
        self._api, self._pods, self._jobs, self._clock = api, pods, jobs, clock
        self._settings = settings or ReviewSettings()
        self._cache: OrderedDict[bytes, tuple[float, BoundPod | str]] = OrderedDict()
        self._turn = asyncio.Semaphore(self._settings.at_once)
        self._allowed, self._counted_at = self._settings.burst, clock()
        self._sent_away = 0.0

    async def authenticate(self, hello: Hello) -> HelloRejected | None:
        """Returns None if the token is that worker's, else the refusal."""
        digest = hashlib.sha256(hello.token.encode()).digest()
        found = self._remembered(digest)
        if found is None:
            if not self._may_ask():
                # those that were sent away come again one after another, as they would have been taken
                after = min(_MAX_AFTER_SECONDS, self._sent_away / self._settings.rate)
                return HelloRejected("too many tokens are being reviewed: ask again", retry=True, after_seconds=after)
            try:
                found = await self._reviewed(hello.token)
            except PlatformError as error:
                return HelloRejected(f"the token cannot be reviewed now: {error}", retry=True)
            self._remember(digest, hello.token, found)
        if isinstance(found, str):
            return HelloRejected(found, retry=False)
        stored = self._pods.get((found.namespace, found.name))
        # looked for among all only where something is wrong already
        right = self._worker(hello) if stored is None or stored["metadata"]["uid"] != found.uid else stored
        return rejection(hello, found, stored, right, stored is not None and self._controls(hello.job, stored))

    def _worker(self, hello: Hello) -> Pod | None:
        wanted = worker_labels(hello).items()
        bearing = (pod for pod in self._pods.values() if wanted <= pod["metadata"].get("labels", {}).items())
        return next((pod for pod in bearing if self._controls(hello.job, pod)), None)

    def _controls(self, uid: str, pod: Pod) -> bool:
        """Whether the job of that uid, as it stands in the pod's own namespace, controls the pod."""
        owner = api_objects.controller_of(pod)
        job = self._jobs.get((pod["metadata"]["namespace"], owner[0])) if owner is not None else None
        return job is not None and owner is not None and owner[1] == uid == job["metadata"]["uid"]

    async def _reviewed(self, token: str) -> BoundPod | str:
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [self._settings.audience]},
        }
        process_metrics.token_reviews.inc()
        async with self._turn:
            answer = await self._api.post(REVIEWS, body)
        return bound_pod(answer.get("status", {}), self._settings.audience)

    def _may_ask(self) -> bool:
        now = self._clock()
        gained = max(0.0, now - self._counted_at) * self._settings.rate
        self._allowed, self._counted_at = min(self._settings.burst, self._allowed + gained), now
        self._sent_away = max(0.0, self._sent_away - gained)
        if self._allowed < 1.0:
            self._sent_away += 1
            return False
        self._allowed -= 1.0
        return True

    def _remembered(self, digest: bytes) -> BoundPod | str | None:
        until, found = self._cache.get(digest, (0.0, None))
        return found if self._clock() < until else None

    def _remember(self, digest: bytes, token: str, found: BoundPod | str) -> None:
        soon = self._clock() + self._settings.rejected_seconds
        until = soon if isinstance(found, str) else expires_seconds(token) or soon
        self._cache[digest] = (until, found)
        self._cache.move_to_end(digest)
        while len(self._cache) > self._settings.remembered:
            self._cache.popitem(last=False)
