"""The TrainingJob on a real API server: what it refuses and with which words, and that nothing of a job is lost there.

Runs on the cluster that stands, or brings one of two nodes up and takes it down; skipped where none can be had.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.error import HTTPError

import pytest

from chart import spec_pages
from cluster.api import Api
from cluster.engine import Engine
from cluster.processes import wait
from support.sample_jobs import REFUSED, WHOLE, changed
from support.servers.kubernetes_cluster import a_cluster, install_crd
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.parse import POD_RULES, parse_job
from surefoot_operator.api.status import Condition, Incident, JobStatus, Membership, SaveInterval
from surefoot_operator.api.status_json import status_from_json, status_to_json
from surefoot_operator.errors import SpecError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

JOBS = "/apis/surefoot.dev/v1alpha1/namespaces/default/trainingjobs"

SMALL: dict[str, Any] = {
    "apiVersion": "surefoot.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "small"},
    "spec": {
        "replicas": 3,
        "template": {"spec": {"containers": [{"name": "trainer", "command": ["python", "train.py"]}]}},
    },
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    yield from a_cluster(2)


@pytest.fixture(scope="module")
def api(engine: Engine) -> Api:
    found = Api(engine.facts().kubeconfig)
    install_crd(found)
    assert wait(lambda: found.answers(JOBS), 30.0)
    return found


@pytest.fixture
def made(api: Api) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """Makes a job; jobs made are deleted at the end."""
    names: list[str] = []

    def make(body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = api.call("POST", f"{JOBS}?fieldValidation=Strict", body)
        names.append(body["metadata"]["name"])
        return answer

    yield make
    for name in names:
        api.call("DELETE", f"{JOBS}/{name}")
        assert wait(lambda: not api.answers(f"{JOBS}/{name}"), 30.0)  # noqa: B023 -- called before the name moves on


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(HTTPError) as caught:
        call()
    assert caught.value.code in (400, 422)
    return str(json.loads(caught.value.read())["message"])


@pytest.mark.parametrize(("path", "value", "where"), [row[:3] for row in REFUSED], ids=range(len(REFUSED)))
def test_the_api_server_refuses_what_the_reader_refuses(api: Api, path: str, value: Any, where: str) -> None:
    body = changed(path, value)
    message = refusal(lambda: api.call("POST", f"{JOBS}?fieldValidation=Strict&dryRun=All", body))
    assert where in message
    with pytest.raises(SpecError) as caught:
        parse_job(body)
    rules = [*POD_RULES, *(rule for _, cls in spec_pages.classes() for rule in getattr(cls, "RULES", ()))]
    for rule in rules:
        if caught.value.allowed.startswith(rule.message):
            assert rule.message in message


def test_a_template_changes_only_while_the_job_is_suspended(
    api: Api, made: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    found = made(SMALL)
    found["spec"]["template"]["spec"]["nodeSelector"] = {"gpu": "yes"}
    words = refusal(lambda: api.call("PUT", f"{JOBS}/small", found))
    assert "template cannot be changed while the job runs: set suspend to true first" in words
    found["spec"]["suspend"] = True
    assert "template cannot be changed" in refusal(lambda: api.call("PUT", f"{JOBS}/small", found))
    del found["spec"]["template"]["spec"]["nodeSelector"]
    found = api.call("PUT", f"{JOBS}/small", found)
    found["spec"]["template"]["spec"]["nodeSelector"] = {"gpu": "yes"}
    found["spec"]["suspend"] = False
    assert api.call("PUT", f"{JOBS}/small", found)["spec"]["template"]["spec"]["nodeSelector"] == {"gpu": "yes"}


def test_a_scheduling_policy_changes_only_while_the_job_is_suspended(
    api: Api, made: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    body = copy.deepcopy(SMALL)
    body["spec"] |= {"schedulingPolicy": {"gang": "Coscheduling"}, "managedBy": "example.org/nobody"}
    made(body)
    for policy in (None, {"scheduleTimeoutSeconds": 9}):
        words = refusal(lambda: api.merge(f"{JOBS}/small", {"spec": {"schedulingPolicy": policy}}))  # noqa: B023
        assert "schedulingPolicy cannot be changed while the job runs" in words
    api.merge(f"{JOBS}/small", {"spec": {"suspend": True}})
    api.merge(f"{JOBS}/small", {"spec": {"schedulingPolicy": None, "suspend": False}})
    words = refusal(lambda: api.merge(f"{JOBS}/small", {"spec": {"schedulingPolicy": {"gang": "Coscheduling"}}}))
    assert "schedulingPolicy cannot be changed while the job runs" in words


def test_what_workers_are_told_once_changes_only_while_the_job_is_suspended(
    api: Api, made: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    body = copy.deepcopy(SMALL)
    body["spec"] |= {"checkpoint": {"persistent": {"uri": "s3://bucket/prefix"}}, "managedBy": "example.org/nobody"}
    found = made(body)

    def change(*path: str, value: Any) -> dict[str, Any]:
        new = copy.deepcopy(found)
        place = new["spec"]
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        return api.call("PUT", f"{JOBS}/small", new)  # type: ignore[no-any-return]

    for path, value, words in (
        (("checkpoint", "memory", "intervalSteps"), 5, "memory cannot be changed while the job runs: set suspend"),
        (("checkpoint", "persistent", "intervalSeconds"), 30, "intervalSeconds cannot be changed while the job runs"),
        (("checkpoint", "persistent", "keep"), 9, "persistent.keep cannot be changed while the job runs: set suspend"),
        (("checkpoint", "persistent"), None, "checkpoint.persistent.uri cannot be changed while the job runs"),
        (
            ("checkpoint", "persistent", "uri"),
            "s3://another",
            "checkpoint.persistent.uri cannot be changed: make a new",
        ),
        (("healthPolicy", "heartbeatSeconds"), 0.25, "heartbeatSeconds cannot be changed while the job runs"),
        (("managedBy",), "a.b/c", "managedBy cannot be changed"),
    ):
        assert words in refusal(lambda: change(*path, value=value))  # noqa: B023 -- called before the loop moves on
    found = change("checkpoint", "persistent", "onJobDeletion", value="Delete")
    found = change("checkpoint", "persistent", "keepEverySteps", value=500)
    found = change("replicas", value=4)
    found = change("suspend", value=True)
    found = change("checkpoint", "memory", "intervalSteps", value=5)
    assert "uri cannot be changed" in refusal(lambda: change("checkpoint", "persistent", "uri", value="s3://another"))


def test_a_job_with_every_field_comes_back_as_it_was(made: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    kept, meant = parse_job(made(WHOLE), "uid"), parse_job(WHOLE, "uid")
    assert dataclasses.replace(kept, namespace="", metadata_generation=1) == dataclasses.replace(meant, namespace="")
    assert kept.spec.template.raw == meant.spec.template.raw


def test_a_small_job_comes_back_with_the_defaults_that_the_parser_would_give(
    made: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    assert parse_job(made(SMALL), "uid").spec == parse_job(SMALL, "uid").spec


def test_a_status_comes_back_whole_and_scale_and_its_columns_are_served(
    api: Api, made: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    found = made(SMALL)
    incident = Incident("node-lost", "it died", None, None, 1, 12.5, world_size_before=3)
    conditions = (Condition("Running", "True", "Running", "", 3.25),)
    status = JobStatus("Running", 1, Membership(2, "Committed", Checkpoint(1, 5), 3), step=7, incidents=(incident,))
    often = SaveInterval(64, 6, "it costs least", 3.5, 40, 4.5, target_seconds=60.5, memory_loss_probability=0.05)
    status = dataclasses.replace(status, conditions=conditions, memory_interval=often)
    found["status"] = {**status_to_json(status), "replicas": 3, "selector": "a=b"}
    found = api.call("PUT", f"{JOBS}/small/status", found)
    assert status_from_json(found["status"]) == status
    scale = api.call("GET", f"{JOBS}/small/scale")
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (3, 3)
