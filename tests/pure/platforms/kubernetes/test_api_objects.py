"""Tests of `platforms.kubernetes.api_objects`."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from support.fakes.fake_api import FakeApi
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.api_client import parse_error
from surefoot_operator.platforms.kubernetes.api_objects import (
    ApiError,
    already_exists,
    classify_error,
    is_expected_error,
    parse_call,
    shorten_message,
)
from surefoot_operator.platforms.kubernetes.platform import KubernetesPlatform
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache
from surefoot_operator.rejected_calls import ApiCall

# ---- api calls -------------------------------------------------------------------------------------------------------
# What a call asks for and what its answer means; and that a refusal's reason leads its sentence.

JOB = "/apis/surefoot.dev/v1alpha1/namespaces/team/trainingjobs/gpt"
TEST_FAILED = "the server rejected our request due to an error in our request"


@pytest.mark.parametrize(
    ("method", "path", "body", "call"),
    [
        ("GET", "/api/v1/nodes", None, ApiCall("watch", "nodes")),
        ("GET", "/api/v1/namespaces/team/pods", None, ApiCall("watch", "pods", "team")),
        ("GET", "/api/v1/namespaces/team", None, ApiCall("get", "namespaces", "", "team")),
        ("GET", JOB, None, ApiCall("get", "trainingjobs", "team", "gpt")),
        ("PATCH", f"{JOB}/status", [], ApiCall("patch", "trainingjobs/status", "team", "gpt")),
        ("PATCH", "/api/v1/nodes/n1/status", {}, ApiCall("patch", "nodes/status", "", "n1")),
        (
            "POST", "/api/v1/namespaces/team/pods", {"metadata": {"name": "p"}}, ApiCall("create", "pods", "team", "p"),
        ),
        (
            "POST", "/api/v1/namespaces/team/events", {"metadata": {"name": "gpt.0a"}},
            ApiCall("create", "events", "team"),
        ),
        (
            "POST", "/apis/authentication.k8s.io/v1/tokenreviews", {"spec": {}}, ApiCall("create", "tokenreviews"),
        ),
        ("DELETE", "/api/v1/namespaces/team/pods/p", {}, ApiCall("delete", "pods", "team", "p")),
        ("GET", "/", None, ApiCall("watch", "")),
    ],
)  # fmt: skip
def test_a_call_is_read_from_its_path(method: str, path: str, body: Any, call: ApiCall) -> None:
    assert parse_call(method, path, body) == call


@pytest.mark.parametrize(
    ("method", "path", "code", "reason", "message", "ordinary"),
    [
        ("DELETE", "/api/v1/namespaces/team/pods/p", 404, "NotFound", "", True),
        ("DELETE", "/api/v1/namespaces/team/pods/p", 403, "Forbidden", "", False),
        ("GET", "/api/v1/nodes", 410, "Expired", "", True),
        ("GET", "/api/v1/nodes", 403, "Forbidden", "", False),
        ("GET", "/apis/surefoot.dev/v1alpha1/trainingjobs", 404, "NotFound", "", False),
        ("POST", "/api/v1/namespaces/team/pods", 404, "NotFound", "namespaces not found", False),
        ("PUT", "/apis/x/v1/namespaces/s/leases/l", 409, "Conflict", "", True),
        ("PATCH", f"{JOB}/status", 422, "Invalid", TEST_FAILED, True),
        ("PATCH", f"{JOB}/status", 422, "Invalid", 'unknown field "status.serial"', False),
        ("PATCH", f"{JOB}/status", 429, "TooManyRequests", "", False),
        ("PATCH", f"{JOB}/status", 500, "InternalError", "failed calling webhook", False),
    ],
)
def test_what_only_tells_of_a_state_of_things_refuses_nothing(
    method: str, path: str, code: int, reason: str, message: str, ordinary: bool
) -> None:
    assert is_expected_error(parse_call(method, path), ApiError(f"{method} {path}", code, reason, message)) is ordinary


def test_what_exists_already_is_there_and_a_conflict_is_not() -> None:
    call = parse_call("POST", "/api/v1/namespaces/team/secrets", {"metadata": {"name": "s"}})
    assert already_exists(call, ApiError("POST", 409, "AlreadyExists", ""))
    assert not already_exists(call, ApiError("POST", 409, "Conflict", ""))


@pytest.mark.parametrize(
    ("code", "message", "cause"),
    [
        (403, 'pods "p" is forbidden: exceeded quota: team, requested: pods=1', "quota"),
        (403, 'pods "p" is forbidden: failed quota: team: must specify limits.cpu for: delete', "quota"),
        (403, "unable to create new content in namespace team because it is being terminated", "closing"),
        (403, 'nodes is forbidden: User "x" cannot list resource "nodes"', "forbidden"),
        (401, "Unauthorized", "forbidden"),
        (404, "the server could not find the requested resource", "absent"),
        (422, "Invalid", "invalid"),
        (413, "the request is too large", "invalid"),
        (429, "too many requests", "busy"),
        (500, "failed calling webhook", "failed"),
        (503, "etcdserver: no leader", "failed"),
    ],
)
def test_causes_are_few(code: int, message: str, cause: str) -> None:
    assert classify_error(ApiError("POST pods", code, "R", message)) == cause


def test_a_namespace_that_is_being_deleted_is_known_by_its_cause() -> None:
    body = {"message": "forbidden", "reason": "Forbidden", "details": {"causes": [{"reason": "NamespaceTerminating"}]}}
    assert parse_error("POST pods", 403, json.dumps(body)).is_namespace_deleted
    for details in (None, {}, [], {"causes": None}, {"causes": "x"}, {"causes": [1, {"reason": 2}]}):
        assert not parse_error("POST pods", 403, json.dumps({"message": "no", "details": details})).is_namespace_deleted


def test_the_server_s_reason_leads_and_whole_objects_are_left_out() -> None:
    """Kilobytes came first, and log viewers cut the reason off behind them."""
    value = json.dumps(json.dumps({"status": {"phase": "Running", "world": "x" * 4000}}))
    message = f'"" is invalid: patch: Invalid value: {value}: strict decoding error: unknown field "status.serial"'
    said = str(ApiError(f"PATCH {JOB}/status", 422, "Invalid", message))
    assert said.startswith(
        '"" is invalid: patch: Invalid value: "…": strict decoding error: unknown field "status.serial"'
    )
    assert "if the CustomResourceDefinition in the cluster is older than this operator" in said
    assert said.endswith(f"(422 Invalid: the API server rejected PATCH {JOB}/status)")
    assert len(said) < 600


def test_a_long_reason_keeps_both_its_ends() -> None:
    said = ApiError("POST pods", 403, "Forbidden", "begins " + "word " * 9000 + "ends").server_message
    assert said.startswith("begins word")
    assert said.endswith("word ends")
    assert len(said) < 720
    assert ApiError("POST pods", 403, "Forbidden", "").server_message == "the API server gave no reason"


def test_the_text_between_two_quoted_names_is_kept() -> None:
    """A long sentence between two quotes is no quoted value: only a whole object that the server quotes is cut out."""
    sentence = 'pods "refused-worker-0-1" is forbidden: error looking up service account scenarios/nobody: '
    sentence += 'serviceaccount "nobody" not found'
    assert shorten_message(sentence) == sentence
    long_object = '{\\"apiVersion\\":\\"v1\\",' + "x" * 200 + "}"
    assert shorten_message(f'Invalid value: "{long_object}": no') == 'Invalid value: "…": no'
    assert shorten_message(f'patch: "{long_object}": no') == 'patch: "…": no'
    assert shorten_message(f'Invalid value: "{"x" * 200}": no') == 'Invalid value: "…": no'


# ---- strangers -------------------------------------------------------------------------------------------------------
# A pod that bears a job's labels and is not the job's: it is no worker, and keeps nobody from looking after the job.

OWNER = {"apiVersion": "surefoot.dev/v1alpha1", "kind": "TrainingJob", "name": "gpt", "uid": "u", "controller": True}
WORKER = {api_objects.WORKER_INDEX_LABEL: "0", api_objects.ATTEMPT_LABEL: "7"}


def pod(
    name: str, namespace: str = "team", owner: dict[str, Any] | None = OWNER, marks: Any = WORKER
) -> Any:  # never written to
    metadata = {"name": name, "namespace": namespace, "uid": f"uid-{namespace}-{name}", "resourceVersion": "5"}
    owners = [owner] if owner is not None else []
    marked = {**metadata, "labels": {api_objects.JOB_UID_LABEL: "u", **marks}, "ownerReferences": owners}
    return {"metadata": marked, "spec": {"nodeName": "n1", "containers": [{"name": "trainer"}]}, "status": {}}


def workers(*pods: Any) -> list[str]:
    cache = ClusterCache(FakeApi().api)
    for one in pods:
        cache.workers._apply_event("ADDED", one)
    fabric = KubernetesPlatform(cache, "team", "gpt", "u")
    return [
        seen.name
        for seen in (*fabric._observe_workers(fabric._own_pods()), *fabric._observe_workers(fabric._own_pods()))
    ]


@pytest.mark.parametrize(
    "stranger",
    [
        pod("x", namespace="evil"),
        pod("x", owner=None),
        pod("x", owner={**OWNER, "uid": "another"}),
        pod("x", owner={**OWNER, "controller": False}),
        pod("x", owner=None, marks={}),
        pod("x", namespace="evil", marks={}),
        pod("x", owner={"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "gpt", "uid": "u", "controller": True}),
    ],
)
def test_a_stranger_is_left_out_and_told_of_once(stranger: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert workers(pod("true"), stranger) == ["true", "true"]
    namespace = stranger["metadata"]["namespace"]
    assert [record.getMessage() for record in caplog.records] == [
        f"ignoring pod {namespace}/x, which has the labels of job team/gpt but is not controlled by it"
    ]
