"""Frames trainer messages: a four-byte little-endian length before each.

Both ends use it.
"""

from __future__ import annotations

from surefoot.errors import ProtocolError

HEADER_BYTES = 4
LARGEST = 256 << 20
"""A layout record of a large model is megabytes; more than this is not a message."""


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(HEADER_BYTES, "little") + message


class Unframer:
    """Bytes in, whole messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes, in order."""
        self._buffer += data
        whole: list[bytes] = []
        while len(self._buffer) >= HEADER_BYTES:
            size = int.from_bytes(self._buffer[:HEADER_BYTES], "little")
            if size > LARGEST:
                raise ProtocolError(f"a frame of {size} bytes on the trainer's line: it is not spoken here")
            if len(self._buffer) < HEADER_BYTES + size:
                break
            whole.append(bytes(self._buffer[HEADER_BYTES : HEADER_BYTES + size]))
            del self._buffer[: HEADER_BYTES + size]
        return whole
