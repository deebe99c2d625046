"""Sends bytes to this node's own address and back.

A collective of gloo goes the same way, over TCP at the address that other workers reach. Torch is not imported for it: that
takes longer than all other trials together.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Iterator

from surefoot.node_tests.host_tests import Trial

_BYTES = 8 << 20
_CALL_SECONDS = 3.0
_TRIES = 2
_PAUSE_SECONDS = 0.3


def try_loopback(host: str) -> Trial:
    """Over TCP, there and back.

    What is not reached is tried once more: the network of a pod may be a moment behind its processes.
    """
    pattern = bytes(range(256)) * (_BYTES >> 8)
    for left in reversed(range(_TRIES)):
        began = time.monotonic()
        try:
            back = _there_and_back(host, pattern)
            break
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:  # a setting's, behind a translated address: no proof of anything
                return Trial("loopback", "unknown", text=f"{host} is no address of this node: {error}")
            if not left:
                text = f"this node does not reach its own address {host}: {error}"
                return Trial("loopback", "fails", "LoopbackFails", text)
        time.sleep(_PAUSE_SECONDS)
    if back != pattern:
        text = f"what is sent to this node's own address {host} comes back otherwise"
        return Trial("loopback", "fails", "LoopbackFails", text)
    return Trial("loopback", "well", rate=2e-9 * _BYTES / max(time.monotonic() - began, 1e-9), unit="GB")


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
        line, _ = listener.accept()
        with line:
            line.settimeout(_CALL_SECONDS)
            while data := line.recv(1 << 18):
                line.sendall(data)


def _sent_and_received(address: tuple[str, int], pattern: bytes) -> bytes:
    with socket.create_connection(address, timeout=_CALL_SECONDS) as line:
        sender = threading.Thread(target=_send, args=(line, pattern), daemon=True)
        sender.start()
        back = bytearray()
        while len(back) < len(pattern) and (data := line.recv(1 << 18)):
            back += data
        sender.join(_CALL_SECONDS)
        return bytes(back)


def _send(line: socket.socket, pattern: bytes) -> None:
    with contextlib.suppress(OSError):  # then less comes back
        line.sendall(pattern)
