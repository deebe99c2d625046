"""Serves a few texts over HTTP in a thread of its own: metrics and probes.

Used by the agent and by the operator, whose event loops renew leases and hear heartbeats by the second. Anybody who
reaches the port may ask; whatever is asked, and however often, those loops neither answer nor wait for it.
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
"""Of one address, so that one that asks without end leaves room for Prometheus and the kubelet."""
MAX_HEADER_BYTES = 8192
HEADER_SECONDS = 3.0
"""A request that is not complete by then is dropped."""
ANSWER_SECONDS = 15.0
"""A client that has not taken its answer by then is dropped."""
CACHE_SECONDS = 1.0
"""A text is rendered this often at most, however many ask for it."""
_BACKLOG = 64
_BUSY_SECONDS = 0.02
"""How long nobody is let in after a peer was turned away: a flood of connections takes no more than that of the GIL."""
_JOIN_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, content type and body of one answer."""

    status: int
    content_type: str
    body: bytes


Page = Callable[[], Answer]
"""Makes an answer, in the server's thread: it must touch nothing that an event loop changes without care for threads."""


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
    """`start`, then `close`, which joins its thread. One request a connection."""

    def __init__(self, pages: Mapping[str, Page]) -> None:
        self._pages = pages
        self._sockets: list[socket.socket] = []
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._of_peer: Counter[str] = Counter()
        self.port = 0

    def start(self, host: str, port: int) -> None:
        """Listens and answers from now on; an empty host is every address.

        Raises OSError if the port is taken.
        """
        listener = _listening(host, port)
        self._sockets, self.port = [listener], listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"texts on port {self.port}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening, drops what is under way and joins the thread."""
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
        """Lets in as many as may be at a time; others wait in the kernel, where they cost nothing."""
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
                if self._of_peer[peer] >= MAX_CONNECTIONS_OF_PEER:
                    connection.close()
                    free_slots.release()
                    await asyncio.sleep(_BUSY_SECONDS)
                    continue
                self._of_peer[peer] += 1
                task = tasks.create_task(self._serve(loop, connection))
                task.add_done_callback(partial(self._leave, free_slots, peer))

    def _leave(self, free_slots: asyncio.Semaphore, peer: str, _task: asyncio.Task[None]) -> None:
        free_slots.release()
        self._of_peer[peer] -= 1
        if self._of_peer[peer] <= 0:
            del self._of_peer[peer]

    async def _serve(self, loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
        with connection, suppress(TimeoutError, OSError):
            connection.setblocking(False)
            async with asyncio.timeout(HEADER_SECONDS):
                request = await _request(loop, connection)
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
                    pass  # a reset in place of an end would take the answer from a slow reader

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


async def _request(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> tuple[str, str] | None:
    """Method and path of a request; None where it is none, or too long."""
    request = b""
    while b"\r\n\r\n" not in request:
        chunk = await loop.sock_recv(connection, MAX_HEADER_BYTES)
        request += chunk
        if not chunk or len(request) > MAX_HEADER_BYTES:
            return None
    words = request.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    return (words[0], words[1]) if len(words) == 3 and words[2].startswith("HTTP/1.") else None


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens there; on every address, with one socket for both families where there are two."""
    if host:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", port), backlog=_BACKLOG)
    listener.setblocking(False)
    return listener
