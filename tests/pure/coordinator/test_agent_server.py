"""What a TLS line of an agent takes: asyncio gives each a buffer of its own for as long as it lives."""

from __future__ import annotations

import asyncio
import ssl
from asyncio import sslproto

import pytest

from surefoot_operator.coordinator import agent_server


async def test_a_line_has_a_small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sslproto.SSLProtocol, "max_size", 256 * 1024)  # put back after the test
    agent_server.shrink_tls_buffers()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    loop = asyncio.get_running_loop()
    line = sslproto.SSLProtocol(loop, asyncio.Protocol(), context, loop.create_future(), server_side=True)
    line._get_app_transport().close()  # type: ignore[attr-defined]  # it complains if it is forgotten open
    assert len(line.get_buffer(-1)) == agent_server.TLS_BUFFER_BYTES
