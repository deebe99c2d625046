"""Calls the Kubernetes API server with plain JSON values and time limits.

Called by `cluster_cache` and `api_writes`. An error response raises `ApiError`; a call without a response, whose
outcome is unknown, raises `ApiUnreachable`. Both are PlatformErrors and name the call. The outcome of every call is
recorded in `RefusedCalls`, from which the job's blockers are derived.
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

from surefoot_operator.errors import PlatformError
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.api_objects import ApiError, ApiUnreachable
from surefoot_operator.rejected_calls import ApiCall, RejectedCalls

# ---- pod exec --------------------------------------------------------------------------------------------------------
# Runs a program in a container through the API server's WebSocket.

_PROTOCOL = "v4.channel.k8s.io"
_INPUT, _OUTPUT, _ERRORS, _STATUS = range(4)
"""Stream numbers of that protocol; the first byte of each message is the number of its stream."""
_MAX_BYTES = 1 << 20
"""Largest output of a program, of all streams together."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The output and the result of a program that ran in a container."""

    stdout: str
    """Its standard output."""
    stderr: str
    """Its standard error."""
    failure: str
    """Why it failed; empty: it exited with code 0."""


async def exec_in_pod(
    client: Any, path: str, container: str, command: Sequence[str], stdin: str, seconds: float
) -> ExecResult:
    """Runs a program in a container and waits for its end.

    Args:
        client: The API client whose server and credentials are used.
        path: Path of the pod's `exec` subresource.
        container: Name of the container.
        command: The program and its arguments.
        stdin: Text for its standard input, which stays open.
        seconds: Time limit for the whole call.

    Raises:
        ApiError: The API server rejected the call.
        ApiUnreachable: The connection broke, or the program did not end in time.
    """
    call_text = f"exec {path}"
    query = [("container", container), *((stream, "true") for stream in ("stdin", "stdout", "stderr"))]
    query += [("command", word) for word in command]
    sockets: Any = WsApiClient(client.configuration)  # type: ignore[no-untyped-call]  # it has no types
    try:
        async with asyncio.timeout(seconds):
            _, url, headers, _, _ = await sockets.param_serialize(
                "GET", path, query_params=query, header_params={}, auth_settings=["BearerToken"]
            )
            headers["sec-websocket-protocol"] = _PROTOCOL
            connection = await sockets.call_api("GET", url, headers, _preload_content=False)
            async with connection.response as socket:
                await socket.send_bytes(bytes([_INPUT]) + stdin.encode())
                return await _read_result(socket)
    except aiohttp.WSServerHandshakeError as error:
        raise ApiError(call_text, error.status, "", error.message) from error
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise ApiUnreachable(call_text, error) from error
    finally:
        await sockets.close()


async def _read_result(socket: aiohttp.ClientWebSocketResponse) -> ExecResult:
    """Reads all streams to their end; raises ValueError if the output is too long or breaks off."""
    streams: dict[int, bytes] = {}
    async for message in socket:
        frame = message.data if isinstance(message.data, bytes) else str(message.data).encode()
        if frame:
            streams[frame[0]] = streams.get(frame[0], b"") + frame[1:]
        if sum(map(len, streams.values())) > _MAX_BYTES:
            raise ValueError(f"the program wrote more than {_MAX_BYTES} bytes, which is the limit")
    if _STATUS not in streams:
        raise ValueError("the connection was closed before the program ended")
    status = json.loads(streams[_STATUS])
    problem = (
        "" if status.get("status") == "Success" else str(status.get("message") or status.get("reason") or "it failed")
    )
    return ExecResult(
        streams.get(_OUTPUT, b"").decode(errors="replace"), streams.get(_ERRORS, b"").decode(errors="replace"), problem
    )


# ---- api client ------------------------------------------------------------------------------------------------------

CALL_SECONDS = 10.0
"""Time limit of one call."""
CONNECT_SECONDS = 3.0
"""Time limit for opening a connection."""
JSON_PATCH = "application/json-patch+json"
STRATEGIC_MERGE = "application/strategic-merge-patch+json"
Body = dict[str, Any]


class Api:
    """Calls one API server under one identity, in one event loop.

    Args:
        client: The Kubernetes client with its connections.
        call_seconds: Time limit of one call.
        may_write: Called before each write; raises PlatformError to prevent it. None: every write is allowed.
        rejected_calls: Records which calls are rejected repeatedly; None: a new record.
        job: UID of the job for which calls are made; empty: for none in particular.
    """

    def __init__(
        self,
        client: Any,
        call_seconds: float = CALL_SECONDS,
        may_write: Callable[[], None] | None = None,
        rejected_calls: RejectedCalls | None = None,
        job: str = "",
    ) -> None:
        self._client, self._call_seconds = client, call_seconds
        self._may_write = may_write
        self.rejected_calls = RejectedCalls() if rejected_calls is None else rejected_calls
        """The calls that are rejected repeatedly, through this object and its copies."""
        self._job = job
        self._timeout = aiohttp.ClientTimeout(total=call_seconds, sock_connect=CONNECT_SECONDS)

    def with_write_check(self, may_write: Callable[[], None]) -> Api:
        """Returns a copy with the same connections that calls `may_write` before each write.

        `may_write` raises PlatformError to prevent the write, as a replica that lost its lease must.
        """
        return Api(self._client, self._call_seconds, may_write, self.rejected_calls, self._job)

    def with_job(self, job: str) -> Api:
        """Returns a copy whose rejected calls are recorded as those of the job with this UID."""
        return Api(self._client, self._call_seconds, self._may_write, self.rejected_calls, job)

    def without_reports(self) -> Api:
        """Returns a copy with the same connections whose rejected calls are not recorded here."""
        return Api(self._client, self._call_seconds, self._may_write)

    def with_own_connections(self) -> Api:
        """Returns a copy with its own connections."""
        client = ApiClient(self._client.configuration)
        return Api(client, self._call_seconds, self._may_write, self.rejected_calls, self._job)

    def check_allowed(self) -> None:
        """Raises PlatformError if this replica may not write now."""
        if self._may_write is not None:
            self._may_write()

    async def get(self, path: str, query: Mapping[str, str | int] | None = None) -> Body:
        """Reads an object or a list."""
        return await self._request_object("GET", path, query=query)

    async def post(self, path: str, body: Body, query: Mapping[str, str | int] | None = None) -> Body:
        """Creates an object and returns it as stored."""
        return await self._request_object("POST", path, body, query)

    async def put(self, path: str, body: Body) -> Body:
        """Replaces an object, if it still has the `resourceVersion` in `body`."""
        return await self._request_object("PUT", path, body)

    async def patch(self, path: str, operations: list[Body]) -> Body:
        """Applies a JSON Patch; its `test` operations make it a compare-and-swap.

        The server rejects fields that it does not know. Otherwise an older CRD would silently drop them, for example
        the members of a generation.
        """
        return await self._request_object("PATCH", path, operations, {"fieldValidation": "Strict"}, JSON_PATCH)

    async def merge(self, path: str, body: Body) -> Body:
        """Applies a strategic merge patch; in a list with merge keys, changes only the items in `body`."""
        return await self._request_object("PATCH", path, body, None, STRATEGIC_MERGE)

    async def delete(self, path: str, options: Body) -> Body:
        """Deletes an object; `options` is a DeleteOptions."""
        return await self._request_object("DELETE", path, options)

    async def watch(
        self, path: str, query: Mapping[str, str | int], silence_seconds: float
    ) -> AsyncGenerator[Body, None]:
        """Yields the events of a watch, first {"type": "OPEN"}, until the server ends it.

        Raises ApiUnreachable if nothing arrives for `silence_seconds`, or the connection breaks.
        """
        call_text, call = f"watch {path}", api_objects.parse_call("GET", path, job=self._job)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=silence_seconds)
        try:
            response = await self._send_request(
                "GET", path, None, {**query, "watch": "true"}, "application/json", timeout
            )
            async with response:
                if response.status != 200:
                    raise self._record_rejection(call, parse_error(call_text, response.status, await response.text()))
                self.rejected_calls.record_accepted(call, time.monotonic())
                yield {"type": "OPEN"}
                async for line in response.content:
                    yield json.loads(line)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise self._record_no_response(call, ApiUnreachable(call_text, error)) from error

    async def stream_text(
        self, path: str, query: Mapping[str, str | int], silence_seconds: float
    ) -> AsyncGenerator[bytes, None]:
        """Yields the parts of a growing text, such as a log, until the server ends it.

        Raises ApiError if the call is rejected, and ApiUnreachable if nothing arrives for `silence_seconds` or the
        connection breaks.
        """
        call_text = f"stream {path}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=silence_seconds)
        try:
            response = await self._send_request("GET", path, None, query, "application/json", timeout)
            async with response:
                if response.status != 200:
                    raise parse_error(call_text, response.status, await response.text())
                async for chunk in response.content.iter_any():
                    yield chunk
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ApiUnreachable(call_text, error) from error

    async def exec_in_pod(
        self, path: str, container: str, command: Sequence[str], stdin: str, seconds: float
    ) -> ExecResult:
        """Runs a program in a container; see `exec_in_pod`."""
        return await exec_in_pod(self._client, path, container, command, stdin, seconds)

    async def close(self) -> None:
        """Closes the connections, also those of copies that share them."""
        await self._client.close()

    async def _request_object(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: Mapping[str, str | int] | None = None,
        kind: str = "application/json",
    ) -> Body:
        return _parse_object(f"{method} {path}", await self._request_text(method, path, body, query or {}, kind))

    async def _request_text(self, method: str, path: str, body: Any, query: Mapping[str, str | int], kind: str) -> str:
        call_text, call = f"{method} {path}", api_objects.parse_call(method, path, body, self._job)
        if method != "GET":
            self.check_allowed()
        try:
            response = await self._send_request(method, path, body, query, kind, self._timeout)
            async with response:
                text = await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._record_no_response(call, ApiUnreachable(call_text, error)) from error
        if not 200 <= response.status < 300:
            raise self._record_rejection(call, parse_error(call_text, response.status, text))
        self.rejected_calls.record_accepted(call, time.monotonic())
        return text

    def _record_rejection(self, call: ApiCall, error: ApiError) -> ApiError:
        """Records an error response, unless it is one that a correct operator gets too; returns the error."""
        if api_objects.already_exists(call, error):
            self.rejected_calls.record_accepted(call, time.monotonic())
        elif not api_objects.is_expected_error(call, error):
            response_text = f"{error.code} {error.reason}"
            self.rejected_calls.record_rejected(
                call, api_objects.classify_error(error), error.server_message, response_text, time.monotonic()
            )
        return error

    def _record_no_response(self, call: ApiCall, error: ApiUnreachable) -> ApiUnreachable:
        self.rejected_calls.record_rejected(call, "silent", str(error), "no answer", time.monotonic())
        return error

    async def _send_request(
        self, method: str, path: str, body: Any, query: Mapping[str, str | int], kind: str, timeout: Any
    ) -> aiohttp.ClientResponse:
        headers = {"Content-Type": kind, "Accept": "application/json"}
        request = await self._client.param_serialize(
            method, path, query_params=list(query.items()), header_params=headers, auth_settings=["BearerToken"]
        )
        _, url, headers, _, _ = request
        call_result = await self._client.call_api(method, url, headers, body, _request_timeout=timeout)
        response: aiohttp.ClientResponse = call_result.response
        return response


def parse_error(call_text: str, code: int, text: str) -> ApiError:
    """Parses an error response, usually a Status object, into an ApiError."""
    try:
        status = json.loads(text)
    except ValueError:
        status = {}
    if not isinstance(status, dict):
        status = {}
    details = status.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    namespace_terminating = any(
        isinstance(c, dict) and c.get("reason") == "NamespaceTerminating" for c in _as_list(causes)
    )
    return ApiError(
        call_text, code, str(status.get("reason", "")), str(status.get("message", text[:300])), namespace_terminating
    )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _parse_object(call_text: str, text: str) -> Body:
    try:
        body = json.loads(text)
    except ValueError as error:
        raise ApiUnreachable(call_text, error) from error
    if not isinstance(body, dict):
        raise ApiUnreachable(call_text, ValueError("the response is not a JSON object"))
    return body


async def connect_to_api_server(kubeconfig: Path | None = None, call_seconds: float = CALL_SECONDS) -> Api:
    """Connects to the API server of a kubeconfig, or of the cluster of this pod if it is None.

    Raises:
        PlatformError: The configuration or its certificates cannot be read.
    """
    configuration = await load_configuration(kubeconfig)
    try:
        return Api(await asyncio.to_thread(ApiClient, configuration), call_seconds)
    except (OSError, ValueError) as error:
        raise PlatformError(
            f"cannot connect to the API server of {kubeconfig or 'this pod'}: {error}; check its certificates"
        ) from error


async def load_configuration(kubeconfig: Path | None) -> Any:
    """Loads the client's Configuration from a kubeconfig, or from the pod if it is None; raises PlatformError."""
    configuration: Any = Configuration()
    load: Any = load_kube_config  # neither loader has types
    load_in_pod: Any = load_incluster_config
    try:
        if kubeconfig is None:
            load_in_pod(client_configuration=configuration)
        else:
            await load(config_file=str(kubeconfig), client_configuration=configuration)
    except Exception as error:  # the loaders pass on any error of their parsers
        source = kubeconfig or "this pod's service account"
        raise PlatformError(f"cannot read the API server's address and credentials from {source}: {error}") from error
    return configuration
