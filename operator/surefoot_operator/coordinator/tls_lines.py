"""Makes TLS connections of an event loop take less memory.

Called by `agent_server` before it listens. asyncio gives each TLS connection a buffer of 256 KiB for what comes in, for as long
as it lives: half a gigabyte at two thousand agents, whose heartbeats are some hundred bytes.
"""

from __future__ import annotations

from asyncio import sslproto

BUFFER_BYTES = 32 * 1024
"""Two records of TLS. More that comes at once is read in turns."""


def lessen_buffers() -> None:
    """Sets the buffer of each TLS connection opened from now on."""
    sslproto.SSLProtocol.max_size = BUFFER_BYTES
