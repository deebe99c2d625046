"""Tests of `cli.cluster_access`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.builders import running
from support.fakes.fake_api import FakeApi, silent
from support.stored import node_object, stored_document, worker_pod, written
from surefoot_operator.cli.cluster_access import (
    ClusterConnection,
    ClusterRequestFailed,
    Permission,
    describe_api_error,
    jobs_right,
)
from surefoot_operator.cli.jobs.read_jobs import read_job, read_jobs, read_view
from surefoot_operator.errors import PlatformError
from surefoot_operator.platforms.kubernetes.api_objects import ApiError, ApiUnreachable

# ---- cluster reads ---------------------------------------------------------------------------------------------------
# Jobs and their surroundings read from an API server that refuses parts of it.

JOBS = "/apis/surefoot.dev/v1alpha1/namespaces/team/trainingjobs"


def refusing(code: int, part: str) -> Callable[[str, str], None]:
    def before(verb: str, path: str) -> None:
        if part in path:
            raise ApiError(f"{verb} {path}", code, "Forbidden", "no")

    return before


@pytest.fixture
def server() -> FakeApi:
    found, seen = FakeApi(), running()
    found.keep(f"{JOBS}/gpt", written(seen.status, seen))
    for index in (1, 0):
        found.keep(f"/api/v1/namespaces/team/pods/gpt-worker-{index}-1", worker_pod(index))
    found.keep("/api/v1/namespaces/team/pods/stranger", worker_pod(5, uid="uid-9"))
    found.keep("/api/v1/nodes/n0", node_object("n0"))
    found.keep("/api/v1/nodes/n1", node_object("n1", unschedulable=True))
    event: dict[str, Any] = {"reason": "WorkerLost", "message": "m", "type": "Warning", "metadata": {"name": "e"}}
    found.keep("/api/v1/namespaces/team/events/e", {**event, "lastTimestamp": "1970-01-01T00:16:40Z"})
    return found


def cluster(server: FakeApi, namespace: str = "team") -> ClusterConnection:
    return ClusterConnection(server.api, namespace, "https://cluster:6443")


async def test_a_view_has_the_job_and_all_around_it(server: FakeApi) -> None:
    found = await read_view(cluster(server), "gpt")
    assert found.stored.phase == "Running"
    assert [one.index for one in found.workers] == [0, 1]  # the stranger with a label of another job counts for nothing
    assert found.nodes is not None
    assert [(one.name, one.schedulable) for one in found.nodes] == [("n0", True), ("n1", False)]
    assert [(one.reason, one.warning, one.at_seconds) for one in found.events] == [("WorkerLost", True, 1000.0)]
    assert found.unread == ()


async def test_what_may_not_be_read_is_a_sentence_beside_what_may(server: FakeApi) -> None:
    server.before = refusing(403, "/nodes")
    found = await read_view(cluster(server), "gpt")
    assert (found.nodes, len(found.workers)) == (None, 2)
    assert found.unread == (
        "you may not list nodes in the whole cluster (403): ask an administrator for a ClusterRole with the verb list on nodes",
    )


async def test_a_pod_with_labels_of_nobody_is_named_and_the_others_are_shown(server: FakeApi) -> None:
    strange = worker_pod(3)
    strange["metadata"]["labels"]["surefoot.dev/worker-index"] = "x"
    server.keep("/api/v1/namespaces/team/pods/strange", strange)
    found = await read_view(cluster(server), "gpt")
    assert len(found.workers) == 2
    assert "has an invalid or missing label" in found.unread[0]


async def test_a_job_that_is_not_there_is_named_with_its_namespace(server: FakeApi) -> None:
    with pytest.raises(ClusterRequestFailed, match="there is no TrainingJob nope in namespace team"):
        await read_job(cluster(server), "nope")


async def test_a_cluster_without_the_crd_is_told_from_one_without_jobs(server: FakeApi) -> None:
    assert [one.name for one in await read_jobs(cluster(server))] == ["gpt"]
    server.before = refusing(404, "trainingjobs")
    with pytest.raises(ClusterRequestFailed, match=r"the CRD .* is not installed"):
        await read_jobs(cluster(server))


async def test_a_server_that_does_not_answer_is_named(server: FakeApi) -> None:
    server.before = silent
    with pytest.raises(ClusterRequestFailed, match="Is https://cluster:6443 running"):
        await read_jobs(cluster(server))


async def test_a_long_list_is_read_page_by_page_and_one_without_end_is_refused() -> None:
    class Paging(FakeApi):
        async def get(self, path: str, query: Any = None) -> dict[str, Any]:
            number = int(query.get("continue", "0"))
            assert query["limit"] == 500
            further = str(number + 1) if number != 2 or self.endless else ""
            body = stored_document(name=f"j{number}")
            return {"items": [body], "metadata": {"continue": further}}

        endless = False

    server = Paging()
    assert [one.name for one in await read_jobs(cluster(server))] == ["j0", "j1", "j2"]
    server.endless = True
    with pytest.raises(
        ClusterRequestFailed, match=r"200 pages of .*/trainingjobs, 200 objects, and named a further one"
    ):
        await read_jobs(cluster(server))


# ---- cluster refusals ------------------------------------------------------------------------------------------------
# What a cluster refuses is said with the verb, the resource and who can give it.

SERVER = "https://cluster:6443"


def answer(code: int) -> ApiError:
    return ApiError("GET /x", code, "Reason", "words")


@pytest.mark.parametrize(
    ("error", "needed", "said"),
    [
        (answer(403), jobs_right("list", "team"), "you may not list trainingjobs.surefoot.dev in namespace team (403)"),
        (answer(403), jobs_right("list", ""), "in the whole cluster (403): users with Kubernetes' role view"),
        (answer(403), jobs_right("patch", "team"), "users with Kubernetes' role edit there may"),
        (answer(403), Permission("list", "pods", "team"), "you may not list pods in namespace team (403)"),
        (answer(403), Permission("list", "nodes"), "a ClusterRole with the verb list on nodes"),
        (answer(401), jobs_right("list", "team"), "does not accept your credentials (401)"),
        (answer(404), jobs_right("list", "team"), "the CRD is not installed"),
        (answer(409), jobs_right("patch", "team"), "another client changed the job at the same time"),
        (answer(500), jobs_right("get", "team"), "could not get trainingjobs.surefoot.dev in namespace team"),
        (ApiUnreachable("GET /x", TimeoutError()), jobs_right("get", "team"), f"Is {SERVER} running"),
    ],
)
def test_a_refusal_says_what_is_missing(error: PlatformError, needed: Permission, said: str) -> None:
    found = str(describe_api_error(error, needed, SERVER, "the CRD is not installed"))
    assert said in found
    assert "trying again" not in found
