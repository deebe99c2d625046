"""Calls the API server with plain JSON values and time limits.

Touches the network; called by `cluster_cache` and `api_writes`. A refusal raises `ApiRefused`, an unknown outcome `ApiSilent`;
both are FabricErrors and name the call. `blockers` hears the outcome of each.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import load_incluster_config, load_kube_config
from kubernetes.aio.stream import WsApiClient

from surefoot_operator.errors import FabricError
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.api_objects import ApiRefused, ApiSilent
from surefoot_operator.rejected_calls import ApiCall, RefusedCalls

# ---- pod exec --------------------------------------------------------------------------------------------------------
# Runs a program in a container through the API server's web socket. Touches the network.

_PROTOCOL = "v4.channel.k8s.io"
_INPUT, _OUTPUT, _ERRORS, _STATUS = range(4)
"""The first byte of each message says which stream it is of."""
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Ran:
    """What a program in a container left."""

    output: str
    errors: str
    problem: str
    """Why it did not end with 0; empty: it did."""


async def exec_in_pod(client: Any, path: str, container: str, command: Sequence[str], told: str, seconds: float) -> Ran:
    """Runs a program to its end.

    `told` is its input, which stays open. Raises ApiRefused, and ApiSilent after `seconds`.
    """
    asked = f"exec {path}"
    query = [("container", container), *((stream, "true") for stream in ("stdin", "stdout", "stderr"))]
    query += [("command", word) for word in command]
    sockets: Any = WsApiClient(client.configuration)  # type: ignore[no-untyped-call]  # it has no types
    try:
        async with asyncio.timeout(seconds):
            _, url, headers, _, _ = await sockets.param_serialize(
                "GET", path, query_params=query, header_params={}, auth_settings=["BearerToken"]
            )
            headers["sec-websocket-protocol"] = _PROTOCOL
            opened = await sockets.call_api("GET", url, headers, _preload_content=False)
            async with opened.response as socket:
                await socket.send_bytes(bytes([_INPUT]) + told.encode())
                return await _read(socket)
    except aiohttp.WSServerHandshakeError as error:
        raise ApiRefused(asked, error.status, "", error.message) from error
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise ApiSilent(asked, error) from error
    finally:
        await sockets.close()


async def _read(socket: aiohttp.ClientWebSocketResponse) -> Ran:
    """Reads to the end; raises ValueError where it never came, or is too long."""
    streams: dict[int, bytes] = {}
    async for message in socket:
        data = message.data if isinstance(message.data, bytes) else str(message.data).encode()
        if data:
            streams[data[0]] = streams.get(data[0], b"") + data[1:]
        if sum(map(len, streams.values())) > _MOST_BYTES:
            raise ValueError(f"the program wrote more than {_MOST_BYTES} bytes")
    if _STATUS not in streams:
        raise ValueError("the connection ended before the program did")
    status = json.loads(streams[_STATUS])
    problem = (
        "" if status.get("status") == "Success" else str(status.get("message") or status.get("reason") or "it failed")
    )
    return Ran(
        streams.get(_OUTPUT, b"").decode(errors="replace"), streams.get(_ERRORS, b"").decode(errors="replace"), problem
    )


# ---- api client ------------------------------------------------------------------------------------------------------

CALL_SECONDS = 10.0
CONNECT_SECONDS = 3.0
JSON_PATCH = "application/json-patch+json"
STRATEGIC_MERGE = "application/strategic-merge-patch+json"
Body = dict[str, Any]


class Api:
    """Calls one API server under one identity, in one event loop."""

    def __init__(
        self,
        client: Any,
        call_seconds: float = CALL_SECONDS,
        may_write: Callable[[], None] | None = None,
        refused: RefusedCalls | None = None,
        job: str = "",
    ) -> None:
        self._client, self._call_seconds = client, call_seconds
        self._may_write = may_write
        self.refused = RefusedCalls() if refused is None else refused
        """What is refused again and again, of all calls over this one and its copies."""
        self._job = job
        self._timeout = aiohttp.ClientTimeout(total=call_seconds, sock_connect=CONNECT_SECONDS)

    def guarded(self, may_write: Callable[[], None]) -> Api:
        """Shares the connections; `may_write` is called before each write.

        It raises FabricError to refuse the write, as a replica that lost its lease must.
        """
        return Api(self._client, self._call_seconds, may_write, self.refused, self._job)

    def about(self, job: str) -> Api:
        """Shares all; refusals are reported as those of the job with this uid."""
        return Api(self._client, self._call_seconds, self._may_write, self.refused, job)

    def unreported(self) -> Api:
        """Shares the connections; whoever calls reports refusals itself."""
        return Api(self._client, self._call_seconds, self._may_write)

    def apart(self) -> Api:
        """Returns the same access over connections of its own."""
        client = ApiClient(self._client.configuration)
        return Api(client, self._call_seconds, self._may_write, self.refused, self._job)

    def check_allowed(self) -> None:
        """Raises FabricError where a write would be refused."""
        if self._may_write is not None:
            self._may_write()

    async def get(self, path: str, query: Mapping[str, str | int] | None = None) -> Body:
        return await self._call("GET", path, query=query)

    async def post(self, path: str, body: Body, query: Mapping[str, str | int] | None = None) -> Body:
        return await self._call("POST", path, body, query)

    async def put(self, path: str, body: Body) -> Body:
        """Replaces an object if it still has the `resourceVersion` in `body`."""
        return await self._call("PUT", path, body)

    async def patch(self, path: str, operations: list[Body]) -> Body:
        """Applies a JSON Patch; its `test` operations make it a compare-and-swap.

        Fields that the server does not know are refused: an older CRD would silently drop them, and with them the
        members of a world.
        """
        return await self._call("PATCH", path, operations, {"fieldValidation": "Strict"}, JSON_PATCH)

    async def merge(self, path: str, body: Body) -> Body:
        """Applies a strategic merge.

        Of a list with keys only the items that `body` names change.
        """
        return await self._call("PATCH", path, body, None, STRATEGIC_MERGE)

    async def delete(self, path: str, options: Body) -> Body:
        return await self._call("DELETE", path, options)

    async def watch(
        self, path: str, query: Mapping[str, str | int], silence_seconds: float
    ) -> AsyncGenerator[Body, None]:
        """Yields a watch's events until the server ends it.

        Raises ApiSilent if nothing comes for `silence_seconds`, or the connection breaks.
        """
        asked, call = f"watch {path}", api_objects.call_of("GET", path, job=self._job)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=silence_seconds)
        try:
            response = await self._send("GET", path, None, {**query, "watch": "true"}, "application/json", timeout)
            async with response:
                if response.status != 200:
                    raise self._refused(call, refusal(asked, response.status, await response.text()))
                self.refused.accept(call, time.monotonic())
                yield {"type": "OPEN"}
                async for line in response.content:
                    yield json.loads(line)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise self._silent(call, ApiSilent(asked, error)) from error

    async def stream(
        self, path: str, query: Mapping[str, str | int], silence_seconds: float
    ) -> AsyncGenerator[bytes, None]:
        """Yields a growing text until the server ends it.

        Raises ApiRefused; ApiSilent if nothing comes for `silence_seconds`, or the connection breaks.
        """
        asked = f"stream {path}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=silence_seconds)
        try:
            response = await self._send("GET", path, None, query, "application/json", timeout)
            async with response:
                if response.status != 200:
                    raise refusal(asked, response.status, await response.text())
                async for chunk in response.content.iter_any():
                    yield chunk
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ApiSilent(asked, error) from error

    async def run_in(self, path: str, container: str, command: Sequence[str], told: str, seconds: float) -> Ran:
        """Runs a program in a container, by the pod's `exec`.

        Raises ApiRefused, ApiSilent.
        """
        return await exec_in_pod(self._client, path, container, command, told, seconds)

    async def close(self) -> None:
        await self._client.close()

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: Mapping[str, str | int] | None = None,
        kind: str = "application/json",
    ) -> Body:
        asked, call = f"{method} {path}", api_objects.call_of(method, path, body, self._job)
        if method != "GET":
            self.check_allowed()
        try:
            response = await self._send(method, path, body, query or {}, kind, self._timeout)
            async with response:
                text = await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._silent(call, ApiSilent(asked, error)) from error
        if not 200 <= response.status < 300:
            raise self._refused(call, refusal(asked, response.status, text))
        self.refused.accept(call, time.monotonic())
        return _mapping(asked, text)

    def _refused(self, call: ApiCall, error: ApiRefused) -> ApiRefused:
        if api_objects.is_there(call, error):
            self.refused.accept(call, time.monotonic())
        elif not api_objects.is_ordinary(call, error):
            answer = f"{error.code} {error.reason}"
            self.refused.refuse(call, api_objects.cause_of(error), error.sentence, answer, time.monotonic())
        return error

    def _silent(self, call: ApiCall, error: ApiSilent) -> ApiSilent:
        self.refused.refuse(call, "silent", str(error), "no answer", time.monotonic())
        return error

    async def _send(
        self, method: str, path: str, body: Any, query: Mapping[str, str | int], kind: str, timeout: Any
    ) -> aiohttp.ClientResponse:
        headers = {"Content-Type": kind, "Accept": "application/json"}
        sent = await self._client.param_serialize(
            method, path, query_params=list(query.items()), header_params=headers, auth_settings=["BearerToken"]
        )
        _, url, headers, _, _ = sent
        answer = await self._client.call_api(method, url, headers, body, _request_timeout=timeout)
        found: aiohttp.ClientResponse = answer.response
        return found


def refusal(asked: str, code: int, text: str) -> ApiRefused:
    """Reads a Status object into an ApiRefused."""
    try:
        body = json.loads(text)
    except ValueError:
        body = {}
    if not isinstance(body, dict):
        body = {}
    details = body.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    closing = any(isinstance(c, dict) and c.get("reason") == "NamespaceTerminating" for c in _listed(causes))
    return ApiRefused(asked, code, str(body.get("reason", "")), str(body.get("message", text[:300])), closing)


def _listed(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def _mapping(asked: str, text: str) -> Body:
    try:
        body = json.loads(text)
    except ValueError as error:
        raise ApiSilent(asked, error) from error
    if not isinstance(body, dict):
        raise ApiSilent(asked, ValueError("the answer is no object"))
    return body


async def connect(kubeconfig: Path | None = None, call_seconds: float = CALL_SECONDS) -> Api:
    """Connects to a kubeconfig's API server, or the pod's. Raises FabricError."""
    configuration = await loaded(kubeconfig)
    try:
        return Api(await asyncio.to_thread(ApiClient, configuration), call_seconds)
    except (OSError, ValueError) as error:
        raise FabricError(f"the API server of {kubeconfig or 'the pod'} cannot be reached: {error}") from error


async def loaded(kubeconfig: Path | None) -> Any:
    """Loads the client's Configuration of that server. Raises FabricError."""
    configuration: Any = Configuration()
    load: Any = load_kube_config  # neither loader has types
    load_in_pod: Any = load_incluster_config
    try:
        if kubeconfig is None:
            load_in_pod(client_configuration=configuration)
        else:
            await load(config_file=str(kubeconfig), client_configuration=configuration)
    except Exception as error:  # the loaders raise whatever their parsers do; all of it means the same
        raise FabricError(f"no API server is configured by {kubeconfig or 'the pod'}: {error}") from error
    return configuration
