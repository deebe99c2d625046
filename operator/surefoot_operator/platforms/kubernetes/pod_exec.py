"""Runs a program in a container through the API server's web socket.

Touches the network; called by `api_client`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from kubernetes.aio.stream import WsApiClient

from surefoot_operator.platforms.kubernetes.api_errors import ApiRefused, ApiSilent

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


async def ran(client: Any, path: str, container: str, command: Sequence[str], told: str, seconds: float) -> Ran:
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
