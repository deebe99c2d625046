"""Tests a node's disk and loopback network, and defines the result of a node test."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["well", "fails", "unknown"]


@dataclass(frozen=True, slots=True)
class NodeTestResult:
    """Reports the test of one part of a node."""

    name: str
    """Name of the tested part, as `disk` or `gpu 0`."""
    verdict: Verdict
    """`fails`: a result that healthy hardware never has. `unknown`: it could not be tested, which proves nothing."""
    reason: str = ""
    """CamelCase reason of the finding if the test fails, else empty."""
    text: str = ""
    """Sentence that describes the problem; empty if the part is well."""
    rate: float = 0.0
    """Measured speed in `unit` per second; 0: not measured."""
    unit: str = ""
    """Unit of the rate, as `GB`."""


# ---- disk test -------------------------------------------------------------------------------------------------------
# Writes to a folder, syncs, and reads it back. No system call fails on a disk that returns other bytes than were written;
# training would find that days later.

_DISK_BYTES = 4 << 20


def try_disk(folder: Path) -> NodeTestResult:
    """Writes random bytes to a folder of the worker and compares them with those read back."""
    path = folder / f".surefoot-trial-{os.getpid()}"
    content = os.urandom(1 << 16) * (_DISK_BYTES >> 16)
    start_seconds = time.monotonic()
    try:
        content_read = _written_and_read(path, content)
    except OSError as error:
        return _failed(folder, error)
    finally:
        path.unlink(missing_ok=True)
    if content_read != content:
        text = (
            f"{folder} returned other bytes than were written to it ({len(content_read)} of {_DISK_BYTES} bytes read)"
        )
        return NodeTestResult("disk", "fails", "DiskTestFailed", text)
    return NodeTestResult(
        "disk", "well", rate=1e-6 * _DISK_BYTES / max(time.monotonic() - start_seconds, 1e-9), unit="MB"
    )


def _written_and_read(path: Path, content: bytes) -> bytes:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else the page cache answers
    return path.read_bytes()


def _failed(folder: Path, error: OSError) -> NodeTestResult:
    """Returns a failed test for an I/O error of the disk; a full or read-only folder may be intended and proves nothing."""
    text = f"{folder} could not be written to and read back: {error.strerror or error}"
    if error.errno == errno.EIO:
        return NodeTestResult("disk", "fails", "DiskTestFailed", text)
    return NodeTestResult("disk", "unknown", text=text)


# ---- loopback test ---------------------------------------------------------------------------------------------------
# Sends bytes to this node's own address and back, as a gloo collective does: over TCP, at the address that other workers
# use. Without torch, whose import takes longer than all other tests together.

_LOOPBACK_BYTES = 8 << 20
_CALL_SECONDS = 3.0
_TRIES = 2
_PAUSE_SECONDS = 0.3


def try_loopback(host: str) -> NodeTestResult:
    """Sends a pattern to this node's own address and compares the echo.

    A failed connection is tried once more: a pod's network may become ready a moment after its processes.
    """
    pattern = bytes(range(256)) * (_LOOPBACK_BYTES >> 8)
    for attempts_left in reversed(range(_TRIES)):
        start_seconds = time.monotonic()
        try:
            received = _there_and_back(host, pattern)
            break
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:  # a translated address or a wrong setting: proves nothing
                return NodeTestResult("loopback", "unknown", text=f"{host} is no address of this node: {error}")
            if not attempts_left:
                text = f"this node cannot connect to its own address {host}: {error}"
                return NodeTestResult("loopback", "fails", "LoopbackTestFailed", text)
        time.sleep(_PAUSE_SECONDS)
    if received != pattern:
        text = f"bytes sent to this node's own address {host} came back changed"
        return NodeTestResult("loopback", "fails", "LoopbackTestFailed", text)
    return NodeTestResult(
        "loopback", "well", rate=2e-9 * _LOOPBACK_BYTES / max(time.monotonic() - start_seconds, 1e-9), unit="GB"
    )


def _there_and_back(host: str, pattern: bytes) -> bytes:
    with _echoing(host) as address:
        return _sent_and_received(address, pattern)


@contextlib.contextmanager
def _echoing(host: str) -> Iterator[tuple[str, int]]:
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.settimeout(_CALL_SECONDS)
    echo = threading.Thread(target=_echo, args=(listener,), daemon=True)
    echo.start()
    try:
        yield listener.getsockname()[:2]
    finally:
        listener.close()
        echo.join(_CALL_SECONDS)


def _echo(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the sender reports the error
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(_CALL_SECONDS)
            while data := connection.recv(1 << 18):
                connection.sendall(data)


def _sent_and_received(address: tuple[str, int], pattern: bytes) -> bytes:
    with socket.create_connection(address, timeout=_CALL_SECONDS) as connection:
        sender = threading.Thread(target=_send, args=(connection, pattern), daemon=True)
        sender.start()
        received = bytearray()
        while len(received) < len(pattern) and (data := connection.recv(1 << 18)):
            received += data
        sender.join(_CALL_SECONDS)
        return bytes(received)


def _send(connection: socket.socket, pattern: bytes) -> None:
    with contextlib.suppress(OSError):  # the receiver then gets too few bytes and reports that
        connection.sendall(pattern)
