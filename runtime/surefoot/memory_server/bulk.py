"""Receives long replies straight into the caller's memory.

Redis' own parsers take replies in pieces of 32 KiB and copy each twice, which costs more than everything else about a
read. Used by `connection.Wire` alone. A reply that is not the one expected is read to its end like any other.
"""

from __future__ import annotations

import socket
import ssl
import struct
from typing import Any

import redis

_LONGEST_LINE = 512


def limit_by_kernel(line: socket.socket, seconds: float) -> None:
    """Sets the socket's time limits in the kernel.

    One call then sends or receives megabytes without waking this process for each part. Each wait ends after `seconds`
    with BlockingIOError. TLS has records of its own and stays as it is.
    """
    if isinstance(line, ssl.SSLSocket):
        return
    whole = int(seconds)
    limit = struct.pack("ll", whole, max(1, int((seconds - whole) * 1e6)))
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    line.settimeout(None)


def reply_into(line: socket.socket, into: memoryview) -> int:
    """Reads one string reply into `into`; returns the reply's length.

    A shorter string fills the beginning of `into`. Raises redis' ResponseError for an error reply, ConnectionError for
    anything else; after either, and after another length, the socket must be closed (`Wire.take` does).
    """
    expected = b"$%d\r\n" % len(into)
    head = bytearray(len(expected))
    seen = 0
    while seen < len(head) and b"\r\n" not in head[:seen]:
        seen += _received(line, memoryview(head)[seen:], 0)
    if head == expected:
        _fill(line, into)
        _end(line)
        return len(into)
    return _other_reply(line, bytes(head[:seen]), into)


def _other_reply(line: socket.socket, start: bytes, into: memoryview) -> int:
    """An error, an absent value, or a shorter string."""
    while b"\r\n" not in start and len(start) < _LONGEST_LINE:
        start += _more(line)
    text, _, rest = start.partition(b"\r\n")
    if text[:1] == b"-":
        raise _error(text[1:].decode(errors="replace"))
    if text[:1] != b"$" or not text[1:].lstrip(b"-").isdigit() or int(text[1:]) > len(into):
        raise redis.exceptions.ConnectionError(f"it answered {text[:60]!r} where {len(into)} bytes were expected")
    length = max(0, int(text[1:]))
    into[: min(length, len(rest))] = rest[:length]
    _fill(line, into[min(length, len(rest)) : length])
    return length


def _error(text: str) -> Exception:
    """The class that redis-py gives an error of this text, so that callers tell them apart as everywhere."""
    parse: Any = redis.connection.DefaultParser.parse_error  # redis-py leaves it untyped
    found = parse(text)
    assert isinstance(found, Exception)
    return found


def _fill(line: socket.socket, view: memoryview) -> None:
    whole = 0 if isinstance(line, ssl.SSLSocket) else socket.MSG_WAITALL
    while view:
        view = view[_received(line, view, whole) :]


def _end(line: socket.socket) -> None:
    end = bytearray(2)
    _fill(line, memoryview(end))
    if end != b"\r\n":
        raise redis.exceptions.ConnectionError("a reply did not end where its length said")


def _more(line: socket.socket) -> bytes:
    more = bytearray(_LONGEST_LINE)
    return bytes(more[: _received(line, memoryview(more), 0)])


def _received(line: socket.socket, view: memoryview, flags: int) -> int:
    count = line.recv_into(view, 0, flags)
    if count == 0:
        raise redis.exceptions.ConnectionError("it closed the connection")
    return count
