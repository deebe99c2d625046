"""What bears the name of something that a job needs: its own is found, an older job's is replaced, another's is refused."""

from __future__ import annotations

from typing import Any

import pytest

from support.fakes.fake_api import FakeApi
from surefoot_operator.errors import PlatformError
from surefoot_operator.platforms.kubernetes import api_objects, api_writes

JOB = api_objects.JobIdentity("default", "gpt", "uid-new")
PATH = "/api/v1/namespaces/default/services/gpt-workers"


def service(job_uid: str, uid: str, **other: str) -> dict[str, Any]:
    return {
        "kind": "Service",
        "metadata": {"name": "gpt-workers", "uid": uid, "labels": {**api_objects.job_labels("gpt", job_uid), **other}},
    }


def stored_uid(api: FakeApi) -> str:
    return str(api.objects[PATH]["metadata"]["uid"])


async def test_ours_is_found_and_kept() -> None:
    api = FakeApi()
    api.keep(PATH, service("uid-new", "s1"))
    await api_writes.create_or_find(api.api, "services", service("uid-new", "s2"), JOB)
    assert stored_uid(api) == "s1"


async def test_what_an_older_job_of_that_name_left_behind_is_replaced() -> None:
    api = FakeApi()
    api.keep(PATH, service("uid-old", "s1"))
    await api_writes.create_or_find(api.api, "services", service("uid-new", "s2"), JOB)
    assert stored_uid(api) == "s2"
    assert ("DELETE", PATH) in api.asked


@pytest.mark.parametrize("name", [api_objects.MANAGED_BY_LABEL, api_objects.JOB_NAME_LABEL])
async def test_what_somebody_else_made_is_left_and_said(name: str) -> None:
    api = FakeApi()
    api.keep(PATH, service("uid-old", "s1", **{name: "somebody"}))
    with pytest.raises(PlatformError, match="does not belong to job gpt"):
        await api_writes.create_or_find(api.api, "services", service("uid-new", "s2"), JOB)
    assert stored_uid(api) == "s1"
