"""Agents' tokens against an API server in memory: what is asked once, what is asked again, what is not asked at all."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import replace
from typing import Any

import pytest

from support.fakes.fake_agent import hello
from support.fakes.fake_api import FakeApi, silent
from surefoot.protocol.messages import Hello
from surefoot_operator.controller.credentials.token_review import REVIEWS, ReviewSettings, TokenReviewer
from surefoot_operator.platforms.kubernetes.api_objects import ApiError

NOW = 1000.0
OWNER = {
    "apiVersion": "surefoot.dev/v1alpha1",
    "kind": "TrainingJob",
    "name": "job",
    "uid": "job-1",
    "controller": True,
}
POD = {
    "metadata": {
        "name": "job-worker-0-1",
        "namespace": "team",
        "uid": "pod-uid",
        "ownerReferences": [OWNER],
        "labels": {
            "surefoot.dev/job-uid": "job-1",
            "surefoot.dev/worker-index": "0",
            "surefoot.dev/attempt": "1",
        },
    }
}


def token(expires: float = NOW + 3600, salt: str = "") -> str:
    claims = base64.urlsafe_b64encode(json.dumps({"exp": expires, "salt": salt}).encode()).decode().rstrip("=")
    return f"head.{claims}.signature"


class Stand:
    """An authenticator, its server, its clock and its pods."""

    def __init__(self, settings: ReviewSettings | None = None) -> None:
        self.server, self.now = FakeApi(), NOW
        self.pods: dict[tuple[str, str], Any] = {("team", "job-worker-0-1"): POD}
        self.status: dict[str, Any] = {
            "authenticated": True,
            "audiences": ["surefoot"],
            "user": {
                "username": "system:serviceaccount:team:default",
                "extra": {
                    "authentication.kubernetes.io/pod-name": ["job-worker-0-1"],
                    "authentication.kubernetes.io/pod-uid": ["pod-uid"],
                },
            },
        }
        self.server.answers[REVIEWS] = self._answer
        self.bodies: list[dict[str, Any]] = []
        self.jobs: dict[tuple[str, str], Any] = {("team", "job"): {"metadata": {"uid": "job-1"}}}
        self.reviews = TokenReviewer(self.server.api, self.pods, self.jobs, lambda: self.now, settings)

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        return {**body, "status": self.status}

    async def refused(self, said: Hello) -> tuple[bool, str] | None:
        found = await self.reviews.authenticate(said)
        return None if found is None else (found.retry, found.reason)


GOOD = replace(hello(0, 1), token=token())


async def test_a_good_token_is_reviewed_once_until_it_expires() -> None:
    stand = Stand()
    assert await stand.refused(GOOD) is None
    assert await stand.refused(GOOD) is None
    assert len(stand.bodies) == 1
    assert stand.bodies[0]["spec"] == {"token": GOOD.token, "audiences": ["surefoot"]}
    stand.now = NOW + 3601
    assert await stand.refused(GOOD) is None
    assert len(stand.bodies) == 2


async def test_a_remembered_token_is_no_pass_for_a_pod_that_is_gone() -> None:
    stand = Stand()
    assert await stand.refused(GOOD) is None
    stand.pods.clear()
    found = await stand.refused(GOOD)
    assert found is not None
    assert found[0] is True
    assert "not in the operator's cache yet" in found[1]


async def test_a_remembered_token_is_no_pass_for_another_worker() -> None:
    stand = Stand()
    assert await stand.refused(GOOD) is None
    found = await stand.refused(replace(GOOD, index=1))
    assert found is not None
    assert found[0] is False


@pytest.mark.parametrize(
    "change",
    [
        {"ownerReferences": []},
        {"ownerReferences": [{**OWNER, "uid": "another"}]},
        {"ownerReferences": [{**OWNER, "controller": False}]},
        {"ownerReferences": [{**OWNER, "kind": "Job"}]},
    ],
)
async def test_a_pod_that_only_bears_a_workers_labels_is_no_worker(change: dict[str, Any]) -> None:
    stand = Stand()
    stand.pods[("team", "job-worker-0-1")] = {"metadata": {**POD["metadata"], **change}}
    found = await stand.refused(GOOD)
    assert found == (False, "the token belongs to pod team/job-worker-0-1, which job job-1 does not control")


async def test_a_pod_of_another_namespace_is_no_worker_whatever_it_says_of_itself() -> None:
    """It bears the labels and names the job as its owner; that job stands in another namespace."""
    stand = Stand()
    stand.status["user"]["username"] = "system:serviceaccount:evil:default"
    stand.pods[("evil", "job-worker-0-1")] = {"metadata": {**POD["metadata"], "namespace": "evil"}}
    found = await stand.refused(GOOD)
    assert found == (False, "the token belongs to pod evil/job-worker-0-1, which job job-1 does not control")


async def test_a_stranger_in_disguise_does_not_send_the_true_worker_away() -> None:
    """Its own pod is not in the operator's cache yet: it is told to ask again, and not that somebody else is that worker."""
    stand = Stand()
    stand.pods[("evil", "job-worker-0-1")] = {"metadata": {**POD["metadata"], "namespace": "evil", "uid": "evil"}}
    del stand.pods[("team", "job-worker-0-1")]
    found = await stand.refused(GOOD)
    assert found is not None
    assert found[0] is True


async def test_a_pod_that_is_no_worker_is_told_who_is() -> None:
    stand = Stand()
    extra = stand.status["user"]["extra"]
    extra["authentication.kubernetes.io/pod-name"] = ["stranger"]
    extra["authentication.kubernetes.io/pod-uid"] = ["stranger-uid"]
    found = await stand.refused(GOOD)
    assert found == (False, "the token belongs to pod team/stranger, but that worker is pod job-worker-0-1")
    other = await stand.refused(replace(GOOD, attempt=2))
    assert other is not None
    assert other[0] is True


async def test_a_token_of_nobody_is_refused_and_not_asked_about_each_time() -> None:
    stand = Stand()
    stand.status = {"authenticated": False, "error": "invalid bearer token"}
    bad = replace(GOOD, token=token(salt="bad"))
    assert await stand.refused(bad) == (False, "the API server rejects the token: invalid bearer token")
    assert await stand.refused(bad) is not None
    assert len(stand.bodies) == 1
    stand.now += 6
    assert await stand.refused(bad) is not None
    assert len(stand.bodies) == 2


@pytest.mark.parametrize("code", [503, 500, 429, 403])
async def test_what_cannot_be_found_out_is_asked_again_later(code: int) -> None:
    stand = Stand()

    def refuse(verb: str, path: str) -> None:
        raise ApiError(f"{verb} {path}", code, "Reason", "not now")

    stand.server.before = refuse
    found = await stand.refused(GOOD)
    assert found is not None
    assert found[0] is True
    stand.server.before = silent
    found = await stand.refused(GOOD)
    assert found is not None
    assert found[0] is True
    stand.server.before = lambda verb, path: None
    assert await stand.refused(GOOD) is None


async def test_reviews_are_bounded_in_rate_and_in_number_at_once() -> None:
    stand = Stand(ReviewSettings(reviews_per_second=1.0, burst_reviews=3.0, max_concurrent=2))
    stand.server.reachable.clear()
    calls = [asyncio.create_task(stand.refused(replace(GOOD, token=token(salt=str(n))))) for n in range(5)]
    await asyncio.sleep(0.05)  # nothing announces that no third call comes
    assert len(stand.server.asked) == 2
    stand.server.reachable.set()
    found = await asyncio.gather(*calls)
    assert found[:3] == [None, None, None]
    assert found[3:] == [(True, "too many tokens are being reviewed: retry")] * 2
    stand.now += 1
    assert await stand.refused(replace(GOOD, token=token(salt="later"))) is None


async def test_a_herd_is_asked_to_come_again_one_after_another_and_who_is_known_is_let_in_at_once() -> None:
    stand = Stand(ReviewSettings(reviews_per_second=10.0, burst_reviews=3.0))
    known = [replace(GOOD, token=token(salt=str(n))) for n in range(3)]
    for one in known:
        assert await stand.refused(one) is None
    told = [await stand.reviews.authenticate(replace(GOOD, token=token(salt=f"late {n}"))) for n in range(100)]
    waits = [refusal.after_seconds for refusal in told if refusal is not None]
    assert len(waits) == 100
    assert waits == sorted(waits)
    assert (waits[0], waits[19], waits[-1]) == (0.1, 2.0, 7.0)
    for one in known * 10:
        assert await stand.refused(one) is None, "what was answered before is not asked again, and costs no turn"
    assert len(stand.bodies) == 3


async def test_what_is_remembered_is_bounded() -> None:
    stand = Stand(ReviewSettings(max_cached=2))
    for salt in ("a", "b", "c", "a"):
        assert await stand.refused(replace(GOOD, token=token(salt=salt))) is None
    assert len(stand.bodies) == 4
