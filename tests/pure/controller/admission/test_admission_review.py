"""How AdmissionReviews are read and answered: as the API server writes them, and not otherwise."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot_operator.controller.admission_webhooks import (
    ALLOWED,
    BadReview,
    Verdict,
    answered,
    invalid,
    later,
    read_review,
)


def posted(**request: Any) -> dict[str, Any]:
    known = {"uid": "u-1", "operation": "CREATE", "namespace": "team", "name": "gpt", "object": {"spec": {}}}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {**known, **request}}


def test_a_review_is_read_as_the_server_writes_it() -> None:
    review = read_review(posted(oldObject=None, dryRun=True))
    assert (review.uid, review.operation, review.namespace, review.name) == ("u-1", "CREATE", "team", "gpt")
    assert (review.body, review.old) == ({"spec": {}}, {})


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
    with pytest.raises(BadReview):
        read_review(document)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda one: st.lists(one) | st.dictionaries(st.text(), one),
    )
)
def test_nothing_that_is_json_breaks_the_reader(request: Any) -> None:
    try:
        read_review(posted() | {"request": request})
    except BadReview:
        pass


def test_an_answer_bears_the_uid_and_what_people_read() -> None:
    review = read_review(posted())
    assert answered(review, ALLOWED)["response"] == {"uid": "u-1", "allowed": True}
    assert answered(review, Verdict(True, warnings=("mind",)))["response"]["warnings"] == ["mind"]
    assert answered(review, invalid("no"))["response"]["status"]["code"] == 422
    refused = answered(review, later("not yet"))
    assert refused["response"]["status"] == {
        "status": "Failure",
        "message": "not yet",
        "code": 429,
        "reason": "TooManyRequests",
    }
    assert (refused["apiVersion"], refused["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
