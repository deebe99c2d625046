"""An API server's objects in memory: versions, conflicts and refusals as the real one gives them, and outages at will.

Stands in for `fabric.kubernetes.api.Api` where a test needs two callers to race; what a real server does with the same
calls is tried in tests/cluster.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, cast

from surefoot_operator.platforms.kubernetes.api_client import Api, ExecResult
from surefoot_operator.platforms.kubernetes.api_objects import ApiError, ApiUnreachable
from surefoot_operator.rejected_calls import RejectedCalls

Body = dict[str, Any]


class FakeApi:
    """Objects by path. `before` is called with each verb and path, and may raise what the caller shall see."""

    def __init__(self) -> None:
        self.objects: dict[str, Body] = {}
        self.asked: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None] = lambda verb, path: None
        self.answers: dict[str, Callable[[Body], Body]] = {}
        """Path -> what a POST there gives, where nothing is kept."""
        self.texts: dict[str, str] = {}
        """Path -> what is streamed there that is no JSON."""
        self.queries: list[dict[str, str | int]] = []
        """With what each of these was asked for."""
        self.programs: dict[str, Callable[[Sequence[str], str], ExecResult]] = {}
        """Path -> what a command with an input leaves there."""
        self.rejected_calls = RejectedCalls()
        self.reachable = asyncio.Event()
        self.reachable.set()
        self._version = 0

    @property
    def api(self) -> Api:
        return cast(Api, self)

    def check_allowed(self) -> None:
        """Whoever uses this one may write."""

    def with_job(self, job: str) -> Api:
        """Refusals are nobody's here: what reports them is `Api`."""
        return self.api

    def without_reports(self) -> Api:
        return self.api

    async def get(self, path: str, query: Mapping[str, str | int] | None = None) -> Body:
        await self._asked("GET", path)
        if path in self.objects:
            return copy.deepcopy(self.objects[path])
        if query is not None:
            items = [copy.deepcopy(o) for p, o in sorted(self.objects.items()) if p.startswith(f"{path}/")]
            return {"items": items, "metadata": {"resourceVersion": str(self._version)}}
        raise ApiError(f"GET {path}", 404, "NotFound", "not found")

    async def stream_text(
        self, path: str, query: Mapping[str, str | int], silence_seconds: float
    ) -> AsyncGenerator[bytes, None]:
        assert silence_seconds > 0
        await self._asked("STREAM", path)
        if path not in self.texts:
            raise ApiError(f"STREAM {path}", 400, "BadRequest", "container trainer is waiting to start")
        self.queries.append(dict(query))
        yield self.texts[path].encode()

    async def exec_in_pod(
        self, path: str, container: str, command: Sequence[str], told: str, seconds: float
    ) -> ExecResult:
        assert seconds > 0
        await self._asked("EXEC", path)
        if path not in self.programs:
            raise ApiError(f"exec {path}", 404, "NotFound", "not found")
        return self.programs[path](command, told)

    async def post(self, path: str, body: Body, query: Mapping[str, str | int] | None = None) -> Body:
        await self._asked("POST", path)
        if path in self.answers:
            return self.answers[path](body)
        where = f"{path}/{body['metadata']['name']}"
        if where in self.objects:
            raise ApiError(f"POST {path}", 409, "AlreadyExists", "it exists")
        return self.keep(where, body)

    async def put(self, path: str, body: Body) -> Body:
        await self._asked("PUT", path)
        if path not in self.objects:
            raise ApiError(f"PUT {path}", 404, "NotFound", "not found")
        if body["metadata"].get("resourceVersion") != self.objects[path]["metadata"]["resourceVersion"]:
            raise ApiError(f"PUT {path}", 409, "Conflict", "the object has been modified")
        return self.keep(path, body)

    async def patch(self, path: str, operations: list[Body]) -> Body:
        """A JSON Patch, whole or not at all."""
        await self._asked("PATCH", path)
        if path not in self.objects:
            raise ApiError(f"PATCH {path}", 404, "NotFound", "not found")
        changed = copy.deepcopy(self.objects[path])
        for operation in operations:
            if not _patched(changed, operation):
                raise ApiError(f"PATCH {path}", 422, "Invalid", f"{operation['op']} {operation['path']}")
        return self.keep(path, changed)

    async def delete(self, path: str, options: Body) -> Body:
        await self._asked("DELETE", path)
        if path not in self.objects:
            raise ApiError(f"DELETE {path}", 404, "NotFound", "not found")
        wanted = options.get("preconditions", {}).get("uid")
        if wanted is not None and wanted != self.objects[path]["metadata"].get("uid"):
            raise ApiError(f"DELETE {path}", 409, "Conflict", "the uid differs")
        return self.objects.pop(path)

    def keep(self, path: str, body: Body) -> Body:
        """Stores it as a new version."""
        self._version += 1
        stored = copy.deepcopy(body)
        stored["metadata"]["resourceVersion"] = str(self._version)
        self.objects[path] = stored
        return copy.deepcopy(stored)

    async def _asked(self, verb: str, path: str) -> None:
        self.asked.append((verb, path))
        await self.reachable.wait()
        await asyncio.sleep(0)  # as a real call: others run meanwhile
        self.before(verb, path)


def _patched(body: Body, operation: Body) -> bool:
    """Carries one operation out; whether it could be."""
    *way, last = (part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:])
    where: Any = body
    for part in way:
        where = where[int(part)] if isinstance(where, list) else where.setdefault(part, {})
    match operation["op"]:
        case "test":
            return bool(where.get(last) == operation["value"])
        case "remove":
            return where.pop(last, None) is not None
    where[last] = operation["value"]
    return True


def silent(verb: str, path: str) -> None:
    """For `before`: no answer comes."""
    raise ApiUnreachable(f"{verb} {path}", ConnectionRefusedError("refused"))
