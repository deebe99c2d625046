"""Runs the epoch's rendezvous TCPStore in a process of its own.

It is up before any trainer starts. Forked from the zygote, or started cold as `python -m surefoot.launcher.tcp_store
PORT_FD PARENT_PID HOST`. It writes its port into the pipe and serves until it is killed. A TCPStore asks nobody for a
password, and by itself listens on every address of a machine: whoever reached it could read and set the keys of a
world. It is given a socket of one address.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from surefoot.linux_process import die_with_parent

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_WAITING = 2048
"""Connections that wait to be taken: all ranks of a world come at once."""


def listening_store(host: str) -> TCPStore:
    """Opens a store on a free port of `host` alone.

    The host is loopback, or the address by which the other workers reach this one. Where it is an address that this
    machine does not bear (behind a translation) it listens on all, and says so.
    """
    from torch._C._distributed_c10d import TCPStore

    try:
        listener = _listener(host)
    except OSError as error:
        sys.stderr.write(
            f"the epoch's store cannot listen on {host} ({error}); it listens on every address: is SUREFOOT_HOST right?\n"
        )
        return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    address, port = listener.getsockname()[:2]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _listener(host: str) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.bind(address)
        listener.listen(_WAITING)
    except OSError:
        listener.close()
        raise
    return listener


def serve_store(port_fd: int, host: str) -> None:
    """Serves a store until killed.

    Binds a free port and writes it as a line into `port_fd`; never returns.
    """
    store = listening_store(host)
    os.write(port_fd, f"{store.port}\n".encode())
    os.close(port_fd)
    while True:
        signal.pause()


def main() -> None:
    die_with_parent(int(sys.argv[2]))
    serve_store(int(sys.argv[1]), sys.argv[3])


if __name__ == "__main__":
    main()
