"""`python -m surefoot.memory_server.sidecar` monitors local Redis servers until SIGTERM, and exports their metrics."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from surefoot.errors import ConfigurationError
from surefoot.logs import configure_logging
from surefoot.memory_server.sidecar.server_monitor import NodeServersMonitor, render_metrics
from surefoot.memory_server.sidecar.sidecar_settings import read_sidecar_settings

_TEXT = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of Prometheus' text format."""
_REQUEST_SECONDS = 5.0
"""Time limit for one request."""
_log = logging.getLogger(__name__)


class SidecarServer(ThreadingHTTPServer):
    """Serves /metrics, /readyz and /healthz for a node's servers."""

    daemon_threads = True
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def __init__(self, port: int, node: NodeServersMonitor) -> None:
        self.monitor = node
        super().__init__(("", port), _RequestHandler)

    def server_bind(self) -> None:
        """Binds to IPv6 and IPv4, where the machine has both."""
        if self.address_family is socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


class _RequestHandler(BaseHTTPRequestHandler):
    """Replies to one HTTP request."""

    timeout = _REQUEST_SECONDS
    server: SidecarServer

    def do_GET(self) -> None:
        """Replies with metrics, readiness, liveness or 404."""
        node = self.server.monitor
        match self.path.partition("?")[0]:
            case "/metrics":
                self._send_reply(200, render_metrics(node.states))
            case "/readyz":
                reason = node.not_ready_reason
                self._send_reply(503 if reason else 200, f"{reason or 'ready'}\n".encode())
            case "/healthz":
                self._send_reply(200, b"alive\n")
            case _:
                self._send_reply(404, b"/metrics, /readyz or /healthz\n")

    def _send_reply(self, code: int, body: bytes) -> None:
        """Sends a complete reply."""
        self.send_response(code)
        self.send_header("Content-Type", _TEXT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name is the base class's
        """Logs nothing, as kubelet sends requests every two seconds."""


def main() -> int:
    """Runs the sidecar until a signal; returns its exit code, 2 for a wrong setting."""
    try:
        configure_logging(os.environ, "%(asctime)s %(levelname)s %(name)s: %(message)s")
        settings = read_sidecar_settings()
    except ConfigurationError as error:
        _log.error("%s", error)
        return 2
    node = NodeServersMonitor(settings)
    # a pipe, not a threading.Event: a signal handler that sets an Event could deadlock with the main thread's wait for it
    wakeup_fd, signal_fd = os.pipe()
    with SidecarServer(settings.port, node) as http_server:
        ports = ", ".join(str(settings.redis_port + server) for server in range(settings.servers))
        _log.info("monitoring %s:%s; metrics at port %d", settings.redis_host, ports, http_server.server_port)
        http_thread = threading.Thread(target=http_server.serve_forever, name="http", daemon=True)
        http_thread.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: os.write(signal_fd, b"!"))
        with node.run_monitors():
            os.read(wakeup_fd, 1)
        http_server.shutdown()
        http_thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
