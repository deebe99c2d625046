"""What a round reads again: nothing that is as it was. Of a thousand jobs most have not changed since their last round."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from support.fakes.fake_api import FakeApi
from surefoot_operator.platforms.kubernetes import api_objects, platform
from surefoot_operator.platforms.kubernetes.platform import KubernetesPlatform
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache

WORKERS, ROUNDS = 10, 20


def job(version: int, **status: Any) -> dict[str, Any]:
    metadata = {"name": "gpt", "namespace": "team", "uid": "u", "generation": 1, "resourceVersion": str(version)}
    template = {"spec": {"containers": [{"name": "trainer", "command": ["a"]}]}}
    kind = {"apiVersion": "surefoot.dev/v1alpha1", "kind": "TrainingJob"}
    return {**kind, "metadata": metadata, "spec": {"replicas": WORKERS, "template": template}, "status": status}


def worker(index: int) -> dict[str, Any]:
    own = {
        api_objects.WORKER_INDEX_LABEL: str(index),
        api_objects.ATTEMPT_LABEL: "1",
        **api_objects.job_labels("gpt", "u"),
    }
    metadata = {
        "name": f"w{index}", "namespace": "team", "uid": f"w{index}", "resourceVersion": "1", "labels": own,
        "ownerReferences": [api_objects.owner_reference("gpt", "u")],
    }  # fmt: skip
    return {"metadata": metadata, "spec": {}, "status": {"phase": "Pending"}}


async def test_a_round_reads_spec_status_and_pods_again_only_if_they_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    read: Counter[str] = Counter()

    def counted(where: Any, name: str) -> None:
        given = getattr(where, name)

        def once(*arguments: Any) -> Any:
            read[name] += 1
            return given(*arguments)

        monkeypatch.setattr(where, name, once)

    for where, name in (
        (platform, "parse_job"), (platform, "status_from_json"),
        (platform.observations, "observe_worker"), (api_objects, "is_controlled_by"),
    ):  # fmt: skip
        counted(where, name)
    cache = ClusterCache(FakeApi().api)
    cache.check_fresh = lambda: None  # type: ignore[method-assign]
    cache.jobs._apply_event("ADDED", job(1, serial=1))
    for index in range(WORKERS):
        cache.workers._apply_event("ADDED", worker(index))
    fabric = KubernetesPlatform(cache, "team", "gpt", "u")
    assert fabric.last_valid_job() is not None
    for _ in range(ROUNDS):
        seen = await fabric.observe()
    assert (len(seen.workers), seen.status.serial) == (WORKERS, 1)
    assert read == {
        "parse_job": 1,
        "status_from_json": 1,
        "observe_worker": WORKERS,
        "is_controlled_by": WORKERS * ROUNDS,
    }
    cache.jobs._apply_event("MODIFIED", job(2, serial=2))
    assert (await fabric.observe()).status.serial == 2
    assert (read["parse_job"], read["status_from_json"]) == (1, 2)
