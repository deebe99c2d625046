"""Whose token was shown: every answer of a TokenReview, and every pod that it may be of."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from support.fakes.fake_agent import hello
from surefoot_operator.controller.credentials.token_review import (
    BoundPod,
    hello_rejection,
    parse_bound_pod,
    token_expiry_seconds,
)

POD = BoundPod("team", "job-worker-0-1", "pod-uid")


def review(**changed: Any) -> dict[str, Any]:
    extra = {
        "authentication.kubernetes.io/pod-name": ["job-worker-0-1"],
        "authentication.kubernetes.io/pod-uid": ["pod-uid"],
    }
    user = {"username": "system:serviceaccount:team:default", "extra": extra, **changed.pop("user", {})}
    return {"authenticated": True, "audiences": ["surefoot"], "user": user, **changed}


def test_a_token_is_its_pods() -> None:
    assert parse_bound_pod(review(), "surefoot") == POD


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        ({}, "rejects the token: not authenticated"),
        ({"authenticated": False, "error": "token expired"}, "rejects the token: token expired"),
        (review(audiences=["vault"]), "not for the audience 'surefoot'"),
        (review(audiences=[]), "not for the audience 'surefoot'"),
        (review(user={"extra": {}}), "not bound to a pod"),
        (review(user={"extra": None}), "not bound to a pod"),
        (review(user={"username": "jane"}), "the token of jane is not bound to a pod"),
    ],
)
def test_what_is_no_pods_token_counts_for_nothing(status: dict[str, Any], sentence: str) -> None:
    found = parse_bound_pod(status, "surefoot")
    assert isinstance(found, str)
    assert sentence in found


def stored(uid: str = "pod-uid", job: str = "job-1", index: int = 0, attempt: int = 1) -> dict[str, Any]:
    labels = {
        "surefoot.dev/job-uid": job,
        "surefoot.dev/worker-index": str(index),
        "surefoot.dev/attempt": str(attempt),
    }
    return {"metadata": {"name": POD.name, "namespace": POD.namespace, "uid": uid, "labels": labels}}


def test_the_pod_must_be_that_worker() -> None:
    assert hello_rejection(hello(0, 1), POD, stored(), stored(), controlled=True) is None


def test_a_pod_that_only_bears_the_workers_labels_is_refused() -> None:
    found = hello_rejection(hello(0, 1), POD, stored(), stored(), controlled=False)
    assert found is not None
    assert (found.retry, found.reason) == (
        False,
        "the token belongs to pod team/job-worker-0-1, which job job-1 does not control",
    )


@pytest.mark.parametrize(
    ("pod", "retry", "sentence"),
    [
        (None, True, "not in the operator's cache yet"),
        (stored(uid="another"), True, "not in the operator's cache yet"),
        (stored(job="job-2"), False, "job-uid is 'job-2', not 'job-1'"),
        (stored(index=1), False, "worker-index is '1', not '0'"),
        (stored(attempt=2), False, "attempt is '2', not '1'"),
        ({"metadata": {"uid": "pod-uid"}}, False, "job-uid is None"),
    ],
)
def test_another_pods_worker_is_refused(pod: dict[str, Any] | None, retry: bool, sentence: str) -> None:
    found = hello_rejection(hello(0, 1), POD, pod, None, controlled=True)
    assert found is not None
    assert found.retry is retry
    assert sentence in found.reason


def jwt(claims: Any) -> str:
    middle = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"head.{middle}.signature"


@pytest.mark.parametrize(
    ("token", "until"),
    [
        (jwt({"exp": 1234}), 1234.0),
        (jwt({"sub": "x"}), None),
        (jwt([]), None),
        (jwt({"exp": "soon"}), None),
        ("not-a-jwt", None),
        ("a.!!!.c", None),
        ("", None),
    ],
)
def test_a_token_says_itself_when_it_ends(token: str, until: float | None) -> None:
    assert token_expiry_seconds(token) == until
