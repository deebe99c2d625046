"""The floor of replication on this machine: chunks through plain sockets into warm memory of two other processes,
digested at both ends, acknowledged at the end; with the settings of a connection within a machine that the memory tier
uses. No Redis, no layout, no index. Run by `__main__`.
"""

from __future__ import annotations

import mmap
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

from xxhash import xxh3_64_intdigest

from surefoot.memory_server.connection import limit_in_flight_bytes
from surefoot.protocol.checkpoints.records import MAX_CHUNK_BYTES

COPIES = 2


def replicated_seconds(size_bytes: int, times: int) -> list[float]:
    """Seconds of each of `times` replications of `size_bytes` to two receivers."""
    memory = mmap.mmap(-1, size_bytes)
    for page in range(0, size_bytes, mmap.PAGESIZE):
        memory[page] = page & 0xFF
    view = memoryview(memory)
    chunks = [view[start : start + MAX_CHUNK_BYTES] for start in range(0, size_bytes, MAX_CHUNK_BYTES)]
    with ExitStack() as stack:
        lines = [_receiver(stack, size_bytes) for _ in range(COPIES)]
        found = []
        for _ in range(times + 1):
            began = time.monotonic()
            threads = [threading.Thread(target=_send, args=(line, chunks)) for line in lines]
            for thread in threads:
                thread.start()
            for chunk in chunks:
                xxh3_64_intdigest(chunk)
            for thread in threads:
                thread.join()
            found.append(time.monotonic() - began)
        return found[1:]


def _receiver(stack: ExitStack, size_bytes: int) -> socket.socket:
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    port = listener.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "bench.floor", str(port), str(size_bytes)])
    stack.callback(process.wait)
    stack.callback(process.kill)
    line = stack.enter_context(listener.accept()[0])
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    limit_in_flight_bytes(line)
    return line


def _send(line: socket.socket, chunks: list[memoryview]) -> None:
    for chunk in chunks:
        line.sendall(chunk)
    if line.recv(1) != b"k":
        raise ConnectionError("a receiver went away")


def receive(port: int, size_bytes: int) -> None:
    """The other end: every chunk into its place of memory that is kept, digested, then one byte back."""
    memory = memoryview(mmap.mmap(-1, size_bytes))
    with socket.create_connection(("127.0.0.1", port)) as line:
        while True:
            for start in range(0, size_bytes, MAX_CHUNK_BYTES):
                chunk = memory[start : start + MAX_CHUNK_BYTES]
                got = 0
                while got < len(chunk):
                    more = line.recv_into(chunk[got:])
                    if more == 0:
                        return
                    got += more
                xxh3_64_intdigest(chunk)
            line.sendall(b"k")


if __name__ == "__main__":
    receive(int(sys.argv[1]), int(sys.argv[2]))
