"""Authenticates agents by TokenReview, with a cache of results.

Touches the API server. If a decision is not possible now, the agent is rejected with `retry`; its training continues. A
reviewed token is accepted until it expires, but only while its pod exists.
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
# Checks that a pod-bound token belongs to the worker that presents it. Pure; called with the API server's answer.

_POD = "authentication.kubernetes.io/pod-"
_ACCOUNT = "system:serviceaccount:"


@dataclass(frozen=True, slots=True)
class BoundPod:
    """Identifies the pod that the API server bound a token to."""

    namespace: str
    name: str
    uid: str


def parse_bound_pod(status: Mapping[str, Any], audience: str) -> BoundPod | str:
    """Returns the pod of a reviewed token, or why the token is rejected.

    Args:
        status: Status of the TokenReview.
        audience: Audience that the token must be for.
    """
    if not status.get("authenticated"):
        return f"the API server rejects the token: {status.get('error') or 'not authenticated'}"
    if audience not in status.get("audiences", ()):
        return f"the token is not for the audience {audience!r}"
    user = status.get("user", {})
    username, extra = str(user.get("username", "")), user.get("extra") or {}
    names, uids = extra.get(f"{_POD}name") or [], extra.get(f"{_POD}uid") or []
    if not username.startswith(_ACCOUNT) or len(names) != 1 or len(uids) != 1:
        return f"the token of {username or 'an unknown user'} is not bound to a pod; a projected service-account token is needed"
    return BoundPod(username.removeprefix(_ACCOUNT).partition(":")[0], names[0], uids[0])


def hello_rejection(
    hello: Hello,
    pod: BoundPod,
    stored: Mapping[str, Any] | None,
    worker_pod: Mapping[str, Any] | None,
    controlled: bool,
) -> HelloRejected | None:
    """Returns why the token's pod is not the worker that the hello names; None: it is that worker.

    Labels alone are not enough: a pod of any namespace could pose as a worker of any job whose uid it knows.

    Args:
        hello: The agent's first message.
        pod: The pod that the token is bound to.
        stored: The cached pod with that namespace and name; None: there is none.
        worker_pod: The cached pod of the worker; None: there is none.
        controlled: Whether the hello's job controls `stored`.
    """
    token_text = f"the token belongs to pod {pod.namespace}/{pod.name}"
    if stored is None or stored["metadata"]["uid"] != pod.uid:
        if worker_pod is not None:
            return HelloRejected(f"{token_text}, but that worker is pod {worker_pod['metadata']['name']}", retry=False)
        # The watch may be a moment late. A pod that was deleted will not ask again.
        return HelloRejected(
            f"pod {pod.namespace}/{pod.name} ({pod.uid}) is not in the operator's cache yet: retry", retry=True
        )
    labels = stored["metadata"].get("labels") or {}
    expected_labels = worker_labels(hello)
    mismatches = [
        f"{name} is {labels.get(name)!r}, not {text!r}"
        for name, text in expected_labels.items()
        if labels.get(name) != text
    ]
    if mismatches:
        return HelloRejected(f"{token_text}, whose {mismatches[0]}", retry=False)
    return None if controlled else HelloRejected(f"{token_text}, which job {hello.job} does not control", retry=False)


def worker_labels(hello: Hello) -> dict[str, str]:
    """Returns the labels that the worker's pod must have."""
    return {
        api_objects.JOB_UID_LABEL: hello.job,
        api_objects.WORKER_INDEX_LABEL: str(hello.index),
        api_objects.ATTEMPT_LABEL: str(hello.attempt),
    }


def token_expiry_seconds(token: str) -> float | None:
    """Reads a JWT's expiry in Unix seconds; None: it has none or cannot be read.

    The signature is not checked, so call it only for reviewed tokens.
    """
    segments = token.split(".")
    if len(segments) != 3:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(segments[1] + "=" * (-len(segments[1]) % 4)))
        return float(claims["exp"])
    except (binascii.Error, ValueError, KeyError, TypeError):
        return None


# ---- token review ----------------------------------------------------------------------------------------------------

REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
Pod = Mapping[str, Any]
_MAX_AFTER_SECONDS = 7.0


@dataclass(frozen=True, slots=True)
class ReviewSettings:
    """Limits of the token reviews."""

    audience: str = "surefoot"
    """Audience that agents' tokens must be for."""
    max_cached: int = 16384
    """Number of cached results; the oldest is dropped first and reviewed again if needed."""
    rejected_seconds: float = 5.0
    """How long a rejected token is not reviewed again."""
    reviews_per_second: float = 300.0
    """Average reviews a second; agents beyond it must retry. A review costs the API server about a millisecond."""
    burst_reviews: float = 1000.0
    """Reviews allowed at once after a pause."""
    max_concurrent: int = 16
    """Concurrent reviews; others wait within the time limit of their connection's first message."""


class TokenReviewer:
    """Authenticates agents' hellos for the agent server.

    Args:
        api: The API server.
        pods: Cached pods by namespace and name.
        jobs: Cached jobs by namespace and name.
        clock: Returns Unix seconds.
        settings: Limits; None: the defaults.
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
        self._concurrency = asyncio.Semaphore(self._settings.max_concurrent)
        self._tokens, self._refilled_seconds = self._settings.burst_reviews, clock()
        self._retrying_agents = 0.0
        """Agents that must retry, less those that the average rate has admitted since."""

    async def authenticate(self, hello: Hello) -> HelloRejected | None:
        """Returns None if the token belongs to the worker that the hello names, else the rejection."""
        digest = hashlib.sha256(hello.token.encode()).digest()
        verdict = self._cached_verdict(digest)
        if verdict is None:
            if not self._take_review_token():
                # Spread the retries, so that agents come back at the rate at which they can be reviewed.
                after_seconds = min(_MAX_AFTER_SECONDS, self._retrying_agents / self._settings.reviews_per_second)
                return HelloRejected(
                    "too many tokens are being reviewed: retry", retry=True, after_seconds=after_seconds
                )
            try:
                verdict = await self._review_token(hello.token)
            except PlatformError as error:
                return HelloRejected(f"the token cannot be reviewed now, retry: {error}", retry=True)
            self._cache_verdict(digest, hello.token, verdict)
        if isinstance(verdict, str):
            return HelloRejected(verdict, retry=False)
        stored_pod = self._pods.get((verdict.namespace, verdict.name))
        # Search all pods only if the token does not match; it serves the error message.
        worker_pod = (
            self._find_worker_pod(hello)
            if stored_pod is None or stored_pod["metadata"]["uid"] != verdict.uid
            else stored_pod
        )
        return hello_rejection(
            hello, verdict, stored_pod, worker_pod, stored_pod is not None and self._controls(hello.job, stored_pod)
        )

    def _find_worker_pod(self, hello: Hello) -> Pod | None:
        labels = worker_labels(hello).items()
        labelled_pods = (pod for pod in self._pods.values() if labels <= pod["metadata"].get("labels", {}).items())
        return next((pod for pod in labelled_pods if self._controls(hello.job, pod)), None)

    def _controls(self, uid: str, pod: Pod) -> bool:
        """Returns whether the job with that uid, in the pod's own namespace, controls the pod."""
        owner = api_objects.controller_of(pod)
        job = self._jobs.get((pod["metadata"]["namespace"], owner[0])) if owner is not None else None
        return job is not None and owner is not None and owner[1] == uid == job["metadata"]["uid"]

    async def _review_token(self, token: str) -> BoundPod | str:
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [self._settings.audience]},
        }
        process_metrics.token_reviews.inc()
        async with self._concurrency:
            review = await self._api.post(REVIEWS, body)
        return parse_bound_pod(review.get("status", {}), self._settings.audience)

    def _take_review_token(self) -> bool:
        now = self._clock()
        gained = max(0.0, now - self._refilled_seconds) * self._settings.reviews_per_second
        self._tokens, self._refilled_seconds = min(self._settings.burst_reviews, self._tokens + gained), now
        self._retrying_agents = max(0.0, self._retrying_agents - gained)
        if self._tokens < 1.0:
            self._retrying_agents += 1
            return False
        self._tokens -= 1.0
        return True

    def _cached_verdict(self, digest: bytes) -> BoundPod | str | None:
        until_seconds, verdict = self._cache.get(digest, (0.0, None))
        return verdict if self._clock() < until_seconds else None

    def _cache_verdict(self, digest: bytes, token: str, verdict: BoundPod | str) -> None:
        retry_seconds = self._clock() + self._settings.rejected_seconds
        until_seconds = retry_seconds if isinstance(verdict, str) else token_expiry_seconds(token) or retry_seconds
        self._cache[digest] = (until_seconds, verdict)
        self._cache.move_to_end(digest)
        while len(self._cache) > self._settings.max_cached:
            self._cache.popitem(last=False)
