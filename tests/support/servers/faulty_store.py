"""A store behind a line that fails: answers are delayed, cut, reset or refused, one fault for each request in turn."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit

Fault = Literal["none", "busy", "reset", "cut", "silent", "trickle"]
"""503; the line reset before an answer; the body cut in its middle; no answer; whole, and a little at a time."""
UPSTREAM_SECONDS = 30.0
TRICKLE_SECONDS = 1.5


class FaultyLine:
    """`FaultyLine` passes requests on to `target`; `script` has the fault of each of the next ones, then there is none."""

    def __init__(self, target: str) -> None:
        self.target = urlsplit(target)
        self.script: deque[Fault] = deque()
        self.always: Fault = "none"
        self.asked = 0
        self.before_answer: Callable[[str], None] = lambda path: None
        """Called with the path of each request before it is passed on."""
        self.over = threading.Event()
        self._lock = threading.Lock()
        self.url = ""

    def fail(self, faults: Iterable[Fault]) -> None:
        """The next requests' faults, in their order."""
        self.script.extend(faults)

    def next_fault(self) -> Fault:
        with self._lock:
            self.asked += 1
            return self.script.popleft() if self.script else self.always


@contextmanager
def faulty(target: str) -> Iterator[FaultyLine]:
    """A line to `target` for the block, at its `url`."""
    line = FaultyLine(target)
    server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *given: _Passed(line, *given))
    server.daemon_threads = True
    line.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield line
    finally:
        line.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Passed(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, line: FaultyLine, *given: Any) -> None:
        self._line = line
        super().__init__(*given)

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        line, fault = self._line, self._line.next_fault()
        line.before_answer(self.path)
        self.close_connection = fault != "none"
        if fault == "busy":
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.send_header("Connection", "close")
            self.end_headers()
            return
        if fault == "silent":
            line.over.wait()
            return
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            return
        status, headers, body = self._asked()
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if fault == "trickle" and body:
            some = -(-len(body) // 50)
            for at in range(0, len(body), some):
                line.over.wait(TRICKLE_SECONDS / 50)
                self.wfile.write(body[at : at + some])
            return
        self.wfile.write(body[: len(body) // 2] if fault == "cut" else body)

    def _asked(self) -> tuple[int, list[tuple[str, str]], bytes]:
        target = self._line.target
        asked = http.client.HTTPConnection(target.hostname or "", target.port, timeout=UPSTREAM_SECONDS)
        try:
            asked.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                asked.putheader(name, value)  # the host too, which the signature is of
            asked.endheaders()
            answer = asked.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            asked.close()

    def log_message(self, *_: Any) -> None:
        pass
