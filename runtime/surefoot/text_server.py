"""Serves a few texts over HTTP in its own thread: metrics and health endpoints.

Agent and operator use it; their event loops handle leases and heartbeats every second. Every client that reaches the port
may send requests, and no number of them delays those loops.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
MAX_CONNECTIONS_OF_PEER = 8
"""Most connections from one address, so that a flooding client leaves some for Prometheus and the kubelet."""
MAX_HEADER_BYTES = 8192
HEADER_SECONDS = 3.0
"""Timeout for receiving a request."""
ANSWER_SECONDS = 15.0
"""Timeout for sending an answer."""
CACHE_SECONDS = 1.0
"""Shortest time between two renderings of a page, however many clients request it."""
_BACKLOG = 64
_REJECT_PAUSE_SECONDS = 0.02
"""Pause in accepting after a peer's connection was rejected, which limits a flood's share of the GIL."""
_JOIN_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer: status, content type and body."""

    status: int
    content_type: str
    body: bytes


Page = Callable[[], Answer]
"""Renders an answer in the server's thread; it must be thread-safe towards the caller's event loop."""


class CachedPage:
    """Renders a page at most once in `CACHE_SECONDS`; for one thread."""

    def __init__(self, render: Page) -> None:
        self._render = render
        self._made: tuple[float, Answer] | None = None

    def __call__(self) -> Answer:
        now = time.monotonic()
        if self._made is None or now - self._made[0] >= CACHE_SECONDS:
            self._made = (now, self._render())
        return self._made[1]


class TextServer:
    """Serves pages by path, one request per connection: `start`, then `close`, which joins its thread."""

    def __init__(self, pages: Mapping[str, Page]) -> None:
        self._pages = pages
        self._sockets: list[socket.socket] = []
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections_by_peer: Counter[str] = Counter()
        self.port = 0

    def start(self, host: str, port: int) -> None:
        """Starts listening and answering; an empty host means all addresses.

        Raises:
            OSError: The port is in use.
        """
        listener = _open_listener(host, port)
        self._sockets, self.port = [listener], listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"texts on port {self.port}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening, drops open requests and joins the thread."""
        if self._thread is None or self._loop is None:
            return
        loop = self._loop
        with suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
        self._thread.join(_JOIN_SECONDS)
        self._thread = None

    def _run(self) -> None:
        assert self._loop is not None, "made by `start`"
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._accept(self._loop, self._sockets[0]))
        except Exception:
            log.exception("the thread that serves texts on port %d ended", self.port)
        finally:
            self._sockets[0].close()
            self._loop.close()

    async def _accept(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        """Accepts up to MAX_CONNECTIONS at a time; others wait in the kernel's backlog, where they cost nothing."""
        free_slots = asyncio.Semaphore(MAX_CONNECTIONS)
        async with asyncio.TaskGroup() as tasks:
            while True:
                await free_slots.acquire()
                try:
                    connection, address = await loop.sock_accept(listener)
                except OSError as error:
                    log.warning("no connection could be accepted on port %d: %s", self.port, error)
                    free_slots.release()
                    await asyncio.sleep(HEADER_SECONDS)
                    continue
                peer = str(address[0])
                if self._connections_by_peer[peer] >= MAX_CONNECTIONS_OF_PEER:
                    connection.close()
                    free_slots.release()
                    await asyncio.sleep(_REJECT_PAUSE_SECONDS)
                    continue
                self._connections_by_peer[peer] += 1
                task = tasks.create_task(self._serve(loop, connection))
                task.add_done_callback(partial(self._release_slot, free_slots, peer))

    def _release_slot(self, free_slots: asyncio.Semaphore, peer: str, _task: asyncio.Task[None]) -> None:
        free_slots.release()
        self._connections_by_peer[peer] -= 1
        if self._connections_by_peer[peer] <= 0:
            del self._connections_by_peer[peer]

    async def _serve(self, loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
        with connection, suppress(TimeoutError, OSError):
            connection.setblocking(False)
            async with asyncio.timeout(HEADER_SECONDS):
                request = await _read_request(loop, connection)
            if request is None:
                return
            answer = self._answer(request)
            header = (
                f"HTTP/1.1 {answer.status} {'OK' if answer.status == 200 else 'Not OK'}\r\nContent-Type: {answer.content_type}"
                f"\r\nContent-Length: {len(answer.body)}\r\nConnection: close\r\n\r\n"
            ).encode()
            async with asyncio.timeout(ANSWER_SECONDS):
                await loop.sock_sendall(connection, header if request[0] == "HEAD" else header + answer.body)
                connection.shutdown(socket.SHUT_WR)
                while await loop.sock_recv(connection, MAX_HEADER_BYTES):
                    pass  # closing with unread data would reset the connection before a slow reader has the answer

    def _answer(self, request: tuple[str, str]) -> Answer:
        method, path = request
        page = self._pages.get(path.partition("?")[0])
        if page is None:
            return Answer(404, "text/plain; charset=utf-8", f"{', '.join(self._pages)}\n".encode())
        if method not in ("GET", "HEAD"):
            return Answer(405, "text/plain; charset=utf-8", b"GET or HEAD\n")
        try:
            return page()
        except Exception:
            log.exception("%s could not be rendered", path)
            return Answer(500, "text/plain; charset=utf-8", b"see the log\n")


async def _read_request(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> tuple[str, str] | None:
    """Reads the method and path of a request; None: it is malformed or too long."""
    request = b""
    while b"\r\n\r\n" not in request:
        chunk = await loop.sock_recv(connection, MAX_HEADER_BYTES)
        request += chunk
        if not chunk or len(request) > MAX_HEADER_BYTES:
            return None
    words = request.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    return (words[0], words[1]) if len(words) == 3 and words[2].startswith("HTTP/1.") else None


def _open_listener(host: str, port: int) -> socket.socket:
    """Opens a listening socket; for an empty host, one for all addresses of both IP families where possible."""
    if host:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", port), backlog=_BACKLOG)
    listener.setblocking(False)
    return listener
