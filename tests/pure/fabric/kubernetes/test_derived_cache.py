"""What is remembered of a cluster's objects: no longer than they stand, and each job's pods without a search."""

from __future__ import annotations

from typing import Any

from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache, DerivedCache


def pod(name: str, job: str | None, version: int = 1, uid: str = "") -> dict[str, Any]:
    marks = {} if job is None else {api_objects.JOB_UID: job}
    metadata = {"name": name, "namespace": "n", "uid": uid or name, "resourceVersion": str(version), "labels": marks}
    return {"metadata": metadata}


def test_what_was_made_of_an_object_is_made_again_only_for_another() -> None:
    made: list[str] = []

    def make(found: dict[str, Any]) -> str:
        made.append(found["metadata"]["name"])
        return found["metadata"]["resourceVersion"]  # type: ignore[no-any-return]

    memo = DerivedCache[str]()
    first, second = pod("a", "j"), pod("b", "j")
    assert memo.all([first, second], make, lambda _: None) == ["1", "1"]
    assert memo.all([first, second], make, lambda _: None) == ["1", "1"]
    assert made == ["a", "b"]
    assert memo.all([pod("a", "j", 2), second], make, lambda _: None) == ["2", "1"]
    assert memo.all([second], make, lambda _: None) == ["1"]
    assert memo.all([first], make, lambda _: None) == ["1"]
    assert made == ["a", "b", "a", "a"]  # nothing is kept of what was gone
    memo.all([first], make, lambda _: "something else")
    assert made[-1] == "a"
    assert len(made) == 5


def names(cache: ClusterCache, job: str) -> list[str]:
    return sorted(found["metadata"]["name"] for found in cache.pods_of(job))


def test_a_job_has_its_pods_and_only_them_at_every_moment() -> None:
    cache = ClusterCache(None)  # type: ignore[arg-type] -- nothing is asked of the server
    for found in (pod("a", "one"), pod("b", "one"), pod("c", "two"), pod("d", None)):
        cache.workers.learn(found)
    assert (names(cache, "one"), names(cache, "two"), names(cache, "three")) == (["a", "b"], ["c"], [])
    newer = pod("b", "one", 2)
    cache.workers.learn(newer)
    assert any(found["metadata"]["resourceVersion"] == "2" for found in cache.pods_of("one"))
    assert len(cache.pods_of("one")) == 2
    cache.workers.learn(pod("b", "two", 3))  # somebody changed its label
    assert (names(cache, "one"), names(cache, "two")) == (["a"], ["b", "c"])
    cache.workers.learn(pod("a", "one", 4, uid="another"))
    assert [found["metadata"]["uid"] for found in cache.pods_of("one")] == ["another"]
    cache.workers.forget("n", "a", "another")
    assert names(cache, "one") == []
