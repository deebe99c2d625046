"""Tests of `controller.admission_webhooks`."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.controller.admission_webhooks import (
    ALLOWED,
    AdmissionRequest,
    AdmissionResponse,
    InvalidAdmissionReview,
    build_response,
    ca_bundle_patch,
    job_to_review,
    parse_review,
    reject,
    reject_for_now,
)

# ---- job review ------------------------------------------------------------------------------------------------------
# Which jobs are let in: what the operator could not run is refused with its own sentence, what is as it was never.

SPEC: dict[str, Any] = {
    "replicas": 2,
    "template": {"spec": {"containers": [{"name": "trainer", "image": "i", "command": ["python", "train.py"]}]}},
}


def job(name: str = "gpt", metadata: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "surefoot.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "team"} | (metadata or {}),
        "spec": SPEC | spec,
    }


def said(found: AdmissionResponse | TrainingJob) -> AdmissionResponse:
    return AdmissionResponse(True) if isinstance(found, TrainingJob) else found


def created(body: dict[str, Any]) -> AdmissionResponse:
    return said(job_to_review(AdmissionRequest("u", "CREATE", "team", str(body["metadata"].get("name", "")), body)))


def updated(old: dict[str, Any], new: dict[str, Any]) -> AdmissionResponse:
    return said(job_to_review(AdmissionRequest("u", "UPDATE", "team", "gpt", new, old)))


def test_a_job_that_can_be_run_is_let_in() -> None:
    assert created(job()) == AdmissionResponse(True)


def test_one_that_cannot_is_refused_with_the_sentence_of_its_condition() -> None:
    verdict = created(job(elasticPolicy={"minReplicas": 3, "maxReplicas": 2}))
    assert (verdict.allowed, verdict.status_code) == (False, 422)
    assert verdict.message.startswith("the job's spec is invalid: spec.elasticPolicy")


def test_what_leaves_the_spec_as_it_is_passes_whatever_the_spec_says() -> None:
    bad = job(replicas=0)
    assert not created(bad).allowed
    assert updated(bad, bad | {"metadata": {"name": "gpt", "finalizers": []}}).allowed
    assert not updated(job(), bad).allowed
    assert updated(bad, job()).allowed


def test_a_job_that_is_being_deleted_is_held_up_by_nothing() -> None:
    leaving = job(metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}, replicas=0)
    assert updated(job(), leaving).allowed


def test_a_job_of_another_manager_is_not_judged() -> None:
    assert created(job(managedBy="kueue.x-k8s.io/multikueue", replicas=0)).allowed


def test_a_name_that_the_server_will_make_is_no_reason_to_refuse() -> None:
    body = job(metadata={"generateName": "gpt-"})
    del body["metadata"]["name"]
    assert created(body).allowed


# ---- admission review ------------------------------------------------------------------------------------------------
# How AdmissionReviews are read and answered: as the API server writes them, and not otherwise.


def posted(**request: Any) -> dict[str, Any]:
    known = {"uid": "u-1", "operation": "CREATE", "namespace": "team", "name": "gpt", "object": {"spec": {}}}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {**known, **request}}


def test_a_review_is_read_as_the_server_writes_it() -> None:
    review = parse_review(posted(oldObject=None, dryRun=True))
    assert (review.uid, review.operation, review.namespace, review.name) == ("u-1", "CREATE", "team", "gpt")
    assert (review.new_object, review.old_object) == ({"spec": {}}, {})


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        {"apiVersion": "admission.k8s.io/v1"},
        {**posted(), "apiVersion": "admission.k8s.io/v1beta1"},
        posted(uid=""),
        posted(uid=7),
        posted(name=["gpt"]),
        posted(object="spec"),
        posted(oldObject=[1]),
    ],
)
def test_anything_else_is_a_bad_request(document: object) -> None:
    with pytest.raises(InvalidAdmissionReview):
        parse_review(document)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda one: st.lists(one) | st.dictionaries(st.text(), one),
    )
)
def test_nothing_that_is_json_breaks_the_reader(request: Any) -> None:
    try:
        parse_review(posted() | {"request": request})
    except InvalidAdmissionReview:
        pass


def test_an_answer_bears_the_uid_and_what_people_read() -> None:
    review = parse_review(posted())
    assert build_response(review, ALLOWED)["response"] == {"uid": "u-1", "allowed": True}
    assert build_response(review, AdmissionResponse(True, warnings=("mind",)))["response"]["warnings"] == ["mind"]
    assert build_response(review, reject("no"))["response"]["status"]["code"] == 422
    refused = build_response(review, reject_for_now("not yet"))
    assert refused["response"]["status"] == {
        "status": "Failure",
        "message": "not yet",
        "code": 429,
        "reason": "TooManyRequests",
    }
    assert (refused["apiVersion"], refused["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")


# ---- webhook trust ---------------------------------------------------------------------------------------------------
# What is written into the webhooks' configuration, and when nothing is.

AUTHORITY = "-----BEGIN CERTIFICATE-----\n"
WANTED = base64.b64encode(AUTHORITY.encode()).decode()


def configuration(*bundles: str | None) -> dict[str, Any]:
    return {
        "metadata": {"resourceVersion": "7"},
        "webhooks": [{"clientConfig": {} if one is None else {"caBundle": one}} for one in bundles],
    }


def test_each_webhook_that_trusts_another_or_nobody_is_patched() -> None:
    version, *operations = ca_bundle_patch(configuration(None, WANTED, "b3RoZXI="), AUTHORITY)
    assert version == {"op": "test", "path": "/metadata/resourceVersion", "value": "7"}
    assert [one["path"] for one in operations] == [
        "/webhooks/0/clientConfig/caBundle",
        "/webhooks/2/clientConfig/caBundle",
    ]
    assert {one["value"] for one in operations} == {WANTED}


def test_nothing_is_written_where_all_trust_us() -> None:
    assert ca_bundle_patch(configuration(WANTED, WANTED), AUTHORITY) == []
    assert ca_bundle_patch({}, AUTHORITY) == []
