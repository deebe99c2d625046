"""Defines what one trial of a part of the node finds."""

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
    """One part of the node that was tried.

    `fails`: it did what no well part does, as a wrong result. unknown: it could not be tried, which proves nothing.
    """

    name: str
    verdict: Verdict
    reason: str = ""
    """CamelCase and stable, where it fails."""
    text: str = ""
    """A sentence for people, where it is not well."""
    rate: float = 0.0
    """How fast it was, in units of `unit` a second."""
    unit: str = ""


# ---- disk trial ------------------------------------------------------------------------------------------------------
# Writes to a folder, syncs, and reads it back. A disk that takes everything and returns something else is found by no
# system call, and by a training days later.

_DISK_BYTES = 4 << 20


def try_disk(folder: Path) -> NodeTestResult:
    """Of a folder that a worker writes to."""
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
        text = f"what was written to {folder} is read back otherwise ({len(content_read)} of {_DISK_BYTES} bytes)"
        return NodeTestResult("disk", "fails", "DiskTestFailed", text)
    return NodeTestResult("disk", "well", rate=1e-6 * _DISK_BYTES / max(time.monotonic() - start_seconds, 1e-9), unit="MB")


def _written_and_read(path: Path, content: bytes) -> bytes:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else it is read from memory
    return path.read_bytes()


def _failed(folder: Path, error: OSError) -> NodeTestResult:
    """Only the disk's own error is the node's; full, read-only or another's may be meant so."""
    text = f"{folder} could not be written to and read back: {error.strerror or error}"
    if error.errno == errno.EIO:
        return NodeTestResult("disk", "fails", "DiskTestFailed", text)
    return NodeTestResult("disk", "unknown", text=text)


# ---- loopback trial --------------------------------------------------------------------------------------------------
# Sends bytes to this node's own address and back. A collective of gloo goes the same way, over TCP at the address that
# other workers reach. Torch is not imported for it: that takes longer than all other trials together.

_LOOPBACK_BYTES = 8 << 20
_CALL_SECONDS = 3.0
_TRIES = 2
_PAUSE_SECONDS = 0.3


def try_loopback(host: str) -> NodeTestResult:
    """Over TCP, there and back.

    What is not reached is tried once more: the network of a pod may be a moment behind its processes.
    """
    pattern = bytes(range(256)) * (_LOOPBACK_BYTES >> 8)
    for attempts_left in reversed(range(_TRIES)):
        start_seconds = time.monotonic()
        try:
            received = _there_and_back(host, pattern)
            break
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:  # a setting's, behind a translated address: no proof of anything
                return NodeTestResult("loopback", "unknown", text=f"{host} is no address of this node: {error}")
            if not attempts_left:
                text = f"this node does not reach its own address {host}: {error}"
                return NodeTestResult("loopback", "fails", "LoopbackTestFailed", text)
        time.sleep(_PAUSE_SECONDS)
    if received != pattern:
        text = f"what is sent to this node's own address {host} comes back otherwise"
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
    with contextlib.suppress(OSError):  # whoever called says what went wrong
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
    with contextlib.suppress(OSError):  # then less comes back
        connection.sendall(pattern)
