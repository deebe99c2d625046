"""Texts for anybody who asks, from a thread: a flood of questions delays neither heartbeats nor probes."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from multiprocessing.synchronize import Event

import pytest

from surefoot import text_server
from surefoot.text_server import Answer, CachedPage, TextServer

SECONDS = 30.0
CONNECTIONS = 1200
BEAT_SECONDS, SILENCE_SECONDS = 0.1, 3.0
ASK = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


class Rendered:
    """A page that costs some milliseconds of Python, as a worker's metrics do."""

    def __init__(self) -> None:
        self.times = 0
        self.threads: set[str] = set()

    def __call__(self) -> Answer:
        self.times += 1
        self.threads.add(threading.current_thread().name)
        return Answer(200, "text/plain", "".join(f"series {n}\n" for n in range(20_000)).encode())


@pytest.fixture
def rendered() -> Rendered:
    return Rendered()


@pytest.fixture
def server(rendered: Rendered) -> Iterator[TextServer]:
    started = TextServer({"/metrics": CachedPage(rendered)})
    started.start("127.0.0.1", 0)
    yield started
    started.close()
    assert not any(thread.name.startswith("texts on port") for thread in threading.enumerate())


def asked(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), SECONDS) as connection:
        connection.sendall(ASK)
        answer = b""
        while more := connection.recv(1 << 16):
            answer += more
    return answer


def test_a_text_is_answered_whole_and_rendered_once_for_all(server: TextServer, rendered: Rendered) -> None:
    begun = time.monotonic()
    answers = [asked(server.port) for _ in range(20)]
    head, _, body = answers[0].partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert body.endswith(b"series 19999\n")
    assert len(set(answers)) == 1
    assert rendered.times <= 1 + (time.monotonic() - begun) / text_server.CACHE_SECONDS
    assert rendered.threads == {f"texts on port {server.port}"}


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (b"GET /other HTTP/1.1\r\n\r\n", b"HTTP/1.1 404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"HTTP/1.1 405"),
        (b"\x16\x03\x01 nonsense\r\n\r\n", b""),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 2 * text_server.MAX_HEADER_BYTES, b""),
    ],
)
def test_other_requests_are_refused(server: TextServer, request_text: bytes, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), SECONDS) as connection:
        with suppress(OSError):  # it may close before it has read all of it
            connection.sendall(request_text)
        answer = b""
        with suppress(OSError):
            answer = connection.recv(64)
        assert answer.startswith(status) if status else answer == b""


def test_half_requests_are_dropped_after_their_time(server: TextServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_server, "HEADER_SECONDS", 0.5)
    with ExitStack() as stack:
        halves = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), SECONDS))
            for _ in range(text_server.MAX_CONNECTIONS_OF_PEER)
        ]
        for half in halves:
            half.sendall(ASK[:20])
        assert [half.recv(1) for half in halves] == [b""] * len(halves)
    assert asked(server.port).startswith(b"HTTP/1.1 200")


def flood(port: int, flooding: Event, ended: Event) -> None:
    """Keeps so many connections open, each with a question under way."""
    connections: dict[int, socket.socket] = {}
    while not ended.is_set():
        for number in range(CONNECTIONS):
            connection = connections.get(number)
            try:
                if connection is None:
                    connection = connections[number] = socket.socket()
                    connection.setblocking(False)
                    connection.connect_ex(("127.0.0.1", port))
                    continue
                if number % 3:  # the others send half a request
                    connection.send(ASK * 8)
                if connection.recv(1 << 20) == b"":
                    raise ConnectionError("it was closed")
            except BlockingIOError:
                pass
            except OSError:
                connections.pop(number).close()
        flooding.set()


async def test_a_flood_of_questions_delays_no_heartbeat(server: TextServer) -> None:
    context = multiprocessing.get_context("spawn")
    flooding, ended = context.Event(), context.Event()
    flooder = context.Process(target=flood, args=(server.port, flooding, ended))
    flooder.start()
    try:
        assert await asyncio.to_thread(flooding.wait, SECONDS)
        late = []
        until = time.monotonic() + 5.0
        while (begun := time.monotonic()) < until:
            await asyncio.sleep(BEAT_SECONDS)
            late.append(time.monotonic() - begun - BEAT_SECONDS)
    finally:
        ended.set()
        await asyncio.to_thread(flooder.join, SECONDS)
    print(f"a heartbeat was late by {max(late):.3f} s at most, of {len(late)}")
    assert max(late) < SILENCE_SECONDS / 2
