"""Serves the metrics of a local run's operator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import REGISTRY, start_http_server

from surefoot_operator import metrics
from surefoot_operator.platforms.local.run_folder import RunFolder, write_json

HOST = "127.0.0.1"


@contextmanager
def served(root: Path) -> Iterator[None]:
    """Serves this process' metrics on a free port.

    The run folder names it as a Prometheus file_sd target.
    """
    REGISTRY.register(metrics.jobs)
    server, thread = start_http_server(0, addr=HOST)
    told = RunFolder(root).metrics / "operator.json"
    write_json(told, [{"targets": [f"{HOST}:{server.server_port}"]}], durable=False)
    try:
        yield
    finally:
        told.unlink(missing_ok=True)
        server.shutdown()
        server.server_close()
        thread.join()
        REGISTRY.unregister(metrics.jobs)
