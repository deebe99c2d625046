"""Runs the generation's rendezvous TCPStore in a process of its own.

It is up before any trainer starts. It is forked from the fork server, or started cold as
`python -m surefoot.launcher.tcp_store PORT_FD PARENT_PID HOST`. It writes its port into the pipe and serves until it is
killed. A TCPStore has no password and by default listens on every address, so that any client could change its keys;
therefore it gets a socket that is bound to one address.
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

_BACKLOG = 2048
"""Listen backlog: all ranks of a generation connect at once."""


def listening_store(host: str) -> TCPStore:
    """Opens a store on a free port of `host` only.

    `host` is loopback, or the address at which other workers reach this one. If this machine does not have that address
    (it is translated), the store listens on all addresses and a line on stderr reports it.
    """
    from torch._C._distributed_c10d import TCPStore

    try:
        listener = _listen_on(host)
    except OSError as error:
        sys.stderr.write(
            f"the generation's store cannot listen on {host} ({error}); it listens on every address instead: "
            "is SUREFOOT_HOST right?\n"
        )
        return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    address, port = listener.getsockname()[:2]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _listen_on(host: str) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
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
