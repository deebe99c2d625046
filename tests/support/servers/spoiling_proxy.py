"""Stands between a client and an S3 server, and spoils the answers that a test names."""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

Fault = Literal["slow down", "missing", "flip", "halve", "portal", "hide"]
_ERRORS: dict[Fault, tuple[int, bytes]] = {
    "slow down": (503, b"<Error><Code>SlowDown</Code></Error>"),
    "missing": (404, b"<Error><Code>NoSuchKey</Code></Error>"),
    "portal": (200, b"<html><body>sign in</body></html>"),
}


@dataclass
class Rule:
    """Spoils `times` answers to requests (`GET /path`) that match; `hidden`: folders that a listing then lacks."""

    pattern: str
    fault: Fault
    times: int = 10**9
    hidden: tuple[str, ...] = ()
    struck: int = field(default=0, init=False)


@dataclass
class Proxy:
    endpoint: str
    rules: list[Rule]
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fault_of(self, request: str) -> Rule | None:
        with self.lock:
            for rule in self.rules:
                if rule.struck < rule.times and re.search(rule.pattern, request):
                    rule.struck += 1
                    return rule
        return None


@contextmanager
def spoiling(endpoint: str) -> Iterator[Proxy]:
    """A proxy before the server at `endpoint`, without rules yet."""
    target = urlsplit(endpoint).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            rule = proxy.fault_of(f"{self.command} {self.path}")
            if rule is not None and rule.fault in _ERRORS:
                self._answer(*_ERRORS[rule.fault], [])
                return
            connection = http.client.HTTPConnection(target, timeout=30)
            passed = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
            connection.request(self.command, self.path, body, passed)
            response = connection.getresponse()
            data, headers = response.read(), response.getheaders()
            connection.close()
            self._answer(response.status, data if rule is None else _spoiled(rule, data), headers)

        def _answer(self, status: int, data: bytes, headers: list[tuple[str, str]]) -> None:
            self.send_response_only(status)
            length = len(data)
            for name, value in headers:
                if name.lower() == "content-length" and self.command == "HEAD":
                    length = int(value)
                elif name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

    for method in ("GET", "PUT", "POST", "DELETE", "HEAD"):
        setattr(Handler, f"do_{method}", Handler._pass_on)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy = Proxy(f"http://127.0.0.1:{server.server_address[1]}", [])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _spoiled(rule: Rule, data: bytes) -> bytes:
    if rule.fault == "flip":
        return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :]
    if rule.fault == "halve":
        return data[: len(data) // 2]
    for name in rule.hidden:
        data = re.sub(
            rb"<CommonPrefixes>\s*<Prefix>[^<]*" + name.encode() + rb"/</Prefix>\s*</CommonPrefixes>", b"", data
        )
    return data
