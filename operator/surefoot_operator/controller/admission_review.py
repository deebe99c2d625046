"""Reads an AdmissionReview and makes its answer.

Pure; the format is `admission.k8s.io/v1`. Called by `admission_server`. What cannot be read is refused as a bad request,
which the API server answers by the webhook's failure policy: nothing is let in or kept out by a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from surefoot_operator.errors import OperatorError

API_VERSION = "admission.k8s.io/v1"
Object = Mapping[str, Any]


class BadReview(OperatorError):
    """What was posted is no AdmissionReview that this version knows."""


@dataclass(frozen=True, slots=True)
class Review:
    """One question of the API server."""

    uid: str
    operation: str
    """CREATE, UPDATE, DELETE or CONNECT."""
    namespace: str
    name: str
    """Empty where the server will make one from `generateName`."""
    body: Object = field(default_factory=dict)
    """As it would be stored."""
    old: Object = field(default_factory=dict)
    """As it is stored; empty for what is created."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """An answer, with the sentences that people get with it."""

    allowed: bool
    message: str = ""
    """Why it is not."""
    code: int = 200
    reason: str = ""
    """As Kubernetes names it, of a refusal."""
    warnings: tuple[str, ...] = ()
    """Shown by kubectl beside what is let in."""


ALLOWED = Verdict(True)


def invalid(message: str) -> Verdict:
    """Refuses what is never right; nobody should send it again unchanged."""
    return Verdict(False, message, 422, "Invalid")


def later(message: str) -> Verdict:
    """Refuses for now, as a PodDisruptionBudget does: drains and autoscalers ask again."""
    return Verdict(False, message, 429, "TooManyRequests")


def read_review(document: object) -> Review:
    """Reads what the API server posts. Raises BadReview."""
    request = document.get("request") if isinstance(document, Mapping) else None
    if not isinstance(request, Mapping) or document.get("apiVersion") != API_VERSION:  # type: ignore[attr-defined]
        raise BadReview(f"an AdmissionReview of {API_VERSION} with a request is needed")
    texts = [request.get(name) or "" for name in ("uid", "operation", "namespace", "name")]
    bodies = [request.get(name) or {} for name in ("object", "oldObject")]
    if not all(isinstance(text, str) for text in texts) or not texts[0]:
        raise BadReview("uid, operation, namespace and name of the request are no texts, or the uid is empty")
    if not all(isinstance(body, Mapping) for body in bodies):
        raise BadReview("object and oldObject of the request are no objects")
    uid, operation, namespace, name = texts
    return Review(uid, operation, namespace, name, *bodies)


def answered(review: Review, verdict: Verdict) -> dict[str, Any]:
    """Makes the AdmissionReview to answer with."""
    response: dict[str, Any] = {"uid": review.uid, "allowed": verdict.allowed}
    if verdict.warnings:
        response["warnings"] = list(verdict.warnings)
    if not verdict.allowed:
        response["status"] = {
            "status": "Failure",
            "message": verdict.message,
            "code": verdict.code,
            "reason": verdict.reason,
        }
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}
