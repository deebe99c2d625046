"""The epoch's rendezvous store: a TCPStore in a process of its own, so that it is up before any trainer starts.

Forked from the zygote, or started cold as `python -m surefoot.agent.store PORT_FD PARENT_PID`. It writes its port
into the pipe and serves until it is killed.
"""

from __future__ import annotations

import os
import signal
import sys

from surefoot.agent.deathsig import die_with_parent


def serve_store(port_fd: int) -> None:
    """Binds a free port, writes it as a line into `port_fd`, and never returns."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.write(port_fd, f"{store.port}\n".encode())
    os.close(port_fd)
    while True:
        signal.pause()


def main() -> None:
    die_with_parent(int(sys.argv[2]))
    serve_store(int(sys.argv[1]))


if __name__ == "__main__":
    main()
