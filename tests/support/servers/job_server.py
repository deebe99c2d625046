"""An API server of a few lines for one TrainingJob: JSON Patch, creates, and answers that are lost on demand."""

from __future__ import annotations

import copy
from typing import Any

from surefoot_operator.errors import PlatformError
from surefoot_operator.platforms.kubernetes.api_objects import ApiError, ApiUnreachable
from surefoot_operator.platforms.kubernetes.platform import KubernetesPlatform
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache
from surefoot_operator.rejected_calls import RejectedCalls

JOB: dict[str, Any] = {
    "apiVersion": "surefoot.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "gpt", "namespace": "default", "uid": "u", "resourceVersion": "1", "generation": 1},
    "spec": {"template": {"spec": {"containers": [{"name": "trainer", "command": ["a"]}]}}},
}


class JobServer:
    """`stored` is the job; `calls` names the methods that were called."""

    def __init__(self) -> None:
        self.stored = copy.deepcopy(JOB)
        self.calls: list[str] = []
        self.loses_answer = self.loses_request = False
        self.deleted: list[tuple[str, str]] = []
        self.tried: list[dict[str, str]] = []
        """What dry runs asked for."""
        self.verdicts: list[PlatformError] = []
        """What is said to a dry run; empty: it would be made."""
        self.refuses: dict[str, PlatformError] = {}
        """What is said to creates of a kind: `secrets`, `services`, `pods`."""
        self.rejected_calls = RejectedCalls()
        self._made: dict[str, dict[str, Any]] = {}
        self._version = 1

    def with_job(self, job: str) -> JobServer:
        assert job == self.stored["metadata"]["uid"]
        return self

    def made(self, kind: str) -> list[dict[str, Any]]:
        """What was created, of `pods`, `secrets`, `events`."""
        return [body for path, body in self._made.items() if f"/{kind}/" in path]

    def forget(self, kind: str) -> None:
        """As if somebody had removed all of a kind."""
        self._made = {path: body for path, body in self._made.items() if f"/{kind}/" not in path}

    def edit(self, spec: dict[str, Any]) -> None:
        self.stored["spec"] |= spec
        self.stored["metadata"]["generation"] += 1
        self._stamp(self.stored)

    def changed(self, body: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        """The next version of something that was created."""
        found = {**copy.deepcopy(body), **fields}
        self._stamp(found)
        return found

    def finalize(self, names: list[str]) -> None:
        self.stored["metadata"]["finalizers"] = names
        self._stamp(self.stored)

    async def get(self, path: str, query: object = None) -> dict[str, Any]:
        self.calls.append("get")
        return copy.deepcopy(self._made.get(path, self.stored))

    async def post(self, path: str, body: dict[str, Any], query: dict[str, str] | None = None) -> dict[str, Any]:
        if query is not None and query.get("dryRun") == "All":
            self.tried.append(query)
            for verdict in self.verdicts[:1]:
                raise verdict
            return body
        self.calls.append("post")
        if refusal := self.refuses.get(path.rsplit("/", 1)[-1]):
            raise refusal
        name = f"{path}/{body['metadata']['name']}"
        if name in self._made:
            raise ApiError("post", 409, "AlreadyExists", f"{name} exists")
        found = self._made[name] = copy.deepcopy(body)
        found["metadata"]["uid"] = f"uid-{name}"
        self._stamp(found)
        return copy.deepcopy(found)

    async def patch(self, path: str, operations: list[dict[str, Any]]) -> dict[str, Any]:
        self.calls.append("patch")
        if self.loses_request:
            raise ApiUnreachable("patch", TimeoutError())
        for operation in operations:
            if operation["op"] == "test" and self._at(operation["path"]) != operation["value"]:
                raise ApiError("patch", 422, "Invalid", "the test failed")
        where: Any = self.stored
        *parents, last = operations[-1]["path"].strip("/").split("/")
        for part in parents:
            where = where[part]
        where[last] = copy.deepcopy(operations[-1]["value"])
        self._stamp(self.stored)
        if self.loses_answer:
            raise ApiUnreachable("patch", TimeoutError())
        return copy.deepcopy(self.stored)

    async def delete(self, path: str, options: dict[str, Any]) -> dict[str, Any]:
        self.deleted.append((path, options["preconditions"]["uid"]))
        return {"kind": "Status"}

    def _stamp(self, body: dict[str, Any]) -> None:
        self._version += 1
        body["metadata"]["resourceVersion"] = str(self._version)

    def _at(self, path: str) -> Any:
        found: Any = self.stored
        *parents, last = path.strip("/").split("/")
        for part in parents:
            if part not in found:
                raise ApiError("patch", 422, "Invalid", f"{path} is missing")
            found = found[part]
        return found.get(last)


def fabric_of(server: JobServer) -> KubernetesPlatform:
    """With a cache that hears nothing but what is learned from answers."""
    cache = ClusterCache(server)  # type: ignore[arg-type]
    cache.jobs.apply_write_result(copy.deepcopy(server.stored))
    cache.check_fresh = lambda: None  # type: ignore[method-assign]
    return KubernetesPlatform(cache, "default", "gpt", "u")
