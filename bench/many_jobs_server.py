"""An API server in memory for many jobs: lists in pages, watches, JSON Patches, and pods that run as soon as they are made.

A process of its own, forked by `bench.many_jobs`: what it keeps is no part of the operator's memory, nor what it does of its CPU.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

Object = dict[str, Any]
_ITEM = re.compile(
    r"/(?:api/v1|apis/[^/]+/[^/]+)(?:/namespaces/(?P<space>[^/]+))?/(?P<kind>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+))?"
)
LONG_AGO = datetime.fromtimestamp(time.time() - 600, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
"""What is begun is an operator, not the jobs."""


class Objects:
    """By kind, namespace and name; each write is told to who watches the kind."""

    def __init__(self, seed: list[Object], nodes: list[str]) -> None:
        self.kept: dict[str, dict[tuple[str, str], Object]] = {}
        self.calls: Counter[str] = Counter()
        self.watching: dict[str, list[tuple[str, asyncio.Queue[str]]]] = {}
        self.version, self._nodes, self._pods = 1000, nodes, 0
        for one in seed:
            self.keep(plural(one), one, "ADDED")

    def keep(self, kind: str, body: Object, event: str) -> Object:
        self.version += 1
        metadata = body["metadata"]
        metadata.setdefault("uid", f"uid-{kind}-{self.version}-b0c5-4a5e8f0a9d11")
        metadata.setdefault("creationTimestamp", LONG_AGO)
        metadata["resourceVersion"] = str(self.version)
        key = (metadata.get("namespace", ""), metadata["name"])
        self.kept.setdefault(kind, {})[key] = body
        told = json.dumps({"type": event, "object": body}) + "\n"
        for selector, queue in self.watching.get(kind, ()):
            if bears(body, selector):
                queue.put_nowait(told)
        return body

    def run(self, pod: Object) -> Object:
        """As a scheduler, a kubelet and the API server leave a pod that runs."""
        node = self._nodes[self._pods % len(self._nodes)]
        self._pods += 1
        spec = pod["spec"]
        spec |= {"nodeName": node, "dnsPolicy": "ClusterFirst", "schedulerName": "default-scheduler", "priority": 0}
        spec |= {
            "serviceAccountName": "default",
            "enableServiceLinks": True,
            "preemptionPolicy": "PreemptLowerPriority",
        }
        states = [{"type": t, "status": "True", "lastProbeTime": None, "lastTransitionTime": LONG_AGO} for t in _SAID]
        container = {"name": "trainer", "ready": True, "restartCount": 0, "image": "registry.invalid/trainer:1"}
        container |= {
            "state": {"running": {"startedAt": LONG_AGO}},
            "containerID": f"containerd://{self._pods:064x}",
        }
        pod["status"] = {
            "phase": "Running",
            "conditions": states,
            "containerStatuses": [container],
            "qosClass": "BestEffort",
        }
        pod["status"] |= {
            "hostIP": "10.98.0.1",
            "podIP": "10.99.0.1",
            "podIPs": [{"ip": "10.99.0.1"}],
            "startTime": LONG_AGO,
        }
        return fields_named(pod)


_SAID = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")


def fields_named(body: Object) -> Object:
    """With managedFields, as the API server keeps them of each writer."""
    body["metadata"].pop("managedFields", None)
    parts = {name: owned(body[name]) for name in ("metadata", "spec", "status") if name in body}
    entry = {"apiVersion": "v1", "fieldsType": "FieldsV1", "operation": "Update", "time": LONG_AGO}
    writers = {"OpenAPI-Generator": ("metadata", "spec"), "kwok": ("status",)}
    body["metadata"]["managedFields"] = [
        {**entry, "manager": who, "fieldsV1": {f"f:{n}": parts[n] for n in names if n in parts}}
        for who, names in writers.items()
    ]
    return body


def owned(value: Any) -> Object:
    if isinstance(value, dict):
        return {f"f:{name}": owned(one) for name, one in value.items()}
    if isinstance(value, list):
        return {
            f'k:{{"name":"{one.get("name", n)}"}}': owned(one) for n, one in enumerate(value) if isinstance(one, dict)
        }
    return {}


def plural(body: Object) -> str:
    return f"{body['kind'].lower()}s"


def bears(body: Object, selector: str) -> bool:
    labels = body["metadata"].get("labels") or {}
    wanted = [part.partition("=") for part in selector.split(",") if part]
    return all(name in labels and (not sign or labels[name] == value) for name, sign, value in wanted)


class Server:
    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/dump":
            return web.json_response([one for kept in self._objects.kept.values() for one in kept.values()])
        if request.path == "/calls":
            return web.json_response(self._objects.calls)
        match = _ITEM.fullmatch(request.path)
        if match is None:
            return web.json_response({}, status=404)
        space, kind, name = match["space"] or "", match["kind"], match["name"]
        verb = "watch" if "watch" in request.query else request.method.lower()
        self._objects.calls[f"{verb} {kind}"] += 1
        if verb == "watch":
            return await self._watch(request, kind)
        if verb == "get":
            return self._get(request, kind, (space, name)) if name else self._list(request, kind)
        body = json.loads(await request.text())
        if verb == "patch":
            return self._patch(kind, (space, name or ""), body)
        if "dryRun" in request.query:
            return web.json_response(body, status=201)
        made = self._objects.run(body) if kind == "pods" else body
        return web.json_response(self._objects.keep(kind, made, "ADDED"), status=201)

    def _get(self, request: web.Request, kind: str, key: tuple[str, str]) -> web.Response:
        found = self._objects.kept.get(kind, {}).get(key)
        return web.json_response(found or {}, status=200 if found else 404)

    def _list(self, request: web.Request, kind: str) -> web.Response:
        selector, begin = request.query.get("labelSelector", ""), int(request.query.get("continue") or 0)
        found = [one for one in self._objects.kept.get(kind, {}).values() if bears(one, selector)]
        end = begin + int(request.query.get("limit", len(found) or 1))
        metadata = {"resourceVersion": str(self._objects.version), "continue": str(end) if end < len(found) else ""}
        return web.json_response({"metadata": metadata, "kind": "List", "items": found[begin:end]})

    async def _watch(self, request: web.Request, kind: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        mine = (request.query.get("labelSelector", ""), asyncio.Queue[str]())
        self._objects.watching.setdefault(kind, []).append(mine)
        try:
            async with asyncio.timeout(float(request.query.get("timeoutSeconds", 600))):
                while True:
                    await response.write((await mine[1].get()).encode())
        except (TimeoutError, ConnectionError):
            return response
        finally:
            self._objects.watching[kind].remove(mine)

    def _patch(self, kind: str, key: tuple[str, str], operations: list[Object]) -> web.Response:
        found = self._objects.kept.get(kind, {}).get(key)
        if found is None:
            return web.json_response({}, status=404)
        changed = json.loads(json.dumps(found))
        for operation in operations:
            *way, last = operation["path"].split("/")[1:]
            where = changed
            for part in way:
                where = where.setdefault(part, {})
            if operation["op"] == "test" and where.get(last) != operation["value"]:
                return web.json_response({"message": f"{operation}"}, status=422)
            if operation["op"] == "add":
                where[last] = operation["value"]
        return web.json_response(self._objects.keep(kind, fields_named(changed), "MODIFIED"))


def _serve(seed: list[Object], nodes: list[str], port: Any) -> None:
    async def run() -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", Server(Objects(seed, nodes)).answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


@contextmanager
def serving(seed: list[Object], nodes: list[str]) -> Iterator[str]:
    """Its address, while it runs."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(seed, nodes, theirs), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join()
