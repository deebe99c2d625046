"""A job's pod group on a server in memory: made, changed and deleted, and nobody else's ever touched."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from support.fakes.fake_api import FakeApi, silent
from support.servers.job_server import JOB
from surefoot_operator.errors import PlatformError
from surefoot_operator.job_snapshot import PodGroup
from surefoot_operator.platforms.kubernetes import api_objects, pod_groups
from surefoot_operator.platforms.kubernetes.platform import KubernetesPlatform
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache
from surefoot_operator.policy.core.actions import ApplyPodGroup, DeletePodGroup

PATH = "/apis/scheduling.x-k8s.io/v1alpha1/namespaces/default/podgroups/gpt"
WANTED = ApplyPodGroup(PodGroup("Coscheduling", 2, 60))


@pytest.fixture
def server() -> FakeApi:
    made = FakeApi()
    keep = made.keep

    def with_uid(path: str, body: dict[str, Any]) -> dict[str, Any]:
        body = copy.deepcopy(body)
        body["metadata"].setdefault("uid", f"made-{len(made.asked)}")
        return keep(path, body)

    made.keep = with_uid  # type: ignore[method-assign]
    return made


@pytest.fixture
def fabric(server: FakeApi) -> KubernetesPlatform:
    return fabric_of(ClusterCache(server.api, gangs=("Coscheduling",)))


def fabric_of(cache: ClusterCache) -> KubernetesPlatform:
    cache.jobs.apply_write_result(copy.deepcopy(JOB))
    cache.check_fresh = lambda: None  # type: ignore[method-assign]
    return KubernetesPlatform(cache, "default", "gpt", "u")


async def groups(fabric: KubernetesPlatform) -> list[PodGroup]:
    seen = (await fabric.observe()).pod_groups
    assert seen is not None
    return [one.group for one in seen.groups]


async def test_a_group_is_made_once_seen_at_once_and_changed(server: FakeApi, fabric: KubernetesPlatform) -> None:
    assert await groups(fabric) == []
    await fabric.apply_pod_group(WANTED)
    assert await groups(fabric) == [WANTED.group]
    await fabric.apply_pod_group(ApplyPodGroup(PodGroup("Coscheduling", 3)))
    assert server.objects[PATH]["spec"] == {"minMember": 3, "scheduleTimeoutSeconds": 60}
    assert await groups(fabric) == [PodGroup("Coscheduling", 3, 60)]


async def test_one_that_was_made_although_its_answer_was_lost_is_success(
    server: FakeApi, fabric: KubernetesPlatform
) -> None:
    server.keep(
        PATH, pod_groups.build_pod_group(api_objects.JobIdentity("default", "gpt", "u"), PodGroup("Coscheduling", 1))
    )
    await fabric.apply_pod_group(WANTED)
    assert server.objects[PATH]["spec"]["minMember"] == 2


async def test_a_change_that_comes_late_undoes_no_newer_one(server: FakeApi, fabric: KubernetesPlatform) -> None:
    await fabric.apply_pod_group(WANTED)
    newer = copy.deepcopy(server.objects[PATH])
    newer["spec"]["minMember"] = 5
    server.keep(PATH, newer)
    with pytest.raises(PlatformError, match="resourceVersion"):
        await fabric.apply_pod_group(WANTED)  # decided from what the cache still shows
    assert server.objects[PATH]["spec"]["minMember"] == 5


async def test_somebody_elses_group_is_left_and_named(server: FakeApi, fabric: KubernetesPlatform) -> None:
    server.keep(PATH, {"metadata": {"name": "gpt", "namespace": "default"}, "spec": {"minMember": 9}})
    with pytest.raises(PlatformError, match="does not belong to the job of that name; delete or rename it"):
        await fabric.apply_pod_group(WANTED)
    assert server.objects[PATH]["spec"] == {"minMember": 9}
    assert await groups(fabric) == []


async def test_the_group_of_an_older_job_of_this_name_makes_room(server: FakeApi, fabric: KubernetesPlatform) -> None:
    server.keep(
        PATH,
        pod_groups.build_pod_group(api_objects.JobIdentity("default", "gpt", "older"), PodGroup("Coscheduling", 9)),
    )
    await fabric.apply_pod_group(WANTED)
    assert api_objects.is_controlled_by(server.objects[PATH], api_objects.JobIdentity("default", "gpt", "u"))
    assert await groups(fabric) == [WANTED.group]


async def test_exactly_this_group_is_deleted_and_one_that_is_gone_is_success(
    server: FakeApi, fabric: KubernetesPlatform
) -> None:
    await fabric.apply_pod_group(WANTED)
    uid = server.objects[PATH]["metadata"]["uid"]
    await fabric.delete_pod_group(DeletePodGroup("Coscheduling", "another", ""))
    assert PATH in server.objects
    await fabric.delete_pod_group(DeletePodGroup("Coscheduling", uid, ""))
    assert await groups(fabric) == []
    await fabric.delete_pod_group(DeletePodGroup("Coscheduling", uid, ""))


async def test_no_answer_is_an_error_and_a_scheduler_that_is_not_used_is_named(
    server: FakeApi, fabric: KubernetesPlatform
) -> None:
    server.before = silent
    with pytest.raises(PlatformError, match="did not answer"):
        await fabric.apply_pod_group(WANTED)
    unused = fabric_of(ClusterCache(server.api))
    seen = (await unused.observe()).pod_groups
    assert seen is not None
    assert list(seen.unavailable) == ["Coscheduling"]
    with pytest.raises(PlatformError, match=r"add it to the chart's value operator\.gangSchedulers"):
        await unused.apply_pod_group(WANTED)
