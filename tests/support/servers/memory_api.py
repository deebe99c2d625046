"""An API server in memory, over a real socket: enough of it for a whole operator, and refusals at will.

What a real server does with the same calls is tried in tests/cluster.
"""

from __future__ import annotations

import asyncio
import copy
import json
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Refusal:
    """What is answered instead of doing what was asked."""

    code: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Target:
    """What a request asks for."""

    method: str
    group: str
    plural: str
    namespace: str
    name: str
    part: str
    """A subresource, or nothing."""


class MemoryApi:
    """Objects by (group, plural, namespace, name). `refuse` is asked before each request."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str, str], Body] = {}
        self.refuse: Callable[[Target], Refusal | None] = lambda target: None
        self._version = 0
        self._changed = asyncio.Condition()
        self._history: list[tuple[int, str, tuple[str, str, str, str], Body]] = []

    def put(self, group: str, plural: str, body: Body, kind: str = "ADDED") -> Body:
        """Stores a version of an object; watches tell of it soon."""
        metadata = body["metadata"]
        self._version += 1
        stored = copy.deepcopy(body)
        stored["metadata"] = {
            "uid": str(uuid.uuid4()),
            "generation": 1,
            **metadata,
            "resourceVersion": str(self._version),
        }
        key = (group, plural, metadata.get("namespace", ""), metadata["name"])
        if kind == "DELETED":
            self.objects.pop(key, None)
        else:
            self.objects[key] = stored
        self._history.append((self._version, kind, key, stored))
        return stored

    def all(self, plural: str) -> list[Body]:
        """Every object of a kind."""
        return [one for (_, its, _, _), one in self.objects.items() if its == plural]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        target = _target(request)
        if (refusal := self.refuse(target)) is not None:
            return _status(refusal)
        if "watch" in request.query:
            return await self._watch(request, target)
        key = (target.group, target.plural, target.namespace, target.name)
        if target.method == "GET" and not target.name:
            items = [one for its, one in self.objects.items() if _is_in(its, target) and _is_selected(one, request)]
            return web.json_response({"items": items, "metadata": {"resourceVersion": str(self._version)}})
        body = json.loads(await request.text() or "{}")
        if target.method == "POST":
            key = (*key[:3], body["metadata"]["name"])
            if key in self.objects:
                return _status(Refusal(409, "AlreadyExists", f"{key[3]} already exists"))
            body["metadata"].setdefault("namespace", target.namespace)
            return web.json_response(self.put(target.group, target.plural, body), status=201)
        if key not in self.objects:
            return _status(Refusal(404, "NotFound", f"{target.plural} {target.name} not found"))
        return self._change(target, self.objects[key], body)

    def _change(self, target: Target, old: Body, body: Any) -> web.Response:
        kind, new = "MODIFIED", body
        if target.method == "PATCH":
            new = copy.deepcopy(old)
            if not all(_patched(new, operation) for operation in body):
                # all that the real one says
                text = "the server rejected our request due to an error in our request"
                return _status(Refusal(422, "Invalid", text))
        elif target.method == "DELETE":
            kind, new = "DELETED", old
        elif target.method == "PUT" and body["metadata"]["resourceVersion"] != old["metadata"]["resourceVersion"]:
            return _status(Refusal(409, "Conflict", "the object has been modified"))
        return web.json_response(old if target.method == "GET" else self.put(target.group, target.plural, new, kind))

    async def _watch(self, request: web.Request, target: Target) -> web.StreamResponse:
        seen = int(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        while self.refuse(target) is None:
            news = [event for event in self._history if event[0] > seen]
            seen = self._version
            for _, kind, key, body in news:
                if _is_in(key, target) and _is_selected(body, request):
                    await response.write(json.dumps({"type": kind, "object": body}).encode() + b"\n")
            await asyncio.sleep(0.02)
        return response


def _target(request: web.Request) -> Target:
    parts = request.path.strip("/").split("/")
    group, parts = ("", parts[2:]) if parts[0] == "api" else (parts[1], parts[3:])
    namespace = ""
    if parts[0] == "namespaces" and len(parts) > 2:
        namespace, parts = parts[1], parts[2:]
    plural, name, part = (*parts, "", "")[:3]
    return Target(request.method, group, plural, namespace, name, part)


def _is_in(key: tuple[str, str, str, str], target: Target) -> bool:
    return key[:2] == (target.group, target.plural) and target.namespace in ("", key[2])


def _is_selected(body: Body, request: web.Request) -> bool:
    marks = body["metadata"].get("labels") or {}
    wanted = [term.partition("=") for term in request.query.get("labelSelector", "").split(",") if term]
    return all(name in marks and (not equal or marks[name] == value) for name, equal, value in wanted)


def _status(refusal: Refusal) -> web.Response:
    body = {"kind": "Status", "code": refusal.code, "reason": refusal.reason, "message": refusal.message}
    return web.json_response(body, status=refusal.code)


def _patched(body: Body, operation: Body) -> bool:
    """Carries one operation of a JSON Patch out; whether it could be."""
    *way, last = (part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:])
    where: Any = body
    for part in way:
        where = where.setdefault(part, {})
    match operation["op"]:
        case "test":
            return bool(where.get(last) == operation["value"])
        case "remove":
            return where.pop(last, None) is not None
    where[last] = operation["value"]
    return True


@asynccontextmanager
async def served() -> AsyncIterator[tuple[MemoryApi, ApiClient]]:
    """The server, and a client of it."""
    server, app = MemoryApi(), web.Application(client_max_size=2**24)
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    configuration = Configuration()  # type: ignore[no-untyped-call]
    configuration.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    client = ApiClient(configuration)  # type: ignore[no-untyped-call]
    yield server, client
    await client.close()
    await runner.cleanup()
