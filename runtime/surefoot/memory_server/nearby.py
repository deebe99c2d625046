"""Detects whether a connection ends on this machine.

Used by `connection.Wire`. A holder of this node is reached by its Unix socket, where the kernel does none of a
network's work for each packet. What reaches this machine by TCP has little under way at once.

Between two processes of one machine a byte is copied twice. With the kernel's usual megabytes under way the second
copy finds it in main memory; with a few hundred kilobytes it finds it in the core's cache. And what a network needs
against congestion costs there: BBR, the default of many machines, paces each burst by a timer. Both together doubled
what two holders took with one core (docs/measuring.md). On a network the kernel goes on choosing.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
from functools import cache
from pathlib import Path

from surefoot.sockets import reachable

_log = logging.getLogger(__name__)

UNDER_WAY_BYTES = 256 * 1024
"""The kernel doubles it for its own needs. Less makes the two processes wake each other too often."""

CONGESTION = b"reno"
"""Every Linux has it, and lets every process choose it."""

NEAR_SECONDS = 40e-6
"""A round trip of no network but a very near one, which at this size still carries 25 Gbit/s."""

_TCP_INFO_RTT = 68
"""Where Linux' tcp_info has the smoothed round trip, in microseconds."""


def limit_under_way(line: socket.socket) -> None:
    """Limits an open connection's bytes under way, within this machine.

    Called once: sets send buffer and congestion control. TLS on top changes nothing; a Unix socket buffers as little.
    """
    if line.family == socket.AF_UNIX or not is_near(line):
        return
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNDER_WAY_BYTES)
    with contextlib.suppress(OSError):  # an administrator may forbid the choice: it is slower then, and nothing else
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION)


def connect(path: str, seconds: float) -> socket.socket:
    """Connects to the server's Unix socket without waiting.

    Raises OSError where nobody listens, or the backlog is full.
    """
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.settimeout(seconds)
        with reachable(Path(path)) as name:
            line.connect(name)
    except OSError:
        line.close()
        raise
    return line


def count_fallback(path: str, why: str) -> None:
    """Counts and logs a connection by TCP instead of the socket."""
    from surefoot import metrics  # of the runtime: an operator that reads holders exports none of them

    metrics.fallbacks.labels("holder_socket").inc()
    _say_once(path, why)


@cache
def _say_once(path: str, why: str) -> None:
    _log.warning(
        "this node's holder is reached by TCP, which costs more: its socket %s cannot be connected: %s. Let its folder"
        " be mounted in both pods, or switch memoryTier.localSocket off",
        path,
        why,
    )


def is_near(line: socket.socket) -> bool:
    """Returns whether the other end is on this machine.

    It has this end's address, or a round trip as short as only within a machine (a pod of the same node).
    """
    return line.getsockname()[0] == line.getpeername()[0] or 0 < round_trip_seconds(line) <= NEAR_SECONDS


def round_trip_seconds(line: socket.socket) -> float:
    """The connection's round trip as the kernel measured it; 0.0: unknown."""
    told = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_RTT + 4)
    if len(told) < _TCP_INFO_RTT + 4:
        return 0.0
    (microseconds,) = struct.unpack_from("I", told, _TCP_INFO_RTT)
    return float(microseconds) / 1e6
